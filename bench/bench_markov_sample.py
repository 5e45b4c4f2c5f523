"""``markov_sample`` (vanilla head, greedy) beside the stock loop."""

import pytest
import torch

from carryover_kernels.ops import markov_sample

from . import peers, report
from .floors import count_bytes

RANK = 256


def case(batch, steps, vocab) -> report.Case:
    base, anchors = torch.randn(batch, steps, vocab).bfloat16(), torch.randint(0, vocab, (batch,))
    w1, w2 = torch.randn(vocab, RANK).bfloat16(), (torch.randn(vocab, RANK) / RANK**0.5).bfloat16()

    def ours():
        return markov_sample(base, anchors, w1, w2, "vanilla")

    def check():
        # In float32, step by step along our own tokens: a token is right if nothing beats it by more than the loop's own rounding.
        tokens = ours()[0]
        before = torch.cat([anchors[:, None], tokens[:, :-1]], 1)
        for i in range(steps):
            logits = base[:, i].float() + w1[before[:, i]].float() @ w2.float().T
            lost = logits.max(-1).values - logits.gather(1, tokens[:, i : i + 1])[:, 0]
            if not (lost <= logits.abs().max() * torch.finfo(torch.bfloat16).eps).all():
                raise AssertionError(f"markov_sample: step {i} is {float(lost.max()):.3g} below the best")

    return report.Case(
        f"batch {batch} steps {steps} vocab {vocab}", ours, {"eager": lambda: peers.markov_greedy(base, anchors, w1, w2)}, check,
        count_bytes(base) + steps * count_bytes(w2), 2 * batch * steps * vocab * RANK, axes={"batch": batch, "rows": steps, "vocab": vocab},
    )  # fmt: skip


def cases(quick: bool):
    yield case(1, 7, 2048)
    yield case(1, 15, 151936)
    if quick:
        return
    yield case(1, 7, 32768)
    yield case(8, 7, 151936)


@pytest.mark.parametrize("number", range(1))
def test_markov_sample(number, benchmark):
    report.pytest_case(benchmark, "markov_sample", cases(quick=True), number)
