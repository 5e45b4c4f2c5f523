"""Training: the torch drafter against the golden rounds, masks by brute force, losses, the loop's resume."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import types
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from carryover_kernels.training import cache, carry, corpus, data, losses, masks, parallel, record, rollout, train
from carryover_kernels.training.loop import Loop, TrainingStopped, make_optimizers, step_seed
from carryover_kernels.training.model import DraftConfig, DraftModel

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
PARITY = 2e-5  # the golden rounds' own promise, golden/README.md: float32, nothing rounded


def golden_drafter(name, mark=None):
    folder = GOLDEN / name
    borrowed = {}
    if (folder / "target.safetensors").exists():
        target = load_file(folder / "target.safetensors")
        borrowed = dict(embed=target["embed_tokens.weight"], head=target["lm_head.weight"])
    drafter = DraftModel.load(folder, mark=mark, **borrowed)
    return drafter.eval(), load_file(folder / "rounds.safetensors")


@pytest.mark.parametrize("variant", ["baseline", "carryover", "carryover_post_norm"])
@pytest.mark.parametrize(
    "name",
    ["zlab_dflash_qwen3", "deepspec_dspark_qwen3_vanilla", "deepspec_dspark_qwen3_gated", "deepspec_dspark_qwen3_rnn"],
)
def test_golden_rounds(name, variant):
    site = {"baseline": None, "carryover": "pre_norm", "carryover_post_norm": "post_norm"}[variant]
    drafter, rounds = golden_drafter(name, site)
    if site:
        drafter.carryover_mark.data.copy_(rounds["carryover_marker"])
    context, carry, carry_positions = rounds["prompt_features"], None, None
    for r in range(5):
        start = rounds[f"round{r}.start"].reshape(1, 1)
        anchor = rounds[f"round{r}.anchor_token"].reshape(1)
        positions = torch.arange(context.shape[0])
        assert context.shape[0] == start.item()
        outside = drafter.outside_keys(drafter.features(context[None]), positions[None])
        valid = torch.ones(1, len(positions), dtype=torch.bool)
        if site and carry is not None and carry.shape[0]:
            kept = drafter.outside_keys(drafter.features(carry[None], carried=True), carry_positions[None])
            outside = [tuple(torch.cat(p, 1) for p in zip(a, b)) for a, b in zip(outside, kept)]
            seen = masks.draft_sight(
                positions, valid, start, drafter.c.block, carry_positions[None, None],
                torch.ones(1, 1, len(carry_positions), dtype=torch.bool),
            )
        else:
            seen = masks.draft_sight(positions, valid, start, drafter.c.block)
        tokens = drafter.block_tokens(anchor[None])[0]
        hidden = drafter(tokens, start + torch.arange(drafter.c.block), outside, seen.dense())
        proposed, logits = drafter.propose(drafter.proposal_rows(hidden), anchor, allow_mask=True)
        key = f"{variant}.round{r}"
        assert (hidden[0] - rounds[f"{key}.block_hidden"]).abs().max() < PARITY
        assert (logits[0] - rounds[f"{key}.draft_logits"]).abs().max() < PARITY
        assert torch.equal(proposed[0], rounds[f"{key}.draft_tokens"])
        if drafter.c.confidence:
            previous = torch.cat([anchor[:, None], proposed[:, :-1]], 1)
            confidence = drafter.confidence_logits(drafter.proposal_rows(hidden), previous)
            assert (confidence[0] - rounds[f"{key}.confidence_logits"]).abs().max() < PARITY
            taught = drafter.logits(drafter.proposal_rows(hidden), previous)
            assert (taught[0] - rounds[f"{key}.draft_logits"]).abs().max() < PARITY
        if f"round{r}.verify_features" in rounds:
            verified, accepted = rounds[f"round{r}.verify_features"], rounds[f"round{r}.num_accepted"].item()
            context = torch.cat([context, verified[: accepted + 1]])
            carry = verified[accepted + 1 :]
            carry_positions = start.item() + accepted + 1 + torch.arange(len(carry))


# masks


def brute_force(sight):
    """The rule again, by loops over plain numbers."""
    n, queries = sight.limit.shape
    keys = sight.kind.shape[1]
    out = torch.zeros(n, 1, queries, keys, dtype=torch.bool)
    for b in range(n):
        for q in range(queries):
            for k in range(keys):
                kind = sight.kind[b, k].item()
                if kind == masks.CONTEXT:
                    out[b, 0, q, k] = sight.key_position[b, k].item() < sight.limit[b, q].item()
                elif kind == masks.BRANCH and sight.key_owner[b, k].item() == sight.owner[b, q].item():
                    out[b, 0, q, k] = not sight.causal or sight.key_position[b, k].item() <= sight.position[b, q].item()
    return out


def test_draft_sight(rng):
    lengths = torch.tensor([9, 6])
    valid = torch.arange(9) < lengths[:, None]
    anchors = torch.tensor([[3, 5, 7], [2, 2, 4]])
    carried = torch.rand(2, 3, 4, generator=rng) < 0.5
    positions = anchors[..., None] + torch.arange(4)
    sight = masks.draft_sight(torch.arange(9), valid, anchors, 3, positions, carried)
    dense = sight.dense()
    assert torch.equal(dense, brute_force(sight))
    # by hand: anchor 1 of sequence 0 (position 5) sees context 0..4, its own carried rows and its own block
    row = dense[0, 0, 3]
    assert row[:9].tolist() == [True] * 5 + [False] * 4
    assert row[9:21].tolist() == [False] * 4 + carried[0, 1].tolist() + [False] * 4
    assert row[21:].tolist() == [False] * 3 + [True] * 3 + [False] * 3
    # padding is seen by nobody: sequence 1 ends at 6, its keys beyond are never seen
    assert not dense[1, 0, :, 6:9].any()
    assert dense.any(-1).all(), "a block row sees itself at least"


def test_branch_sight():
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    sight = masks.branch_sight(valid, torch.tensor([[1, 3], [0, 2]]), 3)
    dense = sight.dense()
    assert torch.equal(dense, brute_force(sight))
    # row 1 of branch 0 (anchor 1) stands at 3, sees record 0..1 and its branch's rows 0 and 1
    assert dense[0, 0, 1].tolist() == [True, True] + [False] * 4 + [True, True, False] + [False] * 3


def test_flex_mask_is_the_same_rule(rng):
    from torch.nn.attention.flex_attention import create_mask

    anchors = torch.randint(0, 8, (2, 3), generator=rng)
    carried = torch.rand(2, 3, 4, generator=rng) < 0.5
    valid = torch.arange(9) < torch.tensor([[9], [5]])
    sight = masks.draft_sight(torch.arange(9), valid, anchors, 3, anchors[..., None] + torch.arange(4), carried)
    flex = create_mask(sight.flex(), B=2, H=1, Q_LEN=9, KV_LEN=9 + 12 + 9, device="cpu")
    assert torch.equal(flex, sight.dense())


# losses


def test_position_weights_stop_at_a_hole():
    weights = losses.position_weights(torch.tensor([[True, True, False, True]]))
    assert torch.allclose(weights, torch.tensor([[1.0, math.exp(-0.25), 0.0, 0.0]]))


def test_losses_by_hand(rng):
    logits = torch.randn(2, 3, 5, generator=rng)
    target = torch.randn(2, 3, 5, generator=rng)
    labels = torch.randint(0, 5, (2, 3), generator=rng)
    weights = losses.position_weights(torch.tensor([[True, True, True], [True, False, True]]))
    labels[1, 1] = -7  # never read: its weight is 0
    expected = variation = 0.0
    for n in range(2):
        for k in range(3):
            if weights[n, k] > 0:
                expected -= weights[n, k] * torch.log_softmax(logits[n, k], -1)[labels[n, k]]
                p, q = target[n, k].softmax(-1), logits[n, k].softmax(-1)
                variation += weights[n, k] * (1 - torch.minimum(p, q).sum())  # the other definition of the distance
    total = weights.sum()
    close = dict(rtol=1e-5, atol=1e-6)  # float32 sums of a dozen terms
    assert torch.allclose(losses.cross_entropy(logits, labels, weights), expected / total, **close)
    assert torch.allclose(losses.total_variation(logits, target, weights), variation / total, **close)
    hidden, head = torch.randn(11, 4, generator=rng, requires_grad=True), torch.randn(5, 4, generator=rng)
    y, w = torch.randint(0, 5, (11,), generator=rng), torch.rand(11, generator=rng)
    whole = losses.cross_entropy(hidden @ head.T, y, w)
    for chunk in (3, 100):  # with and without logits made again in the backward pass
        summed, tokens = losses.chunked(hidden, head, y, w, chunk=chunk)
        chunked = summed / w.sum()
        assert torch.allclose(whole, chunked, **close)
        assert torch.equal(tokens, (hidden @ head.T).argmax(-1))
        a, b = (torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (whole, chunked))
        assert torch.allclose(a, b, **close)


def test_chunked_losses_are_the_sum_of_their_parts(rng):
    """DSpark's three losses with a Markov bias, in chunks, against the plain functions; gradients too."""
    hidden, head = torch.randn(11, 4, generator=rng, requires_grad=True), torch.randn(5, 4, generator=rng)
    factors, w2 = torch.randn(11, 2, generator=rng), torch.randn(5, 2, generator=rng)
    seen, guesses = torch.randn(11, 4, generator=rng), torch.randn(11, generator=rng, requires_grad=True)
    y, w = torch.randint(0, 5, (11,), generator=rng), torch.rand(11, generator=rng)
    logits, of_target = hidden @ head.T + factors @ w2.T, seen @ head.T
    whole = 0.1 * losses.cross_entropy(logits, y, w) + 1.8 * losses.total_variation(logits, of_target, w)
    whole = whole + losses.confidence(guesses, logits, of_target, w)
    summed, _ = losses.chunked(
        hidden, head, y, w, bias=(factors, w2), target=(seen, head), confidence_logits=guesses,
        parts=losses.Parts(0.1, 1.8, 1.0), chunk=4,
    )
    close = dict(rtol=1e-5, atol=1e-6)  # float32 sums of a dozen terms
    assert torch.allclose(summed / w.sum(), whole, **close)
    for x in (hidden, guesses):
        a, b = (torch.autograd.grad(y, x, retain_graph=True)[0] for y in (whole, summed / w.sum()))
        assert torch.allclose(a, b, **close)


