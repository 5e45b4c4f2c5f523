"""The three checkpoint formats: read alike, written back exactly, refused by key or tensor where they can't be honoured."""

import json
import os

import pytest
import torch
from compare import assert_equal
from drafter_tools import (  # ops, where: fixtures
    DSPARK,
    FOLDERS,
    GOLDEN,
    TOLERANCE,
    absorb,
    as_speculators,
    assert_same_proposals,
    changed,
    load,
    propose,
    refused,
    replay,
    source_of,
    target_of,
    ops,  # noqa: F401
    where,  # noqa: F401
)
from safetensors.torch import load_file, save_file

from carryover_kernels.drafter import CarryoverDrafter, CheckpointError
from carryover_kernels.drafter.files import write_checkpoint
from carryover_kernels.drafter.formats import read_config


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


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 64}
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
    "layer_types_no_list": (DSPARK[0], dict(layer_types=5), "layer_types"),
    "window_true": (DSPARK[0], dict(layer_types=["sliding_attention"] * 2, sliding_window=True), "sliding_window"),
    "target_layers_text": (DSPARK[0], dict(num_target_layers="many"), "num_target_layers"),
    "causal_text": ("zlab_dflash_qwen3", dict(is_causal="false"), "is_causal"),
    "causal_number": ("zlab_dflash_qwen3", dict(dflash_config={"causal": 0}), "causal"),
    "eps_nan": (DSPARK[0], dict(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "eps_negative": (DSPARK[0], dict(rms_norm_eps=-1e-6), "rms_norm_eps"),
    "softcap_negative": ("deepspec_dspark_gemma4", dict(attn_logit_softcapping=-5.0), "attn_logit_softcapping"),
    "heads_do_not_divide": (DSPARK[0], dict(num_key_value_heads=3), "num_key_value_heads"),
    "head_dim_1": (DSPARK[0], dict(head_dim=1), "head_dim"),
    "head_dim_7": (DSPARK[0], dict(head_dim=7), "head_dim"),
    "rope_type_list": (DSPARK[0], dict(rope_parameters={"rope_type": [], "rope_theta": 1e4}), "rope_type"),
    "rope_theta_0": (DSPARK[0], dict(rope_parameters={"rope_theta": 0.0}), "rope_theta"),
    "rope_theta_infinite": (DSPARK[0], dict(rope_parameters={"rope_theta": float("inf")}), "rope_theta"),
    "rope_rotates_nothing": (DSPARK[0], dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.01}), "partial_rotary_factor"),
    "linear_factor_0": (DSPARK[0], dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0}), "factor"),
    "yarn_beta_text": (DSPARK[0], dict(rope_parameters=YARN | {"beta_fast": "x"}), "beta_fast"),
    "yarn_truncate_text": (DSPARK[0], dict(rope_parameters=YARN | {"truncate": "x"}), "truncate"),
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
        (dict(draft_vocab_size=102), "draft_vocab_size"),
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


def test_draft_ids_that_are_no_target_ids_are_refused():
    """Each of these once loaded, and drafted other tokens than the drafter meant, or failed in the middle of a round."""
    source, tensors = as_speculators(DSPARK[0])
    source["draft_vocab_size"] = 50
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name][:50]
    ids = torch.zeros(50, dtype=torch.int64)
    for d2t, words in (
        (ids + 52, ("d2t", "49 to target id 101", "0 to 100")),
        (ids - 1, ("d2t", "0 to target id -1")),
        (-torch.arange(50), ("d2t", "two draft ids")),
        (ids.bfloat16(), ("d2t", "bfloat16", "int64")),
        (ids.bool(), ("d2t", "bool", "int64")),
    ):
        sentence = refused(source, tensors | {"d2t": d2t})
        assert all(word in sentence for word in words), sentence
    assert CarryoverDrafter(read_config(source), tensors | {"d2t": ids.int() + 51}).draft_to_target[0] == 51


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../b"}}'])
def test_damaged_index_is_refused(text, tmp_path):
    source, tensors = source_of(DSPARK[0])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(source))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json is damaged, must"):
        CarryoverDrafter.from_pretrained(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    source, tensors = source_of(DSPARK[0])
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"norm.weight": tensors["norm.weight"]}, tmp_path / "b.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(source))
    shards = {"norm.weight": "a.safetensors", "fc.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CheckpointError, match="tensor norm.weight is in two files"):
        CarryoverDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04" + bytes(30), {"a": 1}, torch.zeros(64, dtype=torch.int64)])
def test_damaged_mask_embedding_is_refused(content, tmp_path):
    source, tensors = source_of(DSPARK[0])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(source))
    if isinstance(content, bytes):
        (tmp_path / "mask_embedding.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match="^mask_embedding.pt .*, must"):
        CarryoverDrafter.from_pretrained(tmp_path)


def test_saving_through_a_link_and_into_the_current_folder(tmp_path, monkeypatch):
    drafter = load(DSPARK[0])
    drafter.save_pretrained(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    drafter.save_pretrained(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"] and (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path / "real")
    with pytest.raises(FileExistsError, match="the current folder, must be another"):
        drafter.save_pretrained(".")
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == ["config.json", "model.safetensors"]


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
