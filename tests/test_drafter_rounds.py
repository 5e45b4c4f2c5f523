"""A drafter's life between rounds: batches, slots, pages, carried rows, bad calls, sampling."""

import pytest
import torch
from compare import assert_equal
from dense_drafter import block_hidden
from drafter_tools import (  # ops, where: fixtures
    DSPARK,
    FOLDERS,
    GOLDEN,
    TOLERANCE,
    absorb,
    ints,
    load,
    propose,
    target_of,
    two_requests,
    where,  # noqa: F401
)
from safetensors.torch import load_file


def test_batch_equals_each_alone(backend, where, rng):
    """Order in the batch, padding and company change nothing (float32 GEMMs of other heights: golden's tolerance, tokens exact)."""
    drafter = load(FOLDERS[-1], "carryover", device=where)
    state, slots, _ = two_requests(drafter, rng)
    alone = [propose(drafter, state, [slot], [anchor], return_hidden=True) for slot, anchor in zip(slots, (5, 9))]
    both = propose(drafter, state, [slots[1], -3, slots[0]], [9, -1, 5], return_hidden=True)  # any negative slot is padding
    for row, single in ((0, alone[1]), (2, alone[0])):
        assert_equal(both.tokens[row], single.tokens[0], "tokens")
        assert float((both.hidden[row] - single.hidden[0]).abs().max()) <= TOLERANCE
    assert (both.tokens[1] == -1).all()


def test_packed_absorb_equals_each_alone(backend, where, rng):
    drafter = load(FOLDERS[-1], "carryover", device=where)
    state, slots, rows = two_requests(drafter, rng)
    packed = drafter.new_state(4, page_size=4, num_pages=30)
    pair = [packed.allocate(40), packed.allocate(40)]
    for part in (0, 1):  # prompts, then verify rows, with a padding request between and a row nobody owns at the end
        pieces = [features[:length] if part == 0 else features[length:] for features, length, _ in rows]
        starts = [0, 0] if part == 0 else [length for _, length, _ in rows]
        rejected = [0, 0] if part == 0 else [count for _, _, count in rows]
        counts = [piece.shape[0] for piece in pieces]
        states = torch.cat([*pieces, torch.full_like(pieces[0][:1], float("nan"))]).to(where)
        positions = torch.cat([*(torch.arange(s, s + n) for s, n in zip(starts, counts)), torch.zeros(1, dtype=torch.int64)])
        loc = ints(0, counts[0], counts[0], sum(counts), device=where)
        drafter.absorb(packed, [pair[0], -1, pair[1]], states, loc, ints(rejected[0], 0, rejected[1], device=where), positions.to(where))
    assert packed.seq_lens[pair].tolist() == state.seq_lens[slots].tolist() == [15, 8]
    assert packed.carry_lens[pair].tolist() == state.carry_lens[slots].tolist() == [2, 4]
    a, b = (propose(drafter, s, ids, [5, 9], return_hidden=True) for s, ids in ((packed, pair), (state, slots)))
    assert_equal(a.tokens, b.tokens.cpu() if where == "cpu" else b.tokens, "tokens")
    assert float((a.hidden - b.hidden).abs().max()) <= TOLERANCE


def test_request_without_rows_keeps_its_length(backend, where, rng):
    """In a batch where it had no verify rows a request keeps its committed length; what it carried is gone."""
    drafter = load(FOLDERS[-1], "carryover", device=where)
    state, slots, _ = two_requests(drafter, rng)
    rows = torch.randn(8, 192, generator=rng).to(where)
    loc, rejected = ints(0, 0, 8, device=where), ints(0, 3, device=where)
    drafter.absorb(state, slots, rows, loc, rejected, torch.arange(8, 16, device=where))
    assert state.seq_lens[slots].tolist() == [15, 13] and state.carry_lens[slots].tolist() == [0, 3]


