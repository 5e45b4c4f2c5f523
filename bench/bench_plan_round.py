"""``plan_round`` beside the same bookkeeping in tensor operations."""

import pytest
import torch

from carryover_kernels.ops import plan_round

from . import peers, report
from .floors import count_bytes


def case(batch, rows=16, capacity=15) -> report.Case:
    starts = torch.arange(batch + 1, dtype=torch.int32) * rows
    rejected = torch.randint(0, rows - 1, (batch,), dtype=torch.int32)
    positions, slots = torch.arange(batch * rows), torch.arange(batch * rows)
    ids, lens = torch.arange(batch, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)

    def ours():
        return plan_round(starts, rejected, positions, slots, ids, lens, capacity)

    def eager():
        return peers.plan_round(rejected, positions, slots, ids, lens, rows, capacity)

    def check():
        for got, expected in zip(ours(), eager()):
            if not torch.equal(got, expected):
                raise AssertionError("plan_round: another plan than the tensor operations give")

    return report.Case(
        f"batch {batch} rows {rows}", ours, {"eager": eager}, check, count_bytes(positions, slots, starts, rejected, *ours()),
        axes={"batch": batch},
    )  # fmt: skip


def cases(quick: bool):
    for batch in (1, 32) if quick else (1, 8, 32, 256):
        yield case(batch)


@pytest.mark.parametrize("number", range(2))
def test_plan_round(number, benchmark):
    report.pytest_case(benchmark, "plan_round", cases(quick=True), number)
