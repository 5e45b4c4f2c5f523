"""``qk_norm_rope`` beside the norms and rotations of stock modules."""

import pytest
import torch

from carryover_kernels.ops import qk_norm_rope

from . import peers, report
from .floors import count_bytes
from .shapes import EMBEDDED, GEMMA4_12B, QWEN3_4B


def case(model, batch) -> report.Case:
    rows = batch * model.block
    qkv = torch.randn(rows, model.qkv_columns).bfloat16()
    positions, table = torch.arange(rows) % 1024, torch.randn(1024, model.head_dim)
    q_weight, k_weight = torch.rand(model.head_dim) + 0.5, torch.rand(model.head_dim) + 0.5
    heads = (model.q_heads, model.kv_heads)

    def ours():
        return qk_norm_rope(qkv, positions, table, q_weight, k_weight, *heads, share_kv=model.share_kv, v_norm=model.v_norm)

    def eager(x=qkv):
        return peers.qk_norm_rope(x, positions, table, q_weight, k_weight, *heads, model.share_kv, model.v_norm)

    def check():
        for got, plain, truth in zip(ours(), eager(), eager(qkv.float())):
            report.assert_close(got, plain, truth, f"qk_norm_rope {model.name}")

    return report.Case(
        f"{model.name} batch {batch}", ours, {"eager": eager}, check, count_bytes(qkv, *ours()), axes={"model": model.name, "batch": batch}
    )


def cases(quick: bool):
    for model in (EMBEDDED, QWEN3_4B) if quick else (EMBEDDED, QWEN3_4B, GEMMA4_12B):
        for batch in (1, 32) if quick else (1, 8, 32):
            yield case(model, batch)


@pytest.mark.parametrize("number", range(2))
def test_qk_norm_rope(number, benchmark):
    report.pytest_case(benchmark, "qk_norm_rope", cases(quick=True), number)
