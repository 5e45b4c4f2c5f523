"""The floating-point ops as a PyTorch user writes them in the activation dtype: the yardstick of the tolerance rule, never the truth.

Same arguments as the op; roundings where eager PyTorch rounds: after every matmul, after every norm, after softmax.
"""

import torch

from .markov_sample import markov_sample as markov_sample_ref


def rms_norm(x, eps, weight=None):
    """As Transformers' RMSNorm modules: float32 inside, rounded, then the weight."""
    wide = x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else weight.to(x.dtype) * y


def rope(x, row, neox):
    """x [..., heads, D], row [..., rotary_dim]: cos and sin in x's dtype, as Transformers keeps them."""
    rotary = row.shape[-1]
    cos, sin = row.to(x.dtype).unsqueeze(-2).chunk(2, dim=-1)
    turning, rest = x[..., :rotary], x[..., rotary:]
    if neox:
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


def qk_norm_rope(
    qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads,
    eps=1e-6, neox=True, share_kv=False, v_norm=False, rope_parity=False,
):  # fmt: skip
    heads = num_q_heads + (1 if share_kv else 2) * num_kv_heads
    x = qkv.reshape(qkv.shape[0], heads, qkv.shape[1] // heads)
    q, k = x[:, :num_q_heads], x[:, num_q_heads : num_q_heads + num_kv_heads]
    v = k if share_kv else x[:, num_q_heads + num_kv_heads :]
    known = (positions >= 0) & (positions < rope_table.shape[0])
    row = rope_table[torch.where(known, positions, 0)]
    q = rope(q if q_norm_weight is None else rms_norm(q, eps, q_norm_weight), row, neox)
    k = rope(k if k_norm_weight is None else rms_norm(k, eps, k_norm_weight), row, neox)
    v = rms_norm(v, eps) if v_norm else v
    return tuple(torch.where(known[:, None, None], y, 0) for y in (q, k, v))


def project_states(
    states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot, row_position,
    k_cache, v_cache, carry_k=None, carry_v=None, norm_eps=1e-6, k_norm_eps=1e-6, neox=True, share_kv=False, v_norm=False,
    rope_parity=False, k_scale=None, v_scale=None,
):  # fmt: skip
    pages, page_size, kv_heads, head_dim = k_cache[0].shape
    carried = (row_carry_slot >= 0)[:, None]
    x = states if fc_weight is None else torch.nn.functional.linear(states, fc_weight)
    if mark is not None:
        x = x + torch.where(carried, mark.to(x.dtype), 0)
    kv = torch.nn.functional.linear(rms_norm(x, norm_eps), kv_weight)
    if kv_bias is not None:
        kv = kv + kv_bias.to(kv.dtype)
    if mark_kv is not None:
        kv = kv + torch.where(carried, mark_kv.to(kv.dtype), 0)
    kv = kv.view(states.shape[0], len(k_cache), 1 if share_kv else 2, kv_heads, head_dim)
    known = (row_position >= 0) & (row_position < rope_table.shape[0])
    row = rope_table[torch.where(known, row_position, 0)]
    in_pages = known & (row_cache_slot >= 0) & (row_cache_slot < pages * page_size)
    slots = 0 if carry_k is None else carry_k.shape[1] * carry_k.shape[2]
    in_carry = known & (row_carry_slot >= 0) & (row_carry_slot < slots)

    def scaled(y, scale, dtype):
        y = y if scale is None else y / scale.to(y.dtype)
        if dtype.itemsize == 1:
            y = y.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        return y.to(dtype)

    for layer in range(len(k_cache)):
        k = kv[:, layer, 0]
        v = k if share_kv else kv[:, layer, 1]
        k = rope(k if k_norm_weight is None else rms_norm(k, k_norm_eps, k_norm_weight[layer]), row, neox)
        v = rms_norm(v, k_norm_eps) if v_norm else v
        for t in in_pages.nonzero()[:, 0].tolist():
            at = divmod(int(row_cache_slot[t]), page_size)
            k_cache[layer][at] = scaled(k[t], None if k_scale is None else k_scale[layer], k_cache[layer].dtype)
            v_cache[layer][at] = scaled(v[t], None if v_scale is None else v_scale[layer], v_cache[layer].dtype)
        for t in in_carry.nonzero()[:, 0].tolist():
            at = (layer, *divmod(int(row_carry_slot[t]), carry_k.shape[2]))
            carry_k[at], carry_v[at] = k[t].to(carry_k.dtype), v[t].to(carry_v.dtype)


def block_attention(
    q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k=None, carry_v=None, carry_lens=None, carry_slot_ids=None,
    block_start=None, carry_positions=None, scale=None, causal=False, window_left=-1, window_right=-1, sinks=None, softcap=0.0,
    k_scale=None, v_scale=None, num_splits=0, return_lse=False,
):  # fmt: skip
    """Gather, concatenate, mask, softmax in float32, all else in q's dtype: what engines without this op run."""
    dtype, page_size, group = q.dtype, k_cache.shape[1], q.shape[2] // k_block.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"))
    for r in range(q.shape[0]):
        if seq_lens[r] < 0:
            continue
        n = min(int(seq_lens[r]), block_table.shape[1] * page_size)
        start = int(seq_lens[r]) if block_start is None else int(block_start[r])
        index = torch.arange(n)
        page = block_table[r].long()[index // page_size]
        known = (page >= 0) & (page < k_cache.shape[0])
        index, page = index[known], page[known]
        keys, values, positions = [], [], [start - n + index]
        for cache, cache_scale, parts in ((k_cache, k_scale, keys), (v_cache, v_scale, values)):
            part = cache[page, index % page_size].to(dtype)
            parts.append(part if cache_scale is None else part * cache_scale.to(dtype))
        slot = -1 if carry_k is None else int(carry_slot_ids[r])
        if carry_k is not None and 0 <= slot < carry_k.shape[0]:
            m = min(max(int(carry_lens[slot]), 0), carry_k.shape[1])
            keys.append(carry_k[slot, :m].to(dtype))
            values.append(carry_v[slot, :m].to(dtype))
            positions.append(start + torch.arange(m) if carry_positions is None else carry_positions[slot, :m])
        keys.append(k_block[r])
        values.append(v_block[r])
        positions.append(start + torch.arange(k_block.shape[1]))
        k = torch.cat(keys).repeat_interleave(group, dim=1).transpose(0, 1)  # [Hq, keys, D]
        v = torch.cat(values).repeat_interleave(group, dim=1).transpose(0, 1)
        distance = (start + torch.arange(q.shape[1]))[:, None] - torch.cat(positions)[None]  # query - key
        mask = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            mask |= distance < 0
        if window_left >= 0:
            mask |= distance > window_left
        if window_right >= 0:
            mask |= -distance > window_right
        scores = (q[r].transpose(0, 1) @ k.transpose(1, 2)) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.float().masked_fill(mask, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)], dim=2)
        some = (~mask).any(1)
        weights = torch.softmax(scores, dim=-1).to(dtype)[:, :, : k.shape[1]]
        out[r] = torch.where(some[:, None, None], (weights @ v).transpose(0, 1), 0)
        lse[r] = torch.where(some[:, None], torch.logsumexp(scores, dim=-1).T, float("-inf"))
    return out, lse if return_lse else lse.new_empty(0)


def markov_sample(*args, **kwargs):
    """The op promises float32 arithmetic whatever the weights are, so the yardstick is the definition in float32."""
    return markov_sample_ref(*args, dtype=torch.float32, **kwargs)
