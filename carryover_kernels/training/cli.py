"""What `carryover record` and `carryover train` do, as plain functions; the command table lives in carryover_kernels.cli."""

from dataclasses import replace
from pathlib import Path

import torch

from carryover_kernels.training import carry, data
from carryover_kernels.training.loop import Loop, make_optimizers, progress_bar, step_seed, write_json
from carryover_kernels.training.model import DraftConfig, DraftModel


def load_target(path, dtype=torch.float32):
    """A frozen Hugging Face causal LM and its tokenizer from a local folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (Path(path) / "config.json").exists():
        raise ValueError(f"train: target was {path}, must be a folder with config.json")
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    return model.eval().requires_grad_(False), tokenizer


def record(target, prompts, out, *, max_new_tokens=256, temperatures=(0.0, 0.7), batch=64, seed=0):
    """Lets the target at folder `target` answer the prompts of a JSONL file ({"prompt": text} or {"prompt_ids": [...]},
    optional "kind") and writes folder `out`. Goes on where it was stopped. Returns the number of records."""
    rows = data.read_jsonl(prompts)
    model, tokenizer = load_target(target)
    pairs = []
    for number, row in enumerate(rows, 1):
        ids = row.get("prompt_ids")
        if ids is None and isinstance(row.get("prompt"), str):
            ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError(f"{prompts}: line {number} has no prompt, must have prompt (text) or prompt_ids (a list)")
        pairs.append((row.get("kind", ""), ids))
    with progress_bar("record", len(pairs)) as tick:
        records = data.record(
            model, pairs, out, max_new_tokens=max_new_tokens, end_token=tokenizer.eos_token_id,
            temperatures=temperatures, batch=batch, seed=seed, on_batch=tick,
        )
    return len(records)


def train(target, records, out, work, *, drafter=None, mode="carryover", mark_site="pre_norm", mark_scale=0.02,
          share=1.0, steps=1000, batch=16, anchors=16, lr=1e-3, muon_lr=1e-3, mark_lr=5e-3, seed=0, quiet=False,
          new_drafter=None):
    """Trains a drafter for the target on recorded responses and writes it to `out`.

    drafter: folder to start from, or None with new_drafter (a DraftConfig). mode: "carryover", "none" or "plain" (see
    carry.CarrySettings). work: checkpoint.pt and metrics.jsonl; the same call goes on from there.
    Raises TrainingStopped on Ctrl-C and on a loss that is not a number, with where the checkpoint is.
    """
    if mode not in ("carryover", "none", "plain"):
        raise ValueError(f"train: mode was {mode!r}, must be 'carryover', 'none' or 'plain'")
    model_target, _ = load_target(target)
    kept = [r for r in data.read_records(records) if len(r.ids) - r.start > 2]
    if not kept:
        raise ValueError(f"train: {records} holds no response of three tokens or more, must hold at least one")
    embed = model_target.get_input_embeddings().weight.detach()
    head = model_target.get_output_embeddings().weight.detach()
    if drafter is not None:
        model = DraftModel.load(drafter, embed=embed, head=head, mark=mark_site if mode == "carryover" else None)
    elif isinstance(new_drafter, DraftConfig):
        model = DraftModel(replace(new_drafter, mark=mark_site if mode == "carryover" else ""), embed, head)
        model.initialise(step_seed(seed, 0, 2))
    else:
        raise ValueError("train: drafter was None, must be a folder to start from or new_drafter a DraftConfig")
    if mode == "carryover" and not model.carryover_mark.any():
        carry.set_mark(model, mark_scale, step_seed(seed, 0, 4))
    settings = carry.CarrySettings(mode=mode, share=share)
    loop = Loop(model, make_optimizers(model, lr, muon_lr, mark_lr=mark_lr), work, steps,
                warmup=max(1, min(100, steps // 10)), name=mode, quiet=quiet)
    loop.resume()
    loop.run(carry.carry_step(model, model_target, kept, settings, seed=seed, batch=batch, anchors=anchors))
    model.save(out)
    write_json(Path(work) / "training.json", {
        "mode": mode, "mark_site": mark_site, "mark_scale": mark_scale, "share": share, "steps": steps, "batch": batch,
        "anchors": anchors, "lr": lr, "muon_lr": muon_lr, "mark_lr": mark_lr, "seed": seed, "records": len(kept),
    })
    return Path(out)


