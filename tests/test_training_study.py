"""The study's measures on cases small enough to check by hand, and its gain held by the shipped weights."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from test_training import records_like, tiny_drafter, tiny_target  # noqa: F401 (a fixture)

from carryover_kernels.drafter import CarryoverDrafter, CheckpointError
from carryover_kernels.training import cache, carry, data, measures, parallel, study, study_docs
from carryover_kernels.training.model import DraftModel, attention_apart

MODELS = Path(carry.__file__).parents[1] / "models"
DOCS = Path(__file__).parents[1] / "docs"


def records_of(drafter, target, rng):
    ids, lengths, _, _ = records_like(drafter, target, rng)
    return [data.Record("code", ids[n, : lengths[n]].tolist(), 3, 0.0) for n in range(2)]


def test_watched_mass_is_the_attention_on_carried_rows(rng):
    """With values of 1 on carried rows and 0 elsewhere attention gives back the mass that lies on them."""
    n, count, block, group, length, heads, kv, d = 2, 3, 4, 5, 6, 4, 2, 8
    q = torch.randn(n, count * block, heads, d, generator=rng)
    k = [torch.randn(*shape, kv, d, generator=rng) for shape in ((n, length), (n, count * block), (n, count, group))]
    v = [torch.zeros_like(k[0]), torch.zeros_like(k[1]), torch.ones_like(k[2])]
    sees_context = torch.rand(n, 1, count * block, length, generator=rng) < 0.7
    sees_own = torch.rand(n, count, 1, block, group + block, generator=rng) < 0.7
    sees_own[..., -1] = True
    watch = []
    out = attention_apart(q, (k[0], v[0]), (k[1], v[1]), (k[2], v[2]), sees_context, sees_own, watch)
    # float32 sums of a dozen weights
    assert torch.allclose(watch[0].flatten(1), out[..., 0].mean(-1), atol=1e-6) and watch[0].shape == (n, count, block)
    assert watch[0].min() < watch[0].max() < 1


def test_attention_on_carried_counts_every_branch_once(tiny_target, rng):  # noqa: F811
    drafter = tiny_drafter(tiny_target)
    found = measures.attention_on_carried(drafter, tiny_target, records_of(drafter, tiny_target, rng), anchors=20)
    assert len(found["share"]) == 2 and all(0 < x < 1 for x in found["share"])
    assert len(found["by_rows"]) == len(found["branches"]) == 3 and sum(found["branches"]) > 0
    assert all(layer.self_attn.watch is None for layer in drafter.layers)


def test_chained_details_and_shuffled_rows(tiny_target, rng):  # noqa: F811
    drafter = tiny_drafter(tiny_target)
    records = records_of(drafter, tiny_target, rng)
    plain = carry.chained(drafter, tiny_target, records, carry="on")
    detailed = carry.chained(drafter, tiny_target, records, carry="on", details=True)
    assert [x[:3] for x in detailed] == plain
    assert all(0 <= again <= rounds * (drafter.c.proposals - 1) for _, rounds, _, again, _ in detailed)
    # alone in its batch a prompt's neighbour is itself
    one = carry.chained(drafter, tiny_target, records[:1], carry="shuffled", batch=1)
    assert one == carry.chained(drafter, tiny_target, records[:1], carry="on", batch=1)


def test_potential_is_between_the_drafter_and_the_oracle(tiny_target, rng, tmp_path):  # noqa: F811
    drafter = tiny_drafter(tiny_target)
    records = records_of(drafter, tiny_target, rng)
    cache.build(tmp_path, drafter, tiny_target, records, anchors=20, seed=1, limit=1e9)
    found = measures.potential(drafter, cache.Store(tmp_path, records), 2)
    assert list(found) == ["code 0"]
    entry = found["code 0"]
    assert 1 <= entry["tokens"] <= entry["oracle"] <= 4 and entry["branches"] > 0
    # by hand: two branches of three slots; the target along the branch is right where the drafter is wrong
    logits = torch.log_softmax(torch.tensor([[[2.0, 0.0], [0.0, 1.0], [0.0, 1.0]]] * 2), -1)
    labels = torch.tensor([[0, 0, 1]] * 2)
    every = torch.ones(2, 3, dtype=torch.bool)
    entry = measures._potential_of(logits, labels, every, torch.zeros(2, 3, dtype=torch.int64), every, labels, 3)
    assert entry["tokens"] == 2 and entry["oracle"] == 4
    assert entry["drafter_right"] == [1, 0, 1] and entry["target_right"] == [1, 1, 0] and entry["draft_right"] == [1, 1, 1]
    assert entry["with_bonus"] == 4  # a bonus of 1.5 on slot 1 alone


def test_summary_by_hand():
    held = {"0": [data.Record(kind, [1, 2, 3], 1, 0.0) for kind in ("code", "text")]}
    rows = {
        "base": {"0": {"off": [[12, 6, [1] * 6, 0], [12, 12, [0] * 12, 0]]}},
        "none_1": {"0": {"off": [[12, 6, [1] * 6, 3], [12, 12, [0] * 12, 0]]}},
        "carryover_1": {"0": {"on": [[12, 4, [2] * 4, 0], [12, 12, [0] * 12, 0]], "off": [[12, 6, [1] * 6, 0], [12, 12, [0] * 12, 0]]}},
    }
    out = measures.summary(rows, held, ["none", "carryover"], [1])["0"]
    assert out["acceptance_length"]["carryover_1 on"] == {"all": 24 / 16, "code": 3.0, "text": 1.0}
    gain = out["contrasts"]["carryover on / none off"]
    assert gain["code"]["gain"] == pytest.approx(0.5) and gain["code"]["seeds"] == {1: pytest.approx(0.5)}
    assert gain["all"]["gain"] == pytest.approx(18 / 16 - 1) and gain["text"]["gain"] == 0
    assert "carryover on / carryover shuffled" not in out["contrasts"]
    assert out["by_position"]["none_1 off"] == [6 / 18] and out["by_position"]["carryover_1 on"] == [4 / 16, 4 / 16]
    assert out["reconvergence"]["kinds"]["code"] == {"reconverged": 0.5, "gain": pytest.approx(0.5)}
    json.dumps(out)  # study.json holds it


def test_an_earlier_runs_pairs_keep_their_own_settings(tmp_path):
    file = tmp_path / "study.json"
    assert study.kept(file) == {}
    file.write_text(json.dumps({"settings": {"lr": 1}, "prompts": {"0": 4}, "pairs": {"a": {}, "b": {"settings": {"lr": 2}}}, "shipped": {}}))
    assert study.kept(file) == {"pairs": {"a": {"prompts": {"0": 4}, "settings": {"lr": 1}}, "b": {"prompts": {"0": 4}, "settings": {"lr": 2}}},
                                "shipped": {}}


def test_a_work_folder_belongs_to_the_settings_it_was_begun_with(tmp_path):
    study.claim(tmp_path, study.Settings())
    study.claim(tmp_path, replace(study.Settings(), chained=1))  # how much is decoded may differ
    with pytest.raises(ValueError, match="was begun with other settings, must be from these"):
        study.claim(tmp_path, replace(study.Settings(), lr=1.0))


def test_settings_by_name():
    assert study.changes(["steps=7", "lr=1e-4"]) == {"steps": 7, "lr": 1e-4}
    for word in ("steps", "steps=1e-4", "unknown=1", "=1"):
        with pytest.raises(ValueError, match=f"--set was '{word}', must be NAME=NUMBER"):
            study.changes([word])


@pytest.mark.parametrize("name", study.CELLS)
def test_every_cell_trains_and_reads_back(tiny_target, rng, tmp_path, name):  # noqa: F811
    """One step over stored branches moves what the cell has (its mark, its projector) exactly where it carries; the saved folder
    reads back as the same cell; serving refuses what it would run otherwise."""
    cell = study.CELLS[name]
    carries, embed, head = cell["mode"] == "carryover", tiny_target.model.embed_tokens.weight.detach(), tiny_target.lm_head.weight.detach()
    base = tiny_drafter(tiny_target, mark="")
    records = records_of(base, tiny_target, rng)
    cache.build(tmp_path / "branches", base, tiny_target, records, anchors=20, seed=1, limit=1e9)
    base.save(tmp_path / "base", torch.float32)
    fields = {key: cell[key] for key in study.STUDY if key in cell}
    model = DraftModel.load(tmp_path / "base", embed, head, mark=cell.get("mark_site", "pre_norm") if carries else None, **fields)
    states = data.tap_states(tiny_target, data.pad_records(records)[0], model.c.taps)
    if model.c.carried != "states":
        carry.size_projector(model, states)
        sizes = [x.detach().square().mean() for x in (model.carry_proj(model.embed), model.fc(states))]
        assert sizes[0] == pytest.approx(sizes[1].item(), rel=1e-4)  # float32
    store = cache.Store(tmp_path / "branches", records)
    step = carry.stored_step(parallel.wrap(model), store, carry.CarrySettings(mode=cell["mode"]), seed=0, batch=2, anchors=20)
    step(0)[0].backward()
    own = {key: p.grad for key, p in model.named_parameters() if key in ("carryover_mark", "carry_proj.weight")}
    assert set(own) == ({"carryover_mark"} if model.c.mark else set()) | ({"carry_proj.weight"} if fields.keys() & {"carried", "own_projector"} else set())
    assert all(g is not None and g.any() for g in own.values())
    model.save(tmp_path / "cell", torch.float32)
    again = DraftModel.load(tmp_path / "cell", embed, head)
    assert again.c == model.c and all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    assert carry.chained(again, tiny_target, records, carry="on") == carry.chained(model, tiny_target, records, carry="on")
    if fields:
        with pytest.raises(CheckpointError, match="must be absent: it is not supported"):
            CarryoverDrafter.from_pretrained(tmp_path / "cell", embed_tokens=embed, lm_head=head)


def test_a_run_of_the_study_from_start_to_text(tmp_path, monkeypatch):
    """Two pairs (one with a Markov head) in two runs through the script itself, few steps and prompts; the second keeps the
    first one's pair, and the text tells both."""
    small = dict(records=8, new_tokens=8, anchors_kept=4, base_steps=1, steps=1, base_batch=2, base_anchors=2, batch=2, anchors=2, warmup=0,
                 held_out=1, held_out_sampled=1, chained=1, chained_sampled=1, recall_prompts=1, potential_records=1,
                 base_muon_lr=0.0, muon_lr=0.0)
    monkeypatch.setattr(study, "QUICK", small)
    common = ["--quick", "--seeds", "7", "--potential", "--kinds", "code", "records", "--out", str(tmp_path / "study.json")]
    study.main([*common, "--work", str(tmp_path / "a"), "--pairs", "layers_1", "--cells", "none", "carryover", "target_tokens",
                "--temperatures", "0", "--sides", *study.SIDES])
    study.main([*common, "--work", str(tmp_path / "b"), "--pairs", "markov_1", "--cells", "plain", "none", "carryover", "--set", "steps=2"])
    out = json.loads((tmp_path / "study.json").read_text())
    assert list(out["pairs"]) == ["layers_1", "markov_1"]
    assert [pair["settings"]["steps"] for pair in out["pairs"].values()] == [1, 2]
    measured = out["pairs"]["layers_1"]["measures"]["0"]
    assert {f"carryover on / carryover {side}" for side in ("off", "shuffled", "zero", "stale", "two_rounds", "on_cut")} <= set(measured["contrasts"])
    assert {"carryover on / target_tokens on", "carryover on_cut / none off_cut", "target_tokens on / none off"} <= set(measured["contrasts"])
    assert set(measured["verified"]) == {"none_7 off_cut", "carryover_7 on_cut", "target_tokens_7 on_cut"}
    saved = json.loads((tmp_path / "b/markov_1/carryover_7/model/config.json").read_text())
    assert saved["dflash_config"]["markov_rank"] == 64 and set(out["pairs"]["markov_1"]["cells"]) == {"plain_7", "none_7", "carryover_7"}
    study_docs.main([str(tmp_path / "study.json"), str(tmp_path / "study.md"), "--no-plots"])
    told = (tmp_path / "study.md").read_text()
    assert "## Markov drafter of 1 layer" in told and "drafts verified a round" in told


