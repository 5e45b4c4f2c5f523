"""``block_attention`` beside gather + cat + SDPA, over context, batch, page size, carried rows and dtype."""

import functools

import pytest
import torch

from carryover_kernels.ops import block_attention

from . import peers, report
from .floors import count_bytes
from .shapes import EMBEDDED, GEMMA4_12B, QWEN3_4B


def case(model, batch, context, page, carry, dtype=torch.bfloat16, compiled=False) -> report.Case:
    rows, heads, kv_heads, dim = model.block, model.q_heads, model.kv_heads, model.head_dim
    width = (context + page - 1) // page
    pages = batch * width + 1
    q = torch.randn(batch, rows, heads, dim).to(dtype)
    k, v = (torch.randn(batch, rows, kv_heads, dim).to(dtype) for _ in range(2))
    k_cache, v_cache = (torch.randn(pages, page, kv_heads, dim).to(dtype) for _ in range(2))
    carry_k, carry_v = (torch.randn(batch, max(carry, 1), kv_heads, dim).to(dtype) for _ in range(2))
    table = torch.randperm(pages)[: batch * width].view(batch, width).int()
    seq_lens = torch.full((batch,), context, dtype=torch.int32)
    carry_lens, ids = torch.full((batch,), carry, dtype=torch.int32), torch.arange(batch, dtype=torch.int32)

    ours = functools.partial(block_attention, q, k, v, k_cache, v_cache, table, seq_lens, carry_k, carry_v, carry_lens, ids)
    inputs = (q, k, v, k_cache, v_cache)
    eager = functools.partial(peers.block_attention, *inputs, table, context, carry_k, carry_v, carry)
    others = {"eager": eager}
    if compiled:
        whole = torch.compile(peers.block_attention, dynamic=False)
        others["compile"] = lambda: whole(*inputs, table, context, carry_k, carry_v, carry)

    def check():
        truth = peers.block_attention(*(x.double() for x in inputs), table, context, carry_k.double(), carry_v.double(), carry)
        report.assert_close(ours()[0], eager(), truth, f"block_attention {model.name} {context}")

    keys = context + carry + rows
    return report.Case(
        f"{model.name} batch {batch} context {context} page {page} carry {carry}" + ("" if dtype == torch.bfloat16 else " f32"),
        ours, others, check, 2 * batch * keys * kv_heads * dim * q.element_size() + 2 * count_bytes(q),
        4 * batch * rows * heads * dim * keys, dtype,
        {"model": model.name, "batch": batch, "context": context, "page": page, "carry": carry},
    )  # fmt: skip


def cases(quick: bool):
    yield case(EMBEDDED, 1, 512, 16, 7)
    for context in (512, 8192) if quick else (512, 1024, 2048, 4096, 8192, 16384, 32768):
        yield case(QWEN3_4B, 1, context, 16, 7, compiled=context == 512 and not quick)
    yield case(QWEN3_4B, 1, 4096 if quick else 8192, 16, 7, torch.float32)
    if quick:
        return
    yield case(QWEN3_4B, 1, 512, 16, 7, torch.float32)
    yield case(QWEN3_4B, 1, 32768, 16, 7, torch.float32)
    for page in (1, 64):
        yield case(QWEN3_4B, 1, 8192, page, 7)
    for carry in (0, 15):
        yield case(QWEN3_4B, 1, 4096, 16, carry)
    for batch in (8, 32):
        yield case(QWEN3_4B, batch, 512, 16, 7)
    yield case(QWEN3_4B, 8, 4096, 16, 7)
    yield case(GEMMA4_12B, 1, 4096, 16, 7)
    yield case(EMBEDDED, 8, 512, 16, 7)


@pytest.mark.parametrize("number", range(3))
def test_block_attention(number, benchmark):
    report.pytest_case(benchmark, "block_attention", cases(quick=True), number)
