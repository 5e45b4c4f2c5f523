"""``carryover demo``: held-out prompts, the embedded target alone and with its drafters, side by side."""

import importlib.util
import json
from pathlib import Path

import torch
from rich.table import Table

from ..decoding import Interrupted, Request, generate
from .show import Printer, explain_difference, legend, load_drafter, load_target, new_console, say

MODELS = Path(__file__).resolve().parent.parent / "models"


def run_demo(prompts: int, max_new_tokens: int, only: str | None = None, models: Path | None = None, plot: Path | None = None) -> int:
    if plot is not None:
        _check_plot(plot)
    console = new_console()
    models = models or MODELS
    # float32: then a greedy pass over many rows and one over a single row give the same tokens.
    target, tokenizer = load_target(models / "target", torch.float32)
    drafters = {name: load_drafter(models / name, target) for name in _drafter_names(models, only)}
    chosen = _held_out(models / "held_out.json", prompts)
    parameters = sum(parameter.numel() for parameter in target.model.parameters()) / 1e6
    say(console, f"target of {parameters:.1f} M parameters, {torch.get_num_threads()} threads, greedy, float32")
    for name, drafter in drafters.items():
        trained = "trained with carryover: carryover on" if drafter.mark is not None else "trained without carryover: carryover off"
        say(console, f"drafter {name}: {len(drafter.config.layers)} layers, {drafter.config.num_draft_tokens} drafts a round, {trained}")
    if not any(drafter.mark is not None for drafter in drafters.values()):
        say(console, "There is no embedded carryover drafter yet: what follows is plain block drafting, nothing is carried over.")
    console.print(legend(console))

    shown = _to_show(drafters)
    say(console, f"Each text below is what {shown} and the target wrote.\n")
    prompt_ids = [tokenizer(entry["prompt"])["input_ids"] for entry in chosen]
    for drafter in (None, *drafters.values()):  # first passes allocate and set up threads: not measured
        generate(target, drafter, prompt_ids[:1], 8)

    runs: list[tuple[str, str, Request, Request]] = []  # prompt, decoder, its answer, the target's own
    code = 0
    try:
        for entry, ids in zip(chosen, prompt_ids):
            name = f"{entry['kind']} {_short(entry['source'])}"
            alone = generate(target, None, [ids], max_new_tokens)[0]
            runs.append((name, "target alone", alone, alone))
            say(console, name, style="bold")
            say(console, entry["prompt"], end="", style="dim")
            for decoder, drafter in drafters.items():
                stream = Printer(console, tokenizer, ids) if decoder == shown else None
                request = generate(target, drafter, [ids], max_new_tokens, stream=stream)[0]
                runs.append((name, decoder, request, alone))
            say(console, "\n")
    except KeyboardInterrupt as stopped:
        done = len(stopped.requests[0].tokens) if isinstance(stopped, Interrupted) else 0
        say(console, f"\ninterrupted after {done} tokens of this run; the table has the runs that were finished")
        code = 130
    if runs:
        console.print(_table(runs))
        shares = {decoder: shares_by_position([request for _, name, request, _ in runs if name == decoder]) for decoder in drafters}
        _bars(console, shares)
        if plot is not None:
            _plot(plot, shares)
            say(console, f"plot: {plot}")
        code = code or _prove(console, target, runs)
    return code


def _drafter_names(models: Path, only: str | None) -> list[str]:
    names = sorted((p.parent.name for p in models.glob("*/config.json") if p.parent.name != "target"), key=lambda n: ("carryover" in n, n))
    if only is not None:
        if only not in names:
            raise ValueError(f"demo: drafter is '{only}', must be one of {', '.join(names) or 'none: no drafter is embedded'}")
        return [only]
    if not names:
        raise ValueError(f"demo: no drafter in {models}, must have a folder with its config.json there")
    return names


def _to_show(drafters) -> str:
    """The drafter whose text is streamed: one trained with carryover if there is one, else the first."""
    return next((name for name, drafter in drafters.items() if drafter.mark is not None), next(iter(drafters)))


def _held_out(path: Path, count: int) -> list[dict]:
    """The first prompts of each kind in turn, ``count`` in all."""
    if not path.is_file():
        raise FileNotFoundError(f"demo: no file {path}, must be the list of held-out prompts")
    by_kind: dict[str, list[dict]] = {}
    for entry in json.loads(path.read_text(encoding="utf-8")):
        by_kind.setdefault(entry["kind"], []).append(entry)
    depth = max(map(len, by_kind.values()))
    turns = [entries[i] for i in range(depth) for entries in by_kind.values() if i < len(entries)]
    return turns[:count]


