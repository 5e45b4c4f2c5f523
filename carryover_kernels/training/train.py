"""`carryover train`: a drafter for a target, on its recorded responses, with carryover or without.

Under torchrun each process takes its share of every step's records; --parallel says how weights and moments lie.
"""

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import torch

from carryover_kernels.drafter.files import check_folder
from carryover_kernels.training import cache, carry, data, losses, parallel
from carryover_kernels.training.loop import Loop, TrainingInterrupted, TrainingStopped, make_optimizers, progress_bar, step_seed, write_json
from carryover_kernels.training.model import DraftConfig, DraftModel

MODES = ("carryover", "none", "plain")
LOSSES = {"dflash": losses.Parts(), "dspark": losses.Parts(0.1, 1.8, 1.0)}  # as published, see losses.Parts
ANCHORS_KEPT = 32  # a record, in the cache of branches


def train(target, records, out, work, *, drafter=None, mode="carryover", mark_site="pre_norm", mark_scale=1.0,
          share=1.0, ramp=0, temperature=0.0, loss="dflash", steps=1000, batch=16, anchors=16, lr=1e-3, muon_lr=1e-3, mark_lr=5e-3,
          seed=0, quiet=False, new_drafter=None, kind="ddp", cache_gb=0.0, autocast=True, device="cpu", tensorboard=None):
    """Trains a drafter for the target on recorded responses and writes it to `out`.

    drafter: folder to start from, or None with new_drafter (a DraftConfig). mode: "carryover", "none" or "plain"; share,
    ramp, temperature, autocast: see carry.CarrySettings. loss: "dflash" or "dspark". work: checkpoint.pt, metrics.jsonl
    and TensorBoard's files (default: where it is installed); the same call goes on from there. kind: "ddp" or "fsdp", of
    the processes that torchrun started; batch counts the records of all of them. cache_gb: over 0, the branches of the
    starting drafter are computed once and kept in work/branches, in at most so many GB, instead of anew in every step.
    Raises TrainingInterrupted on Ctrl-C and TrainingStopped on a loss that is not a number, with where the checkpoint is.
    """
    if mode not in MODES:
        raise ValueError(f"train: mode was {mode!r}, must be 'carryover', 'none' or 'plain'")
    if loss not in LOSSES:
        raise ValueError(f"train: loss was {loss!r}, must be 'dflash' or 'dspark'")
    for name, value in (("steps", steps), ("batch", batch), ("anchors", anchors)):
        data.check_number("train", name, value, 1)
    for name, value in (("muon_lr", muon_lr), ("mark_lr", mark_lr), ("mark_scale", mark_scale), ("ramp", ramp), ("temperature", temperature),
                        ("cache_gb", cache_gb)):
        data.check_number("train", name, value, 0)
    data.check_number("train", "lr", lr, 0, above=True)
    data.check_number("train", "share", share, 0, 1)
    check_folder(out, "train", "out")  # now, not after the last step
    Path(out).resolve().parent.mkdir(parents=True, exist_ok=True)
    parallel.start(device)
    parallel.share(batch)
    model_target, _ = data.load_target(target)
    model_target.to(device)
    kept = [r for r in data.read_records(records) if len(r.ids) - r.start > 2]
    if not kept:
        raise ValueError(f"train: {records} holds no response of three tokens or more, must hold at least one")
    embed = model_target.get_input_embeddings().weight.detach()
    for record in kept:
        data.check_ids(f"{records}: a record", record.ids, len(embed))
    head = model_target.get_output_embeddings().weight.detach()
    if drafter is not None:
        model = DraftModel.load(drafter, embed=embed, head=head, mark=mark_site if mode == "carryover" else None)
    elif isinstance(new_drafter, DraftConfig):
        model = DraftModel(replace(new_drafter, mark=mark_site if mode == "carryover" else ""), embed, head)
        model.initialise(step_seed(seed, 0, 2))
    else:
        raise ValueError("train: drafter was None, must be a folder to start from or new_drafter a DraftConfig")
    if LOSSES[loss].confidence and not model.c.confidence:
        raise ValueError("train: loss was 'dspark' for a drafter without a confidence head, must be 'dflash'")
    model.to(device)
    mark_size = 1.0
    if mode == "carryover":
        had = model.carryover_mark.detach().clone()
        sample, _ = data.pad_records(kept[:8])
        states = data.tap_states(model_target, sample.to(device), model.c.taps)
        mark_size = carry.set_mark(model, mark_scale, step_seed(seed, 0, 4), states)
        if had.any():  # a drafter that has learned one keeps it
            model.carryover_mark.data.copy_(had)
    settings = carry.CarrySettings(mode=mode, share=share, ramp=ramp, temperature=temperature, parts=LOSSES[loss], autocast=autocast)
    common = dict(seed=seed, batch=batch, anchors=anchors)
    store = keep_branches(work, model, model_target, kept, seed, cache_gb, quiet) if cache_gb else None
    trainee = parallel.wrap(model, kind)
    if store is None:
        step = carry.carry_step(trainee, model_target, kept, settings, **common)
    else:
        step = carry.stored_step(trainee, store, settings, **common)
    tensorboard = importlib.util.find_spec("tensorboard") is not None if tensorboard is None else tensorboard
    loop = Loop(model, make_optimizers(model, lr, muon_lr, mark_lr=mark_lr * mark_size), work, steps,
                warmup=max(1, min(100, steps // 10)), name=mode, quiet=quiet, tensorboard=tensorboard)
    loop.resume()
    loop.run(step)
    weights = parallel.whole_weights(model)
    if parallel.rank() == 0:
        model.save(out, state=weights)
        write_json(Path(work) / "training.json", {
            "mode": mode, "mark_site": mark_site, "mark_scale": mark_scale, "share": share, "ramp": ramp, "loss": loss,
            "temperature": temperature, "steps": steps, "lr": lr, "muon_lr": muon_lr, "mark_lr": mark_lr, "records": len(kept),
            "processes": parallel.size(), "kind": kind, "cache_gb": cache_gb, "autocast": autocast, **common,
        })
    return Path(out)


def keep_branches(work, model, target, records, seed, limit_gb, quiet):
    """The branches of the starting drafter in work/branches; says how much disk they may take before it begins."""
    folder = Path(work) / "branches"
    most = cache.largest_bytes(records, ANCHORS_KEPT, model.c.proposals, len(model.c.taps) * model.c.target_hidden)
    if parallel.rank() == 0 and not quiet:
        print(f"train: branches of {len(records)} records take at most {most / 1e9:.2f} GB in {folder}, limit {limit_gb:g} GB", flush=True)
    share = parallel.rank(), parallel.size()
    with progress_bar("branches", len(records), quiet or parallel.rank() > 0) as tick:
        cache.build(folder, model, target, records, anchors=ANCHORS_KEPT, seed=seed, limit=limit_gb * 1e9, share=share, on_records=tick)
    parallel.total(torch.zeros(1))  # nobody reads before all have written
    return cache.Store(folder, records)


def main(argv=None, prog=None):
    """Returns 0, or after a sentence on stderr 1, or 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--target", required=True, help="folder of a Hugging Face causal LM")
    parser.add_argument("--records", required=True, help="JSONL file or folder that `carryover record` wrote, or a Hugging Face dataset")
    parser.add_argument("--drafter", required=True, help="folder of the drafter to start from")
    parser.add_argument("--out", required=True, help="folder for the trained drafter")
    parser.add_argument("--work", required=True, help="folder for checkpoint.pt and metrics.jsonl; training goes on there")
    parser.add_argument("--mode", choices=MODES, default="carryover", help="none: same anchors, nothing carried")
    parser.add_argument("--loss", choices=list(LOSSES), default="dflash", help="dspark: with total variation and confidence")
    parser.add_argument("--mark-site", choices=("pre_norm", "post_norm"), default="pre_norm")
    parser.add_argument("--mark-scale", type=float, default=1.0, help="the mark at the start, in sizes of a row")
    parser.add_argument("--share", type=float, default=1.0, help="part of the branches that carry")
    parser.add_argument("--ramp", type=int, default=0, help="steps over which the share rises from 0")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the first draft")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="records a step, of all processes together")
    parser.add_argument("--anchors", type=int, default=16, help="anchors a record")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW, for vectors and heads")
    parser.add_argument("--muon-lr", type=float, default=1e-3, help="Muon, for matrices; 0: AdamW for all")
    parser.add_argument("--mark-lr", type=float, default=5e-3, help="in sizes of a row")
    parser.add_argument("--parallel", dest="kind", choices=parallel.KINDS, default="ddp", help="under torchrun: whole weights or shares")
    parser.add_argument("--cache-gb", type=float, default=0.0,
                        help="keep the starting drafter's branches on disk, in at most so many GB; 0: draft anew in every step")
    parser.add_argument("--no-autocast", dest="autocast", action="store_false", help="matrix products in float32, not bf16")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda (not yet run on hardware)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args(argv))
    try:
        out = train(**arguments)
    except (ValueError, OSError, TrainingStopped) as error:
        print(error, file=sys.stderr)
        return 130 if isinstance(error, TrainingInterrupted) else 1
    finally:
        last = parallel.rank()
        parallel.stop()
    if last == 0:
        print(f"train: written {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