def test_chunked_prompt_equals_whole(backend, where):
    drafter = load(FOLDERS[-1], device=where)
    features = load_file(GOLDEN / FOLDERS[-1] / "rounds.safetensors")["prompt_features"]
    hidden = []
    for cuts in ([0, 18], [0, 7, 8, 18]):
        state = drafter.new_state(1, page_size=4, num_pages=8)
        slot = state.allocate(18)
        for begin, end in zip(cuts, cuts[1:]):
            absorb(drafter, state, slot, features[begin:end], begin)
        hidden.append(propose(drafter, state, [slot], [3], return_hidden=True).hidden)
    assert float((hidden[0] - hidden[1]).abs().max()) <= TOLERANCE  # GEMMs of other heights


def test_carry_lives_one_round(backend, where, rng):
    """Cleared, freed and reused slots carry nothing; without carry rejected rows leave no trace."""
    drafter = load(FOLDERS[-1], "carryover", device=where)
    state, slots, _ = two_requests(drafter, rng)
    carried = propose(drafter, state, slots, [5, 9], return_hidden=True).hidden
    plain_state, plain_slots, _ = two_requests(drafter, torch.Generator().manual_seed(rng.initial_seed()), carry=False)
    plain = propose(drafter, plain_state, plain_slots, [5, 9], return_hidden=True).hidden
    assert float((carried - plain).abs().max()) > 10 * TOLERANCE
    state.clear([slots[0], -1])
    cleared = propose(drafter, state, slots, [5, 9], return_hidden=True).hidden
    assert float((cleared[0] - plain[0]).abs().max()) <= TOLERANCE
    assert float((cleared[1] - carried[1]).abs().max()) <= TOLERANCE
    state.free(slots[1])
    assert state.allocate(10) == slots[1]
    assert int(state.carry_lens[slots[1]]) == 0 and int(state.seq_lens[slots[1]]) == 0


def test_slots_and_pages_are_counted(backend):
    drafter = load(FOLDERS[-1])
    state = drafter.new_state(2, page_size=4, num_pages=10)
    first = state.allocate(13)
    assert state.num_reserved(first) == 16 and state.num_free_pages == 6
    with pytest.raises(RuntimeError, match="7 more pages, must be at most the 6 free"):
        state.allocate(25)
    assert state.num_free_pages == 6 and state.num_free_slots == 1  # nothing was taken
    second = state.allocate(24)
    with pytest.raises(RuntimeError, match="all 2 request slots are taken"):
        state.allocate(1)
    state.free(second)
    state.reserve(first, 40)
    assert sorted(state.block_table[first].tolist()) == list(range(10))
    with pytest.raises(ValueError, match="slot is 1, must be one that allocate gave"):
        state.free(second)
    with pytest.raises(ValueError, match="must be at most 4096"):
        state.allocate(5000)
    with pytest.raises(ValueError, match="page_size is 0"):
        drafter.new_state(2, page_size=0)


def test_bad_rounds_are_refused_and_change_nothing(backend, rng):
    drafter = load(FOLDERS[-1], "carryover")
    state = drafter.new_state(2, page_size=4, num_pages=10)
    slot = state.allocate(8)
    absorb(drafter, state, slot, torch.randn(6, 192, generator=rng), 0)
    before = [t.clone() for t in (*state.k_cache, *state.v_cache, *state.carry_k, state.carry_lens, state.seq_lens)]
    rows = torch.randn(5, 192, generator=rng)
    with pytest.raises(ValueError, match=r"positions\[2\] is 8, must be below the tokens that slot 0 has reserved, 8"):
        absorb(drafter, state, slot, rows, 6, num_rejected=1)
    for bad, error in ((rows[:, :100], r"states has shape \[5, 100\]"), (rows[0], r"states has shape \[192\]")):
        with pytest.raises(ValueError, match=error):
            drafter.absorb(state, [slot], bad, ints(0, 5), ints(0), torch.arange(5))
    with pytest.raises(TypeError, match="states has dtype torch.float16"):
        drafter.absorb(state, [slot], rows.half(), ints(0, 5), ints(0), torch.arange(5))
    with pytest.raises(ValueError, match="query_start_loc has 2 entries, must have 3"):
        drafter.absorb(state, [slot, -1], rows, ints(0, 5), ints(0, 0), torch.arange(5))
    for a, b in zip(before, (*state.k_cache, *state.v_cache, *state.carry_k, state.carry_lens, state.seq_lens)):
        assert_equal(b, a, "state")
    absorb(drafter, state, slot, rows, 6, num_rejected=3)  # rejected rows need no pages
    with pytest.raises(ValueError, match="anchor_tokens has 101, must be below 101"):
        propose(drafter, state, [slot], [101])
    for bad, error in (([2], "slots has 2, must be below 2"), ([[0]], r"slots has shape \[1, 1\]")):
        with pytest.raises(ValueError, match=error):
            propose(drafter, state, bad, [1])
    with pytest.raises(ValueError, match="seeds is None"):
        propose(drafter, state, [slot], [1], temperature=0.5)
    with pytest.raises(ValueError, match="anchor_tokens is torch.int64"):
        propose(drafter, state, [slot], [1, 2])


