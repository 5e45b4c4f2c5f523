"""``plan_round`` against the reference, exactly; and the reports about rows, slots and padding."""

import cases
import pytest
import torch
from cases import i32
from compare import assert_equal
from doors import compiled, opcheck, opcheck_dynamic, refused, run
from hypothesis import given
from hypothesis import strategies as st

import python_ref.plan_round as definition

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
NAME = "plan_round"
WRITES = ("carry_lens", "carry_positions")
OUTPUTS = ("row_cache_slot", "row_carry_slot", "row_position", "block_start")


def check(args, device):
    out, after = run(NAME, args, device, WRITES)
    expected = cases.clean(args)
    for name, got, wanted in zip(OUTPUTS, out, definition.plan_round(**expected)):
        assert_equal(got, wanted, name)
    for name in WRITES:
        if args.get(name) is not None:
            assert_equal(after[name], expected[name], name)
    return dict(zip(OUTPUTS, out)) | after


@pytest.mark.parametrize("name", cases.PLAN)
def test_named_case(name, rng, device):
    args = cases.plan_case(rng, **cases.PLAN[name])
    check(args, device)
    opcheck(NAME, args, device)


@st.composite
def ragged(draw):
    rows = draw(st.lists(st.integers(0, 9), max_size=6))
    return {
        "rows": rows,
        "rejected": [draw(st.integers(-1, n + 2)) for n in rows],
        "no_slot": [r for r in range(len(rows)) if draw(st.integers(0, 3)) == 0],
        "capacity": draw(st.integers(0, 8)),
        "slots": len(rows) + draw(st.integers(0, 3)),
        "lead": draw(st.integers(0, 2)),
        "tail": draw(st.integers(0, 5)),
        "flat": draw(st.integers(0, 3)),
        "spaced": draw(st.integers(0, 3)),
        "tree": draw(st.booleans()),
    }


@given(options=ragged(), number=st.integers(0, 2**31))
def test_ragged(options, number, device):
    args = cases.plan_case(torch.Generator().manual_seed(number), **options)
    check(args, device)
    opcheck(NAME, args, device, ("test_faketensor",))


def test_every_row_has_one_fate(rng):
    """Of the reference: rows are committed, carried or skipped, never two; carried rows are distinct and within the capacity."""
    args = cases.plan_case(rng, (5, 7, 3, 9), (2, 7, 0, 6), capacity=4)
    cache, carry, position, _ = definition.plan_round(**args)
    assert not ((cache >= 0) & (carry >= 0)).any()
    kept = carry[carry >= 0]
    assert kept.unique().numel() == kept.numel() and (kept < 5 * 4).all()
    assert (position[(cache < 0) & (carry < 0)] == 0).all()
    assert sorted(args["carry_lens"][args["carry_slot_ids"].long()].tolist()) == [0, 2, 4, 4]


def test_tests_can_fail(rng, device):
    """One rejected row less, or one slot more, is seen."""
    args = cases.plan_case(rng, (8, 4), (5, 2), capacity=4)
    out, after = run(NAME, args, device, WRITES)
    for change in ({"num_rejected": args["num_rejected"] - 1}, {"carry_slot_ids": args["carry_slot_ids"].flip(0)}):
        wrong = cases.clean(args | change)
        with pytest.raises(AssertionError):
            for got, wanted in zip(out, definition.plan_round(**wrong)):
                assert_equal(got, wanted)


def test_all_of_opcheck(rng, device):
    for name in ("ragged", "no_positions_kept"):
        opcheck_dynamic(NAME, cases.plan_case(rng, **cases.PLAN[name]), device)


def test_fullgraph(rng, device):
    args = cases.plan_case(rng)
    out, after = run(NAME, args, device, WRITES)
    traced, placed = compiled(NAME, args, device)
    for a, b in zip(out, traced):
        assert_equal(b, a)
    for name in WRITES:
        assert_equal(placed[name], after[name], name)


def one(rows=4, rejected=2, positions=None, slots=None, ids=(0,), carry_lens=(7, 7), capacity=8, requests=None):
    """Arguments of a small hand-made round."""
    starts = [0, rows] if requests is None else requests
    total = starts[-1]
    return {
        "query_start_loc": i32(starts), "num_rejected": i32([rejected] if isinstance(rejected, int) else rejected),
        "positions": torch.arange(10, 10 + total) if positions is None else torch.tensor(positions),
        "slot_mapping": torch.arange(100, 100 + total) if slots is None else torch.tensor(slots),
        "carry_slot_ids": i32(ids), "carry_lens": i32(carry_lens), "carry_capacity": capacity,
    }  # fmt: skip


def test_r06_block_seeded_at_the_last_row_instead_of_its_successor(device):
    """The anchor stands at the committed length: one after the last committed row, whatever was rejected."""
    for rejected, start in ((0, 14), (1, 13), (3, 11)):
        assert check(one(rejected=rejected), device)["block_start"].tolist() == [start]


