"""What every engine needs beside its own pages: carry buffers by request slot, and the shard of a tensor-parallel rank."""

from typing import NamedTuple

import torch


class PlanArguments(NamedTuple):
    """The first five arguments of ``plan_round``, in order."""

    query_start_loc: torch.Tensor
    num_rejected: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    carry_slot_ids: torch.Tensor


class CarryBuffers(NamedTuple):
    """Fixed addresses, so captured graphs may read them; inert (nothing carried) from the start. S request slots, C rows each.

    carry_k, carry_v: [L, S, C, Hkv, D]; ``carry_k[l]`` is what ``block_attention`` takes. carry_lens: [S] i32.
    """

    carry_k: torch.Tensor
    carry_v: torch.Tensor
    carry_lens: torch.Tensor


def new_buffers(
    num_layers: int, num_slots: int, capacity: int, num_kv_heads: int, head_dim: int, dtype=torch.bfloat16, device="cpu"
) -> CarryBuffers:
    """Empty buffers. num_slots: the engine's request slots (its idx_mapping or req_pool_indices). capacity: most proposals a round.

    Size: 2 * L * S * C * Hkv * D elements; a 5-layer drafter of 8 KV heads of 128 with 15 proposals takes 0.3 MB a request in bf16.
    """
    shape = (num_layers, num_slots, capacity, num_kv_heads, head_dim)
    k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
    return CarryBuffers(k, v, torch.zeros(num_slots, dtype=torch.int32, device=device))


def kv_heads_of_rank(num_kv_heads: int, rank: int, size: int) -> range:
    """KV heads that tensor-parallel ``rank`` of ``size`` holds: an equal share, or one replicated where there are more ranks than heads."""
    if not 0 <= rank < size:
        raise ValueError(f"kv_heads_of_rank: rank is {rank}, must be 0 to {size - 1}")
    if size <= num_kv_heads:
        if num_kv_heads % size:
            raise ValueError(f"kv_heads_of_rank: size is {size}, must divide the {num_kv_heads} KV heads or be a multiple of them")
        share = num_kv_heads // size
        return range(rank * share, (rank + 1) * share)
    if size % num_kv_heads:
        raise ValueError(f"kv_heads_of_rank: size is {size}, must divide the {num_kv_heads} KV heads or be a multiple of them")
    head = rank // (size // num_kv_heads)
    return range(head, head + 1)


def shard_kv_rows(rows: torch.Tensor, num_layers: int, num_kv_heads: int, rank: int, size: int, share_kv: bool = False) -> torch.Tensor:
    """The rank's rows of a ``project_states`` weight, bias or ``mark_kv`` [L * (2 or 1) * Hkv * D, ...], cut by head in a layer's K and V.

    fc, hidden_norm and a mark before the norm are the same on all ranks; carry buffers hold the rank's heads alone.
    """
    heads = kv_heads_of_rank(num_kv_heads, rank, size)
    blocks = num_layers * (1 if share_kv else 2)
    if rows.shape[0] % (blocks * num_kv_heads):
        whole = blocks * num_kv_heads
        raise ValueError(f"shard_kv_rows: rows has {rows.shape[0]} rows, must be a multiple of {whole}: the heads of all layers")
    by_head = rows.view(blocks, num_kv_heads, -1, *rows.shape[1:])
    return by_head[:, heads.start : heads.stop].reshape(-1, *rows.shape[1:]).contiguous()
