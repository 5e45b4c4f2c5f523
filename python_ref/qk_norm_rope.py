"""``qk_norm_rope``: the block's queries and keys, normed by head and rotated."""

import torch


def rms_norm(x, eps, weight=None):
    """x / sqrt(mean(x^2) + eps), times weight, over the last dimension."""
    x = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def norm_and_rotate(x, weight, norm, eps, row, neox, parity, activation):
    """Heads x [heads, D] in the arithmetic's dtype, table row [cos | sin]: RoPE(RMSNorm(x)).

    ``parity``: every step is rounded to ``activation``, as Transformers rounds it.
    """

    def rounded(y):
        return y.to(activation).to(x.dtype) if parity else y

    half = row.shape[0] // 2
    cos, sin = rounded(row[:half]), rounded(row[half:])
    if norm:
        x = rounded(rms_norm(rounded(x), eps))
        if weight is not None:
            x = rounded(x * rounded(weight))
    out = x.clone()
    for j in range(half):
        first, second = (j, j + half) if neox else (2 * j, 2 * j + 1)
        out[..., first] = rounded(rounded(x[..., first] * cos[j]) - rounded(x[..., second] * sin[j]))
        out[..., second] = rounded(rounded(x[..., second] * cos[j]) + rounded(x[..., first] * sin[j]))
    return out


def qk_norm_rope(
    qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads,
    eps=1e-6, neox=True, share_kv=False, v_norm=False, rope_parity=False, *, dtype=torch.float64,
):  # fmt: skip
    rows = qkv.shape[0]
    head_dim = qkv.shape[1] // (num_q_heads + (1 if share_kv else 2) * num_kv_heads)
    q = torch.zeros(rows, num_q_heads, head_dim, dtype=dtype)
    k = torch.zeros(rows, num_kv_heads, head_dim, dtype=dtype)
    v = torch.zeros(rows, num_kv_heads, head_dim, dtype=dtype)
    table = rope_table.to(dtype)
    q_weight = None if q_norm_weight is None else q_norm_weight.to(dtype)
    k_weight = None if k_norm_weight is None else k_norm_weight.to(dtype)

    for m, position in enumerate(positions.tolist()):
        if not 0 <= position < table.shape[0]:
            continue
        heads = qkv[m].to(dtype).reshape(-1, head_dim)
        raw_q = heads[:num_q_heads]
        raw_k = heads[num_q_heads : num_q_heads + num_kv_heads]
        raw_v = raw_k if share_kv else heads[num_q_heads + num_kv_heads :]
        rope = (table[position], neox, rope_parity, qkv.dtype)
        q[m] = norm_and_rotate(raw_q, q_weight, q_weight is not None, eps, *rope)
        k[m] = norm_and_rotate(raw_k, k_weight, k_weight is not None, eps, *rope)
        v[m] = rms_norm(raw_v, eps) if v_norm else raw_v
    return q, k, v