def test_confidence_learns_the_acceptance_chance():
    logits = torch.zeros(1, 1, 2)
    target = torch.tensor([[[math.log(3.0), 0.0]]])  # p = 0.75, 0.25 against q = 0.5, 0.5: TV 0.25, chance 0.75
    guess = torch.zeros(1, 1, requires_grad=True)
    loss = losses.confidence(guess, logits, target, torch.ones(1, 1))
    (gradient,) = torch.autograd.grad(loss, guess)
    assert torch.allclose(gradient, torch.tensor([[0.5 - 0.75]]), atol=1e-6)


# the loop


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = torch.nn.Linear(6, 6)


def run_line(directory, steps=12, stop_at=None, nan_at=None, quiet=True):
    model = Line()
    optimizers = make_optimizers(model, 1e-2, 1e-2)
    loop = Loop(model, optimizers, directory, steps, warmup=2, every_seconds=0.0, log_every=1, quiet=quiet)
    loop.resume()

    def step(i):
        generator = torch.Generator().manual_seed(step_seed(3, i))
        x = torch.randn(4, 6, generator=generator)
        loss = (model.matrix(x) - x.flip(-1)).square().mean()
        if i == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return (loss * float("nan") if i == nan_at else loss), {}

    loop.run(step)
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_killed_run_resumes_exactly(tmp_path):
    whole = run_line(tmp_path / "whole")
    # A fresh process: a fork of this one would wait for OpenMP threads that it did not inherit.
    code = "import sys, pathlib, test_training; test_training.run_line(pathlib.Path(sys.argv[1]), stop_at=7)"
    path = os.pathsep.join(map(str, (HERE, HERE.parent)))
    child = subprocess.run([sys.executable, "-c", code, tmp_path / "killed"], env=os.environ | {"PYTHONPATH": path})
    assert child.returncode == -signal.SIGKILL
    assert run_line(tmp_path / "killed") == whole
    assert len(set(whole)) == 12


def test_nan_stops_with_a_sentence_and_keeps_the_checkpoint(tmp_path):
    with pytest.raises(TrainingStopped, match="loss is nan at step 5.*last good checkpoint is"):
        run_line(tmp_path, nan_at=5)
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 5


def test_interrupt_leaves_a_checkpoint(tmp_path):
    model = Line()
    loop = Loop(model, make_optimizers(model, 1e-2), tmp_path, 9, quiet=True)

    def step(i):
        if i == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return model.matrix.weight.square().sum(), {}

    with pytest.raises(TrainingStopped, match=f"stopped at step 4 of 9; the checkpoint is {tmp_path}"):
        loop.run(step)
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 4


def test_resume_refuses_another_schedule(tmp_path):
    run_line(tmp_path)
    with pytest.raises(ValueError, match="was made for 12 steps, this run has 13"):
        run_line(tmp_path, steps=13)


