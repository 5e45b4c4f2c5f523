"""``clear_carry``: forgets what requests carried."""

import torch

from ._check import INT32, Checker, Values
from ._define import call, define

SCHEMA = "(Tensor carry_slot_ids, Tensor(a!) carry_lens) -> ()"


def _check(carry_slot_ids, carry_lens):
    check = Checker("clear_carry")
    check.tensor("carry_slot_ids", carry_slot_ids, "R", INT32, contiguous=True)
    check.tensor("carry_lens", carry_lens, "slots", INT32, contiguous=True)


def _fake(carry_slot_ids, carry_lens):
    _check(carry_slot_ids, carry_lens)


def _check_values(carry_slot_ids, carry_lens):
    Values("clear_carry").below("carry_slot_ids", carry_slot_ids, carry_lens.shape[0], "carry slots")


_OP = define("clear_carry", SCHEMA, _fake, _check_values)


def clear_carry(carry_slot_ids: torch.Tensor, carry_lens: torch.Tensor) -> None:
    """Forget what requests carried: on finish, preemption, reuse of a slot, or a step that did not speculate (DESIGN section 3).

    A request that advances without ``plan_round`` must be cleared, else its next draft sees rows of a branch that is long gone.

    Args:
        carry_slot_ids: [R] i32, carry slots to clear; negative or >= slots: skipped.
        carry_lens: [slots] i32, set to 0 at those slots.

    Writes: carry_lens.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or layout, named in one sentence.

    Example:
        >>> import torch, carryover_kernels as ck
        >>> carry_lens = torch.tensor([5, 6, 7], dtype=torch.int32)
        >>> ck.clear_carry(torch.tensor([2, -1], dtype=torch.int32), carry_lens)
        >>> carry_lens.tolist()
        [5, 6, 0]
    """
    call(_OP, carry_slot_ids, carry_lens)
