"""The small-scale study: does a drafter gain from the target's states of rejected drafts, and when?

python -m carryover_kernels.training.study --models DIR --work DIR --out study.json [--pairs ...] [--cells ...] [--steps N] [--seeds ...]

From the embedded target and drafter: records of the target (training and held-out prompts), baselines of other depths, the
rejected branches of each baseline, the cells (equal steps, data order and moved anchors), and their measures. What is finished is
not run again, so a run that was stopped goes on. No number is typed by hand: study.json holds all of them, study_docs writes the
tables and plots from it.
"""

import argparse
import json
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from carryover_kernels.training import cache, carry, corpus, data, embedded, evaluation, measures, parallel
from carryover_kernels.training.loop import Loop, make_optimizers, progress_bar, write_json
from carryover_kernels.training.model import STUDY, DraftModel

# A pair is the embedded target with a baseline: the embedded drafter, or fc, norms and these layers of it, with a Markov head or
# without, trained on without carry up to a learning rate of zero. (The last layer is what the head reads: of two, the first and the
# last lose least.)
PAIRS = {
    "layers_3": {"layers": (0, 1, 2)},
    "layers_2": {"layers": (0, 2)},
    "layers_1": {"layers": (0,)},
    "markov_2": {"layers": (0, 2), "markov": "vanilla"},
    "markov_1": {"layers": (0,), "markov": "vanilla"},
}

# What differs between cells. Rates and mark_scale of the mark are in sizes of a row (carry.set_mark); mark_site None: no mark. The
# rest are the drafter's own fields, see model.DraftConfig.
CELLS = {
    "plain": {"mode": "plain"},
    "none": {"mode": "none"},
    "carryover": {"mode": "carryover"},
    "draft_tokens": {"mode": "carryover", "carried": "draft_tokens"},
    "target_tokens": {"mode": "carryover", "carried": "target_tokens"},
    "carryover_post_norm": {"mode": "carryover", "mark_site": "post_norm"},
    "carryover_zero_mark": {"mode": "carryover", "mark_scale": 0.0},
    "carryover_no_mark": {"mode": "carryover", "mark_site": None},
    "carryover_own_projector": {"mode": "carryover", "own_projector": True},
    "carryover_offset_1": {"mode": "carryover", "carry_pos_offset": 1},
}

# How a drafter decodes: carry.chained's sides, and with verification cut where the drafter is unsure.
SIDES = (*carry.SIDES, "on_cut", "off_cut")

# The embedded drafters that differ by carry alone: cell -> folder.
SHIPPED = {"none": "dflash_small", "carryover": "dflash_small_carryover"}


@dataclass(frozen=True)
class Settings:
    """All that decides the study's result beside the embedded models and the interpreter's standard library."""

    records: int = 3840
    new_tokens: int = 128
    anchors_kept: int = 32
    limit_gb: float = 4.0  # of each pair's branches on disk
    base_steps: int = 1000
    base_lr: float = 1.5e-3
    base_muon_lr: float = 3e-3
    base_batch: int = 8
    base_anchors: int = 24
    steps: int = 1000
    lr: float = 1e-3
    muon_lr: float = 2e-3
    mark_lr: float = 5e-3
    mark_scale: float = 1.0
    share: float = 0.9
    carrying: float = 0.85
    batch: int = 8
    anchors: int = 20
    warmup: int = 20
    markov_rank: int = 64
    cut: float = 0.3  # of sides that cut: least product of the drafter's own probabilities
    held_out: int = 256  # prompts a kind, answered greedily
    held_out_sampled: int = 128  # prompts a kind, answered at temperature 0.7
    chained: int = 32  # of the greedy ones, prompts a kind that are decoded
    chained_sampled: int = 16  # of the sampled ones
    chained_batch: int = 32
    recall_prompts: int = 128  # a kind
    potential_records: int = 64  # training records a kind and temperature


