"""The drafter computes what it must: golden rounds, options that no golden folder has, the trainer's own module, the examples.

Parity tests run on the reference ops and on the backend under test (``ops``), the others on the latter (``backend``).
"""

import importlib
import runpy

import pytest
import torch
from compare import assert_as_good_as_torch, assert_equal
from dense_drafter import block_hidden
from drafter_tools import (  # ops, where: fixtures
    FOLDERS,
    GEMMA_MIXED,
    GOLDEN,
    ODD,
    TOLERANCE,
    absorb,
    changed,
    load,
    propose,
    random_checkpoint,
    replay,
    source_of,
    target_of,
    ops,  # noqa: F401
    where,  # noqa: F401
)
from safetensors.torch import load_file, save_file

from carryover_kernels.drafter import CarryoverDrafter
from carryover_kernels.drafter.formats import read_config
from carryover_kernels.drafter.weights import inverse_frequencies

KINDS = ("baseline", "carryover", "carryover_post_norm")


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
