"""SGLang (speculative worker v2): the metadata of its DFlash worker to the arguments of our ops.

SGLang verifies a fixed [bs, B] of rows and appends the first ``commit_lens`` of each to the draft cache at the END of round t; it drafts at
the START of round t + 1, after the scheduler filtered and merged the batch. So carried rows live by request pool index, never by batch row.
All functions take tensors, never sync, and import nothing of SGLang.
"""

import torch

from .buffers import PlanArguments

PADDING_SLOT = 0  # SGLang's reserved request slot: padded batch rows point here


def engine_version() -> str:
    """Version of the installed SGLang.

    Raises:
        ImportError: there is none.
    """
    try:
        import sglang
    except ImportError as error:
        raise ImportError(f"sglang can't be imported ({error}), must be installed for this integration") from None
    return sglang.__version__


def carry_slot_ids(req_pool_indices: torch.Tensor, padding_slot: int | None = PADDING_SLOT) -> torch.Tensor:
    """[R] i32 for our ops: request pool indices, padding rows -1. padding_slot None: no index is reserved."""
    ids = req_pool_indices.to(torch.int32)
    return ids if padding_slot is None else torch.where(ids == padding_slot, -1, ids)


def verify_arguments(
    prefix_lens: torch.Tensor,
    commit_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor,
    block_size: int,
    padding_slot: int | None = PADDING_SLOT,
) -> PlanArguments:
    """``plan_round`` arguments after a verify step of ``block_size`` rows a request.

    Args:
        prefix_lens: [R], committed length before the step (position of the block's first row).
        commit_lens: [R], accepted + 1, as synced over ranks (R47: never a rank's own).
        out_cache_loc: [R * B], flat token slots of the verify rows.
        req_pool_indices: [R].
    """
    requests = prefix_lens.shape[0]
    device = prefix_lens.device
    if out_cache_loc.numel() != requests * block_size:
        entries, wanted = out_cache_loc.numel(), requests * block_size
        raise ValueError(f"verify_arguments: out_cache_loc has {entries} entries, must have {wanted}: R * block_size")
    offsets = torch.arange(block_size, device=device)
    ids = carry_slot_ids(req_pool_indices, padding_slot)
    live = (ids >= 0)[:, None]
    slots = torch.where(live, out_cache_loc.view(requests, block_size).long(), -1)
    return PlanArguments(
        torch.arange(requests + 1, dtype=torch.int32, device=device) * block_size,
        torch.where(ids >= 0, block_size - commit_lens, 0).to(torch.int32),
        (prefix_lens.long()[:, None] + offsets).reshape(-1),
        slots.reshape(-1),
        ids,
    )


def extend_arguments(
    prefix_lens: torch.Tensor, extend_lens: torch.Tensor, out_cache_loc: torch.Tensor, req_pool_indices: torch.Tensor
) -> PlanArguments:
    """``plan_round`` arguments of a prefill or target-only step: nothing is rejected, and what the requests carried is forgotten (R10, 3c).

    prefix_lens, extend_lens: [R]; out_cache_loc: [sum of extend_lens].
    """
    rows = out_cache_loc.shape[0]
    ends = extend_lens.long().cumsum(0)
    query_start_loc = torch.cat([ends.new_zeros(1), ends])
    row = torch.arange(rows, device=out_cache_loc.device)
    owner = torch.bucketize(row, ends, right=True).clamp(max=max(prefix_lens.shape[0] - 1, 0))
    positions = prefix_lens.long()[owner] + row - query_start_loc[owner]
    return PlanArguments(
        query_start_loc.to(torch.int32), torch.zeros_like(extend_lens, dtype=torch.int32), positions, out_cache_loc.long(),
        carry_slot_ids(req_pool_indices),
    )  # fmt: skip


def page_views(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """A token pool's k_buffer or v_buffer [tokens, Hkv, D] as [pages, page, Hkv, D], no copy; a rest below one page is left off."""
    pages = buffer.shape[0] // page_size
    return buffer[: pages * page_size].unflatten(0, (pages, page_size))


def block_table(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, page_size: int) -> torch.Tensor:
    """[R, ctx / page] i32 from ``req_to_token`` [reqs, ctx] i32: the page of each page_size tokens; garbage past a request's length.

    Page size 1 needs no division and no copy of more than the rows.
    """
    rows = req_to_token[req_pool_indices.long()]
    return rows if page_size == 1 else (rows[:, ::page_size] // page_size).contiguous()
