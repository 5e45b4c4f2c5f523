"""``clear_carry`` beside an indexed assignment."""

import pytest
import torch

from carryover_kernels.ops import clear_carry

from . import report
from .floors import count_bytes


def case(batch) -> report.Case:
    ids, lens, other = torch.randperm(batch).int(), torch.ones(batch, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)

    def eager():
        other[ids.long()] = 0

    def check():
        lens.fill_(1)
        clear_carry(ids, lens)
        if lens.any():
            raise AssertionError("clear_carry: a slot that was named is not clear")

    return report.Case(
        f"batch {batch}", lambda: clear_carry(ids, lens), {"eager": eager}, check, count_bytes(ids, lens), axes={"batch": batch}
    )


def cases(quick: bool):
    for batch in (1, 32) if quick else (1, 32, 1024):
        yield case(batch)


@pytest.mark.parametrize("number", range(2))
def test_clear_carry(number, benchmark):
    report.pytest_case(benchmark, "clear_carry", cases(quick=True), number)