def test_the_embedded_pair_is_measured_and_told(tmp_path, monkeypatch):
    """One prompt a kind through all of --shipped, beside what study.json held; the text has its figures."""
    file = tmp_path / "study.json"
    before = json.loads((DOCS / "study.json").read_text())
    file.write_text(json.dumps(before))
    small = replace(study.Settings(), new_tokens=8)
    monkeypatch.setattr(study, "Settings", lambda **_: small)
    study.main(["--shipped", "--prompts", "1", "--work", str(tmp_path / "work"), "--out", str(file)])
    after = json.loads(file.read_text())
    assert after["pairs"] == before["pairs"] and after["shipped"]["prompts"]["0"] <= 4
    for m in after["shipped"]["measures"].values():
        assert list(m["acceptance_length"]) == ["none_shipped off", *(f"carryover_shipped {side}" for side in ("on", "off", "shuffled"))]
        assert list(m["contrasts"]) == [f"carryover on / {other}" for other in ("none off", "carryover off", "carryover shuffled")]
    study_docs.main([str(file), str(tmp_path / "study.md"), "--no-plots"])
    told = (tmp_path / "study.md").read_text()
    assert study_docs.interval(after["shipped"]["measures"]["0.7"]["contrasts"]["carryover on / carryover shuffled"]["all"]) in told


