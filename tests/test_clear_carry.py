"""``clear_carry``: named slots forget, others do not."""

import pytest
import torch
from cases import garbage, i32
from compare import assert_equal
from doors import compiled, opcheck, opcheck_dynamic, refused, run
from hypothesis import given
from hypothesis import strategies as st

import python_ref.clear_carry as definition

NAME = "clear_carry"
WRITES = ("carry_lens",)


def check(args, device):
    out, after = run(NAME, args, device, WRITES)
    assert out == ()
    expected = {name: tensor.clone() for name, tensor in args.items()}
    definition.clear_carry(**expected)
    assert_equal(after["carry_lens"], expected["carry_lens"], "carry_lens")
    opcheck(NAME, args, device)
    return after["carry_lens"].tolist()


@given(
    ids=st.lists(st.integers(-3, 8) | st.sampled_from([2**31 - 1, -(2**31)]), max_size=9),
    slots=st.integers(0, 7),
    number=st.integers(0, 2**31),
)
def test_any_ids(ids, slots, number, device):
    check({"carry_slot_ids": i32(ids), "carry_lens": garbage(torch.Generator().manual_seed(number), slots)}, device)


def test_r10_requests_that_advance_without_speculation_are_forgotten(device):
    """A finished, preempted or prefix-restored request leaves nothing behind; its neighbours keep theirs."""
    assert check({"carry_slot_ids": i32([2, -1, 99, 0]), "carry_lens": i32([5, 6, 7])}, device) == [0, 6, 0]


def test_all_of_opcheck(device):
    opcheck_dynamic(NAME, {"carry_slot_ids": i32([2, -1]), "carry_lens": i32([5, 6, 7])}, device)


def test_fullgraph(device):
    _, placed = compiled(NAME, {"carry_slot_ids": i32([2, -1]), "carry_lens": i32([5, 6, 7])}, device)
    assert placed["carry_lens"].tolist() == [5, 6, 0]


REFUSALS = {
    "carry_slot_ids has dtype int64, must be int32": (torch.zeros(2, dtype=torch.int64), i32([1, 2])),
    "carry_slot_ids has 2 dimensions, must have 1: [R]": (i32([[1]]), i32([1, 2])),
    "carry_slot_ids has strides [2], must be contiguous": (i32([1, 2, 3])[::2], i32([1, 2])),
    "carry_lens has dtype int64, must be int32": (i32([1]), torch.zeros(2, dtype=torch.int64)),
    "carry_lens has dtype float32, must be int32": (i32([1]), torch.zeros(2)),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refuses(sentence, device):
    refused(NAME, dict(zip(("carry_slot_ids", "carry_lens"), REFUSALS[sentence])), sentence, device)
