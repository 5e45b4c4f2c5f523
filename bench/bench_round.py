"""A whole drafter round (plan, projection, block through all layers, head, greedy tokens): carryover on, off, and an ordinary drafter.

Weights are random: time does not depend on them. "off" is the same round whose rejected rows are skipped; "eager" is the round of stock
modules without carryover: unfused projection, gather + cat + SDPA.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from carryover_kernels.ops import block_attention, plan_round, project_states, qk_norm_rope

from . import peers, report
from .floors import count_bytes
from .shapes import EMBEDDED, QWEN3_4B


@functools.lru_cache(maxsize=1)
def weights(model):
    def matrix(rows, columns):
        # One random block, repeated: quick to make, and no two cache lines of a product share an address.
        block = torch.randn(64, columns) / columns**0.5
        return block.bfloat16().repeat((rows + 63) // 64, 1)[:rows].contiguous()

    width = model.q_heads * model.head_dim
    layers = [
        (matrix(model.qkv_columns, model.hidden), matrix(model.hidden, width), matrix(2 * model.intermediate, model.hidden),
         matrix(model.hidden, model.intermediate)) for _ in range(model.layers)
    ]  # fmt: skip
    return matrix(model.hidden, model.features), matrix(model.kv_rows, model.hidden), layers, matrix(model.vocab, model.hidden)


def case(model, batch, context, rejected=7, page=16) -> report.Case:
    fc, kv, layers, head = weights(model)
    rows, capacity = model.block, model.block - 1
    width = (context + 2 * rows + page - 1) // page
    shape = (batch * width, page, model.kv_heads, model.head_dim)

    def pages():
        return [torch.randn(1, 1, 1, model.head_dim).bfloat16().expand(shape).clone() for _ in range(model.layers)]

    k_cache, v_cache = pages(), pages()
    carry_k, carry_v = (torch.zeros(model.layers, batch, capacity, *shape[2:], dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(batch * width).view(batch, width).int()
    states = torch.randn(batch * rows, model.features).bfloat16()
    block = torch.randn(batch * rows, model.hidden).bfloat16()
    ones, mark = torch.ones(model.layers, model.head_dim), torch.randn(model.hidden)
    rope = torch.randn(context + 4 * rows, model.head_dim)
    starts = torch.arange(batch + 1, dtype=torch.int32) * rows
    num_rejected = torch.full((batch,), min(rejected, capacity), dtype=torch.int32)
    positions = (torch.arange(rows) + context).repeat(batch)
    slot = table.long().gather(1, positions.view(batch, rows) // page) * page + positions.view(batch, rows) % page
    slots, length = slot.view(-1), context + rows - int(num_rejected[0])
    seq_lens = torch.full((batch,), length, dtype=torch.int32)
    block_positions = (torch.arange(rows) + length).repeat(batch)
    lens = torch.zeros(batch, dtype=torch.int32)
    ids, none = torch.arange(batch, dtype=torch.int32), torch.full((batch,), -1, dtype=torch.int32)

    def through(attention):
        x = block
        for index, (qkv, out, up, down) in enumerate(layers):
            x = x + F.linear(attention(index, F.linear(peers.rms_norm(x), qkv)).reshape(batch * rows, -1), out)
            gate, value = F.linear(peers.rms_norm(x), up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * value, down)
        return F.linear(peers.rms_norm(x).view(batch, rows, -1)[:, 1:], head).argmax(-1)

    def plan(carry_ids=ids):
        return plan_round(starts, num_rejected, positions, slots, carry_ids, lens, capacity)

    def project(planned):
        cache_slot, carry_slot, position, _ = planned
        project_states(
            states, fc, kv, None, ones, mark, None, rope, cache_slot, carry_slot, position, k_cache, v_cache, carry_k, carry_v,
            share_kv=model.share_kv, v_norm=model.v_norm,
        )  # fmt: skip

    def norm_and_rotate(qkv):
        q, k, v = qk_norm_rope(
            qkv, block_positions, rope, ones[0], ones[0], model.q_heads, model.kv_heads, share_kv=model.share_kv, v_norm=model.v_norm
        )
        return tuple(y.view(batch, rows, *y.shape[1:]) for y in (q, k, v))

    def attend(index, q, k, v, carry_ids=ids):
        return block_attention(q, k, v, k_cache[index], v_cache[index], table, seq_lens, carry_k[index], carry_v[index], lens, carry_ids)[0]

    def ours(carry_ids=ids):
        project(plan(carry_ids))
        return through(lambda index, qkv: attend(index, *norm_and_rotate(qkv), carry_ids))

    def eager():
        plan = peers.plan_round(num_rejected, positions, slots, ids, lens, rows, 0)
        peers.project_states(states, fc, kv, ones, mark, rope, plan[0], plan[1], plan[2], k_cache, v_cache, None, None, model)

        def attention(index, qkv):
            q, k, v = peers.qk_norm_rope(
                qkv, block_positions, rope, ones[0], ones[0], model.q_heads, model.kv_heads, model.share_kv, model.v_norm
            )
            q, k, v = (y.view(batch, rows, *y.shape[1:]) for y in (q, k, v))
            return peers.block_attention(q, k, v, k_cache[index], v_cache[index], table, length, None, None, 0)

        return through(attention)

    def check():
        # Both rounds without carryover give one distribution; bf16 ties may flip an argmax, so nearly all tokens must agree.
        same = (ours(none) == eager()).float().mean()
        if same < 0.9:
            raise AssertionError(f"round: {float(same):.2f} of the tokens agree with the eager round, must be at least 0.9")

    planned, qkv = plan(), F.linear(block, layers[0][0])
    q, k, v = norm_and_rotate(qkv)
    phases = {
        "plan_round": plan,
        "project_states": lambda: project(planned),
        "qk_norm_rope, all layers": lambda: [norm_and_rotate(qkv) for _ in layers],
        "block_attention, all layers": lambda: [attend(index, q, k, v) for index in range(model.layers)],
        "stock modules: projections, MLP, norms, head": lambda: through(lambda index, qkv: q),
    }
    once = count_bytes(fc, kv, head, *(w for layer in layers for w in layer))
    keys = 2 * batch * length * model.kv_heads * model.head_dim * 2 * model.layers
    attention = 4 * batch * rows * model.q_heads * model.head_dim * (length + rows) * model.layers
    return report.Case(
        f"{model.name} batch {batch} context {context} rejected {int(num_rejected[0])}",
        ours, {"off": lambda: ours(none), "eager": eager}, check, once + keys, batch * rows * once + attention,
        axes={"model": model.name, "batch": batch, "context": context}, phases=phases,
    )  # fmt: skip


def cases(quick: bool):
    yield case(EMBEDDED, 1, 256, 4)
    yield case(EMBEDDED, 32, 256, 4)
    if quick:
        return
    yield case(QWEN3_4B, 1, 512)
    yield case(QWEN3_4B, 1, 4096)
    yield case(QWEN3_4B, 32, 512)


@pytest.mark.parametrize("number", range(1))
def test_round(number, benchmark):
    report.pytest_case(benchmark, "round", cases(quick=True), number)
