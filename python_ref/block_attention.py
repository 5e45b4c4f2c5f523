"""``block_attention``: a block's rows attend to [committed | carried | block]."""

import torch


def visible_keys(r, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry, block_start, carry_positions, scales, dtype):
    """All keys of request r as (position, k [Hkv, D], v [Hkv, D]): committed, carried, block."""
    page_size, columns = k_cache.shape[1], block_table.shape[1]
    committed = min(int(seq_lens[r]), columns * page_size)
    start = int(seq_lens[r]) if block_start is None else int(block_start[r])
    k_scale, v_scale = (1.0 if scale is None else scale.to(dtype) for scale in scales)
    keys = []

    for index in range(committed):
        page = int(block_table[r, index // page_size])
        if 0 <= page < k_cache.shape[0]:
            k, v = k_cache[page, index % page_size], v_cache[page, index % page_size]
            keys.append((start - committed + index, k.to(dtype) * k_scale, v.to(dtype) * v_scale))

    if carry is not None:
        carry_k, carry_v, carry_lens, carry_slot_ids = carry
        slot = int(carry_slot_ids[r])
        if 0 <= slot < carry_k.shape[0]:
            for j in range(min(max(int(carry_lens[slot]), 0), carry_k.shape[1])):
                position = start + j if carry_positions is None else int(carry_positions[slot, j])
                keys.append((position, carry_k[slot, j].to(dtype), carry_v[slot, j].to(dtype)))

    for b in range(k_block.shape[1]):
        keys.append((start + b, k_block[r, b].to(dtype), v_block[r, b].to(dtype)))
    return start, keys


def block_attention(
    q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k=None, carry_v=None, carry_lens=None, carry_slot_ids=None,
    block_start=None, carry_positions=None, scale=None, causal=False, window_left=-1, window_right=-1, sinks=None, softcap=0.0,
    k_scale=None, v_scale=None, num_splits=0, return_lse=False, *, dtype=torch.float64,
):  # fmt: skip
    requests, block_rows, q_heads, head_dim = q.shape
    group = q_heads // k_block.shape[2]  # query heads that share a KV head
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=dtype)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=dtype)
    carry = None if carry_k is None else (carry_k, carry_v, carry_lens, carry_slot_ids)

    for r in range(requests):
        if seq_lens[r] < 0:
            continue
        start, keys = visible_keys(
            r, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry, block_start, carry_positions, (k_scale, v_scale), dtype
        )
        for b in range(block_rows):
            position = start + b
            seen = [
                (k, v)
                for key_position, k, v in keys
                if not (causal and key_position > position)
                and not (window_left >= 0 and position - key_position > window_left)
                and not (window_right >= 0 and key_position - position > window_right)
            ]
            if not seen:
                continue
            k = torch.stack([k for k, _ in seen]).repeat_interleave(group, dim=1)  # [keys, Hq, D]
            v = torch.stack([v for _, v in seen]).repeat_interleave(group, dim=1)
            scores = (q[r, b].to(dtype) * k).sum(dim=-1) * scale  # [keys, Hq]
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            logits = scores if sinks is None else torch.cat([scores, sinks.to(dtype)[None]])
            lse[r, b] = torch.logsumexp(logits, dim=0)
            out[r, b] = (torch.exp(scores - lse[r, b])[:, :, None] * v).sum(dim=0)

    return out, lse if return_lse else lse.new_empty(0)
