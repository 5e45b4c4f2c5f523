"""The drafter: golden rounds, the three formats in and out, what is refused, and its life between rounds.

Parity tests run on the reference ops and on the backend under test (``ops``), the others on the latter (``backend``). Config-level
reports have a test named after their row.
"""

import copy
import importlib
import json
import os
import pathlib
import runpy

import pytest
import torch
from compare import assert_as_good_as_torch, assert_equal
from dense_drafter import block_hidden
from safetensors.torch import load_file, save_file

from carryover_kernels.drafter import CarryoverDrafter, CheckpointError
from carryover_kernels.drafter.config import Rope
from carryover_kernels.drafter.files import write_checkpoint
from carryover_kernels.drafter.formats import expected_tensors, read_config
from carryover_kernels.drafter.weights import inverse_frequencies, rope_table

GOLDEN = pathlib.Path(__file__).parent / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
DSPARK = [name for name in FOLDERS if "qwen3_" in name and "dspark" in name]
KINDS = ("baseline", "carryover", "carryover_post_norm")
TOLERANCE = 2e-5  # stated by golden/README.md for float32


@pytest.fixture(params=["reference", "selected"])
def ops(request):
    """The ops that run: python_ref's, or the backend under test (--backend)."""
    if request.param == "selected":
        yield request.getfixturevalue("backend")
        return
    import reference_backend

    with reference_backend.registered():
        yield "reference"


@pytest.fixture
def where(request):
    """Device of a test: the backend's, unless the reference runs."""
    if "ops" in request.fixturenames and request.getfixturevalue("ops") == "reference":
        return "cpu"
    return request.getfixturevalue("device")


def source_of(folder):
    return json.loads((GOLDEN / folder / "config.json").read_text()), load_file(GOLDEN / folder / "model.safetensors")


def target_of(folder):
    path = GOLDEN / folder / "target.safetensors"
    target = load_file(path) if path.exists() else {}
    return dict(embed_tokens=target.get("embed_tokens.weight"), lm_head=target.get("lm_head.weight"))


def load(folder, kind="baseline", **options):
    """The golden drafter of ``folder``, with its mark where ``kind`` has one."""
    rounds = load_file(GOLDEN / folder / "rounds.safetensors")
    if kind != "baseline":
        options |= dict(mark=rounds["carryover_marker"], mark_site="post_norm" if kind.endswith("post_norm") else None)
    return CarryoverDrafter.from_pretrained(GOLDEN / folder, **target_of(folder), **options)


