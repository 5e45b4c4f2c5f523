"""``qk_norm_rope``: one program a row and head."""

import triton
import triton.language as tl

from ._common import cast, pair_index, rms_scale, rope_rotate, rounded


@triton.jit
def qk_norm_rope_kernel(
    q_ptr, k_ptr, v_ptr,

    qkv_ptr, q_norm_weight_ptr, k_norm_weight_ptr, rope_table_ptr,

    positions_ptr,

    stride_qkv, max_position, eps,

    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr,
    SHARE_KV: tl.constexpr, V_NORM: tl.constexpr, PARITY: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    # Grid (M, Hq + 2 Hkv). Programs of q and k norm and rotate, those of v pass or norm; share_kv reads v's source from k's columns.
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK_H)
    a_at, b_at, a_there, b_there = pair_index(lane, HEAD_DIM, ROTARY, NEOX)
    position = tl.load(positions_ptr + row)
    known = (position >= 0) & (position < max_position)
    is_q, is_v = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
    source = head
    if SHARE_KV:
        source = tl.where(is_v, head - KV_HEADS, head)
    # A row of padding is not read at all: what lies there may be anything.
    readable = tl.where(known, HEAD_DIM, 0)
    from_ptr = qkv_ptr + row * stride_qkv + source * HEAD_DIM
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    a = tl.load(from_ptr + a_at, mask=a_there & (a_at < readable), other=0.0).to(tl.float32)
    b = tl.load(from_ptr + b_at, mask=b_there & (b_at < readable), other=0.0).to(tl.float32)
    scale = rms_scale(tl.sum(a * a) + tl.sum(b * b), HEAD_DIM, eps)

    if is_v:
        if V_NORM:
            a, b = a * scale, b * scale
        to_ptr = v_ptr + (row * KV_HEADS + head - Q_HEADS - KV_HEADS) * HEAD_DIM
        tl.store(to_ptr + a_at, cast(a, DTYPE), mask=a_there)
        tl.store(to_ptr + b_at, cast(b, DTYPE), mask=b_there)
    else:
        if is_q:
            if HAS_Q_NORM:
                wa = tl.load(q_norm_weight_ptr + a_at, mask=a_there, other=0.0)
                wb = tl.load(q_norm_weight_ptr + b_at, mask=b_there, other=0.0)
                a = rounded(rounded(a * scale, DTYPE, PARITY) * rounded(wa, DTYPE, PARITY), DTYPE, PARITY)
                b = rounded(rounded(b * scale, DTYPE, PARITY) * rounded(wb, DTYPE, PARITY), DTYPE, PARITY)
        else:
            if HAS_K_NORM:
                wa = tl.load(k_norm_weight_ptr + a_at, mask=a_there, other=0.0)
                wb = tl.load(k_norm_weight_ptr + b_at, mask=b_there, other=0.0)
                a = rounded(rounded(a * scale, DTYPE, PARITY) * rounded(wa, DTYPE, PARITY), DTYPE, PARITY)
                b = rounded(rounded(b * scale, DTYPE, PARITY) * rounded(wb, DTYPE, PARITY), DTYPE, PARITY)
        turns = lane < tl.where(known, ROTARY // 2, 0)
        angle_ptr = rope_table_ptr + position * ROTARY + lane
        cosine = rounded(tl.load(angle_ptr, mask=turns, other=1.0), DTYPE, PARITY)
        sine = rounded(tl.load(angle_ptr + ROTARY // 2, mask=turns, other=0.0), DTYPE, PARITY)
        a, b = rope_rotate(a, b, cosine, sine, DTYPE, PARITY)
        to_ptr = q_ptr + (row * Q_HEADS + head) * HEAD_DIM
        if not is_q:
            to_ptr = k_ptr + (row * KV_HEADS + head - Q_HEADS) * HEAD_DIM
        tl.store(to_ptr + a_at, cast(a, DTYPE), mask=a_there)
        tl.store(to_ptr + b_at, cast(b, DTYPE), mask=b_there)


def qk_norm_rope_triton(
    q, k, v,
    qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads, eps, neox, share_kv, v_norm, rope_parity,
):  # fmt: skip
    rows, head_dim = qkv.shape[0], q.shape[2]
    if rows == 0:
        return
    qk_norm_rope_kernel[(rows, num_q_heads + 2 * num_kv_heads)](
        q, k, v, qkv, q_norm_weight, k_norm_weight, rope_table, positions, qkv.stride(0), rope_table.shape[0], eps,
        num_q_heads, num_kv_heads, head_dim, rope_table.shape[1], neox, share_kv, v_norm, rope_parity,
        q_norm_weight is not None, k_norm_weight is not None, triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
