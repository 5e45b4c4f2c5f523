"""``carry_to_pages`` against the reference, exactly; no slot outside of a request's own room is ever named."""

import cases
import pytest
import torch
from cases import i32
from compare import assert_equal
from doors import compiled, opcheck, opcheck_dynamic, refused, run
from hypothesis import given
from hypothesis import strategies as st

import python_ref.carry_to_pages as definition

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
NAME = "carry_to_pages"
OUTPUTS = ("row_slot", "block_slot", "lengths")


def check(args, device):
    out, _ = run(NAME, args, device)
    for name, got, wanted in zip(OUTPUTS, out, definition.carry_to_pages(**args)):
        assert_equal(got, wanted, name)
    return dict(zip(OUTPUTS, out))


@pytest.mark.parametrize("name", cases.PAGES)
def test_named_case(name, rng, device):
    args = cases.pages_case(rng, **cases.PAGES[name])
    check(args, device)
    opcheck(NAME, args, device)


@st.composite
def ragged(draw):
    requests = draw(st.integers(0, 4))
    page = draw(st.sampled_from([1, 2, 3, 8]))
    columns = draw(st.integers(1, 6))
    room = page * columns
    return {
        "committed": draw(st.lists(st.integers(-1, room + 2), min_size=requests, max_size=requests)),
        "rows": draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=requests, max_size=requests)),
        "block": draw(st.integers(0, 6)),
        "page": page,
        "columns": columns,
        "spare": draw(st.none() | st.lists(st.integers(-3, 12), min_size=requests, max_size=requests)),
        "holes": draw(st.booleans()),
        "lead": draw(st.integers(0, 2)),
        "tail": draw(st.integers(0, 2)),
    }


@given(options=ragged(), number=st.integers(0, 2**31))
def test_ragged(options, number, device):
    args = cases.pages_case(torch.Generator().manual_seed(number), **options)
    check(args, device)
    opcheck(NAME, args, device, ("test_faketensor",))


def test_slots_are_distinct_and_in_order(rng):
    """Of the reference: carried rows, then block rows, fill the token indices after the committed ones without a gap."""
    args = cases.pages_case(rng, committed=(5,), rows=((2, 3),), block=4, page=4, columns=4)
    args["block_table"] = i32([[7, 2, 9, 4]])
    row_slot, block_slot, lengths = definition.carry_to_pages(**args)
    tokens = [7, 2, 9, 4]
    expected = [tokens[index // 4] * 4 + index % 4 for index in range(5, 12)]
    assert row_slot[2:].tolist() + block_slot[0].tolist() == expected and lengths.tolist() == [12]


def test_tests_can_fail(rng, device):
    args = cases.pages_case(rng)
    out, _ = run(NAME, args, device)
    for change in ({"seq_lens": args["seq_lens"] + 1}, {"page_size": 3}, {"num_block_rows": 3}):
        with pytest.raises(AssertionError):
            for got, wanted in zip(out, definition.carry_to_pages(**args | change)):
                assert_equal(got, wanted)


def test_all_of_opcheck(rng, device):
    for name in ("room_for_all", "then_block_rows"):
        opcheck_dynamic(NAME, cases.pages_case(rng, **cases.PAGES[name]), device)


def test_fullgraph(rng, device):
    args = cases.pages_case(rng)
    out, _ = run(NAME, args, device)
    for a, b in zip(out, compiled(NAME, args, device)[0]):
        assert_equal(b, a)


def one(carried=2, **changes):
    return {
        "row_cache_slot": torch.tensor([40, 41] + [-1] * carried), "row_carry_slot": torch.tensor([-1, -1] + list(range(carried))),
        "query_start_loc": i32([0, 2 + carried]), "block_table": i32([[9, 5, 7]]), "seq_lens": i32([6]), "page_size": 4,
        "num_block_rows": 3,
    } | changes  # fmt: skip


def test_r09_first_draft_wrote_into_pages_of_other_requests(device):
    """The third page is stale: 8 slots are reserved, so only indices 6 and 7 are named, and the block takes them."""
    got = check(one(slot_capacity=i32([8])), device)
    assert got["row_slot"].tolist() == [40, 41, -1, -1]
    assert got["block_slot"].tolist() == [[22, 23, -1]]
    assert got["lengths"].tolist() == [8]


def test_r33_reserve_wider_than_the_table(device):
    """page_size 1 at the context boundary: the table's width bounds the room, whatever was reserved."""
    args = one(block_table=i32([[9, 5, 7, 30, 31, 32, 33, 34]]), page_size=1, slot_capacity=i32([100]))
    got = check(args, device)
    assert got["row_slot"].tolist() == [40, 41, -1, -1]
    assert got["block_slot"].tolist() == [[33, 34, -1]]


def test_r35_context_longer_than_the_table(device):
    """No room left: nothing is named, nothing crashes."""
    got = check(one(seq_lens=i32([12])), device)
    assert got["row_slot"].tolist() == [40, 41, -1, -1] and got["block_slot"].tolist() == [[-1, -1, -1]]


def test_r30_page_number_times_page_size_over_32_bits(device):
    got = check(one(block_table=i32([[9, 2**31 - 1, 7]]), page_size=64, seq_lens=i32([70]), num_block_rows=1, carried=1), device)
    assert got["row_slot"].tolist() == [40, 41, (2**31 - 1) * 64 + 6]
    assert got["block_slot"].tolist() == [[(2**31 - 1) * 64 + 7]]


def bad(**changes):
    return lambda args: args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


REFUSALS = {
    "row_cache_slot has dtype int32, must be int64": bad(row_cache_slot=lambda t: t.int()),
    "row_carry_slot has shape [3], must be [4]: [T]": bad(row_carry_slot=lambda t: t[:3]),
    "query_start_loc has dtype int64, must be int32": bad(query_start_loc=lambda t: t.long()),
    "query_start_loc has 0 entries, must have R+1, at least 1": bad(query_start_loc=lambda t: t[:0]),
    "block_table has dtype int64, must be int32": bad(block_table=lambda t: t.long()),
    "block_table has shape [2, 3], must be [1, 3]: [R, P]": bad(block_table=lambda t: t.repeat(2, 1)),
    "block_table has stride 2 in its last dimension, must be 1": bad(block_table=lambda t: t.repeat_interleave(2, dim=1)[:, ::2]),
    "seq_lens has dtype int64, must be int32": bad(seq_lens=lambda t: t.long()),
    "seq_lens has shape [3], must be [1]: [R]": bad(seq_lens=lambda t: t.repeat(3)),
    "page_size is 0, must be at least 1": bad(page_size=0),
    "num_block_rows is -1, must be at least 0": bad(num_block_rows=-1),
    "slot_capacity has dtype int64, must be int32": bad(slot_capacity=torch.tensor([3])),
    "slot_capacity has shape [2], must be [1]: [R]": bad(slot_capacity=i32([3, 3])),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refuses(sentence, device):
    refused(NAME, REFUSALS[sentence](one()), sentence, device)