def ints(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def absorb(drafter, state, slot, rows, start, num_rejected=0):
    """One request's rows from position ``start`` on."""
    device, count = drafter.device, rows.shape[0]
    rows = rows.to(device, drafter.dtype)
    positions = torch.arange(start, start + count, device=device)
    drafter.absorb(state, [slot], rows, ints(0, count, device=device), ints(num_rejected, device=device), positions)


def propose(drafter, state, slots, anchors, **options):
    return drafter.propose(state, slots, torch.tensor(anchors, device=drafter.device), **options)


def replay(drafter, rounds, most=99):
    """Run the rounds of a golden file; one (Proposal, committed length) each. The slot and its pages are not the first ones."""
    state = drafter.new_state(4, page_size=5, num_pages=40)
    state.allocate(7)
    slot = state.allocate(100)
    start, results = 0, []
    count = min(most, sum(name.endswith(".start") for name in rounds))
    absorb(drafter, state, slot, rounds["prompt_features"], 0)
    for r in range(count):
        if r > 0:
            rows = rounds[f"round{r - 1}.verify_features"]
            absorb(drafter, state, slot, rows, start, rows.shape[0] - 1 - int(rounds[f"round{r - 1}.num_accepted"]))
        start = int(state.seq_lens[slot])
        proposal = propose(drafter, state, [slot], [int(rounds[f"round{r}.anchor_token"])], return_logits=True, return_hidden=True)
        results.append((proposal, start))
    return results


# Parity


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_golden(folder, kind, ops, where):
    rounds = load_file(GOLDEN / folder / "rounds.safetensors")
    errors = {"block_hidden": 0.0, "draft_logits": 0.0, "confidence_logits": 0.0}
    results = replay(load(folder, kind, device=where), rounds)
    for r, (proposal, start) in enumerate(results):
        assert start == int(rounds[f"round{r}.start"]), f"round {r} starts elsewhere"
        assert_equal(proposal.tokens[0], rounds[f"{kind}.round{r}.draft_tokens"], f"round {r} tokens")
        got = {"block_hidden": proposal.hidden, "draft_logits": proposal.logits, "confidence_logits": proposal.confidence}
        for name, value in got.items():
            expected = rounds.get(f"{kind}.round{r}.{name}")
            assert (expected is None) == (value is None), f"{name} is there or not, unlike the file"
            if expected is not None:
                error = float((value[0].cpu() - expected).abs().max())
                assert error <= TOLERANCE, f"round {r}: {name} is {error:.2e} off"  # a NaN fails this too
                errors[name] = max(errors[name], error)
    print(f"golden {ops:10s} {folder:30s} {kind:20s} " + " ".join(f"{name} {value:.1e}" for name, value in errors.items()))


def test_golden_sees_a_missing_carry(ops, where):
    """Without the carried rows, or without their mark, the same rounds miss the tolerance: they are compared with what matters."""
    rounds = load_file(GOLDEN / FOLDERS[0] / "rounds.safetensors")
    for drafter in (load(FOLDERS[0], device=where), load(FOLDERS[0], "carryover", device=where)):
        if drafter.mark is not None:
            drafter.mark.zero_()
        proposal, _ = replay(drafter, rounds, 2)[1]
        assert float((proposal.hidden[0].cpu() - rounds["carryover.round1.block_hidden"]).abs().max()) > 10 * TOLERANCE


@pytest.mark.parametrize("folder", ["zlab_dflash_qwen3", "deepspec_dspark_gemma4"])
def test_bfloat16_is_as_good_as_torch(folder, ops, where, tmp_path, monkeypatch):
    """bfloat16 drafter against the float64 reference on the same rounded weights: at most twice the error of eager PyTorch."""
    import reference_backend

    from python_ref import eager
    from python_ref.drafter import Drafter

    rounds = load_file(GOLDEN / folder / "rounds.safetensors")
    rounds = {name: t.bfloat16() if name.endswith("_features") else t for name, t in rounds.items()}
    drafter = load(folder, "carryover", dtype=torch.bfloat16, device=where)
    drafter.save_pretrained(tmp_path / "b")
    target = {f"{name}.weight": t.bfloat16() for name, t in target_of(folder).items() if t is not None}
    if target:
        save_file(target, tmp_path / "b" / "target.safetensors")
    truth = Drafter(tmp_path / "b", torch.float64, rounds["carryover_marker"].double())
    ours = replay(drafter, rounds)
    with reference_backend.registered(), monkeypatch.context() as patch:
        for name in ("project_states", "qk_norm_rope", "block_attention", "markov_sample"):
            patch.setattr(importlib.import_module(f"python_ref.{name}"), name, getattr(eager, name))
        eagerly = replay(load(folder, "carryover", dtype=torch.bfloat16), rounds)
    start = truth.absorb(rounds["prompt_features"].double(), 0, 0)
    exact = []
    for r in range(len(ours)):
        if r > 0:
            rows = rounds[f"round{r - 1}.verify_features"].double()
            start = truth.absorb(rows, start, rows.shape[0] - 1 - int(rounds[f"round{r - 1}.num_accepted"]))
        exact.append(truth.propose(int(rounds[f"round{r}.anchor_token"]), start)[0])
    hidden = [torch.stack([proposal.hidden[0].cpu() for proposal, _ in results]) for results in (ours, eagerly)]
    assert_as_good_as_torch(hidden[0], hidden[1], torch.stack(exact), f"{folder} hidden")


# Options that no golden folder has, against the dense drafter

ODD = {
    "bias_sinks": dict(attention_bias=True, dflash_config={"attention_sink_bias": True}),
    "interleaved": dict(is_neox_style=False),
    "partial": dict(rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}),
    "swa_causal": dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=9),
    "swa_both_ways": dict(dflash_config={"use_swa": True, "swa_window_size": 9, "causal": False}),
    "anchor_predicts": dict(dflash_config={"sample_from_anchor": True}),
    "all_causal": dict(is_causal=True),
}
GEMMA_MIXED = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=9, attn_logit_softcapping=5.0)


def random_checkpoint(source, rng, taps_width=192):
    """Random tensors of the shapes that ``source`` asks for, embedding and head included."""
    config = read_config(source)
    shapes = expected_tensors(config) | {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
    }
    tensors = {}
    for name, shape in shapes.items():
        shape = [taps_width if size < 0 else size for size in shape]
        values = torch.randn(shape, generator=rng)
        tensors[name] = 1 + 0.2 * values if "norm" in name or name.endswith("layer_scalar") else values * shape[-1] ** -0.5 * 3
    return config, tensors


def changed(source, change):
    """``source`` with ``change`` merged in, dflash_config key by key."""
    source = copy.deepcopy(source)
    for key, value in change.items():
        source[key] = source.get(key, {}) | value if key == "dflash_config" else value
    return source