def test_study_text_is_what_its_json_says(tmp_path):
    shown = json.loads((DOCS / "study.json").read_text())
    plots = [f"{name}_position.png" for name, pair in {**shown["pairs"], "shipped": shown["shipped"]}.items() if "measures" in pair]
    (tmp_path / "study").mkdir()
    for plot in (*plots, "potential.png"):
        (tmp_path / "study" / plot).touch()
    study_docs.main([str(DOCS / "study.json"), str(tmp_path / "study.md"), "--no-plots"])
    assert (tmp_path / "study.md").read_text() == (DOCS / "study.md").read_text()
    assert {p.name for p in (tmp_path / "study").iterdir()} == {p.name for p in (DOCS / "study").iterdir()}


def test_shipped_drafter_recalls_more_with_carry():
    """The gain, on held-out prompts that the study's settings weren't chosen by: the same weights at the same anchors, a few
    thousand slots, carry on against off. The study measured several points on these kinds; one point is half of the least."""
    target, tokenizer = data.load_target(MODELS / "target")
    prompts = {}
    for row in json.loads((MODELS / "held_out.json").read_text()):
        prompts.setdefault(row["kind"], []).append(row["prompt"])
    some = [p for kind in ("substitution", "code", "records") for p in prompts[kind][:12]]
    ids = data.encode(tokenizer, some)
    responses = data.respond(target, ids, 64, tokenizer.eos_token_id)
    records = [data.Record("", p + r, len(p), 0.0) for p, r in zip(ids, responses, strict=True)]
    embed = target.get_input_embeddings().weight.detach()
    drafter = DraftModel.load(MODELS / "dflash_small_carryover", embed=embed, head=embed)
    found = carry.recall(drafter, target, records, anchors=24, seed=1)
    assert found["slots"] > 2000
    assert found["on"]["1"] > found["off"]["1"] + 0.01, found
