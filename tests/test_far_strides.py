"""Explicit 64-bit addresses, op by op: one argument after another moves to where index times stride passes 2**31 elements.

Strides themselves stay below 2**31, so that each fits 32 bits and only their products do not: a backend that multiplies in 32 bits wraps
into other memory. The storage is a file without contents, of which only written pages take room.
"""

import cases
import pytest
import torch
from cases import BF16, F32
from compare import assert_equal
from test_block_attention import sparse_storage

from carryover_kernels import ops

STRIDE = 2**30 + 64  # times an index of 2 it is beyond 2**31


def far(tensor, dim=0):
    """The same values, ``dim``'s stride STRIDE; its size must be above 2 for an offset to pass 2**31."""
    assert tensor.shape[dim] > 2, f"{list(tensor.shape)}: dimension {dim} is too small"
    stride, inner = [0] * tensor.dim(), 1
    for d in reversed(range(tensor.dim())):
        if d != dim:
            stride[d], inner = inner, inner * tensor.shape[d]
    stride[dim] = STRIDE
    moved = sparse_storage(tensor.shape, stride, tensor.dtype)
    for i in range(tensor.shape[dim]):
        moved.select(dim, i).copy_(tensor.select(dim, i))
    return moved


def attention(rng):
    return cases.attention_case(rng, BF16, committed=(7, 2, 9, 4), carried=(2, 0, 3, 1), block=4, q_heads=6, kv_heads=3, page=2, sinks=True)


def split_attention(rng):
    return attention(rng) | {"num_splits": 3}


def project(rng):
    return cases.project_case(rng, BF16, kinds="cccrrsb", layers=3, kv_heads=3)


def qk(rng):
    return cases.qk_case(rng, BF16)


def pages(rng):
    return cases.pages_case(rng, committed=(6, 1, 9), rows=((2, 1), (1, 3), (2, 0)))


def markov(rng):
    return cases.markov_case(rng, F32, head="rnn", temperature=cases.WARM)


def verify(rng):
    return cases.verify_case(rng, "rejection")


def verify_block(rng):
    return cases.verify_case(rng, "block")


# Op, its arguments, and (argument, dimension) of each stride that an engine chooses.
MOVED = {
    "block_attention": [
        (attention, [
            ("q", 0), ("q", 1), ("q", 2), ("k_block", 0), ("v_block", 1), ("k_cache", 0), ("v_cache", 0), ("v_cache", 2), ("carry_k", 0),
            ("carry_v", 0), ("carry_k", 1), ("carry_v", 2), ("block_table", 0),
        ]),
        (split_attention, [("k_cache", 0)]),
    ],
    "project_states": [
        (project, [
            ("states", 0), ("k_cache", 0), ("v_cache", 0), ("k_cache", 1), ("v_cache", 2), ("carry_k", 0), ("carry_v", 1), ("carry_k", 2),
            ("carry_v", 3),
        ]),
    ],
    "qk_norm_rope": [(qk, [("qkv", 0)])],
    "carry_to_pages": [(pages, [("block_table", 0)])],
    "markov_sample": [(markov, [("base_logits", 0), ("base_logits", 1), ("hidden", 0), ("hidden", 1)])],
    "verify_draft": [
        (verify, [("target_logits", 0), ("draft_probs", 0), ("draft_probs", 1)]),
        (verify_block, [("target_logits", 0), ("draft_probs", 1)]),
    ],
}  # fmt: skip


def call(name, args):
    out = getattr(ops, name)(**args)
    out = () if out is None else (out,) if isinstance(out, torch.Tensor) else out
    written = [args[key] for key in ("carry_k", "carry_v", "k_cache", "v_cache") if args.get(key) is not None]
    return list(out) + [t.clone() for value in written for t in (value if isinstance(value, list) else [value])]


@pytest.mark.parametrize(("name", "builder", "argument", "dim"), [
    pytest.param(name, builder, argument, dim, id=f"{name}-{builder.__name__}-{argument}-{dim}")
    for name, groups in MOVED.items() for builder, moves in groups for argument, dim in moves
])  # fmt: skip
def test_index_times_stride_over_32_bits(name, builder, argument, dim, seed, backend, device):
    if device != "cpu":
        pytest.skip("sparse memory is a matter of the CPU's page tables")
    near, moved = (builder(torch.Generator().manual_seed(seed)) for _ in range(2))
    value = moved[argument]
    if argument in ("k_cache", "v_cache") and isinstance(value, list):  # one layer far is enough, and a quarter of the address space
        value[-1] = far(value[-1], dim)
    else:
        moved[argument] = far(value, dim)
    expected, got = call(name, near), call(name, moved)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_equal(a, b, f"{name} with {argument} far apart, result {i}")
