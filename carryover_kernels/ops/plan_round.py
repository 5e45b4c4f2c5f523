"""``plan_round``: sorts the verify rows of a round into committed, carried and skipped."""

import torch

from ._check import INT32, INT64, Checker, Values
from ._define import call, define

SCHEMA = (
    "(Tensor query_start_loc, Tensor num_rejected, Tensor positions, Tensor slot_mapping, Tensor carry_slot_ids, "
    "Tensor(a!) carry_lens, int carry_capacity, Tensor(b!)? carry_positions=None) "
    "-> (Tensor row_cache_slot, Tensor row_carry_slot, Tensor row_position, Tensor block_start)"
)


def _check(query_start_loc, num_rejected, positions, slot_mapping, carry_slot_ids, carry_lens, carry_capacity, carry_positions):
    check = Checker("plan_round")
    check.tensor("query_start_loc", query_start_loc, "R+1", INT32, contiguous=True)
    check.require(query_start_loc.shape[0] >= 1, "query_start_loc has 0 entries, must have R+1, at least 1")
    check.sizes["R"] = query_start_loc.shape[0] - 1
    check.tensor("num_rejected", num_rejected, "R", INT32, contiguous=True)
    check.tensor("positions", positions, "T", INT64, contiguous=True)
    check.tensor("slot_mapping", slot_mapping, "T", INT64, contiguous=True)
    check.tensor("carry_slot_ids", carry_slot_ids, "R", INT32, contiguous=True)
    check.tensor("carry_lens", carry_lens, "slots", INT32, contiguous=True)
    check.at_least("carry_capacity", carry_capacity, 0)
    check.sizes["C"] = carry_capacity
    check.optional("carry_positions", carry_positions, "slots C", INT64, contiguous=True)


def _fake(query_start_loc, num_rejected, positions, slot_mapping, carry_slot_ids, carry_lens, carry_capacity, carry_positions=None):
    _check(query_start_loc, num_rejected, positions, slot_mapping, carry_slot_ids, carry_lens, carry_capacity, carry_positions)
    rows = positions.shape[0]
    return (
        positions.new_empty(rows),
        positions.new_empty(rows),
        positions.new_empty(rows),
        positions.new_empty(num_rejected.shape[0]),
    )


def _check_values(query_start_loc, num_rejected, positions, slot_mapping, carry_slot_ids, carry_lens, carry_capacity, carry_positions):
    check = Values("plan_round")
    check.row_bounds(query_start_loc, positions.shape[0])
    check.at_least("num_rejected", num_rejected, 0)
    check.at_most("num_rejected", num_rejected, query_start_loc.diff(), "the request's rows")
    check.at_least("positions", positions, 0, where=slot_mapping >= 0)
    check.below("carry_slot_ids", carry_slot_ids, carry_lens.shape[0], "carry slots")
    check.distinct("carry_slot_ids", carry_slot_ids, carry_lens.shape[0])


_OP = define("plan_round", SCHEMA, _fake, _check_values)


def plan_round(
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    carry_slot_ids: torch.Tensor,
    carry_lens: torch.Tensor,
    carry_capacity: int,
    carry_positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the verify rows of a round into committed, carried and skipped (DESIGN section 1, steps 3 to 5).

    Request r owns rows ``query_start_loc[r] .. query_start_loc[r+1]-1``. Its last ``num_rejected[r]`` rows (clamped to 0 and
    to its row count) are rejected, the others committed. Committed rows go to the engine's own slot; the first C rejected rows go
    to the request's carry slot, in order; everything else is skipped. Rows that no request owns (before ``query_start_loc[0]``,
    after ``query_start_loc[R]``) are skipped: a padded tail of ``query_start_loc`` may be flat, or spaced with slots and ids of -1.

    Args:
        query_start_loc: [R+1] i32, non-decreasing, first row of each request.
        num_rejected: [R] i32, rejected rows of each request; 0 for a prefill or a non-speculative step.
        positions: [T] i64, position of each row. An input, never derived: siblings of a tree share one.
        slot_mapping: [T] i64, the engine's own flat cache slot (page * page_size + offset) of each row; negative = skip the row.
        carry_slot_ids: [R] i32, carry slot of each request; negative or >= slots: padding, or a request that carries nothing.
        carry_lens: [slots] i32, written for every slot named, 0 included; other slots keep theirs.
        carry_capacity: C, rows that a carry slot holds.
        carry_positions: [slots, C] i64 or None: where given, the positions of the carried rows are stored there
            (``block_attention`` needs them for causal or windowed layers under tree verification only).

    Returns:
        row_cache_slot [T] i64: flat cache slot of a committed row, else -1.
        row_carry_slot [T] i64: carry slot id * C + index of a carried row, else -1.
        row_position [T] i64: the row's position, 0 where the row is skipped.
        block_start [R] i64: position of the next block's first row (the anchor): that of the last committed row + 1; that of the
            first row where all rows are rejected; 0 where the request has no rows.

    Writes: carry_lens, and carry_positions where given.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or layout, named in one sentence.

    Example:
        >>> import torch, carryover_kernels as ck
        >>> carry_lens = torch.zeros(4, dtype=torch.int32)
        >>> row_cache_slot, row_carry_slot, row_position, block_start = ck.plan_round(  # 4 rows at 10..13, the last 2 rejected
        ...     torch.tensor([0, 4], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), torch.arange(10, 14),
        ...     torch.tensor([90, 91, 92, 93]), torch.tensor([3], dtype=torch.int32), carry_lens, 8)
        >>> row_cache_slot.tolist(), row_carry_slot.tolist(), block_start.tolist(), carry_lens.tolist()
        ([90, 91, -1, -1], [-1, -1, 24, 25], [12], [0, 0, 0, 2])
    """
    args = (query_start_loc, num_rejected, positions, slot_mapping, carry_slot_ids, carry_lens, carry_capacity, carry_positions)
    return call(_OP, *args)