# parallel draft-verify-draft


@pytest.fixture(scope="module")
def tiny_target():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=23, hidden_size=16, num_hidden_layers=4, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def tiny_drafter(target, mark="pre_norm", shift=0, markov="", seed=0, confidence=False, **fields):
    config = DraftConfig(
        vocab=23, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate=24, taps=(0, 2), block=4,
        mask_token=22, target_hidden=16, target_layers=4, theta=1e4, mark=mark, shift=shift,
        markov_rank=4 if markov else 0, markov_type=markov or "vanilla", confidence=confidence, **fields,
    )
    embed = target.model.embed_tokens.weight.detach()
    model = DraftModel(config, embed, target.lm_head.weight.detach()).initialise(seed, std=0.3)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        if mark:
            model.carryover_mark.normal_(0, 0.3, generator=generator)
        if markov:
            model.markov_head.markov_w2.weight.normal_(0, 0.3, generator=generator)
    return model


def records_like(drafter, target, rng):
    """Two records that the drafter partly agrees with, so that all numbers of accepted drafts occur: random tokens,
    then at some anchors the recorded tokens are replaced by the drafter's own."""
    ids = torch.randint(0, 22, (2, 18), generator=rng)
    lengths = torch.tensor([18, 13])
    for s, n in ((4, 2), (8, drafter.c.proposals)):
        anchors = torch.full((2, 1), s)
        features, _ = rollout.record_pass(target, ids, drafter.c.taps)
        rows = rollout.draft_rows(drafter, features, lengths, ids, anchors)
        drafts, _ = drafter.propose(rows, torch.gather(ids, 1, anchors))
        ids[:, s + 1 : s + 1 + n] = drafts[:, 0, :n]
    anchors = torch.tensor([[3, 4, 8, 15], [4, 5, 8, 11]])
    return ids, lengths, anchors, torch.tensor([[True] * 4, [True, True, True, False]])


def sequential(drafter, target, ids, length, s):
    """One branch the slow way: plain forwards over plain prefixes. -> drafts, accepted, moved anchor, rejected states, rows of
    the second draft (or None where it has no next token). What the drafter's config carries in place of states is taken here
    from the drafts and from the target's plain logits."""
    def taps_of(tokens):
        out = target.model(input_ids=tokens[None], output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[t + 1] for t in drafter.c.taps], -1)

    def draft(prefix, carry):
        at = len(prefix) - 1  # the anchor; its own state does not exist yet
        keys = [drafter.outside_keys(drafter.features(taps_of(prefix)[:, :at]), torch.arange(at)[None])]
        if carry is not None and carry[0].shape[1]:
            keys.append(drafter.outside_keys(drafter.features(carry[0], carried=True), carry[1][None]))
        outside = [tuple(torch.cat(p, 1) for p in zip(*layer)) for layer in zip(*keys)]
        tokens = drafter.block_tokens(prefix[-1:])
        every = torch.ones(1, 1, drafter.c.block, outside[0][0].shape[1] + drafter.c.block, dtype=torch.bool)
        hidden = drafter(tokens, at + torch.arange(drafter.c.block)[None], outside, every)
        return drafter.proposal_rows(hidden)[0]

    with torch.no_grad():
        drafts, _ = drafter.propose(draft(ids[: s + 1], None)[None], ids[s : s + 1])
    drafts, accepted = drafts[0], 0
    while accepted < len(drafts) and s + 1 + accepted < length and drafts[accepted] == ids[s + 1 + accepted]:
        accepted += 1
    moved = s + accepted + 1
    branch = torch.cat([ids[: s + 1], drafts])
    states = taps_of(branch)[:, s + 1 + accepted :]
    carried, rows = states, None
    if drafter.c.carried == "draft_tokens":
        carried = drafter.embed[drafts[accepted:]][None]
    elif drafter.c.carried == "target_tokens":
        carried = drafter.embed[target(branch[None], use_cache=False).logits[0, s + 1 + accepted :].argmax(-1)][None]
    if moved + 1 < length:
        rows = draft(ids[: moved + 1], (carried, moved + torch.arange(states.shape[1]) + drafter.c.carry_pos_offset))
    return drafts, accepted, moved, states[0], rows


# float32: rounding of sums in another order, values of order 1; a wrong row is off by 0.01 or more
ROUNDING = 2e-4


# (mark, shift, markov, fields of the study's cells)
DRAFTERS = [
    *((mark, shift, markov, {}) for mark in ("pre_norm", "post_norm") for shift, markov in ((0, ""), (1, "vanilla"), (1, "gated"), (1, "rnn"))),
    ("pre_norm", 0, "vanilla", {}), ("", 0, "", {}), ("pre_norm", 0, "", {"own_projector": True}),
    ("pre_norm", 0, "", {"carry_pos_offset": 1}), ("pre_norm", 0, "", {"carried": "draft_tokens"}),
    ("pre_norm", 0, "vanilla", {"carried": "target_tokens"}),
]  # fmt: skip


@pytest.mark.parametrize(("mark", "shift", "markov", "fields"), DRAFTERS)
def test_parallel_equals_sequential(tiny_target, rng, mark, shift, markov, fields):
    drafter = tiny_drafter(tiny_target, mark, shift, markov, **fields)
    ids, lengths, anchors, keep = records_like(drafter, tiny_target, rng)
    branches = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, anchors, keep, logits=True)
    rows = rollout.draft_rows(drafter, branches.features, lengths, ids, branches.anchors, branches.carry(model=drafter))
    labels, kept = data.block_labels(ids, lengths, branches.anchors, branches.keep, drafter.c.proposals)
    logits = drafter.logits(rows, rollout.previous_tokens(ids, branches.anchors, labels))
    weights = losses.position_weights(kept)
    losses.cross_entropy(logits, labels, weights).backward()
    got = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    seen, total, norm = set(), 0.0, weights.sum()
    for n in range(2):
        for a in range(4):
            if not keep[n, a]:
                assert not branches.keep[n, a]
                continue
            s, length = anchors[n, a].item(), lengths[n].item()
            drafts, accepted, moved, states, slow = sequential(drafter, tiny_target, ids[n], length, s)
            assert torch.equal(branches.drafts[n, a], drafts)
            assert branches.accepted[n, a] == accepted
            seen.add(accepted)
            assert branches.keep[n, a] == (slow is not None)
            if slow is None:
                continue
            assert branches.anchors[n, a] == moved
            assert branches.rejected[n, a].tolist() == [i >= accepted for i in range(drafter.c.proposals)]
            assert (branches.states[n, a, accepted:] - states).abs().amax() < ROUNDING if len(states) else True
            assert (rows[n, a] - slow).abs().max() < ROUNDING
            own = labels[n, a]
            slow_logits = drafter.logits(slow, torch.cat([ids[n, moved : moved + 1], own[:-1]]))
            assert (logits[n, a] - slow_logits).abs().max() < ROUNDING
            valid = min(drafter.c.proposals, length - 1 - moved)
            for k in range(valid):
                total = total - math.exp(-k / 4) * torch.log_softmax(slow_logits[k], -1)[ids[n, moved + 1 + k]]
    (total / norm).backward()
    assert {0, drafter.c.proposals} <= seen, f"cases must hold none and all accepted, had {seen}"
    for name, p in drafter.named_parameters():
        assert (got[name] - p.grad).abs().max() < ROUNDING * max(1.0, p.grad.abs().max()), name


