"""What the drafter's test files share: golden folders, loading, one request's rounds, and checkpoints made for a test."""

import copy
import json
import pathlib

import pytest
import torch
from compare import assert_equal
from safetensors.torch import load_file

from carryover_kernels.drafter import CarryoverDrafter, CheckpointError
from carryover_kernels.drafter.formats import expected_tensors, read_config

GOLDEN = pathlib.Path(__file__).parent / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
DSPARK = [name for name in FOLDERS if "qwen3_" in name and "dspark" in name]
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


def refused(source, tensors=None, **options):
    """The sentence with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        config = read_config(source)
        CarryoverDrafter(config, tensors if tensors is not None else {}, **options)
    return str(caught.value)


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
