"""`carryover train`: a drafter for a target, on its recorded responses, with carryover or without."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from carryover_kernels.training import carry, data
from carryover_kernels.training.loop import Loop, TrainingStopped, make_optimizers, step_seed, write_json
from carryover_kernels.training.model import DraftConfig, DraftModel

MODES = ("carryover", "none", "plain")


def train(target, records, out, work, *, drafter=None, mode="carryover", mark_site="pre_norm", mark_scale=1.0,
          share=1.0, steps=1000, batch=16, anchors=16, lr=1e-3, muon_lr=1e-3, mark_lr=5e-3, seed=0, quiet=False,
          new_drafter=None):
    """Trains a drafter for the target on recorded responses and writes it to `out`.

    drafter: folder to start from, or None with new_drafter (a DraftConfig). mode: "carryover", "none" or "plain" (see
    carry.CarrySettings). work: checkpoint.pt and metrics.jsonl; the same call goes on from there.
    Raises TrainingStopped on Ctrl-C and on a loss that is not a number, with where the checkpoint is.
    """
    if mode not in MODES:
        raise ValueError(f"train: mode was {mode!r}, must be 'carryover', 'none' or 'plain'")
    model_target, _ = data.load_target(target)
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
    mark_size = 1.0
    if mode == "carryover":
        had = model.carryover_mark.detach().clone()
        sample, _ = data.pad_records(kept[:8])
        mark_size = carry.set_mark(model, mark_scale, step_seed(seed, 0, 4), data.tap_states(model_target, sample, model.c.taps))
        if had.any():  # a drafter that has learned one keeps it
            model.carryover_mark.data.copy_(had)
    settings = carry.CarrySettings(mode=mode, share=share)
    loop = Loop(model, make_optimizers(model, lr, muon_lr, mark_lr=mark_lr * mark_size), work, steps,
                warmup=max(1, min(100, steps // 10)), name=mode, quiet=quiet)
    loop.resume()
    loop.run(carry.carry_step(model, model_target, kept, settings, seed=seed, batch=batch, anchors=anchors))
    model.save(out)
    write_json(Path(work) / "training.json", {
        "mode": mode, "mark_site": mark_site, "mark_scale": mark_scale, "share": share, "steps": steps, "batch": batch,
        "anchors": anchors, "lr": lr, "muon_lr": muon_lr, "mark_lr": mark_lr, "seed": seed, "records": len(kept),
    })
    return Path(out)


def main(argv=None, prog=None):
    """Returns 0, or 1 after a sentence on stderr."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--target", required=True, help="folder of a Hugging Face causal LM")
    parser.add_argument("--records", required=True, help="JSONL file or folder that `carryover record` wrote")
    parser.add_argument("--drafter", required=True, help="folder of the drafter to start from")
    parser.add_argument("--out", required=True, help="folder for the trained drafter")
    parser.add_argument("--work", required=True, help="folder for checkpoint.pt and metrics.jsonl; training goes on there")
    parser.add_argument("--mode", choices=MODES, default="carryover", help="none: same anchors, nothing carried")
    parser.add_argument("--mark-site", choices=("pre_norm", "post_norm"), default="pre_norm")
    parser.add_argument("--mark-scale", type=float, default=1.0, help="the mark at the start, in sizes of a row")
    parser.add_argument("--share", type=float, default=1.0, help="part of the branches that carry")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="records a step")
    parser.add_argument("--anchors", type=int, default=16, help="anchors a record")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW, for vectors and heads")
    parser.add_argument("--muon-lr", type=float, default=1e-3, help="Muon, for matrices; 0: AdamW for all")
    parser.add_argument("--mark-lr", type=float, default=5e-3, help="in sizes of a row")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args(argv))
    try:
        out = train(**arguments)
    except (ValueError, OSError, TrainingStopped) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"train: written {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
