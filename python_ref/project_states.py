"""``project_states``: the target's states of verify rows become the drafter's K/V of every layer."""

import torch

from .qk_norm_rope import norm_and_rotate, rms_norm


def store(cache, index, value):
    """cache[index] = value in the cache's dtype; fp8 saturates at its largest finite value."""
    if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(cache.dtype).max
        value = value.clamp(-largest, largest)
    cache[index] = value.to(cache.dtype)


def project_states(
    states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot, row_position,
    k_cache, v_cache, carry_k=None, carry_v=None, norm_eps=1e-6, k_norm_eps=1e-6, neox=True, share_kv=False, v_norm=False,
    rope_parity=False, k_scale=None, v_scale=None, *, dtype=torch.float64,
):  # fmt: skip
    pages, page_size, kv_heads, head_dim = k_cache[0].shape
    table = rope_table.to(dtype)
    weight = kv_weight.to(dtype)

    for t in range(states.shape[0]):
        cache_slot, carry_slot, position = int(row_cache_slot[t]), int(row_carry_slot[t]), int(row_position[t])
        is_carried = carry_slot >= 0
        in_pages = 0 <= cache_slot < pages * page_size
        in_carry = is_carried and carry_k is not None and carry_slot < carry_k.shape[1] * carry_k.shape[2]
        if not (in_pages or in_carry) or not 0 <= position < table.shape[0]:
            continue

        x = states[t].to(dtype)
        if fc_weight is not None:
            x = fc_weight.to(dtype) @ x
        if is_carried and mark is not None:
            x = x + mark.to(dtype)
        kv = weight @ rms_norm(x, norm_eps)  # hidden_norm's weight is in kv_weight
        if kv_bias is not None:
            kv = kv + kv_bias.to(dtype)
        if is_carried and mark_kv is not None:
            kv = kv + mark_kv.to(dtype)

        kv = kv.view(len(k_cache), -1, kv_heads, head_dim)
        for layer in range(len(k_cache)):
            raw_k = kv[layer, 0]
            raw_v = raw_k if share_kv else kv[layer, 1]
            norm = k_norm_weight is not None
            k = norm_and_rotate(
                raw_k, k_norm_weight[layer].to(dtype) if norm else None, norm, k_norm_eps, table[position], neox, rope_parity, states.dtype
            )
            v = rms_norm(raw_v, k_norm_eps) if v_norm else raw_v
            if in_pages:
                at = (cache_slot // page_size, cache_slot % page_size)
                store(k_cache[layer], at, k if k_scale is None else k / k_scale[layer].to(dtype))
                store(v_cache[layer], at, v if v_scale is None else v / v_scale[layer].to(dtype))
            if in_carry:
                at = (layer, carry_slot // carry_k.shape[2], carry_slot % carry_k.shape[2])
                store(carry_k, at, k)
                store(carry_v, at, v)
