"""Acceptance of the embedded drafters on held-out prompts, and the model cards written from that JSON."""

import json
import os
import random
import shutil
import sys
from dataclasses import asdict

import torch
import torch.nn.functional as F

from carryover_kernels.training import corpus, data, rollout
from carryover_kernels.training.loop import progress_bar, write_json
from carryover_kernels.training.model import DraftModel


def held_out_prompts(settings, files):
    """The prompts that nothing was trained on, as {kind, source, prompt}: invented words and library files held out."""
    samples = [
        corpus.task(kind, f"evaluation/{i}", held_out=True) for kind in corpus.TASKS for i in range(settings.held_out)
    ]
    samples += corpus.text_prompts(files, settings.held_out, "evaluation", held_out=True)
    return samples


def held_out_records(settings, work, tokenizer, target, samples):
    """The target's greedy answers (float32) to the held-out prompts, kept in work/held_out."""
    prompts = list(zip([s.kind for s in samples], data.encode(tokenizer, [s.prompt for s in samples]), strict=True))
    with progress_bar("held-out responses", len(prompts)) as tick:
        return data.record(
            target, prompts, work / "held_out", max_new_tokens=settings.new_tokens,
            end_token=tokenizer.eos_token_id, batch=64, on_batch=tick,
        )


@torch.no_grad()
def evaluate(settings, tokenizer, target, model, samples, records):
    """Greedy acceptance length (bonus counted, tokens / rounds over all prompts of a kind) in float32, held-out losses
    and how often the target solves a task exactly."""
    kinds = {}
    answers = {tuple(r.ids[: r.start]): r for r in records}
    for sample, prompt in zip(samples, data.encode(tokenizer, [s.prompt for s in samples]), strict=True):
        record = answers[tuple(prompt)]
        entry = kinds.setdefault(sample.kind, {
            "prompts": 0, "tokens": 0, "rounds": 0, "by_position": [0] * model.c.proposals,
            "loss": 0.0, "loss_tokens": 0, "solved": 0,
        })
        ids = torch.tensor([record.ids])
        if ids.shape[1] - record.start > 1:
            features = data.tap_states(target, ids, settings.taps)
            accepted = rollout.accepted_everywhere(model, features, ids, ids.shape[1], record.start)
            tokens, rounds, history = rollout.walk(accepted, record.start, ids.shape[1])
            entry["tokens"] += tokens
            entry["rounds"] += rounds
            for m in history:
                for k in range(m):
                    entry["by_position"][k] += 1
        entry["prompts"] += 1
        if sample.response:
            (answer,) = data.encode(tokenizer, [sample.response])
            written = record.ids[record.start :]
            entry["solved"] += written[: len(answer)] == answer[: len(written)]
            logits = target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            entry["loss"] += F.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
            entry["loss_tokens"] += len(answer)
    for entry in kinds.values():
        entry["acceptance_length"] = entry["tokens"] / max(1, entry["rounds"])
        entry["by_position"] = [round(x / max(1, entry["rounds"]), 4) for x in entry["by_position"]]
        entry["target_loss"] = entry.pop("loss") / n if (n := entry.pop("loss_tokens")) else None
    tokens, rounds = (sum(e[k] for e in kinds.values()) for k in ("tokens", "rounds"))
    return {"acceptance_length": tokens / max(1, rounds), "tokens": tokens, "rounds": rounds, "kinds": kinds}