def test_all_anchors_at_once_equal_one_at_a_time(tiny_target, rng):
    drafter = tiny_drafter(tiny_target)
    ids, lengths, anchors, keep = records_like(drafter, tiny_target, rng)
    together = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, anchors, keep)
    rows = rollout.draft_rows(drafter, together.features, lengths, ids, together.anchors, together.carry())
    for a in range(4):
        one = slice(a, a + 1)
        alone = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, anchors[:, one], keep[:, one])
        assert torch.equal(alone.accepted, together.accepted[:, one])
        assert torch.equal(alone.anchors, together.anchors[:, one])
        single = rollout.draft_rows(drafter, alone.features, lengths, ids, alone.anchors, alone.carry())
        held = alone.keep
        assert (single - rows[:, one])[held].abs().max() < ROUNDING if held.any() else True


def test_empty_carry_is_the_baseline_bit_for_bit(tiny_target, rng):
    drafter = tiny_drafter(tiny_target)
    ids, lengths, anchors, keep = records_like(drafter, tiny_target, rng)
    branches = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, anchors, keep)
    nothing = branches.carry(torch.zeros_like(keep))
    poisoned = (torch.full_like(nothing[0], 1e4), *nothing[1:])
    plain = rollout.draft_rows(drafter, branches.features, lengths, ids, branches.anchors)
    empty = rollout.draft_rows(drafter, branches.features, lengths, ids, branches.anchors, poisoned)
    assert torch.equal(plain, empty)
    # and beside branches that carry something, a branch that doesn't is the baseline up to the order of sums
    some = branches.rejected.any(-1) & (torch.arange(4) % 2 == 0)
    assert some.any()
    mixed = rollout.draft_rows(drafter, branches.features, lengths, ids, branches.anchors, branches.carry(some))
    assert (mixed - plain)[branches.keep & ~some].abs().max() < ROUNDING
    assert (mixed - plain)[some].abs().max() > ROUNDING


@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_attention_forms_agree(tiny_target, rng, attention):
    """Context and own rows apart (the CPU's way) against SDPA with the whole mask and against flex_attention (the GPU's way,
    here in its plain form): one description of who sees what, three readers. Forward, and gradients where there are any."""
    drafter = tiny_drafter(tiny_target)
    ids, lengths, anchors, keep = records_like(drafter, tiny_target, rng)
    branches = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, anchors, keep)
    for left in (None, branches.carry()):
        with torch.set_grad_enabled(attention == "dense"):
            rows = [
                rollout.draft_rows(drafter, branches.features, lengths, ids, branches.anchors, left, attention=form)
                for form in ("apart", attention)
            ]
        assert (rows[0] - rows[1])[branches.keep].abs().max() < ROUNDING
        if attention == "dense":
            grads = [torch.autograd.grad(r[branches.keep].square().sum(), drafter.fc.weight)[0] for r in rows]
            assert (grads[0] - grads[1]).abs().max() < ROUNDING * max(1.0, grads[0].abs().max())


def test_cached_branches_are_those_of_the_step(tiny_target, rng, tmp_path):
    """Built in two shares and read back: anchors, drafts and the target's own tokens exactly, states as bf16 holds them."""
    drafter = tiny_drafter(tiny_target)
    ids, lengths, _, _ = records_like(drafter, tiny_target, rng)
    records = [data.Record("", ids[n, : lengths[n]].tolist(), 3, 0.0) for n in range(2)]
    ids = data.pad_records(records)[0]
    most = cache.largest_bytes(records, 20, 3, 32)
    with pytest.raises(ValueError, match="may take .* must be at most the limit"):
        cache.build(tmp_path, drafter, tiny_target, records, anchors=20, seed=1, limit=most - 1)
    with pytest.raises(ValueError, match="is missing, must be there"):
        cache.Store(tmp_path, records)
    for k in (0, 1):
        cache.build(tmp_path, drafter, tiny_target, records, anchors=20, seed=1, limit=most, share=(k, 2))
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < most + 20_000  # the format's own headers
    store = cache.Store(tmp_path, records)
    got_ids, got_lengths, got = store.batch([0, 1], 20, rng)  # more anchors than there are: all of them
    assert torch.equal(got_ids, ids) and torch.equal(got_lengths, lengths)
    first = torch.where(got.keep, got.anchors - got.accepted - 1, 3)
    with data.autocast():
        again = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, first, got.keep, logits=True)
    assert got.rejected.any() and not got.keep.all()
    kept = got.keep
    for key in ("anchors", "accepted", "drafts", "predicted", "positions", "rejected"):
        assert torch.equal(getattr(got, key)[kept], getattr(again, key)[kept]), key
    assert torch.equal(got.states[got.rejected], again.states[got.rejected].to(torch.bfloat16))
    assert torch.equal(got.features[0], again.features[0].to(torch.bfloat16))
    plain = store.batch([0, 1], 20, rng, first=True)[2]
    assert torch.equal(plain.anchors[kept], first[kept]) and not plain.rejected.any()
    few = store.batch([0, 1], 2, rng, carrying=1.0)[2]  # branches with something to carry come first
    assert few.rejected.any(-1).all()
    with pytest.raises(ValueError, match="was made from other records"):
        cache.Store(tmp_path, records[::-1])


