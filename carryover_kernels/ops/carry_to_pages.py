"""``carry_to_pages``: slots and lengths for engines whose attention only takes pages."""

import torch

from ._check import INT32, INT64, Checker, Values
from ._define import call, define

SCHEMA = (
    "(Tensor row_cache_slot, Tensor row_carry_slot, Tensor query_start_loc, Tensor block_table, Tensor seq_lens, int page_size, "
    "int num_block_rows, Tensor? slot_capacity=None) -> (Tensor row_slot, Tensor block_slot, Tensor lengths)"
)


def _check(row_cache_slot, row_carry_slot, query_start_loc, block_table, seq_lens, page_size, num_block_rows, slot_capacity):
    check = Checker("carry_to_pages")
    check.tensor("row_cache_slot", row_cache_slot, "T", INT64, contiguous=True)
    check.tensor("row_carry_slot", row_carry_slot, "T", INT64, contiguous=True)
    check.tensor("query_start_loc", query_start_loc, "R+1", INT32, contiguous=True)
    check.require(query_start_loc.shape[0] >= 1, "query_start_loc has 0 entries, must have R+1, at least 1")
    check.sizes["R"] = query_start_loc.shape[0] - 1
    check.tensor("block_table", block_table, "R P", INT32, last_contiguous=True)
    check.tensor("seq_lens", seq_lens, "R", INT32, contiguous=True)
    check.at_least("page_size", page_size, 1)
    check.at_least("num_block_rows", num_block_rows, 0)
    check.optional("slot_capacity", slot_capacity, "R", INT32, contiguous=True)


def _fake(row_cache_slot, row_carry_slot, query_start_loc, block_table, seq_lens, page_size, num_block_rows, slot_capacity=None):
    _check(row_cache_slot, row_carry_slot, query_start_loc, block_table, seq_lens, page_size, num_block_rows, slot_capacity)
    requests = seq_lens.shape[0]
    return torch.empty_like(row_cache_slot), row_cache_slot.new_empty(requests, num_block_rows), torch.empty_like(seq_lens)


def _check_values(row_cache_slot, row_carry_slot, query_start_loc, block_table, seq_lens, page_size, num_block_rows, slot_capacity):
    check = Values("carry_to_pages")
    check.row_bounds(query_start_loc, row_cache_slot.shape[0])
    check.at_most("seq_lens", seq_lens, block_table.shape[1] * page_size, "P * page_size")
    if slot_capacity is not None:
        check.at_least("slot_capacity", slot_capacity, 0)
        check.at_most("slot_capacity", slot_capacity, block_table.shape[1] * page_size, "P * page_size")
        check.at_most("seq_lens", seq_lens, slot_capacity, "the request's slot_capacity")


_OP = define("carry_to_pages", SCHEMA, _fake, _check_values)


def carry_to_pages(
    row_cache_slot: torch.Tensor,
    row_carry_slot: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    num_block_rows: int,
    slot_capacity: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place carried rows at the tail [committed | carried | block] of a request's own pages (DESIGN section 3).

    The drop-in for engines whose attention takes pages alone: committed rows keep their slot, carried row j of request r goes to
    token index ``seq_lens[r] + j``, block row b to ``seq_lens[r] + carried + b``, and attention runs over ``lengths[r]`` keys. The
    next round's committed rows overwrite them. Only slots that the request has reserved are named: where the room ends,
    the block goes first, carried rows that don't fit beside it are dropped (-1), then block rows (-1). ``lengths`` counts what is placed.

    Args:
        row_cache_slot, row_carry_slot: [T] i64, from ``plan_round``.
        query_start_loc: [R+1] i32, first row of each request.
        block_table: [R, P] i32 (any row stride), page of each page_size tokens; a negative entry ends the request's room.
        seq_lens: [R] i32, committed length after this round (``block_start`` without a prefix offset); negative = padding: nothing is placed.
        page_size: tokens a page, >= 1.
        num_block_rows: B, rows of a block.
        slot_capacity: [R] i32 or None: token slots that request r has reserved in its own pages (look-ahead included); None: P * page_size.
            Give it wherever table tails may be stale: shared pages must never be written.

    Returns:
        row_slot [T] i64: flat slot of each verify row, committed or carried, else -1. Pass it as ``row_cache_slot`` of ``project_states``.
        block_slot [R, B] i64: flat slot of each block row, else -1.
        lengths [R] i32: keys that the block's attention sees, block included; 0 for padding.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or layout, named in one sentence.

    Example:
        >>> import torch, carryover_kernels as ck
        >>> row_slot, block_slot, lengths = ck.carry_to_pages(  # 2 committed, 1 carried; committed length 6, pages of 4: 9, 5, 7
        ...     torch.tensor([20, 21, -1]), torch.tensor([-1, -1, 0]), torch.tensor([0, 3], dtype=torch.int32),
        ...     torch.tensor([[9, 5, 7]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32), 4, 2)
        >>> row_slot.tolist(), block_slot.tolist(), lengths.tolist()
        ([20, 21, 22], [[23, 28]], [9])
    """
    args = (row_cache_slot, row_carry_slot, query_start_loc, block_table, seq_lens, page_size, num_block_rows, slot_capacity)
    return call(_OP, *args)
