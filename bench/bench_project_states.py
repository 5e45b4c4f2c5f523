"""``project_states`` beside the unfused sequence and beside its two GEMMs alone, over rows."""

import pytest
import torch

from carryover_kernels.ops import project_states

from . import peers, report
from .floors import count_bytes
from .shapes import EMBEDDED, GEMMA4_12B, QWEN3_4B


def case(model, rows, carried, dtype=torch.bfloat16) -> report.Case:
    states = torch.randn(rows, model.features).to(dtype)
    fc = (torch.randn(model.hidden, model.features) / model.features**0.5).to(dtype)
    kv = (torch.randn(model.kv_rows, model.hidden) / model.hidden**0.5).to(dtype)
    k_norm, mark, table = torch.rand(model.layers, model.head_dim) + 0.5, torch.randn(model.hidden), torch.randn(4096, model.head_dim)
    pages = rows // 16 + 2
    caches = [[torch.zeros(pages, 16, model.kv_heads, model.head_dim, dtype=dtype) for _ in range(model.layers)] for _ in range(4)]
    carries = [torch.zeros(model.layers, 16, 16, model.kv_heads, model.head_dim, dtype=dtype) for _ in range(4)]
    index = torch.arange(rows)
    is_carried = index >= rows - carried
    cache_slot, carry_slot = torch.where(is_carried, -1, index), torch.where(is_carried, index - (rows - carried), -1)

    def ours():
        project_states(
            states, fc, kv, None, k_norm, mark, None, table, cache_slot, carry_slot, index, caches[0], caches[1], carries[0], carries[1],
            share_kv=model.share_kv, v_norm=model.v_norm,
        )  # fmt: skip

    def unfused(k=caches[2], v=caches[3], carry_k=carries[2], carry_v=carries[3], x=states, a=fc, b=kv):
        peers.project_states(x, a, b, k_norm, mark, table, cache_slot, carry_slot, index, k, v, carry_k, carry_v, model)

    def check():
        wide = [[torch.zeros_like(c, dtype=torch.float64) for c in layers] for layers in caches[2:]]
        wide_carries = [torch.zeros_like(c, dtype=torch.float64) for c in carries[2:]]
        unfused(*wide, *wide_carries, states.double(), fc.double(), kv.double())
        ours()
        unfused()
        got_all, eager_all = caches[0] + caches[1] + carries[:2], caches[2] + caches[3] + carries[2:]
        for got, eager, truth in zip(got_all, eager_all, wide[0] + wide[1] + wide_carries):
            report.assert_close(got, eager, truth, f"project_states {model.name} {rows}")

    stored = 2 * rows * model.layers * model.kv_heads * model.head_dim * states.element_size()
    return report.Case(
        f"{model.name} rows {rows} carried {carried}" + ("" if dtype == torch.bfloat16 else " f32"),
        ours, {"unfused": unfused, "two GEMMs": lambda: peers.bare_products(states, fc, kv)}, check,
        count_bytes(states, fc, kv) + stored, 2 * rows * (fc.numel() + kv.numel()), dtype,
        {"model": model.name, "rows": rows, "carried": carried},
    )  # fmt: skip


def cases(quick: bool):
    yield case(EMBEDDED, 8, 4)
    for rows in (16, 128) if quick else (16, 32, 64, 128, 256):
        yield case(QWEN3_4B, rows, 7)
    if quick:
        return
    yield case(QWEN3_4B, 16, 7, torch.float32)
    yield case(GEMMA4_12B, 16, 7)


@pytest.mark.parametrize("number", range(2))
def test_project_states(number, benchmark):
    report.pytest_case(benchmark, "project_states", cases(quick=True), number)