def test_stored_step_is_the_step(tiny_target, rng, tmp_path):
    """Same loss and gradients as second_sums over branches drafted on the spot, up to bf16 states."""
    drafter = tiny_drafter(tiny_target)
    ids, lengths, _, _ = records_like(drafter, tiny_target, rng)
    records = [data.Record("", ids[n, : lengths[n]].tolist(), 3, 0.0) for n in range(2)]
    ids = data.pad_records(records)[0]
    cache.build(tmp_path, drafter, tiny_target, records, anchors=20, seed=1, limit=1e9)
    store = cache.Store(tmp_path, records)
    settings = carry.CarrySettings(autocast=False)
    loss, metrics = carry.stored_step(parallel.wrap(drafter), store, settings, seed=0, batch=2, anchors=20)(0)
    loss.backward()
    got = drafter.fc.weight.grad.clone()
    drafter.zero_grad()
    whole = store.batch([0, 1], 20, rng)
    first = torch.where(whole[2].keep, whole[2].anchors - whole[2].accepted - 1, 3)
    with data.autocast():  # as the cache drafts: an untrained drafter's near ties fall otherwise in float32
        branches = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, first, whole[2].keep)
    total, sums = carry.second_sums(drafter, ids, lengths, branches, settings)
    loss, expected = carry.reduced(total, sums)
    loss.backward()
    assert metrics["accepted"] == expected["accepted"] and metrics["rejected"] == expected["rejected"]
    # bf16 holds a state to 2**-8 of itself; the loss is a smooth function of a few hundred of them
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=2**-7)
    assert (got - drafter.fc.weight.grad).abs().max() < 2**-4 * got.abs().max()
    with pytest.raises(ValueError, match="stored branches lack it"):
        carry.stored_step(None, store, carry.CarrySettings(parts=losses.Parts(0.1, 1.8, 1.0)), seed=0, batch=2, anchors=2)


def test_share_ramps_up():
    settings = carry.CarrySettings(share=0.8, ramp=4)
    assert [settings.share_at(i) for i in (0, 1, 3, 9)] == [0.2, 0.4, 0.8, 0.8]
    assert carry.CarrySettings(share=0.8).share_at(0) == 0.8


def test_dspark_loss_reads_the_targets_own_rows(tiny_target, rng):
    """Total variation and confidence of a step against the target's logits of a plain pass, position by position."""
    drafter = tiny_drafter(tiny_target, shift=1, markov="vanilla", confidence=True)
    ids, lengths, anchors, keep = records_like(drafter, tiny_target, rng)
    branches = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, anchors, keep, last=True)
    parts = losses.Parts(0.1, 1.8, 1.0)
    head = tiny_target.lm_head.weight
    total, sums = carry.second_sums(drafter, ids, lengths, branches, carry.CarrySettings(parts=parts), head=head)
    labels, kept = data.block_labels(ids, lengths, branches.anchors, branches.keep, drafter.c.proposals)
    weights = losses.position_weights(kept)
    rows = rollout.draft_rows(drafter, branches.features, lengths, ids, branches.anchors, branches.carry())
    previous = rollout.previous_tokens(ids, branches.anchors, labels)
    logits = drafter.logits(rows, previous)
    plain = tiny_target(ids).logits
    wanted = torch.zeros_like(logits)
    for n, a, k in kept.nonzero().tolist():
        wanted[n, a, k] = plain[n, branches.anchors[n, a] + k]
    expected = 0.1 * losses.cross_entropy(logits, labels, weights) + 1.8 * losses.total_variation(logits, wanted, weights)
    expected = expected + losses.confidence(drafter.confidence_logits(rows, previous), logits, wanted, weights)
    assert (total / sums[0] - expected).abs() < ROUNDING
    total.backward()
    assert drafter.confidence_head.proj.weight.grad.any() and drafter.markov_head.markov_w2.weight.grad.any()


def test_mark_learns_exactly_when_something_is_carried(tiny_target, rng):
    drafter = tiny_drafter(tiny_target)
    ids, lengths, anchors, keep = records_like(drafter, tiny_target, rng)
    branches = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, anchors, keep)
    rejections = branches.rejected.any(-1)
    assert rejections.any() and (branches.keep & ~rejections).any()
    for chosen in (torch.zeros_like(keep), branches.keep & ~rejections, rejections):
        drafter.zero_grad()
        rows = rollout.draft_rows(drafter, branches.features, lengths, ids, branches.anchors, branches.carry(chosen))
        rows[branches.keep].square().sum().backward()
        gradient = drafter.carryover_mark.grad
        moved = gradient is not None and gradient.abs().sum().item() > 0
        assert moved == bool((chosen & rejections).any())


def test_chained_decoding_walks_like_the_record(tiny_target, rng):
    """Without carry the rounds are those of `walk`; with carry each round's rows are those of a plain second draft."""
    drafter = tiny_drafter(tiny_target)
    ids, lengths, _, _ = records_like(drafter, tiny_target, rng)
    records = [data.Record("", ids[n, : lengths[n]].tolist(), 3, 0.0) for n in range(2)]
    results = carry.chained(drafter, tiny_target, records, carry=False)
    for n, one in enumerate(records):
        row = torch.tensor([one.ids])
        features, _ = rollout.record_pass(tiny_target, row, drafter.c.taps)
        accepted = rollout.accepted_everywhere(drafter, features, row, len(one.ids), one.start)
        assert results[n] == rollout.walk(accepted, one.start, len(one.ids))
    with_carry = carry.chained(drafter, tiny_target, records, carry=True)
    for n, (tokens, rounds, history) in enumerate(with_carry):
        assert tokens == len(records[n].ids) - 1 - records[n].start and rounds == len(history)
        # the first two rounds by hand: no carry, then the first one's rejected rows
        first = torch.tensor([[records[n].start]])
        row, length = ids[n : n + 1], lengths[n : n + 1]
        branches = rollout.draft_and_verify(drafter, tiny_target, row, length, first, first > 0)
        assert history[0] == branches.accepted.item()
        if rounds > 1:
            rows = rollout.draft_rows(drafter, branches.features, length, row, branches.anchors, branches.carry())
            drafts, _ = drafter.propose(rows, torch.gather(row, 1, branches.anchors))
            labels, kept = data.block_labels(row, length, branches.anchors, branches.keep, drafter.c.proposals)
            assert history[1] == torch.cumprod(((drafts == labels) & kept).long(), -1).sum().item()


@pytest.mark.parametrize("fields", [{"carried": "draft_tokens"}, {"carried": "target_tokens"}, {"carry_pos_offset": 1}])
def test_chained_decoding_carries_what_training_carried(tiny_target, rng, fields):
    """The second round is the second draft of a training branch, whatever the drafter's config carries and wherever."""
    drafter = tiny_drafter(tiny_target, **fields)
    ids, lengths = torch.randint(0, 22, (1, 18), generator=rng), torch.tensor([18])
    first, p = torch.tensor([[5]]), drafter.c.proposals
    b = rollout.draft_and_verify(drafter, tiny_target, ids, lengths, first, first > 0, logits=True)
    assert b.rejected.any(), "random tokens: all drafts agree once in 10 000 runs"
    rows = rollout.draft_rows(drafter, b.features, lengths, ids, b.anchors, b.carry(model=drafter))
    drafts, _ = drafter.propose(rows, torch.gather(ids, 1, b.anchors))
    begin = b.anchors.item() + 1
    ids[0, begin : begin + p] = drafts[0, 0]  # neither draft sees them: from now on all of the second is right
    record = data.Record("", ids[0].tolist(), 5, 0.0)
    assert carry.chained(drafter, tiny_target, [record], carry="on")[0][2][:2] == [b.accepted.item(), p]


