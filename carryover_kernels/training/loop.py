"""The training loop: atomic checkpoints, exact resume, JSONL metrics, a progress bar, a stop on NaN.

Everything random in a step is drawn from (seed, step), so that a run killed at any point and started again computes
the same losses as one that was never stopped.
"""

import json
import math
import os
import signal
import time
from pathlib import Path

import torch

from carryover_kernels.training import parallel


def write_atomically(path, write):
    """Calls write(tmp) and moves tmp to path in one step; a kill leaves the old file or the new one."""
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    write(tmp)
    with open(tmp, "rb+") as handle:
        os.fsync(handle.fileno())
    os.replace(tmp, path)


def write_json(path, value):
    write_atomically(path, lambda tmp: Path(tmp).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8"))


def step_seed(seed, step, salt=0):
    """A seed for one step: distinct for every (seed, step, salt) in range, below 2**63."""
    return (seed * 1_000_003 + salt) * 2**24 + step


def learning_rate(step, steps, warmup, floor=0.0, horizon=None, decay=0):
    """The factor on the peak rate: linear warm-up, then a cosine down to `floor` at step `horizon` (default: the last)
    times, with `decay`, a line to zero over the last `decay` steps."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, (horizon or steps) - warmup)
    factor = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return factor * min(1.0, (steps - step) / decay) if decay else factor


def make_optimizers(model, lr, muon_lr=0.0, weight_decay=0.0, mark_lr=None, no_muon=("embed_tokens", "lm_head", "markov", "confidence")):
    """AdamW for vectors and embeddings, Muon for matrices where muon_lr > 0. Frozen parameters are left out."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if muon_lr and p.ndim == 2 and not any(word in n for word in no_muon)]
    taken = {id(p) for p in matrices}
    groups = [
        {"params": [p for n, p in named if id(p) not in taken and n != "carryover_mark"], "lr": lr},
        {"params": [p for n, p in named if n == "carryover_mark"], "lr": mark_lr or lr},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0))
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


class TrainingStopped(RuntimeError):
    """Training ended early; the sentence says where the readable checkpoint is."""


class TrainingInterrupted(TrainingStopped):
    """Ctrl-C: nothing was wrong, and the same command goes on."""