def test_r14_r16_padding_requests_wrote_into_the_slot_of_a_live_one(device):
    """Padding names slot -1: the live request in slot 0 keeps its length, and no row of the padding is placed anywhere."""
    got = check(one(requests=[0, 4, 8], rejected=[2, 3], ids=(0, -1)), device)
    assert got["carry_lens"].tolist() == [2, 7]
    assert got["row_carry_slot"].tolist() == [-1, -1, 0, 1, -1, -1, -1, -1]


def test_r18_r20_stale_tails_of_index_buffers_were_used(device):
    """A graph of 4 requests replayed with 1: the tail has -1 ids, flat starts, and stale positions and slots that must not be read."""
    got = check(one(requests=[0, 2, 2, 2, 2], rejected=[1, 9, 9, 9], ids=(1, -1, -1, -1)), device)
    assert got["carry_lens"].tolist() == [7, 1]
    assert got["block_start"].tolist() == [11, 0, 0, 0]


def test_r22_padded_query_start_loc_was_taken_for_real(device):
    """Flat and spaced tails both give the live rows the same plan."""
    flat = check(one(requests=[0, 4, 4, 4], rejected=[2, 0, 0], ids=(0, -1, -1)), device)
    spaced = check(one(requests=[0, 4, 5, 6], rejected=[2, 0, 0], ids=(0, -1, -1), slots=[100, 101, 102, 103, -1, -1]), device)
    for name in ("row_cache_slot", "row_carry_slot", "row_position"):
        assert spaced[name][:4].tolist() == flat[name].tolist()
        assert spaced[name][4:].tolist() == ([0, 0] if name == "row_position" else [-1, -1])
    assert flat["carry_lens"].tolist() == spaced["carry_lens"].tolist() == [2, 7]


def test_r36_writes_went_to_the_evicted_null_block(device):
    """A committed row without a slot is skipped, and the block still starts behind it."""
    got = check(one(rejected=1, slots=[-1, 101, -1, 103]), device)
    assert got["row_cache_slot"].tolist() == [-1, 101, -1, -1]
    assert got["block_start"].tolist() == [13]


def test_r41_slots_were_recomputed_from_positions(device):
    """Slots are the engine's own: interleaved ones pass through untouched, and rejected rows need none."""
    got = check(one(rejected=2, slots=[77, 3, -1, -1]), device)
    assert got["row_cache_slot"].tolist() == [77, 3, -1, -1]
    assert got["row_carry_slot"].tolist() == [-1, -1, 0, 1]


def test_r47_carry_length_follows_the_synced_accept_length(device):
    """The length comes from num_rejected alone, 0 included: a round that accepted all forgets the round before."""
    assert check(one(rejected=0), device)["carry_lens"].tolist() == [0, 7]
    assert check(one(rejected=4), device)["carry_lens"].tolist() == [4, 7]


def test_siblings_of_a_tree_keep_their_own_positions(device):
    args = one(rejected=3, positions=[10, 11, 11, 12]) | {"carry_positions": torch.full((2, 8), -1)}
    got = check(args, device)
    assert got["carry_positions"][0, :3].tolist() == [11, 11, 12]
    assert got["row_position"].tolist() == [10, 11, 11, 12]


def test_slots_over_32_bits(device):
    got = check(one(rejected=1, slots=[2**40, 2**33, 5, 6], ids=(1,), capacity=8), device)
    assert got["row_cache_slot"].tolist() == [2**40, 2**33, 5, -1]


def bad(**changes):
    return lambda args: args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


REFUSALS = {
    "query_start_loc has dtype int64, must be int32": bad(query_start_loc=lambda t: t.long()),
    "query_start_loc has 0 entries, must have R+1, at least 1": bad(query_start_loc=lambda t: t[:0]),
    "query_start_loc has 2 dimensions, must have 1: [R+1]": bad(query_start_loc=lambda t: t[None]),
    "num_rejected has shape [2], must be [1]: [R]": bad(num_rejected=lambda t: t.repeat(2)),
    "num_rejected has dtype int64, must be int32": bad(num_rejected=lambda t: t.long()),
    "positions has dtype int32, must be int64": bad(positions=lambda t: t.int()),
    "positions has strides [2], must be contiguous": bad(positions=lambda t: t.repeat_interleave(2)[::2]),
    "slot_mapping has shape [3], must be [4]: [T]": bad(slot_mapping=lambda t: t[:3]),
    "slot_mapping has dtype int32, must be int64": bad(slot_mapping=lambda t: t.int()),
    "carry_slot_ids has dtype int64, must be int32": bad(carry_slot_ids=lambda t: t.long()),
    "carry_slot_ids has shape [3], must be [1]: [R]": bad(carry_slot_ids=lambda t: t.repeat(3)),
    "carry_lens has dtype int64, must be int32": bad(carry_lens=lambda t: t.long()),
    "carry_capacity is -1, must be at least 0": bad(carry_capacity=-1),
    "carry_positions has shape [2, 3], must be [2, 8]: [slots, C]": bad(carry_positions=torch.zeros(2, 3, dtype=torch.int64)),
    "carry_positions has dtype int32, must be int64": bad(carry_positions=torch.zeros(2, 8, dtype=torch.int32)),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refuses(sentence, device):
    refused(NAME, REFUSALS[sentence](one()), sentence, device)
