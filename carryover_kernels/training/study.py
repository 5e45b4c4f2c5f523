"""The small-scale study: cells of equal steps from one baseline, recall and acceptance length on held-out prompts.

python -m carryover_kernels.training.study --embedded WORK --work DIR --out study.json [--cells none carryover] [--steps N]

WORK is the work folder of carryover_kernels.training.embedded: its target, its baseline drafter and its records. A cell that
is finished is not run again. No number is typed by hand: study.json holds all of them.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from carryover_kernels.training import carry, corpus, data, embedded, parallel
from carryover_kernels.training.loop import Loop, make_optimizers, progress_bar, write_json
from carryover_kernels.training.model import DraftModel

# What differs between cells. Rates and mark_scale are in sizes of a row (carry.set_mark).
CELLS = {
    "plain": {"mode": "plain"},
    "none": {"mode": "none"},
    "carryover": {"mode": "carryover", "share": 0.8, "mark_scale": 1.0},
    "carryover_share_1": {"mode": "carryover", "share": 1.0, "mark_scale": 1.0},
    "carryover_post_norm": {"mode": "carryover", "share": 0.8, "mark_scale": 1.0, "mark_site": "post_norm"},
    "carryover_zero_mark": {"mode": "carryover", "share": 0.8, "mark_scale": 0.0},
}
COMMON = {"lr": 1e-3, "muon_lr": 1.5e-3, "mark_lr": 5e-3, "batch": 12, "anchors": 12, "warmup": 20}
HELD_OUT = {"substitution": 192, "code": 64, "records": 64, "text": 64}


def held_out(work, target, tokenizer, counts, name="study"):
    """Greedy records of held-out prompts that neither training nor the embedded evaluation uses. name: "study", or "tuning"
    for the prompts by which settings are chosen."""
    files, _ = corpus.standard_library()
    samples = [corpus.task(kind, f"{name}/{i}", held_out=True) for kind in corpus.TASKS for i in range(counts[kind])]
    samples += corpus.text_prompts(files, counts["text"], name, held_out=True)
    prompts = list(zip([s.kind for s in samples], data.encode(tokenizer, [s.prompt for s in samples]), strict=True))
    with progress_bar(f"{name} responses", len(prompts)) as tick:
        records = data.record(
            target, prompts, work / f"{name}_prompts", max_new_tokens=embedded.Settings().new_tokens,
            end_token=tokenizer.eos_token_id, batch=64, on_batch=tick,
        )
    return [r for r in records if len(r.ids) - r.start > 2]


def load_cell(cell, base, target, records, seed):
    """The baseline's weights, with a mark where the cell carries. -> model, size of the rows that the mark meets."""
    embed = target.get_input_embeddings().weight.detach()
    site = cell.get("mark_site", "pre_norm") if cell["mode"] == "carryover" else None
    model = DraftModel.load(base, embed=embed, head=embed, mark=site)
    if site is None:
        return model, 1.0
    ids, _ = data.pad_records(records[:8])
    return model, carry.set_mark(model, cell["mark_scale"], seed + 11, data.tap_states(target, ids, model.c.taps))


def recalls(model, target, held, prompts):
    return {
        kind: carry.recall(model, target, [r for r in held if r.kind == kind][:prompts], anchors=8, seed=1)
        for kind in corpus.KINDS
    }


def run_cell(name, steps, seed, base, work, target, records, held):
    """Trains and measures one cell; its own JSON is written as soon as it is complete."""
    done = work / f"{name}.json"
    if done.exists():
        return json.loads(done.read_text())
    cell = CELLS[name]
    model, size = load_cell(cell, base, target, records, seed)
    carries = cell["mode"] == "carryover"
    result = {"name": name, "cell": cell, "common": COMMON, "steps": steps, "seed": seed, "row_size": size}
    if carries:
        result["recall_before"] = recalls(model, target, held, 16)
    loop = Loop(model, make_optimizers(model, COMMON["lr"], COMMON["muon_lr"], mark_lr=COMMON["mark_lr"] * size),
                work / name, steps, warmup=COMMON["warmup"], log_every=5, name=name)
    loop.resume()
    began = time.monotonic()
    settings = carry.CarrySettings(mode=cell["mode"], share=cell.get("share", 0.0))
    loop.run(carry.carry_step(parallel.wrap(model), target, records, settings, seed=seed, batch=COMMON["batch"], anchors=COMMON["anchors"]))
    result["seconds"] = time.monotonic() - began
    model.save(work / name / "model")
    model = DraftModel.load(work / name / "model", embed=model.embed, head=model.head)  # as shipped: rounded to bf16
    if carries:
        result["recall"] = recalls(model, target, held, 64)
    result["chained"] = {
        side: carry.chained(model, target, held, carry=side == "on") for side in (("on", "off") if carries else ("off",))
    }
    write_json(done, result)
    return result


def compare(results, held):
    """Acceptance lengths by kind and the paired contrasts, each with its 95 % interval."""
    kinds = ["all", *corpus.KINDS]

    def rows(name, side, kind):
        return [x for x, r in zip(results[name]["chained"][side], held, strict=True) if kind in ("all", r.kind)]

    lengths = {
        f"{name} {side}": {kind: carry.acceptance_length(rows(name, side, kind)) for kind in kinds}
        for name, result in results.items()
        for side in result["chained"]
    }
    contrasts = {}
    for name, result in results.items():
        if "on" not in result["chained"]:
            continue
        others = [("base", "off"), ("plain", "off"), ("none", "off"), (name, "off")]
        for other, side in others:
            if other in results:
                contrasts[f"{name} on / {other} {side}"] = {
                    kind: carry.paired_bootstrap(rows(name, "on", kind), rows(other, side, kind)) for kind in kinds
                }
    return {"acceptance_length": lengths, "contrasts": contrasts}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--embedded", type=Path, required=True, help="work folder of the embedded training")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=["none", "carryover"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    target, tokenizer = data.load_target(arguments.embedded / "target")
    records = [r for r in data.read_records(arguments.embedded / "records") if len(r.ids) - r.start > 2]
    held = held_out(work, target, tokenizer, HELD_OUT)
    base = arguments.embedded / "dflash"
    results = {}
    if not (work / "base.json").exists():
        embed = target.get_input_embeddings().weight.detach()
        model = DraftModel.load(base, embed=embed, head=embed)
        write_json(work / "base.json", {"name": "base", "chained": {"off": carry.chained(model, target, held, carry=False)}})
    results["base"] = json.loads((work / "base.json").read_text())
    for name in arguments.cells:
        results[name] = run_cell(name, arguments.steps, arguments.seed, base, work, target, records, held)
        kept = {n: {k: v for k, v in r.items() if k != "chained"} for n, r in results.items()}
        write_json(arguments.out, {"cells": kept, **compare(results, held), "prompts": HELD_OUT})


if __name__ == "__main__":
    main()
