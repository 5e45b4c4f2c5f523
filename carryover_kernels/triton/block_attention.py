"""``block_attention``: one split-KV kernel over [committed pages | carried | block] and a merge of the splits."""

import torch
import triton
import triton.language as tl

from ._common import LN2, LOG2E, cast, dot, key_reachable, key_visible, softmax_shift, tanh
from ._configs import config, plan_splits


@triton.jit
def attend(q, k, v, visible, m, d, acc, scale_log2, softcap, v_scale, SOFTCAP: tl.constexpr):
    """One tile of keys: k [D, N], v [N, D], visible [M, N]. The state (m, d, acc) is in powers of two."""
    scores = dot(q, k, tl.zeros((q.shape[0], k.shape[1]), tl.float32)) * scale_log2
    if SOFTCAP:
        scores = (softcap * LOG2E) * tanh(scores / (softcap * LOG2E))
    scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    shift = softmax_shift(m_new)
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(m - shift)
    d = d * alpha + tl.sum(p, axis=1)
    acc = dot(cast(p * v_scale, v.dtype), v, acc * alpha[:, None])
    return m_new, d, acc


@triton.jit
def finish(m, d, sink_log2):
    """(factor of acc, natural-log denominator) with the sink counted; a row without keys gives 0 and -inf."""
    top = tl.maximum(m, sink_log2)
    shift = softmax_shift(top)
    total = d * tl.exp2(m - shift) + tl.exp2(sink_log2 - shift)
    seen = d != 0.0  # not by m, which a row of NaN scores may leave at -inf: its d is NaN, and so is its result
    factor = tl.where(seen, tl.exp2(m - shift) / tl.where(seen, total, 1.0), 0.0)
    lse = tl.where(seen, (shift + tl.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf"))
    return factor, lse


@triton.jit(do_not_specialize=["columns"])  # 1 would become a Python int, which has no .to
def block_attention_kernel(
    out_ptr, lse_ptr, partial_ptr, state_ptr,

    q_ptr, k_block_ptr, v_block_ptr, k_cache_ptr, v_cache_ptr, carry_k_ptr, carry_v_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,

    block_table_ptr, seq_lens_ptr, carry_lens_ptr, carry_slot_ids_ptr, block_start_ptr, carry_positions_ptr,

    stride_q_request, stride_q_row, stride_q_head,
    stride_kb_request, stride_kb_row, stride_kb_head, stride_vb_request, stride_vb_row, stride_vb_head,
    stride_kc_page, stride_kc_slot, stride_kc_head, stride_vc_page, stride_vc_slot, stride_vc_head,
    stride_ck_slot, stride_ck_row, stride_ck_head, stride_cv_slot, stride_cv_row, stride_cv_head,
    stride_table,

    pages, page_size, columns, carry_slots, carry_capacity, block_rows, key_rows, scale_log2, softcap,

    COMPUTE: tl.constexpr, Q_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_BLOCK_START: tl.constexpr, HAS_CARRY_POSITIONS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, HAS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Grid (row tiles * splits, Hkv, R). A program owns BLOCK_M of the B * GROUP query rows that share a KV head, and one split of
    # the committed keys; the last split also takes the carried and the block's keys.
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    kv_head, r = tl.program_id(1), tl.program_id(2)
    r64, head64 = r.to(tl.int64), kv_head.to(tl.int64)
    lane_m, lane_n, lane_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_head = lane_d < HEAD_DIM

    row = tile * BLOCK_M + lane_m
    b, head = row // GROUP, kv_head * GROUP + row % GROUP
    live_row = b < block_rows
    length = tl.load(seq_lens_ptr + r)
    live = length >= 0
    start = length.to(tl.int64)
    if HAS_BLOCK_START:
        start = tl.load(block_start_ptr + r)
    committed = tl.where(live, tl.minimum(length.to(tl.int64), columns.to(tl.int64) * page_size), 0).to(tl.int32)
    query_position = start + b
    first_query = start + tile * BLOCK_M // GROUP
    last_query = start + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, block_rows - 1)

    q_at = r64 * stride_q_request + b.to(tl.int64) * stride_q_row + head.to(tl.int64) * stride_q_head
    q = tl.load(q_ptr + q_at[:, None] + lane_d[None, :], mask=(b < tl.where(live, block_rows, 0))[:, None] & in_head[None, :], other=0.0).to(COMPUTE)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    d = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    k_factor, v_factor = 1.0, 1.0
    if HAS_K_SCALE:
        k_factor = tl.load(k_scale_ptr)
    if HAS_V_SCALE:
        v_factor = tl.load(v_scale_ptr)
    # Tiles that every row's window has left behind are never read.
    lowest = 0
    if WINDOW_LEFT >= 0:
        lowest = tl.maximum(committed + tile * BLOCK_M // GROUP - WINDOW_LEFT, 0) // BLOCK_N
    tiles = tl.cdiv(committed, BLOCK_N)
    each = tl.cdiv(tl.maximum(tiles - lowest, 0), SPLITS)
    first_tile = lowest + split * each
    last_tile = tl.minimum(first_tile + each, tiles)
    for n in range(first_tile, last_tile):
        index = n * BLOCK_N + lane_n
        page = tl.load(block_table_ptr + r64 * stride_table + index // page_size, mask=index < committed, other=-1)
        key_position = start - committed + index
        there = (page >= 0) & (page < pages) & key_reachable(key_position, first_query, last_query, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT)
        page64, in_page = page.to(tl.int64), (index % page_size).to(tl.int64)
        k_at = page64 * stride_kc_page + in_page * stride_kc_slot + head64 * stride_kc_head
        v_at = page64 * stride_vc_page + in_page * stride_vc_slot + head64 * stride_vc_head
        k = tl.load(k_cache_ptr + k_at[None, :] + lane_d[:, None], mask=there[None, :] & in_head[:, None], other=0.0).to(COMPUTE)
        v = tl.load(v_cache_ptr + v_at[:, None] + lane_d[None, :], mask=there[:, None] & in_head[None, :], other=0.0).to(COMPUTE)
        visible = there[None, :] & key_visible(key_position[None, :], query_position[:, None], CAUSAL, WINDOW_LEFT, WINDOW_RIGHT)
        m, d, acc = attend(q, k, v, visible, m, d, acc, scale_log2 * k_factor, softcap, v_factor, SOFTCAP)

    if split == SPLITS - 1:
        if HAS_CARRY:
            carry_slot = tl.load(carry_slot_ids_ptr + r)
            known = live & (carry_slot >= 0) & (carry_slot < carry_slots)
            carried = tl.load(carry_lens_ptr + carry_slot, mask=known, other=0)
            carried = tl.minimum(tl.maximum(carried, 0), carry_capacity)
            slot64 = carry_slot.to(tl.int64)
            for begin in range(0, carried, BLOCK_N):
                j = begin + lane_n
                there = j < carried
                key_position = start + j
                if HAS_CARRY_POSITIONS:
                    key_position = tl.load(carry_positions_ptr + slot64 * carry_capacity + j, mask=there, other=0)
                there = there & key_reachable(key_position, first_query, last_query, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT)
                k_at = slot64 * stride_ck_slot + j.to(tl.int64) * stride_ck_row + head64 * stride_ck_head
                v_at = slot64 * stride_cv_slot + j.to(tl.int64) * stride_cv_row + head64 * stride_cv_head
                k = tl.load(carry_k_ptr + k_at[None, :] + lane_d[:, None], mask=there[None, :] & in_head[:, None], other=0.0).to(COMPUTE)
                v = tl.load(carry_v_ptr + v_at[:, None] + lane_d[None, :], mask=there[:, None] & in_head[None, :], other=0.0).to(COMPUTE)
                visible = there[None, :] & key_visible(key_position[None, :], query_position[:, None], CAUSAL, WINDOW_LEFT, WINDOW_RIGHT)
                m, d, acc = attend(q, k, v, visible, m, d, acc, scale_log2, softcap, 1.0, SOFTCAP)
        for begin in range(0, tl.where(live, key_rows, 0), BLOCK_N):
            j = begin + lane_n
            there = (j < key_rows) & key_reachable(start + j, first_query, last_query, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT)
            k_at = r64 * stride_kb_request + j.to(tl.int64) * stride_kb_row + head64 * stride_kb_head
            v_at = r64 * stride_vb_request + j.to(tl.int64) * stride_vb_row + head64 * stride_vb_head
            k = tl.load(k_block_ptr + k_at[None, :] + lane_d[:, None], mask=there[None, :] & in_head[:, None], other=0.0).to(COMPUTE)
            v = tl.load(v_block_ptr + v_at[:, None] + lane_d[None, :], mask=there[:, None] & in_head[None, :], other=0.0).to(COMPUTE)
            visible = there[None, :] & key_visible((start + j)[None, :], query_position[:, None], CAUSAL, WINDOW_LEFT, WINDOW_RIGHT)
            m, d, acc = attend(q, k, v, visible, m, d, acc, scale_log2, softcap, 1.0, SOFTCAP)

    out_row = (r64 * block_rows + b) * Q_HEADS + head
    if SPLITS == 1:
        sink_log2 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        if HAS_SINKS:
            sink_log2 = tl.load(sinks_ptr + head, mask=live_row, other=float("-inf")) * LOG2E
        factor, lse = finish(m, d, sink_log2)
        # A row without keys is 0 by selection: its acc may not be multiplied into being.
        out = tl.where((factor != 0.0)[:, None], acc * factor[:, None], 0.0)
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + lane_d[None, :], cast(out, out_ptr.dtype.element_ty), mask=live_row[:, None] & in_head[None, :])
        if HAS_LSE:
            tl.store(lse_ptr + out_row, lse, mask=live_row)
    else:
        part = out_row * SPLITS + split
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + lane_d[None, :], acc, mask=live_row[:, None] & in_head[None, :])
        tl.store(state_ptr + part * 2, m, mask=live_row)
        tl.store(state_ptr + part * 2 + 1, d, mask=live_row)


@triton.jit
def merge_kernel(
    out_ptr, lse_ptr,

    partial_ptr, state_ptr, sinks_ptr,

    Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Grid (R * B * Hq). A program merges the splits of one query row.
    row = tl.program_id(0).to(tl.int64)
    lane_d = tl.arange(0, BLOCK_D)
    in_head = lane_d < HEAD_DIM
    m = tl.full((), float("-inf"), tl.float32)
    for split in range(SPLITS):
        m = tl.maximum(m, tl.load(state_ptr + (row * SPLITS + split) * 2))
    shift = softmax_shift(m)
    d = tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(SPLITS):
        weight = tl.exp2(tl.load(state_ptr + (row * SPLITS + split) * 2) - shift)
        d += weight * tl.load(state_ptr + (row * SPLITS + split) * 2 + 1)
        acc += weight * tl.load(partial_ptr + (row * SPLITS + split) * HEAD_DIM + lane_d, mask=in_head, other=0.0)
    sink_log2 = tl.full((), float("-inf"), tl.float32)
    if HAS_SINKS:
        sink_log2 = tl.load(sinks_ptr + row % Q_HEADS) * LOG2E
    factor, lse = finish(m, d, sink_log2)
    out = tl.where(factor != 0.0, acc * factor, 0.0)
    tl.store(out_ptr + row * HEAD_DIM + lane_d, cast(out, out_ptr.dtype.element_ty), mask=in_head)
    if HAS_LSE:
        tl.store(lse_ptr + row, lse)


def _compute_dtype(q, k_cache, carry_k):
    """What the products run in: q's dtype where it holds the keys exactly (fp8 does), else float32."""
    exact = (q.dtype, torch.float8_e4m3fn, torch.float8_e5m2)
    mixed = k_cache.dtype not in exact or (carry_k is not None and carry_k.dtype != q.dtype)
    return tl.float32 if mixed else {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[q.dtype]


def block_attention_triton(
    out, lse,
    q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k, carry_v, carry_lens, carry_slot_ids, block_start,
    carry_positions, scale, causal, window_left, window_right, sinks, softcap, k_scale, v_scale, num_splits, return_lse,
):  # fmt: skip
    requests, block_rows, q_heads, head_dim = q.shape
    if out.numel() == 0:
        return
    kv_heads, (pages, page_size) = k_block.shape[2], k_cache.shape[:2]
    group, columns = q_heads // kv_heads, block_table.shape[1]
    wide = torch.float32 in (q.dtype, k_cache.dtype)  # then the products are float32's, which need smaller tiles
    tile = config("block_attention", head_dim=head_dim, rows=group * block_rows, dtype=torch.float32 if wide else q.dtype)
    row_tiles = triton.cdiv(group * block_rows, tile.BLOCK_M)
    splits = num_splits or plan_splits(requests * kv_heads * row_tiles, columns * page_size, q.device, tile.BLOCK_N)
    partial = state = None
    if splits > 1:
        partial = q.new_empty((requests, block_rows, q_heads, splits, head_dim), dtype=torch.float32)
        state = q.new_empty((requests, block_rows, q_heads, splits, 2), dtype=torch.float32)
    carry = carry_k is not None
    carry_strides = (*carry_k.stride()[:3], *carry_v.stride()[:3]) if carry else (0,) * 6
    block_d = triton.next_power_of_2(head_dim)
    block_attention_kernel[(row_tiles * splits, kv_heads, requests)](
        out, lse, partial, state, q, k_block, v_block, k_cache, v_cache, carry_k, carry_v, sinks, k_scale, v_scale,
        block_table, seq_lens, carry_lens, carry_slot_ids, block_start, carry_positions,
        *q.stride()[:3], *k_block.stride()[:3], *v_block.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], *carry_strides,
        block_table.stride(0), pages, page_size, columns, carry_k.shape[0] if carry else 0, carry_k.shape[1] if carry else 0,
        block_rows, k_block.shape[1], (head_dim**-0.5 if scale is None else scale) * LOG2E.value, softcap,
        _compute_dtype(q, k_cache, carry_k), q_heads, group, head_dim, splits, causal, window_left, window_right, softcap > 0,
        carry, block_start is not None, carry_positions is not None, sinks is not None, k_scale is not None, v_scale is not None,
        return_lse, tile.BLOCK_M, tile.BLOCK_N, block_d, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(requests * block_rows * q_heads,)](
            out, lse, partial, state, sinks, q_heads, head_dim, splits, sinks is not None, return_lse, block_d, num_warps=4
        )
