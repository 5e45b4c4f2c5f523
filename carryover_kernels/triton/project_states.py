"""``project_states``: fc with the mark and sums of squares behind it, then all layers' K/V with norm, RoPE and scatter behind that."""

import torch
import triton
import triton.language as tl

from ._common import cast, dot, page_offset, pair_index, rms_scale, rope_rotate, rounded, store_scaled
from ._configs import config

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def project_fc_kernel(
    fused_ptr, squares_ptr,

    states_ptr, fc_weight_ptr, mark_ptr,

    row_carry_slot_ptr,

    rows, stride_states,

    FEATURES: tl.constexpr, HIDDEN: tl.constexpr, HAS_FC: tl.constexpr, HAS_MARK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Grid (ceil(H / BLOCK_N), ceil(T / BLOCK_M)). A program owns a tile of fc's float32 result and its rows' sums of squares there.
    tile_n, tile_m = tl.program_id(0), tl.program_id(1)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    there = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    row64 = row.to(tl.int64)
    if HAS_FC:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        lane_k = tl.arange(0, BLOCK_K)
        for begin in range(0, FEATURES, BLOCK_K):
            k = begin + lane_k
            x = tl.load(states_ptr + row64[:, None] * stride_states + k[None, :], mask=(row < rows)[:, None] & (k < FEATURES)[None, :], other=0.0)
            w = tl.load(
                fc_weight_ptr + column.to(tl.int64)[None, :] * FEATURES + k[:, None],
                mask=(column < HIDDEN)[None, :] & (k < FEATURES)[:, None], other=0.0,
            )  # fmt: skip
            acc = dot(x, w, acc)
    else:
        acc = tl.load(states_ptr + row64[:, None] * stride_states + column[None, :], mask=there, other=0.0).to(tl.float32)
    if HAS_MARK:
        carried = tl.load(row_carry_slot_ptr + row, mask=row < rows, other=-1) >= 0
        mark = tl.load(mark_ptr + column, mask=column < HIDDEN, other=0.0)
        acc += tl.where(carried[:, None], mark[None, :], 0.0)
    tl.store(fused_ptr + row64[:, None] * HIDDEN + column[None, :], acc, mask=there)
    squares = tl.sum(tl.where(there, acc * acc, 0.0), axis=1)
    tl.store(squares_ptr + row64 * tl.num_programs(0) + tile_n, squares, mask=row < rows)


@triton.jit
def project_kv_kernel(
    carry_k_ptr, carry_v_ptr,

    fused_ptr, squares_ptr, kv_weight_ptr, kv_bias_ptr, mark_kv_ptr, k_norm_weight_ptr, rope_table_ptr, k_scale_ptr, v_scale_ptr,

    caches_ptr, row_cache_slot_ptr, row_carry_slot_ptr, row_position_ptr,

    stride_ck_layer, stride_ck_slot, stride_ck_row, stride_ck_head, stride_cv_layer, stride_cv_slot, stride_cv_row, stride_cv_head,

    rows, square_tiles, cache_slots, page_size, carry_slots, carry_capacity, max_position, norm_eps, k_norm_eps,

    CACHE: tl.constexpr, DTYPE: tl.constexpr, HIDDEN: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr, NEOX: tl.constexpr, SHARE_KV: tl.constexpr, V_NORM: tl.constexpr, PARITY: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MARK_KV: tl.constexpr, HAS_K_NORM: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    # Grid (L * parts * Hkv, ceil(T / BLOCK_M)); parts = 2 (K and V), or 1 where K's rows give both. A program owns one head of one
    # part of one layer for BLOCK_M rows, as the two vectors of pair_index, so that RoPE needs no shuffle.
    parts: tl.constexpr = 1 if SHARE_KV else 2
    head = tl.program_id(0) % KV_HEADS
    part = (tl.program_id(0) // KV_HEADS) % parts
    layer = tl.program_id(0) // (KV_HEADS * parts)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row64 = row.to(tl.int64)
    cache_slot = tl.load(row_cache_slot_ptr + row, mask=row < rows, other=-1)
    carry_slot = tl.load(row_carry_slot_ptr + row, mask=row < rows, other=-1)
    position = tl.load(row_position_ptr + row, mask=row < rows, other=-1)
    known = (position >= 0) & (position < max_position)
    is_carried = carry_slot >= 0
    in_pages = known & (cache_slot >= 0) & (cache_slot < cache_slots)
    in_carry = known & is_carried & (carry_slot < carry_slots * carry_capacity)

    total = tl.zeros((BLOCK_M,), tl.float32)
    for begin in range(0, square_tiles, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        squares = tl.load(squares_ptr + row64[:, None] * square_tiles + s[None, :], mask=(row < rows)[:, None] & (s < square_tiles)[None, :], other=0.0)
        total += tl.sum(squares, axis=1)
    inverse = rms_scale(total, HIDDEN, norm_eps)

    lane = tl.arange(0, BLOCK_H)
    a_at, b_at, a_there, b_there = pair_index(lane, HEAD_DIM, ROTARY, NEOX)
    first_row = ((layer * parts + part) * KV_HEADS + head) * HEAD_DIM
    a = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    b = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    lane_k = tl.arange(0, BLOCK_K)
    for begin in range(0, HIDDEN, BLOCK_K):
        k = begin + lane_k
        x = tl.load(fused_ptr + row64[:, None] * HIDDEN + k[None, :], mask=(row < rows)[:, None] & (k < HIDDEN)[None, :], other=0.0)
        x = cast(x * inverse[:, None], DTYPE)
        at_a = (first_row + a_at).to(tl.int64)[None, :] * HIDDEN + k[:, None]
        at_b = (first_row + b_at).to(tl.int64)[None, :] * HIDDEN + k[:, None]
        a = dot(x, tl.load(kv_weight_ptr + at_a, mask=a_there[None, :] & (k < HIDDEN)[:, None], other=0.0), a)
        b = dot(x, tl.load(kv_weight_ptr + at_b, mask=b_there[None, :] & (k < HIDDEN)[:, None], other=0.0), b)
    if HAS_BIAS:
        a += tl.load(kv_bias_ptr + first_row + a_at, mask=a_there, other=0.0)[None, :]
        b += tl.load(kv_bias_ptr + first_row + b_at, mask=b_there, other=0.0)[None, :]
    if HAS_MARK_KV:
        a += tl.where(is_carried[:, None], tl.load(mark_kv_ptr + first_row + a_at, mask=a_there, other=0.0)[None, :], 0.0)
        b += tl.where(is_carried[:, None], tl.load(mark_kv_ptr + first_row + b_at, mask=b_there, other=0.0)[None, :], 0.0)

    # A row of the table: k address, v address, strides of k (page, slot, head), strides of v.
    entry_ptr = caches_ptr + layer * 8
    to_page_a, to_page_b = in_pages[:, None] & a_there[None, :], in_pages[:, None] & b_there[None, :]
    to_carry_a, to_carry_b = in_carry[:, None] & a_there[None, :], in_carry[:, None] & b_there[None, :]
    carry_at = carry_slot // carry_capacity
    carry_row = carry_slot % carry_capacity
    head64 = head.to(tl.int64)
    if SHARE_KV or part == 1:
        va, vb = a, b
        if V_NORM:
            scale = rms_scale(tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1), HEAD_DIM, k_norm_eps)
            va, vb = a * scale[:, None], b * scale[:, None]
        v_factor = 1.0
        if HAS_V_SCALE:
            v_factor = tl.load(v_scale_ptr + layer)
        base = tl.load(entry_ptr + 1).to(tl.pointer_type(CACHE))
        at = page_offset(cache_slot, page_size, tl.load(entry_ptr + 5), tl.load(entry_ptr + 6)) + head64 * tl.load(entry_ptr + 7)
        store_scaled(base + at[:, None] + a_at[None, :], va, v_factor, to_page_a)
        store_scaled(base + at[:, None] + b_at[None, :], vb, v_factor, to_page_b)
        if HAS_CARRY:
            at = layer.to(tl.int64) * stride_cv_layer + carry_at * stride_cv_slot + carry_row * stride_cv_row + head64 * stride_cv_head
            store_scaled(carry_v_ptr + at[:, None] + a_at[None, :], va, 1.0, to_carry_a)
            store_scaled(carry_v_ptr + at[:, None] + b_at[None, :], vb, 1.0, to_carry_b)
    if part == 0:
        if HAS_K_NORM:
            a, b = rounded(a, DTYPE, PARITY), rounded(b, DTYPE, PARITY)
            scale = rms_scale(tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1), HEAD_DIM, k_norm_eps)
            wa = tl.load(k_norm_weight_ptr + layer * HEAD_DIM + a_at, mask=a_there, other=0.0)
            wb = tl.load(k_norm_weight_ptr + layer * HEAD_DIM + b_at, mask=b_there, other=0.0)
            a = rounded(rounded(a * scale[:, None], DTYPE, PARITY) * rounded(wa, DTYPE, PARITY)[None, :], DTYPE, PARITY)
            b = rounded(rounded(b * scale[:, None], DTYPE, PARITY) * rounded(wb, DTYPE, PARITY)[None, :], DTYPE, PARITY)
        turns = known[:, None] & (lane < ROTARY // 2)[None, :]
        angle_at = position[:, None] * ROTARY + lane[None, :]
        cosine = rounded(tl.load(rope_table_ptr + angle_at, mask=turns, other=1.0), DTYPE, PARITY)
        sine = rounded(tl.load(rope_table_ptr + angle_at + ROTARY // 2, mask=turns, other=0.0), DTYPE, PARITY)
        a, b = rope_rotate(a, b, cosine, sine, DTYPE, PARITY)
        k_factor = 1.0
        if HAS_K_SCALE:
            k_factor = tl.load(k_scale_ptr + layer)
        base = tl.load(entry_ptr).to(tl.pointer_type(CACHE))
        at = page_offset(cache_slot, page_size, tl.load(entry_ptr + 2), tl.load(entry_ptr + 3)) + head64 * tl.load(entry_ptr + 4)
        store_scaled(base + at[:, None] + a_at[None, :], a, k_factor, to_page_a)
        store_scaled(base + at[:, None] + b_at[None, :], b, k_factor, to_page_b)
        if HAS_CARRY:
            at = layer.to(tl.int64) * stride_ck_layer + carry_at * stride_ck_slot + carry_row * stride_ck_row + head64 * stride_ck_head
            store_scaled(carry_k_ptr + at[:, None] + a_at[None, :], a, 1.0, to_carry_a)
            store_scaled(carry_k_ptr + at[:, None] + b_at[None, :], b, 1.0, to_carry_b)


# Address tables by their own contents, so that one can never be stale. Kept for good: a captured CUDA graph reads its table when it
# is replayed, and an engine has a handful of them at 64 bytes a layer.
_tables: dict[tuple, torch.Tensor] = {}


def _cache_table(k_cache, v_cache) -> torch.Tensor:
    entries = tuple((k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3]) for k, v in zip(k_cache, v_cache))
    key = (k_cache[0].device, entries)
    if key not in _tables:
        host = torch.tensor(entries, dtype=torch.int64, device="cpu", pin_memory=k_cache[0].is_cuda)
        _tables[key] = host.to(k_cache[0].device, non_blocking=True) if k_cache[0].is_cuda else host
    return _tables[key]


def _cache_type(dtype):
    return _DTYPES.get(dtype) or {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}[dtype]


def project_states_triton(
    states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot, row_position,
    k_cache, v_cache, carry_k, carry_v, norm_eps, k_norm_eps, neox, share_kv, v_norm, rope_parity, k_scale, v_scale,
):  # fmt: skip
    rows, (layers, hidden) = states.shape[0], (len(k_cache), kv_weight.shape[1])
    if rows == 0:
        return
    pages, page_size, kv_heads, head_dim = k_cache[0].shape
    tile = config("project_fc", rows=rows, dtype=states.dtype)
    square_tiles = triton.cdiv(hidden, tile.BLOCK_N)
    fused = states.new_empty((rows, hidden), dtype=torch.float32)
    squares = states.new_empty((rows, square_tiles), dtype=torch.float32)
    project_fc_kernel[(square_tiles, triton.cdiv(rows, tile.BLOCK_M))](
        fused, squares, states, fc_weight, mark, row_carry_slot, rows, states.stride(0), states.shape[1], hidden, fc_weight is not None,
        mark is not None, tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip

    tile = config("project_kv", rows=rows, head_dim=head_dim, dtype=states.dtype)
    carry = carry_k is not None
    carry_strides = (*carry_k.stride()[:4], *carry_v.stride()[:4]) if carry else (0,) * 8
    slots, capacity = carry_k.shape[1:3] if carry else (0, 1)
    project_kv_kernel[(layers * (1 if share_kv else 2) * kv_heads, triton.cdiv(rows, tile.BLOCK_M))](
        carry_k, carry_v, fused, squares, kv_weight, kv_bias, mark_kv, k_norm_weight, rope_table, k_scale, v_scale,
        _cache_table(k_cache, v_cache), row_cache_slot, row_carry_slot, row_position, *carry_strides,
        rows, square_tiles, pages * page_size, page_size, slots, max(capacity, 1), rope_table.shape[0], norm_eps, k_norm_eps,
        _cache_type(k_cache[0].dtype), _DTYPES[states.dtype], hidden, kv_heads, head_dim, rope_table.shape[1], neox, share_kv, v_norm,
        rope_parity, carry, kv_bias is not None, mark_kv is not None, k_norm_weight is not None, k_scale is not None,
        v_scale is not None, tile.BLOCK_M, tile.BLOCK_K, 32, max(16, triton.next_power_of_2((head_dim + 1) // 2)),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