def test_what_stands_in_the_place_of_own_rows(tiny_target, rng):
    """By hand: rejected rows at positions 5, 6 after an anchor moved to 5; the round before left rows at 4, 5, 6, the last two at
    positions still open."""
    own = torch.full((2, 1, 3, 1), 2.0), torch.tensor([[[4, 5, 6]]] * 2), torch.tensor([[[False, True, True]]] * 2)
    own[0][1] = 3.0
    before = torch.full((2, 1, 3, 1), 7.0), torch.tensor([[[4, 5, 6]]] * 2), torch.tensor([[[True, True, False]]] * 2)
    moved = torch.tensor([[5], [5]])
    assert carry._left_behind("on", own, before, moved) is own
    rows, positions, valid = carry._left_behind("shuffled", own, before, moved)
    assert rows[:, 0, 0, 0].tolist() == [3.0, 2.0] and positions is own[1] and valid is own[2]
    rows, positions, valid = carry._left_behind("zero", own, before, moved)
    assert not rows.any() and positions is own[1] and valid is own[2]
    rows, positions, valid = carry._left_behind("stale", own, before, moved)
    assert rows is before[0] and positions is own[1] and valid is own[2]
    assert carry._left_behind("stale", own, None, moved) is None and carry._left_behind("two_rounds", own, None, moved) is own
    rows, positions, valid = carry._left_behind("two_rounds", own, before, moved)
    assert rows[0, 0, :, 0].tolist() == [7, 7, 7, 2, 2, 2] and positions[0, 0].tolist() == [4, 5, 6, 4, 5, 6]
    assert valid[0, 0].tolist() == [False, True, False, False, True, True]
    # and in decoding: the first round has nothing, the second nothing stale and one round only
    drafter = tiny_drafter(tiny_target)
    ids, lengths, _, _ = records_like(drafter, tiny_target, rng)
    records = [data.Record("", ids[n, : lengths[n]].tolist(), 3, 0.0) for n in range(2)]
    found = {side: carry.chained(drafter, tiny_target, records, carry=side) for side in carry.SIDES}
    for n in range(2):
        assert found["stale"][n][2][:2] == found["off"][n][2][:2] and found["two_rounds"][n][2][:2] == found["on"][n][2][:2]
        assert all(x[n][2][0] == found["off"][n][2][0] and x[n][0] == found["off"][n][0] for x in found.values())


