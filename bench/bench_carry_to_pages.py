"""``carry_to_pages`` beside the same slots computed in tensor operations."""

import pytest
import torch

from carryover_kernels.ops import carry_to_pages

from . import peers, report
from .floors import count_bytes


def case(batch, rows=16, block=16, page=16, width=64) -> report.Case:
    starts = torch.arange(batch + 1, dtype=torch.int32) * rows
    rejected = torch.randint(0, rows - 1, (batch, 1))
    row = torch.arange(rows).expand(batch, rows)
    committed = row < rows - rejected
    cache = torch.where(committed, row + 100, -1).reshape(-1)
    carry = torch.where(committed, -1, row - (rows - rejected)).reshape(-1)
    table = torch.randperm(batch * width).view(batch, width).int()
    seq_lens = torch.randint(0, page * width - rows - block, (batch,), dtype=torch.int32)

    def ours():
        return carry_to_pages(cache, carry, starts, table, seq_lens, page, block)

    def eager():
        return peers.carry_to_pages(cache, carry, table, seq_lens, page, rows, block)

    def check():
        for got, expected in zip(ours(), eager()):
            if not torch.equal(got, expected):
                raise AssertionError("carry_to_pages: other slots than the tensor operations give")

    return report.Case(
        f"batch {batch} rows {rows}", ours, {"eager": eager}, check, count_bytes(cache, carry, starts, seq_lens, *ours()),
        axes={"batch": batch},
    )  # fmt: skip


def cases(quick: bool):
    for batch in (1, 32) if quick else (1, 8, 32, 256):
        yield case(batch)


@pytest.mark.parametrize("number", range(2))
def test_carry_to_pages(number, benchmark):
    report.pytest_case(benchmark, "carry_to_pages", cases(quick=True), number)
