"""``verify_draft`` (greedy over logits) beside argmax and a cumulative product."""

import pytest
import torch

from carryover_kernels.ops import verify_draft

from . import peers, report
from .floors import count_bytes


def case(batch, drafts, vocab) -> report.Case:
    logits = torch.randn(batch * (drafts + 1), vocab).bfloat16()
    best = logits.view(batch, drafts + 1, vocab).argmax(-1)
    tokens = torch.where(torch.rand(batch, drafts) < 0.8, best[:, :-1], 0)
    starts = torch.arange(batch + 1, dtype=torch.int32) * (drafts + 1)

    def ours():
        return verify_draft(tokens, starts, target_logits=logits)

    def check():
        accepted, token, _ = ours()
        expected, bonus = peers.verify_greedy(tokens, logits)
        if not (torch.equal(accepted, expected) and torch.equal(token, bonus)):
            raise AssertionError("verify_draft: another result than argmax and cumprod")

    return report.Case(
        f"greedy batch {batch} drafts {drafts} vocab {vocab}", ours, {"eager": lambda: peers.verify_greedy(tokens, logits)}, check,
        count_bytes(logits), axes={"batch": batch, "vocab": vocab},
    )  # fmt: skip


def cases(quick: bool):
    yield case(1, 7, 2048)
    yield case(1, 15, 151936)
    if not quick:
        yield case(8, 15, 151936)


@pytest.mark.parametrize("number", range(1))
def test_verify_draft(number, benchmark):
    report.pytest_case(benchmark, "verify_draft", cases(quick=True), number)