def test_a_cut_verifies_only_what_the_drafter_trusts(tiny_target, rng):
    logits = torch.log(torch.tensor([[[[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]]]))
    drafts = torch.tensor([[[1, 0, 0]]])  # chances 0.8, 0.4, 0.36
    for cut, trusted in ((0.0, [True] * 3), (0.3, [True] * 3), (0.39, [True, True, False]), (0.5, [True, False, False]), (0.9, [True, False, False])):
        assert carry._trusted(logits, drafts, cut)[0, 0].tolist() == trusted
    drafter = tiny_drafter(tiny_target)
    ids, lengths, _, _ = records_like(drafter, tiny_target, rng)
    records = [data.Record("", ids[n, : lengths[n]].tolist(), 3, 0.0) for n in range(2)]
    for side in ("on", "off"):
        whole = carry.chained(drafter, tiny_target, records, carry=side, details=True)
        assert all(x[4] == x[1] * drafter.c.proposals for x in whole)
        for tokens, rounds, history, _, verified in carry.chained(drafter, tiny_target, records, carry=side, details=True, cut=1.0):
            assert verified == rounds and max(history) <= 1 and tokens <= rounds + sum(history)


def test_the_mask_token_is_never_proposed_in_training(tiny_target, rng):
    """The target never saw its embedding: even where the drafter is sure of it, another token is drafted, greedy and sampled."""
    drafter = tiny_drafter(tiny_target)
    rows = torch.randn(1, 2, 3, 16, generator=rng)
    mask = drafter.c.mask_token
    with torch.no_grad():
        drafter.head = drafter.head.clone()
        drafter.head[mask] = 50 * rows.mean((0, 1, 2))
    rows = rows.mean((1, 2), keepdim=True).expand(1, 2, 3, 16)
    anchors = torch.zeros(1, 2, dtype=torch.int64)
    assert (drafter.propose(rows, anchors, allow_mask=True)[0] == mask).all()
    for temperature in (0.0, 1.0):
        assert (drafter.propose(rows, anchors, temperature, rng)[0] != mask).all()


def test_anchors_at_the_end_and_on_one_place(tiny_target):
    """Branch rows beyond the record are carried all the same, count as rejected, and two anchors may move to one place with
    rows of their own each; an anchor that would move onto the last token is dropped and stays where it was."""
    drafter = tiny_drafter(tiny_target)
    ids, lengths, _, _ = records_like(drafter, tiny_target, torch.Generator().manual_seed(0))  # the case is asserted below
    length, p = lengths[0].item(), drafter.c.proposals
    every = torch.arange(3, length - 1)[None]
    b = rollout.draft_and_verify(drafter, tiny_target, ids[:1], lengths[:1], every, torch.ones_like(every, dtype=torch.bool))
    moved = every + b.accepted + 1
    assert torch.equal(b.keep, moved + 1 < length) and not b.keep.all()
    assert torch.equal(b.anchors, torch.where(b.keep, moved, every)) and not b.rejected[~b.keep].any()
    beyond = b.rejected & (b.positions >= length)
    assert beyond.any() and (b.accepted <= length - 1 - every).all()
    same = (b.anchors[0, :, None] == b.anchors[0]) & b.keep[0, :, None] & b.keep[0] & (every[0, :, None] < every[0])
    assert same.any(), "the case must hold two anchors that move to one place: 4 with two accepted drafts, 6 with none"
    one, other = same.nonzero()[0].tolist()
    assert not torch.allclose(b.states[0, one, p - 1], b.states[0, other, p - 1])


def test_chained_decoding_drops_finished_rows_and_never_copies_the_cache(tiny_target, rng, monkeypatch):
    """Prompts of very unequal length in one batch decode as each does alone, and passes get fewer rows as prompts end."""
    drafter = tiny_drafter(tiny_target)
    ids, lengths, _, _ = records_like(drafter, tiny_target, rng)
    whole = ids[0, : lengths[0]].tolist()
    records = [data.Record("", whole[:n], 3, 0.0) for n in (6, 7, 8, len(whole))]
    alone = [carry.chained(drafter, tiny_target, [one], carry="on")[0] for one in records]
    seen, verify = [], rollout.verify_branches

    def watched(target, past, *rest):
        before = [(layer.keys.data_ptr(), layer.keys.shape[0]) for layer in past.layers]
        out = verify(target, past, *rest)
        assert [(layer.keys.data_ptr(), layer.keys.shape[0]) for layer in past.layers] == before
        seen.append(before[0][1])
        return out

    monkeypatch.setattr(rollout, "verify_branches", watched)
    assert carry.chained(drafter, tiny_target, records, carry="on") == alone
    assert seen[0] == 4 and seen[-1] == 1 and seen == sorted(seen, reverse=True)
    seen.clear()
    carry.chained(drafter, tiny_target, records, carry="shuffled")  # a finished prompt's rows are still another one's
    assert set(seen) == {4}


def test_a_reused_cache_verifies_as_a_fresh_one(tiny_target, rng):
    drafter = tiny_drafter(tiny_target)
    ids, lengths, anchors, _ = records_like(drafter, tiny_target, rng)
    reused = None
    for _ in range(3):
        drafts = torch.randint(0, drafter.c.vocab, (*anchors[:, :2].shape, drafter.c.proposals), generator=rng)
        _, past = rollout.record_pass(tiny_target, ids, drafter.c.taps)
        reused = reused or rollout.reuse(rollout.record_pass(tiny_target, ids, drafter.c.taps)[1], drafts[0].numel())
        found = rollout.verify_branches(tiny_target, reused, lengths, anchors[:, :2], drafts, drafter.c.taps)
        assert torch.equal(found, rollout.verify_branches(tiny_target, past, lengths, anchors[:, :2], drafts, drafter.c.taps))


def test_bootstrap_brackets_the_gain():
    one, other = [(12, 3, [])] * 30, [(12, 4, [])] * 30
    result = carry.paired_bootstrap(one, other, draws=200)
    assert result["gain"] == pytest.approx(4 / 3 - 1) and result["low"] <= result["gain"] <= result["high"]


# data


def test_records_round_trip_and_name_broken_lines(tmp_path):
    rows = [{"kind": "a", "prompt_ids": [1, 2], "response_ids": [3], "temperature": 0.7}]
    data.write_jsonl(tmp_path / "r.jsonl", rows)
    (one,) = data.read_records(tmp_path)
    assert (one.ids, one.start, one.temperature) == ([1, 2, 3], 2, 0.7)
    (tmp_path / "r.jsonl").write_text('{"prompt_ids": [1]}\n')
    with pytest.raises(ValueError, match="record 1 has no list response_ids"):
        data.read_records(tmp_path / "r.jsonl")
    (tmp_path / "r.jsonl").write_text("{}\n{oops\n")
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        data.read_records(tmp_path / "r.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no .*jsonl file"):
        data.read_records(tmp_path / "empty")


def test_hugging_face_datasets_are_read_where_installed(tmp_path, monkeypatch):
    """The plumbing, with a stand-in for the package: rows of a saved folder, a parquet file, and the sentences."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if not installed
    with pytest.raises(ValueError, match="the package datasets is not installed"):
        data.read_records(tmp_path / "saved")
    rows = [{"prompt_ids": [1, 2], "response_ids": [3]}]
    stand_in = types.SimpleNamespace(load_from_disk=lambda path: rows, load_dataset=lambda kind, data_files, split: rows * 2)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    assert data.read_records(tmp_path / "saved") == [data.Record("", [1, 2, 3], 2, 0.0)]
    assert len(data.read_records(tmp_path / "x.parquet")) == 2
    stand_in.load_from_disk = lambda path: {"train": rows}
    with pytest.raises(ValueError, match="holds the splits train, must be one of them"):
        data.read_rows(tmp_path / "saved")


def test_anchors_stay_in_the_response(rng):
    rows = [data.Record("", list(range(12)), 5, 0.0), data.Record("", list(range(7)), 5, 0.0)]
    anchors, keep = data.sample_anchors(rows, 4, rng)
    assert keep.tolist() == [[True] * 4, [True] + [False] * 3]
    for row, one in enumerate(rows):
        chosen = anchors[row][keep[row]].tolist()
        assert len(set(chosen)) == len(chosen)
        assert all(one.start <= s < len(one.ids) - 1 for s in chosen)


def test_walk_counts_the_bonus():
    # anchors 3..8 of a record of 10 tokens: 1 accepted, then all to the end
    tokens, rounds, history = rollout.walk([1, 0, 5, 0, 0, 0], start=3, length=10)
    assert (tokens, rounds, history) == (6, 2, [1, 5])


def test_tasks_are_held_out_by_their_words():
    words = {True: set(), False: set()}
    for held in words:
        for i in range(40):
            sample = corpus.task("substitution", str(i), held)
            assert sample == corpus.task("substitution", str(i), held)
            words[held] |= set(re.findall(r"= (\w+)", sample.prompt))
    assert words[True] and words[False] and not words[True] & words[False]


# the commands


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_target):
    """A target with tokenizer and a drafter as folders."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("folders")
    words = {f"w{i}": i for i in range(22)} | {"<mask>": 22}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1")
    tiny_target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    tiny_drafter(tiny_target, mark="").save(root / "drafter", torch.float32)
    lines = [{"kind": "k", "prompt_ids": [2 + i % 15, 3, 4 + i]} for i in range(7)]
    data.write_jsonl(root / "prompts.jsonl", lines)
    return root


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("[3]", "line 1 is a JSON list, must be one object a line"),
        ('{"prompt_ids": ["a"]}', r"line 1: prompt_ids holds 'a', must hold token ids of 0 or more below \d+"),
        ('{"prompt_ids": [99999]}', "prompt_ids holds 99999"),
        ('{"prompt_ids": 5}', "prompt_ids is 5, must be a list of token ids"),
        ("", "holds no prompt, must hold at least one"),
        (b"\xff\n", "is not UTF-8"),
    ],
)
def test_record_refuses_prompts_and_writes_nothing(folders, tmp_path, capsys, line, sentence):
    (tmp_path / "p.jsonl").write_bytes(line if isinstance(line, bytes) else line.encode())
    arguments = ["--target", str(folders / "target"), "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "out")]
    assert record.main(arguments) == 1
    told = capsys.readouterr().err
    assert re.search(sentence, told) and "Traceback" not in told and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "option, value, sentence",
    [
        ("--lr", "nan", "train: lr was nan, must be above 0"),
        ("--batch", "0", "train: batch was 0, must be 1 or more"),
        ("--steps", "0", "train: steps was 0, must be 1 or more"),
        ("--share", "2", "train: share was 2.0, must be from 0 to 1"),
        ("--out", "full", "train: out is .*full, a folder that holds something else"),
        ("--out", "file", "train: out is the file .*file, must be a folder or new"),
        ("--records", "far.jsonl", r"holds 99999, must hold token ids of 0 or more below \d+"),
    ],
)
def test_train_refuses_before_the_first_step(folders, tmp_path, capsys, monkeypatch, option, value, sentence):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    Path("file").write_text("mine")
    Path("near.jsonl").write_text('{"prompt_ids": [2, 3], "response_ids": [4, 5, 6]}\n')
    Path("far.jsonl").write_text('{"prompt_ids": [2, 3], "response_ids": [4, 99999, 6]}\n')
    arguments = {"--target": str(folders / "target"), "--drafter": str(folders / "drafter"), "--records": "near.jsonl", "--out": "o",
                 "--work": "w", "--steps": "1"} | {option: value}  # fmt: skip
    assert train.main([part for pair in arguments.items() for part in pair]) == 1
    told = capsys.readouterr().err
    assert re.search(sentence, told) and "Traceback" not in told
    assert Path("full/mine.txt").read_text() == Path("file").read_text() == "mine" and not Path("o").exists() and not Path("w").exists()