def test_fewer_proposals_read_fewer_rows(backend, where, rng):
    """N proposals below the trained number: exactly the block of N (+ 1) rows; more are refused."""
    for folder, rows in ((FOLDERS[-1], 4), (DSPARK[0], 3)):
        drafter = load(folder, "carryover", device=where)
        source = target_of(folder)["embed_tokens"]
        state = drafter.new_state(1, num_pages=3)
        slot = state.allocate(20)
        features = torch.randn(12, 192, generator=rng)
        absorb(drafter, state, slot, features, 0)
        proposal = propose(drafter, state, [slot], [4], num_draft_tokens=3, return_hidden=True)
        assert proposal.tokens.shape == (1, 3) and proposal.hidden.shape == (1, rows, 64)
        embed = drafter.tensors.get("embed_tokens.weight", source)
        plain = {name: t.cpu() for name, t in drafter.tensors.items()}
        expected = block_hidden(drafter.config, plain, features, features[:0], 4, embed.cpu(), rows=rows)
        assert float((proposal.hidden[0].cpu() - expected).abs().max()) <= TOLERANCE
        most = drafter.config.num_draft_tokens
        with pytest.raises(ValueError, match=f"num_draft_tokens is {most + 1}, must be 1 to {most}: the block was trained at"):
            propose(drafter, state, [slot], [4], num_draft_tokens=most + 1)


def test_sampling_follows_its_probabilities(backend, where, rng):
    """Temperature by request, seeds replay, a greedy request in a sampled batch is greedy."""
    drafter = load(DSPARK[0], "carryover", device=where)
    state, slots, _ = two_requests(drafter, rng)
    greedy = propose(drafter, state, slots, [5, 9]).tokens
    options = dict(
        temperature=torch.tensor([0.0, 1.5]),
        seeds=torch.tensor([1, 2], device=where),
        offsets=torch.tensor([7, 7], device=where),
        return_probs=True,
    )
    first, again = (propose(drafter, state, slots, [5, 9], **options) for _ in range(2))
    assert_equal(first.tokens.cpu(), again.tokens.cpu(), "tokens")
    assert_equal(first.tokens[0].cpu(), greedy[0].cpu(), "greedy request")
    assert (first.probs.sum(-1) - 1).abs().max() < 1e-5  # a float32 sum of 101 terms
    assert_equal(first.probs[0].argmax(-1).cpu(), greedy[0].cpu(), "one-hot")
    others = [propose(drafter, state, slots, [5, 9], **(options | dict(offsets=options["offsets"] + i))).tokens[1] for i in range(1, 6)]
    assert any(not torch.equal(first.tokens[1], other) for other in others)


def test_r44_state_dtypes_are_its_own(backend, where, rng):
    """Pages and carry buffers have their own dtype, whatever the target's is."""
    drafter = load(FOLDERS[-1], "carryover", device=where)
    state = drafter.new_state(1, num_pages=4, cache_dtype=torch.bfloat16, carry_dtype=torch.float16)
    assert state.k_cache[0].dtype == torch.bfloat16 and state.carry_v[0].dtype == torch.float16
    slot = state.allocate(20)
    absorb(drafter, state, slot, torch.randn(12, 192, generator=rng), 0, num_rejected=3)
    assert propose(drafter, state, [slot], [4], return_hidden=True).hidden.isfinite().all()
