"""What a PyTorch user runs instead of each op: stock calls, no Python loop over requests where PyTorch has none."""

import torch
import torch.nn.functional as F


def rms_norm(x, weight=None, eps=1e-6):
    """As the RMSNorm modules of Transformers: float32 inside, rounded, then the weight."""
    wide = x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else y * weight.to(x.dtype)


def rotate(x, cos, sin):
    """x [rows, heads, D], cos and sin [rows, 1, rotary / 2] in x's dtype, neox."""
    rotary = 2 * cos.shape[-1]
    first, second = x[..., :rotary].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., rotary:]], -1)


def qk_norm_rope(qkv, positions, table, q_weight, k_weight, q_heads, kv_heads, share_kv=False, v_norm=False):
    x = qkv.view(qkv.shape[0], q_heads + (1 if share_kv else 2) * kv_heads, -1)
    cos, sin = table[positions].to(x.dtype)[:, None].chunk(2, -1)
    q, k = x[:, :q_heads], x[:, q_heads : q_heads + kv_heads]
    v = k if share_kv else x[:, q_heads + kv_heads :]
    return rotate(rms_norm(q, q_weight), cos, sin), rotate(rms_norm(k, k_weight), cos, sin), rms_norm(v) if v_norm else v.contiguous()


def block_attention(q, k_block, v_block, k_cache, v_cache, block_table, length: int, carry_k, carry_v, carry: int):
    """Gather the pages, concatenate carried and block rows, SDPA. One length for the whole batch: the peer's easiest case."""
    requests, page = q.shape[0], k_cache.shape[1]
    pages = block_table[:, : (length + page - 1) // page].long()

    def keys(cache, carried, block):
        gathered = cache[pages].flatten(1, 2)[:, :length]
        parts = [gathered, carried[:requests, :carry], block] if carry else [gathered, block]
        return torch.cat(parts, 1).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys(k_cache, carry_k, k_block), keys(v_cache, carry_v, v_block), enable_gqa=q.shape[2] != k_block.shape[2]
    )
    return out.transpose(1, 2)


def project_states(states, fc, kv_weight, k_norm, mark, table, cache_slot, carry_slot, position, k_cache, v_cache, carry_k, carry_v, model):
    """The launches of engines today (ENGINE_FACTS 3d), plus the mark: fc, mark, norm, K/V, k_norm, RoPE, a store a layer and place."""
    x = F.linear(states, fc)
    if carry_k is not None:
        x = torch.where((carry_slot >= 0)[:, None], x + mark.to(x.dtype), x)
    kv = F.linear(rms_norm(x), kv_weight).view(states.shape[0], model.layers, -1, model.kv_heads, model.head_dim)
    cos, sin = table[position].to(x.dtype)[:, None].chunk(2, -1)
    rows = (cache_slot >= 0).nonzero()[:, 0]
    carried = (carry_slot >= 0).nonzero()[:, 0] if carry_k is not None else None
    for layer in range(model.layers):
        raw = kv[:, layer, 0]
        k = rotate(rms_norm(raw, k_norm[layer]), cos, sin)
        v = raw if model.share_kv else kv[:, layer, 1]
        v = rms_norm(v) if model.v_norm else v
        k_cache[layer].view(-1, model.kv_heads, model.head_dim)[cache_slot[rows]] = k[rows]
        v_cache[layer].view(-1, model.kv_heads, model.head_dim)[cache_slot[rows]] = v[rows]
        if carried is not None:
            carry_k[layer].view(-1, model.kv_heads, model.head_dim)[carry_slot[carried]] = k[carried]
            carry_v[layer].view(-1, model.kv_heads, model.head_dim)[carry_slot[carried]] = v[carried]


def bare_products(states, fc, kv_weight):
    """The two GEMMs alone: what no epilogue can be quicker than, with PyTorch's GEMM."""
    return F.linear(F.linear(states, fc), kv_weight)


def markov_greedy(base_logits, anchors, w1, w2):
    """The stock loop of a vanilla Markov head, greedy."""
    tokens, before = [], anchors
    for i in range(base_logits.shape[1]):
        logits = base_logits[:, i] + F.linear(F.embedding(before, w1), w2)
        before = logits.argmax(-1)
        tokens.append(before)
    return torch.stack(tokens, 1)


def verify_greedy(drafts, logits):
    """R requests of N + 1 rows each, all of one length."""
    requests, count = drafts.shape
    best = logits.view(requests, count + 1, -1).argmax(-1)
    accepted = (best[:, :-1] == drafts).long().cumprod(1).sum(1)
    return accepted.int(), best.gather(1, accepted[:, None])[:, 0]


def plan_round(rejected, positions, slots, carry_ids, carry_lens, rows: int, capacity: int):
    """R requests of ``rows`` rows each."""
    requests = rejected.shape[0]
    row = torch.arange(rows).expand(requests, rows)
    committed = row < rows - rejected[:, None]
    order = row - (rows - rejected[:, None])
    carried = ~committed & (order < capacity)
    cache = torch.where(committed, slots.view(requests, rows), -1)
    carry = torch.where(carried, carry_ids[:, None].long() * capacity + order, -1)
    carry_lens[carry_ids.long()] = rejected.clamp(max=capacity)
    start = positions.view(requests, rows).gather(1, (rows - rejected[:, None] - 1).long())[:, 0] + 1
    return cache.view(-1), carry.view(-1), torch.where(committed | carried, positions.view(requests, rows), 0).view(-1), start


def carry_to_pages(row_cache, row_carry, table, seq_lens, page: int, rows: int, block: int):
    requests = seq_lens.shape[0]
    carried = (row_carry.view(requests, rows) >= 0).long()
    count = carried.sum(1)
    index = seq_lens.long()[:, None] + carried.cumsum(1) - 1
    slot = table.long().gather(1, index.clamp(min=0) // page) * page + index % page
    row_slot = torch.where(carried.bool(), slot, row_cache.view(requests, rows)).view(-1)
    tail = (seq_lens.long() + count)[:, None] + torch.arange(block)
    return row_slot, table.long().gather(1, tail // page) * page + tail % page, (seq_lens + count + block).int()