@pytest.mark.parametrize("mark_site", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("odd", [*ODD, "gemma4_mixed"])
def test_options_against_dense_drafter(odd, mark_site, ops, where, rng):
    if odd == "gemma4_mixed":
        source = changed(source_of("deepspec_dspark_gemma4")[0], GEMMA_MIXED)
    else:
        source = changed(source_of("zlab_dflash_qwen3")[0], ODD[odd])
    config, tensors = random_checkpoint(source, rng)
    mark = torch.randn(config.hidden_size, generator=rng)
    features = torch.randn(23, 192, generator=rng)
    drafter = CarryoverDrafter(config, tensors, mark=mark, mark_site=mark_site, device=where)
    state = drafter.new_state(2, page_size=3, num_pages=30)
    slot = state.allocate(30)
    absorb(drafter, state, slot, features[:18], 0)
    absorb(drafter, state, slot, features[18:], 18, num_rejected=3)
    hidden = propose(drafter, state, [slot], [7], return_hidden=True).hidden[0].cpu()
    expected = block_hidden(drafter.config, tensors, features[:20], features[20:], 7, tensors["embed_tokens.weight"], mark)
    without = block_hidden(drafter.config, tensors, features[:20], features[:0], 7, tensors["embed_tokens.weight"])
    assert float((without - expected).abs().max()) > 0.01, "carried rows must matter here"
    # float32 against float64: golden/README.md's tolerance, for values of the same size (a normed row).
    assert float((hidden - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("mark", ["", "pre_norm", "post_norm"])
@pytest.mark.parametrize("shape", ["zlab", "zlab_markov", "deepspec_gated", "deepspec_rnn"])
def test_trained_drafter_is_served_as_trained(shape, mark, backend, where, rng, tmp_path):
    """What the trainer's module computes behind a prefix and carried rows, the drafter computes from the checkpoint it wrote."""
    from carryover_kernels.training.model import DraftConfig, DraftModel

    deepspec = shape.startswith("deepspec")
    options = dict(shift=1, confidence=True, borrowed=False) if deepspec else dict(shift=0)
    if shape != "zlab":
        options |= dict(markov_rank=16, markov_type=shape.removeprefix("deepspec_") if deepspec else "vanilla")
    config = DraftConfig(
        vocab=101, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=96, taps=(1, 5, 9), block=8, mask_token=100,
        target_hidden=64, target_layers=12, theta=1e4, mark=mark, **options,
    )  # fmt: skip
    embed, head = torch.randn(101, 64, generator=rng), torch.randn(101, 64, generator=rng) / 8
    model = DraftModel(config, embed, head).initialise(rng.initial_seed() % 2**31, std=0.15)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias", "markov_w2.weight", "carryover_mark")):
                parameter += 0.3 * torch.randn(parameter.shape, generator=rng)
    taps = torch.randn(1, 17, 192, generator=rng)
    anchor, committed = torch.tensor([7]), 12
    with torch.no_grad():
        features = torch.cat([model.features(taps[:, :committed]), model.features(taps[:, committed:], carried=True)], 1)
        positions = torch.arange(17)[None]
        block = committed + torch.arange(config.block)[None]
        sees_all = torch.ones(1, 1, config.block, 17 + config.block, dtype=torch.bool)
        hidden = model(model.block_tokens(anchor), block, model.outside_keys(features, positions), sees_all)
        rows = model.proposal_rows(hidden)
        tokens, logits = model.propose(rows, anchor, allow_mask=True)
    model.save(tmp_path / "d", dtype=torch.float32)
    drafter = CarryoverDrafter.from_pretrained(tmp_path / "d", device=where, embed_tokens=embed, lm_head=head)
    assert (drafter.mark is not None, drafter.config.mark_site) == (bool(mark), mark or "pre_norm")
    state = drafter.new_state(1, page_size=4, num_pages=8, carry=True)
    slot = state.allocate(20)
    absorb(drafter, state, slot, taps[0, :8], 0)
    absorb(drafter, state, slot, taps[0, 8:], 8, num_rejected=5)
    served = propose(drafter, state, [slot], [7], return_hidden=True, return_logits=True)
    # Both float32, sums in another order: golden/README.md's tolerance, for values of that size.
    for got, expected in ((served.hidden, hidden), (served.logits, logits)):
        assert float((got.cpu() - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))
    assert_equal(served.tokens.cpu(), tokens, "tokens")
    if config.confidence:
        previous = torch.cat([anchor[:, None], tokens[:, :-1]], 1)
        expected = model.confidence_logits(rows, previous).detach()
        assert float((served.confidence.cpu() - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "yarn_mscale", "proportional"])
def test_rope_scalings_are_those_of_transformers(kind):
    """Frequencies and factor equal Transformers' own to float32 rounding (2e-6 relative: two roundings of a power)."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {
        "linear": dict(factor=4.0),
        "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        "yarn": dict(factor=4.0, original_max_position_embeddings=32768, partial_rotary_factor=0.5),
        "yarn_mscale": dict(factor=64.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0),
        "proportional": dict(partial_rotary_factor=0.25),
    }[kind]
    rope_type = kind.removesuffix("_mscale")
    parameters = dict(values, rope_type=rope_type, rope_theta=1e6)
    theirs = Qwen3Config(head_dim=128, hidden_size=512, num_attention_heads=4, rope_parameters=dict(parameters))
    expected, factor = ROPE_INIT_FUNCTIONS[rope_type](theirs, "cpu")
    source = changed(source_of("zlab_dflash_qwen3")[0], dict(rope_parameters=parameters))
    rope = read_config(source).layers[0].geometry.rope
    ours, our_factor = inverse_frequencies(rope, 128)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-6)


# Formats


def as_speculators(folder):
    """A golden checkpoint by speculators' keys: nested Qwen3 config, ids counted one further, its own embedding and head."""
    source, tensors = source_of(folder)
    options = source | source.get("dflash_config", {})
    heads = {key: source[key] for key in source if key.startswith(("markov", "enable_conf", "confidence"))}
    kind = "dspark" if heads else "dflash"
    nested = {
        key: source[key]
        for key in source
        if key not in heads and key not in ("dflash_config", "block_size", "mask_token_id", "target_layer_ids", "architectures")
    }
    config = {
        "architectures": ["DSparkSpeculator" if heads else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": nested,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in options["target_layer_ids"]],
        "block_size": options["block_size"],
        "mask_token_id": options["mask_token_id"],
        "draft_vocab_size": source["vocab_size"],
        "sliding_window_non_causal": False,
        **heads,
    }
    own = {f"{name}.weight": t for name, t in target_of(folder).items() if t is not None}
    return config, tensors | own


def assert_same_proposals(first, second, rounds):
    for (a, _), (b, _) in zip(replay(first, rounds, 3), replay(second, rounds, 3)):
        for name in ("tokens", "hidden", "logits", "confidence"):
            if getattr(a, name) is not None:
                assert_equal(getattr(a, name).cpu(), getattr(b, name).cpu(), name)


@pytest.mark.parametrize("folder", ["zlab_dflash_qwen3", *DSPARK])
def test_speculators_format_computes_the_same(folder, ops, where, tmp_path):
    rounds = load_file(GOLDEN / folder / "rounds.safetensors")
    write_checkpoint(tmp_path / "s", *as_speculators(folder))
    drafter = CarryoverDrafter.from_pretrained(tmp_path / "s", device=where, mark=rounds["carryover_marker"])
    assert drafter.config.format == "speculators" and drafter.config.taps == (1, 5, 9)
    assert_same_proposals(drafter, load(folder, "carryover", device=where), rounds)


@pytest.mark.parametrize("head", ["none", "vanilla"])
def test_speculators_draft_vocabulary(head, backend, where):
    """A smaller draft vocabulary: its logits are the full ones' columns, its tokens and probabilities are in target ids."""
    folder = "zlab_dflash_qwen3" if head == "none" else "deepspec_dspark_qwen3_vanilla"
    source, tensors = as_speculators(folder)
    rounds = load_file(GOLDEN / folder / "rounds.safetensors")
    kept = torch.arange(0, 101, 3)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in tensors:
            tensors[name] = tensors[name][kept]
    tensors |= {"d2t": kept - torch.arange(len(kept)), "t2d": torch.isin(torch.arange(101), kept)}
    source["draft_vocab_size"] = len(kept)
    small = CarryoverDrafter(read_config(source), tensors, device=where)
    full = load(folder, device=where)
    a, b = replay(small, rounds, 1)[0][0], replay(full, rounds, 1)[0][0]
    assert_equal(a.hidden.cpu(), b.hidden.cpu(), "hidden")
    first = b.logits[0, 0, kept.to(where)].cpu()  # later slots follow other tokens under a Markov head
    torch.testing.assert_close(a.logits[0, 0].cpu(), first, rtol=0, atol=TOLERANCE)
    assert torch.isin(a.tokens.cpu(), kept).all()
    assert int(a.tokens[0, 0]) == int(kept[first.argmax()])

    state = small.new_state(1, num_pages=4)
    slot = state.allocate(20)
    absorb(small, state, slot, rounds["prompt_features"], 0)
    one = torch.ones(1, dtype=torch.int64, device=where)
    probs = propose(small, state, [slot], [3], temperature=1.0, seeds=one, offsets=one, return_probs=True).probs.cpu()
    assert probs.shape == (1, small.config.num_draft_tokens, 101)
    assert (probs[..., kept].sum(-1) - 1).abs().max() < 1e-5  # a float32 sum of 34 terms
    others = torch.ones(101, dtype=torch.bool)
    others[kept] = False
    assert (probs[..., others] == 0).all()


def test_deepspec_dflash_computes_the_same(backend, where):
    """DeepSpec's DFlash is its DSpark without heads: same hidden states, logits without the Markov bias, every row proposes."""
    folder = "deepspec_dspark_qwen3_vanilla"
    source, tensors = source_of(folder)
    source |= dict(markov_rank=0, enable_confidence_head=False)
    del source["markov_head_type"], source["confidence_head_with_markov"]
    tensors = {name: t for name, t in tensors.items() if not name.startswith(("markov", "confidence"))}
    rounds = load_file(GOLDEN / folder / "rounds.safetensors")
    drafter = CarryoverDrafter(read_config(source), tensors, mark=rounds["carryover_marker"], device=where)
    for (a, _), (b, _) in zip(replay(drafter, rounds, 3), replay(load(folder, "carryover", device=where), rounds, 3)):
        assert_equal(a.hidden.cpu(), b.hidden.cpu(), "hidden")
        assert a.confidence is None and a.tokens.shape == (1, 7)
        assert_equal(a.tokens[0].cpu(), (a.hidden[0].cpu() @ tensors["lm_head.weight"].T).argmax(-1), "tokens")


@pytest.mark.parametrize("shape", [*FOLDERS, "speculators", "marked", "mask_embedding", "mixed_dtypes"])
def test_round_trip_is_exact(shape, tmp_path, backend, where):
    """config.json key for key and tensors bit for bit come back; the mark is the one tensor more."""
    source, tensors = as_speculators(DSPARK[0]) if shape == "speculators" else source_of(shape if shape in FOLDERS else FOLDERS[-1])
    target = {} if shape in FOLDERS[:-1] or shape == "speculators" else target_of(FOLDERS[-1])
    mask_embedding = torch.arange(64.0) if shape == "mask_embedding" else None
    options = {}
    if shape == "marked":
        options = dict(mark=torch.linspace(-1, 1, 64), mark_site="post_norm")
    if shape == "mixed_dtypes":
        tensors = {name: t if name == "norm.weight" else t.bfloat16() for name, t in tensors.items()}
    write_checkpoint(tmp_path / "a", source, tensors, mask_embedding)
    first = CarryoverDrafter.from_pretrained(tmp_path / "a", device=where, **target, **options)
    first.save_pretrained(tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    expected_source, expected = dict(source), dict(tensors)
    if shape == "marked":
        expected["carryover_mark"] = options["mark"]
        expected_source["carryover_config"] = {"mark_site": "post_norm"}
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == expected_source
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_equal(saved[name], tensor, name)
    assert (tmp_path / "b" / "mask_embedding.pt").exists() == (mask_embedding is not None)
    second = CarryoverDrafter.from_pretrained(tmp_path / "b", device=where, **target)
    assert second.config == first.config
    folder = FOLDERS[-1] if target else DSPARK[0]
    assert_same_proposals(first, second, load_file(GOLDEN / folder / "rounds.safetensors"))


def test_mask_embedding_replaces_the_mask_tokens_row(backend, where, tmp_path):
    source, tensors = source_of(FOLDERS[-1])
    target = target_of(FOLDERS[-1])
    write_checkpoint(tmp_path / "a", source, tensors, target["embed_tokens"][source["dflash_config"]["mask_token_id"]])
    same = CarryoverDrafter.from_pretrained(tmp_path / "a", device=where, **target)
    rounds = load_file(GOLDEN / FOLDERS[-1] / "rounds.safetensors")
    assert_same_proposals(same, load(FOLDERS[-1], device=where), rounds)
    write_checkpoint(tmp_path / "b", source, tensors, torch.zeros(64))
    other = CarryoverDrafter.from_pretrained(tmp_path / "b", device=where, **target)
    assert not torch.equal(replay(other, rounds, 1)[0][0].hidden, replay(same, rounds, 1)[0][0].hidden)


def test_sharded_checkpoint_reads_the_same(tmp_path):
    source, tensors = source_of(DSPARK[0])
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(source))
    drafter = CarryoverDrafter.from_pretrained(tmp_path)
    for name, tensor in tensors.items():
        assert_equal(drafter.tensors[name], tensor, name)
    drafter.save_pretrained(tmp_path)  # over itself: one file now, the shards are gone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


# Refusals


def refused(source, tensors=None, **options):
    """The sentence with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        config = read_config(source)
        CarryoverDrafter(config, tensors if tensors is not None else {}, **options)
    return str(caught.value)


BAD_KEYS = {
    "no_architecture": (FOLDERS[0], dict(architectures=["LlamaForCausalLM"]), "architectures"),
    "no_block_size": ("zlab_dflash_qwen3", dict(block_size=None), "block_size"),
    "two_block_sizes": ("zlab_dflash_qwen3", dict(dflash_config={"block_size": 16}), "block_size"),
    "no_mask_token": (DSPARK[0], dict(mask_token_id=None), "mask_token_id"),
    "text_for_a_number": (DSPARK[0], dict(hidden_size="64"), "hidden_size"),
    "taps_repeated": (DSPARK[0], dict(target_layer_ids=[1, 1]), "target_layer_ids"),
    "taps_empty": (DSPARK[0], dict(target_layer_ids=[]), "target_layer_ids"),
    "unknown_head": (DSPARK[0], dict(markov_head_type="lstm"), "markov_head_type"),
    "confidence_without_rank": (DSPARK[0], dict(markov_rank=0), "confidence_head_with_markov"),
    "domino": ("zlab_dflash_qwen3", dict(dflash_config={"projector_type": "domino"}), "projector_type"),
    "dflash2": ("zlab_dflash_qwen3", dict(dflash_config={"selector_rank": 64}), "selector_rank"),
    "value_scale": ("zlab_dflash_qwen3", dict(dflash_config={"attention_value_scale": 0.7}), "attention_value_scale"),
    "logit_scale": ("zlab_dflash_qwen3", dict(logit_scale=0.5), "logit_scale"),
    "rope_dynamic": (DSPARK[0], dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}), "rope_type"),
    "rope_unknown_key": (DSPARK[0], dict(rope_parameters={"rope_theta": 1e4, "short_factor": [1]}), "short_factor"),
    "rope_no_theta": (DSPARK[0], dict(rope_parameters={"rope_type": "default"}), "rope_theta"),
    "yarn_no_factor": (DSPARK[0], dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "factor"),
    "window_missing": (DSPARK[0], dict(layer_types=["sliding_attention"] * 2), "sliding_window"),
    "layer_types_short": (DSPARK[0], dict(layer_types=["full_attention"]), "layer_types"),
    "layer_type_unknown": (DSPARK[0], dict(layer_types=["linear_attention"] * 2), "layer_types"),
    "activation": (DSPARK[0], dict(hidden_act="gelu"), "hidden_act"),
    "moe": ("deepspec_dspark_gemma4", dict(enable_moe_block=True), "enable_moe_block"),
    "mark_site": (DSPARK[0], dict(carryover_config={"mark_site": "end"}), "mark_site"),
}


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_bad_config_is_refused_by_key(bad):
    folder, change, key = BAD_KEYS[bad]
    sentence = refused(changed(source_of(folder)[0], change))
    assert key in sentence and "must" in sentence


def test_bad_speculators_config_is_refused_by_key():
    source, _ = as_speculators(DSPARK[0])
    for change, key in (
        (dict(speculators_model_type="eagle3"), "speculators_model_type"),
        (dict(transformer_layer_config=None), "transformer_layer_config"),
        (dict(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids"),
        (dict(draft_vocab_size=None), "draft_vocab_size"),
        (dict(mask_token_id=None), "mask_token_id"),
    ):
        assert key in refused(source | change)


def test_bad_tensors_are_refused_by_name():
    source, tensors = source_of(DSPARK[0])
    q = "layers.1.self_attn.q_proj.weight"
    for change, words in (
        ({q: None}, (q, "missing")),
        ({"fc.weight": torch.zeros(64, 126)}, ("fc.weight", "126", "192", "target_layer_ids")),
        ({"fc.weight": torch.zeros(64, 190)}, ("fc.weight", "190")),
        ({q: torch.zeros(128, 63)}, (q, "[128, 63]", "[128, 64]")),
        ({"layers.1.self_attn.g_proj.weight": torch.zeros(1)}, ("g_proj", "unknown")),
        ({"markov_head.markov_w1.weight": torch.zeros(100, 16)}, ("markov_w1", "[100, 16]", "[101, 16]")),
        ({"embed_tokens.weight": None}, ("embed_tokens",)),
        ({"carryover_mark": torch.zeros(3)}, ("carryover_mark", "[64]")),
    ):
        wrong = {name: t for name, t in (tensors | change).items() if t is not None}
        sentence = refused(source, wrong)
        assert all(word in sentence for word in words), sentence
    source["mask_token_id"] = 101
    assert "mask_token_id" in refused(source, tensors)
    with pytest.raises(ValueError, match="mark_site is 'x'"):
        CarryoverDrafter(read_config(source_of(DSPARK[0])[0]), tensors, mark_site="x")
    with pytest.raises(TypeError, match="dtype is torch.int8"):
        CarryoverDrafter(read_config(source_of(DSPARK[0])[0]), tensors, dtype=torch.int8)


def test_unreadable_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a folder"):
        CarryoverDrafter.from_pretrained(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="config.json"):
        CarryoverDrafter.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is not JSON"):
        CarryoverDrafter.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(source_of(DSPARK[0])[0]))
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        CarryoverDrafter.from_pretrained(tmp_path)
    whole = (GOLDEN / DSPARK[0] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors can't be read"):
        CarryoverDrafter.from_pretrained(tmp_path)


def test_saving_loses_nothing(tmp_path, monkeypatch):
    """A failed save leaves the old checkpoint and no litter; other files of the folder stay; a foreign folder is refused."""
    drafter = load(DSPARK[0])
    folder = tmp_path / "d"
    drafter.save_pretrained(folder)
    (folder / "README.md").write_text("card")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def broken(*args, **kwargs):
        raise OSError("disk full")

    def last_rename_fails(source, destination, rename=os.rename):
        last = str(destination) == str(folder) and not str(source).endswith(".old")  # not the one that puts the old folder back
        broken() if last else rename(source, destination)

    for name, failure in (("save_file", broken), ("os.rename", last_rename_fails)):
        with monkeypatch.context() as patch:
            patch.setattr(f"carryover_kernels.drafter.files.{name}", failure)
            with pytest.raises(OSError, match="disk full"):
                drafter.save_pretrained(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["d"]
    drafter.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "card" and [path.name for path in tmp_path.iterdir()] == ["d"]

    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis").write_text("x")
    with pytest.raises(FileExistsError, match="something else"):
        drafter.save_pretrained(tmp_path / "papers")
    assert [path.name for path in (tmp_path / "papers").iterdir()] == ["thesis"]


# Between rounds


def two_requests(drafter, rng, carry=None):
    """A state with two requests of unequal length and carry, and the rows each took in."""
    state = drafter.new_state(4, page_size=4, num_pages=30, carry=carry)
    rows, slots = [], []
    for length, rejected in ((11, 2), (6, 4)):
        slot = state.allocate(40)
        features = torch.randn(length + 6, drafter.tensors["fc.weight"].shape[1], generator=rng)
        absorb(drafter, state, slot, features[:length], 0)
        absorb(drafter, state, slot, features[length:], length, rejected)
        slots.append(slot)
        rows.append((features, length, rejected))
    return state, slots, rows


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


def test_state_dtypes_are_its_own(backend, where, rng):
    """Report R44: pages and carry buffers have their own dtype, whatever the target's is."""
    drafter = load(FOLDERS[-1], "carryover", device=where)
    state = drafter.new_state(1, num_pages=4, cache_dtype=torch.bfloat16, carry_dtype=torch.float16)
    assert state.k_cache[0].dtype == torch.bfloat16 and state.carry_v[0].dtype == torch.float16
    slot = state.allocate(20)
    absorb(drafter, state, slot, torch.randn(12, 192, generator=rng), 0, num_rejected=3)
    assert propose(drafter, state, [slot], [4], return_hidden=True).hidden.isfinite().all()


# Examples


ROOT = GOLDEN.parent.parent
EMBEDDED = ROOT / "carryover_kernels" / "models" / "dflash"


def test_example_of_an_engines_round(backend, capsys):
    runpy.run_path(str(ROOT / "examples" / "engine_round.py"))
    assert "accepted [3, 7], carried [4, 0], blocks start at [12, 12]" in capsys.readouterr().out


@pytest.mark.parametrize("checkpoint", [[str(GOLDEN / FOLDERS[-1])] * 2, *([[]] if EMBEDDED.is_dir() else [])], ids=str)
def test_example_of_a_drafter(checkpoint, backend, capsys, monkeypatch):
    """On a golden checkpoint, and on the embedded one where it is."""
    monkeypatch.setattr("sys.argv", ["drafter.py", *checkpoint])
    runpy.run_path(str(ROOT / "examples" / "drafter.py"))
    printed = capsys.readouterr().out
    assert "first block:" in printed and "carried rows:" in printed


# Reports (shared reports.tsv) that a config or a state decides


def test_r01_rope_layout_comes_from_the_draft_config():
    """NeoX unless the drafter's own config says otherwise, whatever else is in it."""
    source = source_of("zlab_dflash_qwen3")[0]
    assert read_config(source).neox
    assert not read_config(source | dict(is_neox_style=False)).neox
    assert not read_config(source | dict(rope_is_neox_style=False)).neox
    assert "rope_is_neox_style" in refused(source | dict(is_neox_style=True, rope_is_neox_style=False))


def test_r02_rope_is_never_inferred():
    """A target's leftover rope keys change nothing; a missing theta is refused, not taken from elsewhere."""
    source = source_of("zlab_dflash_qwen3")[0]
    assert read_config(source | dict(qk_rope_head_dim=0, target_rope_theta=5.0)) == read_config(source)
    assert "rope_theta" in refused(source | dict(rope_parameters=None))


def test_r03_taps_name_layer_outputs_in_every_format():
    assert read_config(source_of("zlab_dflash_qwen3")[0]).taps == (1, 5, 9)
    assert read_config(as_speculators("zlab_dflash_qwen3")[0]).taps == (1, 5, 9)  # written as 2, 6, 10
    assert read_config(source_of(DSPARK[0])[0] | dict(target_layer_ids=[-1, 3, 4])).taps == (-1, 3, 4)
    source = source_of("zlab_dflash_qwen3")[0]
    assert "eagle_aux" in refused(source | dict(eagle_aux_hidden_state_layer_ids=[1, 5, 9]))
    read_config(source | dict(eagle_aux_hidden_state_layer_ids=[2, 6, 10]))


def test_r04_taps_are_never_guessed():
    for source in (changed(source_of("zlab_dflash_qwen3")[0], dict(dflash_config={"target_layer_ids": None})),
                   source_of(DSPARK[0])[0] | dict(target_layer_ids=None)):  # fmt: skip
        sentence = refused(source)
        assert "target_layer_ids" in sentence and "never guessed" in sentence


def test_r05_last_target_layer_is_refused():
    for folder in ("zlab_dflash_qwen3", DSPARK[0]):
        change = dict(dflash_config={"target_layer_ids": [1, 11]}) if "zlab" in folder else dict(target_layer_ids=[1, 11])
        assert "target_layer_ids is [1, 11], must be below the target's last layer, 11" in refused(changed(source_of(folder)[0], change))


def test_r06_anchor_stands_at_the_committed_length(backend, where, rng):
    """After n committed rows the block starts at n, not at the last row's own position n - 1."""
    drafter = load(FOLDERS[-1], device=where)
    features = torch.randn(10, 192, generator=rng)
    state = drafter.new_state(1, num_pages=4)
    slot = state.allocate(20)
    absorb(drafter, state, slot, features, 0)
    hidden = propose(drafter, state, [slot], [4], return_hidden=True).hidden[0].cpu()
    plain, embed = {name: t.cpu() for name, t in drafter.tensors.items()}, drafter.embed_tokens.cpu()
    right = block_hidden(drafter.config, plain, features, features[:0], 4, embed)
    early = block_hidden(drafter.config, plain, features[:9], features[:0], 4, embed)
    assert float((hidden - right).abs().max()) <= TOLERANCE < 0.01 < float((hidden - early).abs().max())


def test_r07_slot_0_is_the_anchor(backend, where, rng):
    """The anchor's embedding fills slot 0: another anchor, another block."""
    drafter = load(FOLDERS[-1], device=where)
    state, slots, _ = two_requests(drafter, rng)
    a, b, mask = (propose(drafter, state, slots[:1], [token], return_hidden=True).hidden for token in (4, 5, 100))
    assert float((a - b).abs().max()) > 0.01 and float((a - mask).abs().max()) > 0.01


def test_r08_quantised_weights_are_refused():
    source, tensors = source_of(DSPARK[0])
    assert "quantization_config" in refused(source | dict(quantization_config={"quant_method": "fp8"}))
    name = "layers.0.self_attn.k_proj.weight"
    assert "quantised" in refused(source, tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    assert "weight_scale" in refused(source, tensors | {"layers.0.self_attn.k_proj.weight_scale": torch.ones(1)})
    nested = as_speculators(DSPARK[0])[0]
    nested["transformer_layer_config"]["quantization_config"] = {"bits": 4}
    assert "quantization_config" in refused(nested)


def test_r35_blocks_past_the_rope_table_propose_nothing(backend, where, rng):
    """The request at the end of the drafter's positions gets -1, its neighbour its usual drafts."""
    source, tensors = source_of(DSPARK[0])
    drafter = CarryoverDrafter(read_config(source | dict(max_position_embeddings=20)), tensors, device=where)
    state = drafter.new_state(2, num_pages=4)
    slots = [state.allocate(20), state.allocate(20)]
    features = torch.randn(14, 192, generator=rng)
    absorb(drafter, state, slots[0], features[:13], 0)  # 13 + 7 = 20: fits
    absorb(drafter, state, slots[1], features, 0)  # 14 + 7 = 21: doesn't
    both = propose(drafter, state, slots, [4, 4])
    assert (both.tokens[1] == -1).all()
    assert_equal(both.tokens[0].cpu(), propose(drafter, state, slots[:1], [4]).tokens[0].cpu(), "neighbour")
    assert (both.tokens[0] >= 0).all()


def test_r39_causality_is_by_layer():
    """speculators: full layers see both ways, sliding ones by sliding_window_non_causal."""
    source, _ = as_speculators("zlab_dflash_qwen3")
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    source["transformer_layer_config"] |= dict(layer_types=kinds, sliding_window=8)
    assert [layer.causal for layer in read_config(source).layers] == [True, False, True]
    assert [layer.causal for layer in read_config(source | dict(sliding_window_non_causal=True)).layers] == [False] * 3


def test_r40_windows_are_honoured_by_layer():
    """W counts the token itself: W - 1 to either side; full layers have none."""
    source = changed(source_of("zlab_dflash_qwen3")[0], ODD["swa_causal"])
    assert [(layer.window_left, layer.window_right) for layer in read_config(source).layers] == [(8, 8), (-1, -1), (8, 8)]


def test_r46_float16_does_not_overflow(backend, where, rng):
    """Outliers whose fused state is beyond float16's range come out finite and close to float32's."""
    source, tensors = source_of(DSPARK[0])
    tensors["fc.weight"] = tensors["fc.weight"] * 3e4
    features = torch.randn(12, 192, generator=rng) * 50
    assert (features @ tensors["fc.weight"].T).abs().max() > torch.finfo(torch.float16).max
    hidden = []
    for dtype in (torch.float16, torch.float32):
        drafter = CarryoverDrafter(read_config(source), tensors, dtype=dtype, device=where)
        state = drafter.new_state(1, num_pages=2)
        slot = state.allocate(20)
        absorb(drafter, state, slot, features.half(), 0)
        hidden.append(propose(drafter, state, [slot], [4], return_hidden=True).hidden.float())
    assert hidden[0].isfinite().all()
    # Two layers of float16 rounding (2**-11 each step) on values of size 4: far below what a lost row would do.
    assert float((hidden[0] - hidden[1]).abs().max()) < 0.1


def test_r55_rope_table_is_float32_at_long_positions():
    """Against float64 the angle's error stays that of float32 (position * 2**-24 * 4): bfloat16 tables are off by whole turns."""
    rope = Rope("default", 1e6)
    table = rope_table(rope, 128, 40000)
    assert table.dtype == torch.float32
    position = 39999
    exact = torch.tensor([position * 1e6 ** (-2 * j / 128) for j in range(64)], dtype=torch.float64)
    error = (table[position].double() - torch.cat([exact.cos(), exact.sin()])).abs().max()
    assert error < position * 2**-24 * 4
    coarse = (torch.tensor(float(position)).bfloat16() * exact.bfloat16().div(position)).double()
    assert (coarse.cos() - exact.cos()).abs().max() > 100 * error
