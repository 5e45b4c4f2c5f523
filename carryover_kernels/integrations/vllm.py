"""vLLM (V1, model runner V2): the metadata of its DFlash speculator to the arguments of our ops.

In ``propose`` of a speculator, vLLM has the target's whole verify batch on the device, rejected rows included, and runs fc and the K/V
projection over all of it; the rejected part is then thrown away by position 0 and slot -1. Carryover keeps it: same GEMM rows, the
rows' own positions, the mark, and a store by request slot. All functions take tensors (or the engine's own batch object), never sync,
and import nothing of vLLM.
"""

import torch

from .buffers import PlanArguments

LAYOUTS = ("kv_first", "block_first", "packed")


def engine_version() -> str:
    """Version of the installed vLLM.

    Raises:
        ImportError: there is none.
    """
    try:
        import vllm
    except ImportError as error:
        raise ImportError(f"vllm can't be imported ({error}), must be installed for this integration") from None
    return vllm.__version__


def plan_arguments(input_batch, num_sampled: torch.Tensor, num_rejected: torch.Tensor, slot_mapping: torch.Tensor) -> PlanArguments:
    """``plan_round`` arguments from what ``propose`` is given.

    Args:
        input_batch: the target's InputBatch (query_start_loc, idx_mapping, positions, num_reqs, num_tokens are read). Its positions are the
            rows' own; the speculator's ``context_positions`` are not: rejected rows read 0 there.
        num_sampled, num_rejected: [>= R] i32. A request that sampled nothing (a chunk of its prompt) carries nothing.
        slot_mapping: [>= T] i64, the drafter group's context slots (rejected rows may be -1 in it: they are carried all the same).
    """
    requests, rows = input_batch.num_reqs, input_batch.num_tokens
    sampled = num_sampled[:requests] > 0
    return PlanArguments(
        input_batch.query_start_loc[: requests + 1],
        torch.where(sampled, num_rejected[:requests], 0).to(torch.int32),
        input_batch.positions[:rows],
        slot_mapping[:rows],
        input_batch.idx_mapping[:requests],
    )


def padded_slot_ids(idx_mapping: torch.Tensor, num_reqs: int, out: torch.Tensor) -> torch.Tensor:
    """Write request slots into ``out`` [padded R] i32 of a captured graph: live ones, then -1 over the whole tail (R16, R18)."""
    out[:num_reqs].copy_(idx_mapping[:num_reqs])
    out[num_reqs:].fill_(-1)
    return out


def block_seq_lens(block_start: torch.Tensor, num_reqs: int, num_rows: int, max_model_len: int, out: torch.Tensor) -> torch.Tensor:
    """Write committed lengths into ``out`` [padded R] i32 for ``block_attention``; -1 (no keys, rows give 0) where nothing is drafted.

    That is the tail of a captured graph's batch, and requests whose block of ``num_rows`` would pass ``max_model_len``: their drafts are
    to be ignored. Clamping their positions instead, as vLLM does, makes several block rows share one.
    """
    starts = block_start[:num_reqs]
    out[:num_reqs].copy_(torch.where(starts + num_rows <= max_model_len, starts, -1))
    out[num_reqs:].fill_(-1)
    return out


def kv_views(kv_cache: torch.Tensor, layout: str, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v views [pages, page, Hkv, D] of one layer's cache, no copy. The layout is named, never read off the shape: they can coincide.

    Args:
        kv_cache: one layer's tensor, any outer strides.
        layout: 'kv_first' [2, pages, page, Hkv, D]; 'block_first' [pages, 2, page, Hkv, D]; 'packed' [pages, Hkv, page, 2 D], K then V in
            the last dimension. A cache kept heads-first behind these logical shapes needs nothing more: strides say so.
        head_dim: D.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"kv_views: layout is '{layout}', must be one of {', '.join(LAYOUTS)}")
    dims, last = (4, 2 * head_dim) if layout == "packed" else (5, head_dim)
    if kv_cache.dim() != dims or kv_cache.shape[-1] != last:
        shape = list(kv_cache.shape)
        raise ValueError(f"kv_views: kv_cache has shape {shape}, must have {dims} dimensions ending in {last} with '{layout}'")
    if layout == "packed":
        by_token = kv_cache.transpose(1, 2)
        return by_token[..., :head_dim], by_token[..., head_dim:]
    axis = 0 if layout == "kv_first" else 1
    if kv_cache.shape[axis] != 2:
        raise ValueError(f"kv_views: kv_cache has {kv_cache.shape[axis]} entries in dimension {axis}, must have 2 with '{layout}'")
    return kv_cache.select(axis, 0), kv_cache.select(axis, 1)


def draft_slot_mapping(block_table: torch.Tensor, positions: torch.Tensor, owner: torch.Tensor, page_size: int) -> torch.Tensor:
    """[T] i64 slots of rows at ``positions`` of requests ``owner`` [T]: -1 in vLLM's null block 0 and beyond the table (R33, R36).

    Only for drafters that don't take vLLM's own mapping (context parallelism interleaves slots: take the engine's there, R41).
    """
    page = positions // page_size
    inside = (positions >= 0) & (page < block_table.shape[1])
    page_id = block_table[owner, page.clamp(0, block_table.shape[1] - 1)].long()
    return torch.where(inside & (page_id > 0), page_id * page_size + positions % page_size, -1)