class Loop:
    """Runs `step_function(step) -> (loss, metrics)` for a fixed number of steps.

    model: its state_dict is what a checkpoint holds beside the optimizers'.
    directory: gets checkpoint.pt (atomic), metrics.jsonl and, with `tensorboard`, its event files. Of many processes the
    first one writes; all of them must run the loop.
    """

    def __init__(self, model, optimizers, directory, steps, *, warmup=100, clip=1.0, floor=0.0, horizon=None, decay=0, every_seconds=120.0,
                 log_every=10, name="train", quiet=False, tensorboard=False):
        self.model, self.optimizers, self.steps = model, optimizers, steps
        self.directory = Path(directory)
        self.schedule = dict(warmup=warmup, floor=floor, horizon=horizon, decay=decay)
        self.clip = clip
        self.first = parallel.rank() == 0
        self.every_seconds, self.log_every, self.name, self.quiet = every_seconds, log_every, name, quiet or not self.first
        self.tensorboard = tensorboard and self.first
        self.step = 0
        self.base_rates = [[group["lr"] for group in o.param_groups] for o in optimizers]
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self):
        return self.directory / "checkpoint.pt"

    @property
    def metrics(self):
        return self.directory / "metrics.jsonl"

    def save(self):
        weights, optimizers = parallel.model_state(self.model, self.optimizers)
        if not self.first:
            return
        state = {"step": self.step, "steps": self.steps, "model": weights, "optimizers": optimizers}
        write_atomically(self.checkpoint, lambda tmp: torch.save(state, tmp))

    def resume(self):
        """Loads the last checkpoint if there is one and drops metrics written after it. True if it did."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if state["steps"] != self.steps:
            raise ValueError(
                f"train: {self.checkpoint} was made for {state['steps']} steps, this run has {self.steps}; "
                "the learning rates would differ: use another directory or the same number of steps"
            )
        parallel.load_state(self.model, self.optimizers, state["model"], state["optimizers"])
        self.step = state["step"]
        if self.first and self.metrics.exists():
            rows = [json.loads(line) for line in self.metrics.read_text().splitlines() if line.endswith("}")]
            kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] < self.step)
            write_atomically(self.metrics, lambda tmp: Path(tmp).write_text(kept))
        return True

    def run(self, step_function, after_step=None):
        """Trains to the last step. A metric named loss is what is shown and checked, where the value to go back through is
        scaled. Ctrl-C: saves and raises TrainingInterrupted; TrainingStopped on a loss that is not a number (there the last good
        checkpoint stays as it was)."""
        interrupted = []
        previous = signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
        progress, bar = _progress(self.name, self.steps, self.step, self.quiet)
        board = self._board()
        saved_at = time.monotonic()
        try:
            with progress, open(self.metrics if self.first else os.devnull, "a", encoding="utf-8") as log:
                while self.step < self.steps:
                    row = self._one(step_function)
                    if self.step % self.log_every == 0 or self.step + 1 == self.steps:
                        log.write(json.dumps(row) + "\n")
                        log.flush()
                        for key, value in row.items() if board else ():
                            board.add_scalar(f"{self.name}/{key}", value, self.step)
                    self.step += 1
                    shown = " ".join(f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float) and k in SHOWN)
                    progress.update(bar, completed=self.step, shown=shown)
                    stop, save = bool(interrupted), time.monotonic() - saved_at > self.every_seconds
                    if parallel.size() > 1:  # all stop or save together, whoever was asked to
                        stop, save = (parallel.total(torch.tensor([stop, save])) > 0).tolist()
                    if stop:
                        self.save()
                        raise TrainingInterrupted(
                            f"{self.name}: stopped at step {self.step} of {self.steps}; the checkpoint is "
                            f"{self.checkpoint}, the same command goes on from there."
                        )
                    if save:
                        self.save()
                        saved_at = time.monotonic()
                    if after_step is not None:
                        after_step(self.step)
            self.save()
        finally:
            signal.signal(signal.SIGINT, previous)
            if board:
                board.close()

    def _one(self, step_function):
        """One step of the optimizers; the row of metrics."""
        began = time.monotonic()
        factor = learning_rate(self.step, self.steps, **self.schedule)
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad(set_to_none=True)
        loss, metrics = step_function(self.step)
        value = metrics.get("loss", loss.item())
        if not math.isfinite(value):
            raise TrainingStopped(
                f"{self.name}: the loss is {value} at step {self.step}; nothing was updated by it. "
                f"The last good checkpoint is {self.checkpoint}; lower the learning rate and start again."
            )
        loss.backward()
        parameters = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2's gradients lie in shares
        for optimizer in self.optimizers:
            optimizer.step()
        row = {"step": self.step, "loss": value, "norm": norm.item(), "factor": factor, **metrics}
        row["seconds"] = round(time.monotonic() - began, 4)
        return row

    def _board(self):
        if not self.tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.directory / "tensorboard", purge_step=self.step)


class progress_bar:
    """A progress bar as a context manager that gives a function tick(done)."""

    def __init__(self, name, total, quiet=False):
        self.bar, self.task = _progress(name, total, 0, quiet)

    def __enter__(self):
        self.bar.__enter__()
        return lambda done: self.bar.update(self.task, completed=done)

    def __exit__(self, *error):
        return self.bar.__exit__(*error)


SHOWN = ("loss", "accepted", "seconds")


def _progress(name, steps, done, quiet):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(), disable=quiet, refresh_per_second=2,
    )
    return progress, progress.add_task(name, total=steps, completed=done, shown="")