def _short(source: str) -> str:
    parts = source.split("/")
    return parts[-1] if len(parts) > 1 else source


def _table(runs) -> Table:
    table = Table("prompt", "decoder")
    for name in ("tokens", "acceptance length", "tokens a pass", "tokens/s", "speed-up", "text"):
        table.add_column(name, justify="right")
    for prompt, decoder, request, alone in runs:
        table.add_row(prompt if request is alone else "", decoder, *_figures([(request, alone)]))
        if (prompt, decoder) != (runs[-1][0], runs[-1][1]) and _is_last_of_prompt(runs, prompt, decoder):
            table.add_section()
    table.add_section()
    for decoder in dict.fromkeys(decoder for _, decoder, _, _ in runs):
        pairs = [(request, alone) for _, name, request, alone in runs if name == decoder]
        table.add_row(f"all {len(pairs)}", decoder, *_figures(pairs), style="bold")
    return table


def _is_last_of_prompt(runs, prompt, decoder) -> bool:
    return [name for text, name, _, _ in runs if text == prompt][-1] == decoder


def _figures(pairs: list[tuple[Request, Request]]) -> list[str]:
    """Pooled over requests: sums of tokens, passes and seconds, not means of ratios."""
    stats = [request.stats for request, _ in pairs]
    tokens, seconds = sum(s.new_tokens for s in stats), sum(s.seconds for s in stats)
    rounds = sum(s.rounds for s in stats)
    own = sum(alone.stats.seconds for _, alone in pairs) / max(1, sum(alone.stats.new_tokens for _, alone in pairs))
    accepted = (rounds + sum(sum(s.accepted) for s in stats)) / rounds if rounds else None
    alone = all(request is other for request, other in pairs)
    equal = sum(request.tokens == other.tokens for request, other in pairs)
    verdict = "equal" if equal == len(pairs) else "differs" if len(pairs) == 1 else f"{equal} of {len(pairs)} equal"
    return [
        str(tokens),
        "-" if alone or accepted is None else f"{accepted:.2f}",
        f"{tokens / (rounds + len(pairs)):.2f}",
        f"{tokens / seconds:.0f}",
        "-" if alone else f"{own * tokens / seconds:.2f}x",
        "the target's" if alone else verdict,
    ]


def shares_by_position(requests: list[Request]) -> list[float]:
    """Share of rounds that verified draft 1, 2, ... and kept it."""
    verified, accepted = [], []
    for request in requests:
        for total, counts in ((verified, request.stats.verified), (accepted, request.stats.accepted)):
            total.extend([0] * (len(counts) - len(total)))
            for i, count in enumerate(counts):
                total[i] += count
    return [kept / tried for kept, tried in zip(accepted, verified) if tried]


def _bars(console, shares: dict[str, list[float]]):
    """Acceptance by position as bars of the terminal, the drafters one under another."""
    shown = {name: values for name, values in shares.items() if values}
    if not shown:
        return
    say(console, "Share of rounds that kept draft 1, 2, ...:")
    width, full = max(map(len, shown)), "#" if console.encoding.lower() != "utf-8" else "\u2588"
    for i in range(max(map(len, shown.values()))):
        for name, values in shown.items():
            if i < len(values):
                say(console, f"{i + 1:>3}  {name:<{width}}  {full * round(40 * values[i]):<40} {values[i]:4.0%}")


def _check_plot(path: Path):
    """Before anything is decoded: what would only fail once all of it is done."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"demo: plot is {path} and matplotlib is not installed, must be left out (or: pip install matplotlib)")
    if path.suffix.lower() != ".png" or path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"demo: plot is {path}, must be a .png file in a folder that exists")


def _plot(path: Path, shares: dict[str, list[float]]):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    width = 0.8 / max(1, len(shares))
    for i, (name, values) in enumerate(shares.items()):
        axes.bar([k + 1 + (i - (len(shares) - 1) / 2) * width for k in range(len(values))], [100 * v for v in values], width, label=name)
    axes.set(xlabel="draft", ylabel="rounds that kept it, %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _prove(console, target, runs) -> int:
    drafted = [run for run in runs if run[2] is not run[3]]
    wrong = [run for run in drafted if run[2].tokens != run[3].tokens]
    code = 0
    for prompt, decoder, request, alone in wrong:
        words, rounding = explain_difference(target, alone, request)
        say(console, f"{prompt}, {decoder}: {words}")
        code = code if rounding else 1
    if not wrong:
        tokens = sum(len(request.tokens) for _, _, request, _ in drafted)
        say(console, f"Proof: all {len(drafted)} drafted answers ({tokens} tokens) equal the target's own, token for token.")
    return code