@torch.no_grad()
def library_loss(settings, tokenizer, target, files, rows=64):
    """Mean loss a token of the target on rows from held-out library files."""
    stream = []
    for ids in data.encode(tokenizer, [text for relative, text in files if corpus.file_is_held_out(relative)]):
        stream += ids + [tokenizer.eos_token_id]
    rng = random.Random("library_loss")
    total = 0.0
    for _ in range(0, rows, 16):
        begins = [rng.randrange(len(stream) - settings.row - 1) for _ in range(16)]
        ids = torch.tensor([stream[b : b + settings.row + 1] for b in begins])
        total += F.cross_entropy(target(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()).item() / (rows // 16)
    return total


def finish(settings, facts, work, out, files, tokenizer, target, note=""):
    """Evaluates what is saved (bf16 weights, run in float32), writes evaluation.json and the cards, fills `out`."""
    embed = target.model.embed_tokens.weight.detach()
    model = DraftModel.load(work / "dflash", embed=embed, head=embed).eval()
    samples = held_out_prompts(settings, files)
    if not (work / "evaluation.json").exists():
        records = held_out_records(settings, work, tokenizer, target, samples)
        result = evaluate(settings, tokenizer, target, model, samples, records)
        result["library_loss"] = library_loss(settings, tokenizer, target, files)
        write_json(work / "evaluation.json", result)
    result = json.loads((work / "evaluation.json").read_text())
    print(f"acceptance length {result['acceptance_length']:.3f} over {sum(k['prompts'] for k in result['kinds'].values())} "
        "held-out prompts: " + ", ".join(f"{k} {e['acceptance_length']:.2f}" for k, e in result["kinds"].items()))
    out.mkdir(parents=True, exist_ok=True)
    facts = {"settings": asdict(settings), "library": facts, "evaluation": result, "versions": versions(), "note": note,
             "losses": {n: last_loss(work / f"{n}_training" / "metrics.jsonl") for n in ("target", "drafter")}}
    for name in ("target", "dflash"):
        (work / name / "README.md").write_text(card(name, facts), encoding="utf-8")
        tmp = out / f"{name}.tmp"
        shutil.rmtree(tmp, ignore_errors=True)
        shutil.copytree(work / name, tmp)
        for file in tmp.iterdir():
            file.chmod(0o644)
        shutil.rmtree(out / name, ignore_errors=True)
        os.replace(tmp, out / name)
    write_json(out / "training.json", facts)
    write_json(out / "held_out.json", [{"kind": s.kind, "source": s.source, "prompt": s.prompt} for s in samples])
    print(f"written: {out}")


def versions():
    import tokenizers
    import transformers

    return {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__}


def last_loss(path, rows=20):
    """Mean of the last logged losses, so that a single batch doesn't decide."""
    values = [json.loads(line)["loss"] for line in path.read_text().splitlines()[-rows:]]
    return sum(values) / len(values)


def card(name, facts):
    """A model card; every number comes from `facts`, the run's own JSON."""
    s, e, library = facts["settings"], facts["evaluation"], facts["library"]
    head = "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n"
    data_text = (
        f"Data: sources of the Python {library['python']} standard library without its tests ({library['files']} files, "
        f"{library['bytes'] / 1e6:.1f} MB, sha256 `{library['sha256'][:16]}`, PSF licence; one file in "
        f"{corpus.HELD_OUT_FILES} held out) and generated tasks (word substitution, templated code, structured records; "
        "invented words of held-out prompts are never seen in training). Weights: Apache-2.0.\n"
    )
    made = (
        f"Made by `python -m carryover_kernels.training.embedded --seed {s['seed']}` with torch "
        f"{facts['versions']['torch']}, transformers {facts['versions']['transformers']}. A toy for demonstrations and "
        "tests; it knows nothing of the world.\n"
    )
    made += f"{facts['note']}\n" if facts["note"] else ""
    rows = "".join(
        f"| {kind} | {k['prompts']} | {k['acceptance_length']:.2f} | "
        f"{'-' if k['target_loss'] is None else format(k['target_loss'], '.3f')} | "
        f"{'-' if k['target_loss'] is None else str(k['solved'])} |\n"
        for kind, k in e["kinds"].items()
    )
    table = (
        "| kind | held-out prompts | acceptance length (greedy, bonus counted) | target's loss on the answer | solved |\n"
        f"|---|---|---|---|---|\n{rows}\n"
        f"All prompts: acceptance length {e['acceptance_length']:.3f} ({e['tokens']} tokens in {e['rounds']} rounds, "
        f"at most {s['new_tokens']} tokens a prompt).\n"
    )
    if name == "target":
        return (
            f"{head}# Embedded target\n\nQwen3 architecture, {s['layers']} layers, hidden {s['hidden']}, vocabulary "
            f"{s['vocab']}, bf16.\n\n{data_text}\nTraining: {s['target_steps']} steps of {s['rows_per_step']} rows of "
            f"{s['row']} tokens, seed {s['seed']}, last training loss {facts['losses']['target']:.3f}; held-out library "
            f"loss {e['library_loss']:.3f} a token.\n\n{table}\n{made}"
        )
    return (
        f"{head}# Embedded DFlash drafter\n\nz-lab DFlash layout, {s['draft_layers']} layers, block {s['block']} "
        f"({s['block'] - 1} proposals), taps {list(s['taps'])}; embeddings and head are the target's. No carryover mark.\n\n"
        f"{data_text}\nTraining: on the target's own responses to {s['records']} prompts (half greedy, half at "
        f"temperature 0.7), {s['draft_steps']} steps of {s['draft_batch']} responses x {s['anchors']} anchors, seed "
        f"{s['seed']}, last training loss {facts['losses']['drafter']:.3f}.\n\n{table}\n{made}"
    )