QUICK = dict(records=24, new_tokens=16, anchors_kept=8, base_steps=4, steps=4, base_batch=4, base_anchors=8, batch=4, anchors=6,
             warmup=1, held_out=4, held_out_sampled=4, chained=4, chained_sampled=2, recall_prompts=4,
             potential_records=4)


def held_out(work, target, tokenizer, settings, name="study", temperature=0.0):
    """Records of held-out prompts that neither training nor the embedded evaluation uses, greedy or sampled. name:
    "study", or "tuning" for the prompts by which settings are chosen."""
    files, _ = corpus.standard_library()
    n = settings.held_out_sampled if temperature else settings.held_out
    samples = [corpus.task(kind, f"{name}/{i}", held_out=True) for kind in corpus.TASKS for i in range(n)]
    samples += corpus.text_prompts(files, n, name, held_out=True)
    prompts = list(zip([s.kind for s in samples], data.encode(tokenizer, [s.prompt for s in samples]), strict=True))
    folder = work / (f"{name}_prompts" + (f"_t{temperature:g}" if temperature else ""))
    with progress_bar(folder.name, len(prompts)) as tick:
        records = data.record(
            target, prompts, folder, max_new_tokens=settings.new_tokens, end_token=tokenizer.eos_token_id,
            temperatures=(temperature,), batch=64, seed=2, on_batch=tick,
        )
    return [r for r in records if len(r.ids) - r.start > 2]