def test_record_then_train(folders, tmp_path, capsys):
    written = tmp_path / "records"
    arguments = ["--target", str(folders / "target"), "--prompts", str(folders / "prompts.jsonl"), "--out", str(written)]
    assert record.main([*arguments, "--max-new-tokens", "12", "--batch", "3"]) == 0
    records = data.read_records(written)
    assert len(records) == 7 and {r.temperature for r in records} == {0.0, 0.7}
    common = ["--target", str(folders / "target"), "--records", str(written), "--drafter", str(folders / "drafter")]
    common += ["--steps", "3", "--batch", "2", "--anchors", "3"]
    out = tmp_path / "carry"
    assert train.main([*common, "--out", str(out), "--work", str(tmp_path / "w")]) == 0
    tensors = load_file(out / "model.safetensors")
    assert tensors["carryover_mark"].dtype == torch.float32 and tensors["carryover_mark"].any()
    assert json.loads((out / "config.json").read_text())["carryover_config"] == {"mark_site": "pre_norm"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "w" / "tensorboard"))
    events.Reload()
    rows = [json.loads(line) for line in (tmp_path / "w" / "metrics.jsonl").read_text().splitlines()]
    assert [e.value for e in events.Scalars("carryover/loss")] == pytest.approx([row["loss"] for row in rows])
    kept = [*common, "--out", str(tmp_path / "k"), "--work", str(tmp_path / "kw")]
    assert train.main([*kept, "--cache-gb", "1"]) == 0
    assert re.search(r"branches of \d records take at most 0\.00 GB in .*kw/branches, limit 1 GB", capsys.readouterr().out)
    assert (tmp_path / "kw" / "branches" / "00000.pt").exists()
    assert train.main([*kept[:-1], str(tmp_path / "small"), "--cache-gb", "1e-6"]) == 1
    assert "must be at most the limit" in capsys.readouterr().err
    assert train.main([*common, "--out", str(tmp_path / "none"), "--work", str(tmp_path / "n"), "--mode", "none"]) == 0
    assert "carryover_mark" not in load_file(tmp_path / "none" / "model.safetensors")
    capsys.readouterr()
    assert train.main([*common, "--out", str(out), "--work", str(tmp_path / "w"), "--steps", "4"]) == 1
    assert "was made for 3 steps, this run has 4" in capsys.readouterr().err
    assert train.main([*common[2:], "--target", str(tmp_path), "--out", "x", "--work", "y"]) == 1
    assert "must be a folder with config.json" in capsys.readouterr().err


@pytest.mark.parametrize(("shift", "markov"), [(0, ""), (1, "rnn")])
def test_saved_drafter_reads_back(tmp_path, tiny_target, shift, markov):
    """In both layouts, with the target's embeddings and head left out."""
    drafter = tiny_drafter(tiny_target, "pre_norm", shift, markov)
    drafter.save(tmp_path / "d", torch.float32)
    assert "lm_head.weight" not in load_file(tmp_path / "d" / "model.safetensors")
    again = DraftModel.load(tmp_path / "d", embed=drafter.embed, head=drafter.head)
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert again.c == drafter.c
    with pytest.raises(ValueError, match="must be given the target's"):
        DraftModel.load(tmp_path / "d")


# the shipped models


MODELS = Path(train.__file__).parents[1] / "models"


def test_shipped_drafter_is_worth_speculating():
    """Acceptance length of at least 3 at block 8 on held-out prompts, two a kind; the card has all of them."""
    target, tokenizer = data.load_target(MODELS / "target")
    prompts = {}
    for row in json.loads((MODELS / "held_out.json").read_text()):
        prompts.setdefault(row["kind"], []).append(row["prompt"])
    assert set(prompts) == set(corpus.KINDS) and all(len(p) >= 64 for p in prompts.values())
    some = [p for rows in prompts.values() for p in rows[:2]]
    ids = data.encode(tokenizer, some)
    responses = data.respond(target, ids, 64, tokenizer.eos_token_id)
    records = [data.Record("", p + r, len(p), 0.0) for p, r in zip(ids, responses, strict=True)]
    embed = target.get_input_embeddings().weight.detach()
    drafter = DraftModel.load(MODELS / "dflash", embed=embed, head=embed)
    assert drafter.c.proposals == 7
    assert carry.acceptance_length(carry.chained(drafter, target, records, carry=False)) >= 3


def test_shipped_weights_fit():
    files = list(MODELS.rglob("*.safetensors"))
    assert files and sum(f.stat().st_size for f in files) < 24e6


def test_held_out_prompts_share_no_invented_word_with_training():
    for row in json.loads((MODELS / "held_out.json").read_text()):
        if row["kind"] == "substitution":
            rules = row["prompt"].split("\ntext")[0]
            for word in re.findall(r"[=/] (\w+)", rules):
                assert zlib.crc32(word.encode()) % corpus.HELD_OUT_WORDS == 0
        if row["kind"] == "text":
            assert corpus.file_is_held_out(row["source"].rsplit(":", 1)[0])