class Study:
    """Target, prompts and records of a work folder."""

    def __init__(self, models, work, settings, temperatures=("0", "0.7"), sides=("on", "off", "shuffled"), kinds=corpus.KINDS):
        self.temperatures, self.wanted, self.kinds = temperatures, sides, kinds
        self.models, self.work, self.settings = Path(models), Path(work), settings
        self.target, self.tokenizer = data.load_target(self.models / "target")
        self.embed = self.target.get_input_embeddings().weight.detach()
        self.files, self.library = corpus.standard_library()

    @cached_property
    def records(self):
        """The target's responses to training prompts."""
        made = embedded.Settings(records=self.settings.records, new_tokens=self.settings.new_tokens)
        writer = data.load_target(self.models / "target", torch.bfloat16 if data.multiplies_bf16() else torch.float32)[0]
        found = embedded.write_records(made, self.work, self.files, self.tokenizer, writer)
        return [r for r in found if len(r.ids) - r.start > 2]

    @cached_property
    def held(self):
        """Records of held-out prompts by temperature."""
        common = self.work, self.target, self.tokenizer, self.settings
        return {t: held_out(*common, temperature=float(t)) for t in self.temperatures}

    @cached_property
    def decoded(self):
        """The prompts of `held` that are decoded, the first of each kind."""
        counts = {"0": self.settings.chained, "0.7": self.settings.chained_sampled}
        return {t: [r for kind in self.kinds for r in [r for r in held if r.kind == kind][: counts[t]]] for t, held in self.held.items()}

    def load(self, folder, mark=None, **fields):
        return DraftModel.load(folder, embed=self.embed, head=self.embed, mark=mark, **fields)

    def baseline(self, pair):
        """Folder of a pair's baseline, trained where it is not the embedded drafter."""
        shipped, markov = self.models / "dflash", PAIRS[pair].get("markov")
        whole, layers = self.load(shipped), PAIRS[pair]["layers"]
        if len(layers) == whole.c.layers and not markov:
            return shipped
        folder = self.work / pair / "base"
        if not (folder / "model").exists():
            s = self.settings
            head = {"markov_rank": s.markov_rank, "markov_type": markov} if markov else {}
            model = DraftModel(replace(whole.c, layers=len(layers), **head), self.embed, self.embed).initialise(1)
            start = {re.sub(r"^layers\.(\d+)", lambda m: f"layers.{layers[int(m[1])]}", key): key for key in model.state_dict()}
            there = whole.state_dict()
            model.load_state_dict({**model.state_dict(), **{key: there[old] for old, key in start.items() if old in there}})
            loop = Loop(model, make_optimizers(model, s.base_lr, s.base_muon_lr), folder, s.base_steps, warmup=min(50, s.base_steps // 4),
                        log_every=5, decay=s.base_steps // 3, name=f"{pair} base")
            loop.resume()
            loop.run(carry.carry_step(parallel.wrap(model), self.target, self.records, carry.CarrySettings(mode="plain"), seed=1,
                                      batch=s.base_batch, anchors=s.base_anchors))
            model.save(folder / "model")
        return folder / "model"

    def branches(self, pair, base):
        """The rejected branches of a baseline, on disk."""
        s = self.settings
        folder, model = self.work / pair / "branches", self.load(base)
        if (folder / "done").exists():
            return cache.Store(folder, self.records)
        most = cache.largest_bytes(self.records, s.anchors_kept, model.c.proposals, len(model.c.taps) * model.c.target_hidden)
        embedded.log(f"{pair}: branches of {len(self.records)} records, at most {most / 1e9:.2f} GB in {folder}")
        with progress_bar(f"{pair} branches", len(self.records)) as tick:
            cache.build(folder, model, self.target, self.records, anchors=s.anchors_kept, seed=1, limit=s.limit_gb * 1e9, on_records=tick)
        (folder / "done").touch()
        return cache.Store(folder, self.records)

    def cell(self, pair, name, seed, base):
        """Trains one cell. -> folder of its drafter."""
        s, cell = self.settings, CELLS[name]
        folder = self.work / pair / f"{name}_{seed}"
        if (folder / "cell.json").exists():
            return folder / "model"
        carries = cell["mode"] == "carryover"
        fields = {key: cell[key] for key in STUDY if key in cell}
        model, size = self.load(base, cell.get("mark_site", "pre_norm") if carries else None, **fields), 1.0
        if carries:
            ids, _ = data.pad_records(self.records[:8])
            states = data.tap_states(self.target, ids, model.c.taps)
            if model.c.carried != "states":
                carry.size_projector(model, states)
            if model.c.mark:
                size = carry.set_mark(model, cell.get("mark_scale", s.mark_scale), seed + 11, states)
        store = self.branches(pair, base)
        loop = Loop(model, make_optimizers(model, s.lr, s.muon_lr, mark_lr=s.mark_lr * size), folder, s.steps, warmup=s.warmup,
                    log_every=5, name=f"{pair} {name} {seed}")
        loop.resume()
        began, before = time.monotonic(), loop.step
        loop.run(carry.stored_step(
            parallel.wrap(model), store, carry.CarrySettings(mode=cell["mode"], share=s.share), seed=seed, batch=s.batch,
            anchors=s.anchors, carrying=s.carrying,
        ))  # fmt: skip
        minutes = (time.monotonic() - began) / 60 * s.steps / max(1, s.steps - before)
        model.save(folder / "model")
        facts = {"name": name, "cell": cell, "seed": seed, "steps": s.steps, "row_size": size, "minutes": minutes,
                 "last_loss": evaluation.last_loss(folder / "metrics.jsonl")}
        if model.c.mark:
            facts["mark_size"] = model.carryover_mark.detach().square().mean().sqrt().item()
        write_json(folder / "cell.json", facts)
        return folder / "model"

    def chained(self, folder, temperature, side):
        """Rounds of every held-out prompt, [tokens, rounds, accepted each, reconverged drafts]; kept beside the model."""
        at = self.out_of(folder, f"chained_t{temperature}_{side}.json")
        if not at.exists():
            cut = self.settings.cut if side.endswith("_cut") else 0.0
            write_json(at, carry.chained(self.load(folder), self.target, self.decoded[temperature], carry=side.removesuffix("_cut"),
                                         details=True, batch=self.settings.chained_batch, cut=cut))
        return json.loads(at.read_text())

    def out_of(self, folder, name):
        """A measure's file: beside the model, or in the work folder where the model is an embedded one."""
        folder = Path(folder)
        cell = folder.parent if self.work in folder.parents else self.work / folder.name
        at = (cell if self.work in folder.parents else self.work) / "measures"
        at.mkdir(parents=True, exist_ok=True)
        return at / f"{cell.name}_{name}"

    def recall(self, folder, base, temperature):
        at = self.out_of(folder, f"recall_t{temperature}.json")
        if not at.exists():
            model, first = self.load(folder), self.load(base)
            found = {}
            for kind in self.kinds:
                some = [r for r in self.held[temperature] if r.kind == kind][: self.settings.recall_prompts]
                found[kind] = carry.recall(model, self.target, some, anchors=8, seed=1, drafter=first)
            write_json(at, found)
        return json.loads(at.read_text())

    def potential(self, pair):
        """How much a pair's drafter could gain, with its depth and the baseline's acceptance length."""
        at = self.work / pair / "potential.json"
        if not at.exists():
            base = self.baseline(pair)
            write_json(at, measures.potential(self.load(base), self.branches(pair, base), self.settings.potential_records))
        about = {"layers": len(PAIRS[pair]["layers"]), "markov": PAIRS[pair].get("markov", "")}
        return {**about, "potential": json.loads(at.read_text())}

    def run(self, pair, cells, seeds):
        """All of one pair; its part of study.json."""
        base, found = self.baseline(pair), self.potential(pair)
        found.update(cells={}, measures={}, prompts={t: len(r) for t, r in self.decoded.items()}, settings=asdict(self.settings))
        rows = {"base": {t: {"off": self.chained(base, t, "off")} for t in self.held}}
        for seed in seeds:
            for name in cells:
                folder = self.cell(pair, name, seed, base)
                key = f"{name}_{seed}"
                found["cells"][key] = json.loads((folder.parent / "cell.json").read_text())
                carries = CELLS[name]["mode"] == "carryover"
                rows[key] = {t: {side: self.chained(folder, t, side) for side in self.sides(name, seed, seeds, t)} for t in self.decoded}
                if carries and seed == seeds[0]:
                    found["cells"][key]["recall"] = {t: self.recall(folder, base, t) for t in self.decoded}
                    found["cells"][key]["attention"] = self.attention(folder)
        found["measures"] = measures.summary(rows, self.decoded, cells, seeds)
        return found

    def shipped(self):
        """The embedded pair that differs by carry alone, measured as it ships; nothing is trained. Its part of study.json."""
        folders = {name: self.models / folder for name, folder in SHIPPED.items()}
        rows = {}
        for name, folder in folders.items():
            sides = self.wanted if name == "carryover" else ("off",)
            rows[f"{name}_shipped"] = {t: {side: self.chained(folder, t, side) for side in sides} for t in self.decoded}
        carried = folders["carryover"]
        return {
            "prompts": {t: len(r) for t, r in self.decoded.items()},
            "measures": measures.summary(rows, self.decoded, list(folders), ["shipped"]),
            "recall": {t: self.recall(carried, folders["none"], t) for t in self.decoded},
            "attention": self.attention(carried),
        }

    def sides(self, name, seed, seeds, temperature):
        """How a cell's drafter decodes: without carry, with it, and with another prompt's rows. The first seed does all of it
        greedily; on sampled records, and with further seeds, only the main contrast is decoded."""
        first = seed == seeds[0] and temperature == "0"
        if CELLS[name]["mode"] != "carryover":
            return ("off", "off_cut") if first and "off_cut" in self.wanted else ("off",)
        return tuple(s for s in self.wanted if s == "on" or (first and s != "off_cut"))

    def attention(self, folder):
        at = self.out_of(folder, "attention.json")
        if not at.exists():
            model = self.load(folder)
            some = [r for kind in self.kinds for r in [r for r in self.held["0"] if r.kind == kind][:16]]
            write_json(at, measures.attention_on_carried(model, self.target, some))
        return json.loads(at.read_text())


# How much is decoded: what is trained doesn't depend on it.
DECODED = ("held_out", "held_out_sampled", "chained", "chained_sampled", "chained_batch", "recall_prompts", "cut")


def kept(file):
    """What earlier runs left in study.json: its other pairs, each with its own settings, and the embedded pair's measures."""
    if not file.exists():
        return {}
    before = json.loads(file.read_text())
    for pair in before["pairs"].values():
        pair.setdefault("prompts", before.get("prompts"))
        pair.setdefault("settings", before["settings"])
    return {key: before[key] for key in ("pairs", "shipped") if key in before}


def claim(work, settings):
    """Writes down what a work folder was begun with; another run's checkpoints and cells are not this one's."""
    file = work / "settings.json"
    mine = {key: value for key, value in asdict(settings).items() if key not in DECODED}
    if file.exists() and json.loads(file.read_text()) != mine:
        raise ValueError(f"study: {work} was begun with other settings, must be from these: use another folder")
    write_json(file, mine)


def changes(pairs):
    """{"name": number} of words name=number, each of the type that Settings has there."""
    found = {}
    for word in pairs:
        name, _, value = word.partition("=")
        kind = Settings.__annotations__.get(name)
        try:
            found[name] = kind(value)
        except (TypeError, ValueError):
            raise ValueError(f"study: --set was {word!r}, must be NAME=NUMBER with a name of Settings") from None
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, default=Path(__file__).parents[1] / "models", help="the embedded ones")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=["layers_1"])
    parser.add_argument("--potential", nargs="*", choices=list(PAIRS), default=["layers_3"], help="pairs of which only that is measured")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=["none", "carryover"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[7, 8])
    parser.add_argument("--temperatures", nargs="+", choices=("0", "0.7"), default=["0", "0.7"], help="of decoded records")
    parser.add_argument("--kinds", nargs="+", choices=corpus.KINDS, default=list(corpus.KINDS), help="of decoded records")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["on", "off", "shuffled"], help="how carryover cells decode")
    parser.add_argument("--set", nargs="+", metavar="NAME=NUMBER", default=[], help="other settings, see Settings")
    parser.add_argument("--steps", type=int, help="of each cell (default: the study's)")
    parser.add_argument("--quick", action="store_true", help="a few steps and prompts, minutes: shows that the script works")
    parser.add_argument("--shipped", action="store_true",
                        help="train nothing: measure the embedded pair again and put that into --out, which keeps the rest")
    parser.add_argument("--prompts", type=int, help="held-out prompts a kind and temperature, all decoded (default: the study's)")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    settings = Settings(**(QUICK if arguments.quick else {}))
    settings = replace(settings, **changes(arguments.set), **({"steps": arguments.steps} if arguments.steps else {}))
    if n := arguments.prompts:
        settings = replace(settings, held_out=n, held_out_sampled=n, chained=n, chained_sampled=n)
    arguments.work.mkdir(parents=True, exist_ok=True)
    claim(arguments.work, settings)
    study = Study(arguments.models, arguments.work.resolve(), settings, arguments.temperatures, arguments.sides, tuple(arguments.kinds))
    if arguments.shipped:
        write_json(arguments.out, {**json.loads(arguments.out.read_text()), "shipped": study.shipped()})
        return
    out = {"settings": asdict(settings), "library": study.library, "versions": evaluation.versions(), "threads": torch.get_num_threads(),
           "processors": os.cpu_count(), "pairs": {}}
    out.update(kept(arguments.out))
    for pair in arguments.potential:
        out["pairs"][pair] = {**out["pairs"].get(pair, {}), **study.potential(pair)}
    for pair in arguments.pairs:
        out["pairs"][pair] = study.run(pair, arguments.cells, arguments.seeds)
        write_json(arguments.out, out)


if __name__ == "__main__":
    main()
