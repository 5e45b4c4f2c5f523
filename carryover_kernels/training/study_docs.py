"""Writes docs/study.md and its plots from study.json: python -m carryover_kernels.training.study_docs STUDY.json STUDY.md

Every number in the text comes from the JSON. The plots (PNG, a folder beside the text named like it) need matplotlib.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from carryover_kernels.training.corpus import KINDS
from carryover_kernels.training.study import CELLS, SHIPPED

SIDES = {"on": "on", "off": "off", "shuffled": "another prompt's rows", "zero": "rows of zeros", "stale": "rows of the round before the last",
         "two_rounds": "rows of two rounds", "on_cut": "on, verification cut", "off_cut": "off, verification cut"}


def percent(x, sign=True):
    return f"{x:{'+' if sign else ''}.1%}".replace("%", " %")


def interval(c):
    return f"{percent(c['gain'])} [{percent(c['low'])}, {percent(c['high'])}]"


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(map(str, r)) + " |" for r in rows)])


def verdict(contrast):
    c = contrast["all"]
    if c["low"] > 0:
        return "is above that of the control without carry, the interval above zero"
    if c["high"] < 0:
        return "is below that of the control without carry, the interval below zero"
    return "is not told apart from that of the control without carry: the interval holds zero"


def called(pair):
    """What a pair's drafter is called: the start of a title or sentence."""
    return f"{'Markov drafter' if pair.get('markov') else 'Drafter'} of {pair['layers']} layer{'s' if pair['layers'] > 1 else ''}"


def summary(out):
    """One sentence a pair: the main contrast."""
    lines = []
    for name, pair in out["pairs"].items():
        if "measures" not in pair or "carryover on / none off" not in pair["measures"]["0"]["contrasts"]:
            continue
        c = pair["measures"]["0"]["contrasts"]["carryover on / none off"]
        base = pair["measures"]["0"]["acceptance_length"]["base off"]["all"]
        sampled = pair["measures"].get("0.7", {}).get("contrasts", {}).get("carryover on / none off")
        sampled = f", at temperature 0.7 {interval(sampled['all'])}" if sampled else ""
        seeds = sorted({cell["seed"] for cell in pair["cells"].values()})
        how = f"{pair['settings']['steps']} steps a cell, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        aim = "" if c["all"]["gain"] >= 0.065 else " It is below the +6.5 % that the paper reports as its smallest mean gain."
        lines.append(
            f"- **{called(pair)}** (baseline's acceptance length {base:.2f}): the "
            f"acceptance length with carried states {verdict(c)}: {interval(c['all'])}{sampled} ({how}).{aim}"
        )
    if "shipped" in out:
        told = ", ".join(f"{interval(m['contrasts']['carryover on / none off']['all'])} " + ("greedily" if t == "0" else f"at temperature {t}")
                         for t, m in out["shipped"]["measures"].items())
        lines.append(f"- **The embedded pair of one layer**, one seed, more prompts: {told}.")
    return "\n".join(lines)


def pair_text(name, pair, folder):
    parts = [f"## {called(pair)}\n", measures_text(pair["measures"])]
    parts.append(recall_text({key: cell["recall"] for key, cell in pair["cells"].items() if "recall" in cell}, "the baseline's"))
    parts.append(attention_text({key: cell["attention"] for key, cell in pair["cells"].items() if "attention" in cell}))
    parts.append(reconvergence_text(pair["measures"]))
    if (folder / f"{name}_position.png").exists():
        parts.append(f"![acceptance by position]({folder.name}/{name}_position.png)\n")
    parts.append("### Cells\n")
    parts.append(table(["cell", "steps", "minutes", "last loss", "mark / size of a row"], [
        [key, c["steps"], f"{c['minutes']:.1f}", f"{c['last_loss']:.3f}", f"{c['mark_size'] / c['row_size']:.2f}" if "mark_size" in c else "-"]
        for key, c in pair["cells"].items()
    ]) + "\n")  # fmt: skip
    return "\n".join(p for p in parts if p)


def shipped_text(out, folder):
    """The embedded pair, measured as it ships."""
    if "shipped" not in out:
        return ""
    s = out["shipped"]
    parts = [
        "## The embedded pair as it ships\n",
        f"`dflash_small` (none) and `dflash_small_carryover` (carryover), one training seed, decoded again by "
        f"`python -m carryover_kernels.training.study --shipped`: {_decoded(s['prompts'])}.\n",
        measures_text(s["measures"]), recall_text({"carryover shipped": s["recall"]}, "the control's"),
        attention_text({"carryover shipped": s["attention"]}), reconvergence_text(s["measures"]),
    ]
    if (folder / "shipped_position.png").exists():
        parts.append(f"![acceptance by position]({folder.name}/shipped_position.png)\n")
    return "\n".join(p for p in parts if p)


def measures_text(measures):
    parts = []
    for t, m in measures.items():
        kinds = ["all", *(k for k in KINDS if k in next(iter(m["acceptance_length"].values())))]
        how = "greedy" if t == "0" else f"responses sampled at temperature {t}"
        parts.append(f"### Acceptance length, {how}\n")
        parts.append(table(["cell, seed", "carry", *kinds],
                           [[*_key(key), *(f"{x[k]:.3f}" for k in kinds)] for key, x in m["acceptance_length"].items()]) + "\n")
        parts.append("Relative gains in acceptance length, 95 % intervals of a paired bootstrap over prompts, seeds pooled:\n")
        rows = []
        for key, c in m["contrasts"].items():
            seeds = ", ".join(f"{s}: {percent(g)}" for s, g in c["all"]["seeds"].items())
            rows.append([key, *(interval(c[k]) for k in kinds), seeds])
        parts.append(table(["contrast", *kinds, "all, by seed"], rows) + "\n")
        if "verified" in m:
            parts.append("Where verification is cut, drafts verified a round:\n")
            parts.append(table(["cell, seed", "carry", *kinds], [[*_key(key), *(f"{x[k]:.2f}" for k in kinds)] for key, x in m["verified"].items()])
                         + "\n")
    return "\n".join(parts)


def recall_text(cells, first):
    rows = []
    for key, found in cells.items():
        for t, by_kind in found.items():
            for kind, r in by_kind.items():
                rows.append([key, t, kind, r["pairs"], *(
                    f"{percent(r[side][k], False)}" for k in ("1", "16") for side in ("on", "off")
                ), *(f"{100 * (r['on'][k] - r['off'][k]):+.2f}" for k in ("1", "16"))])
    if not rows:
        return ""
    return (f"### Recall at the same anchors, same weights, carry on and off\n\nBranches that carry something; the first draft is {first}.\n\n"
            + table(["cell", "T", "kind", "branches", "@1 on", "@1 off", "@16 on", "@16 off", "@1 on - off, points", "@16"], rows) + "\n")


def attention_text(cells):
    rows = [[key, *(", ".join(percent(x, False) for x in found[name]) for name in ("share", "by_rows"))] for key, found in cells.items()]
    if not rows:
        return ""
    return ("### Attention of proposing rows that lies on carried rows\n\n"
            + table(["cell", "by layer", "by number of carried rows, 1 and more"], rows) + "\n")


def reconvergence_text(measures):
    again = measures["0"].get("reconvergence")
    if not again:
        return ""
    rows = [[k, f"{x['reconverged']:.2f}", percent(x["gain"])] for k, x in again["kinds"].items()]
    told = f"\nCorrelation over prompts: {again['correlation']:.2f}.\n" if again["correlation"] is not None else ""
    return ("### Gain against reconvergence, greedy\n\nDrafts after the first rejected one that agree with the record all the same, a round "
            "of the control, and the mean gain of a prompt:\n\n"
            + table(["kind", "reconverged drafts a round", "mean gain of a prompt"], rows) + "\n" + told)


def _key(key):
    name, side = key.rsplit(" ", 1)
    return name.replace("_", " "), SIDES[side]


def _decoded(prompts):
    return ", ".join(f"{n} held-out prompts answered " + ("greedily" if t == "0" else f"at temperature {t}") for t, n in prompts.items())


def _decoded_by_pair(out):
    return "; ".join(f"{called(pair).lower()}: {_decoded(pair['prompts'])}"
                     for pair in out["pairs"].values() if "measures" in pair)


def potential_text(out):
    rows = []
    for pair in out["pairs"].values():
        for key, p in pair["potential"].items():
            kind, t = key.split()
            rows.append([f"{pair['layers']}{', Markov' if pair.get('markov') else ''}", kind, t, p["branches"], f"{p['tokens']:.2f}", percent(p["with_bonus"] / p["tokens"] - 1),
                         percent(p["oracle"] / p["tokens"] - 1), *(percent(_mean(p[n], p["slots"]), False)
                                                                   for n in ("drafter_right", "target_right", "draft_right"))])
    return table(["drafter's layers", "kind", "T of the record", "branches", "tokens a round, alone", "with a bonus", "oracle",
                  "drafter right", "target right along the branch", "branch's draft right"], rows)


def _mean(values, weights):
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1, sum(weights))


def limits(out):
    """What a reader must know before quoting the result."""
    measured = [p for p in out["pairs"].values() if "measures" in p]
    weak = [called(p).lower() for p in measured if p["measures"]["0"]["acceptance_length"]["base off"]["all"] < 3]
    lines = [f"Small: decoded were, over all kinds together, {_decoded_by_pair(out)}."]
    if weak:
        lines.append(f"The baseline's acceptance length is below 3, weaker than published drafters are: {', '.join(weak)}.")
    again = [m for p in [*measured, *([out["shipped"]] if "shipped" in out else [])] for m in [p["measures"]]]
    if not any("0.7" in m for m in again):
        lines.append("Sampled responses were not decoded.")
    if not any("shuffled" in key for m in again for of_t in m.values() for key in of_t["contrasts"]):
        lines.append("Decoding the same weights without carry or with another prompt's rows was not run; recall on and off was.")
    if not any(key.startswith("plain") for p in measured for key in p["cells"]):
        lines.append("Plain extra training was not run.")
    cells = {key.rsplit("_", 1)[0] for p in measured for key in p["cells"]}
    if left := [name.replace("_", " ") for name in CELLS if name not in cells]:
        lines.append(f"Cells of the script that were not run at this size: {', '.join(left)}.")
    if not any(p.get("markov") for p in measured):
        lines.append("Markov drafters were not run at this size.")
    return " ".join(lines)


def text(out, folder):
    v = out["versions"]
    plots = f"\n![gain against potential]({folder.name}/potential.png)\n" if (folder / "potential.png").exists() else ""
    return f"""# Study: do rejected drafts' states help a small drafter?

Written by `carryover_kernels.training.study_docs` from `study.json`; `make study` runs all of it (hours, goes on where it was
stopped), `make study-quick` shows in minutes that it runs. The target is the embedded one.

## Result

{summary(out)}

What a drafter can gain is what the target knows along a rejected branch and the drafter doesn't. The table below measures that
without training: the embedded three-layer drafter, after a correction, is right nearly wherever the target's rows are, and has
next to nothing to gain; a drafter of fewer layers has much. The gains found by training follow.

{limits(out)}

## How much there is to carry

Of training branches that carry something, after the correction. Slot k is told by the rejected row one position before it. "With a
bonus": a constant on the logit of the target's own greedy token there, one number a slot, chosen on half of the branches and measured on
the other. "Oracle": whichever of the two is right. Gains are in tokens a round.

{potential_text(out)}
{plots}
{chr(10).join(pair_text(name, pair, folder) for name, pair in out["pairs"].items() if "measures" in pair)}
{shipped_text(out, folder)}
## How it was run

- Trained on the target's own responses to training prompts, half greedy, half at temperature 0.7. Decoded: {_decoded_by_pair(out)};
  invented words and library files of held-out prompts are never trained on.
- Baselines start from the embedded drafter's `fc`, norms and some of its layers and are trained without carry, rates down to zero.
- Cells start from the baseline: `plain` (anchors as sampled), `none` (moved anchors, nothing carried), `carryover` (rejected rows
  carried); all of them for the same steps, data order and anchors, rates by a cosine to zero; the mark's is in sizes of a row.
- Where verification is cut, drafts are verified only as far as the product of the drafter's own probabilities stays above a bound.

{settings_text(out)}

- Off-policy, our choice: the first draft of a step is the baseline's throughout, so that all cells share the very same branches, kept on disk.
- Decoding is replayed over the target's records: each round drafts greedily and carries its own last round's rejected rows; agreement
  with the record is verification (exact for greedy records; for sampled ones the coupling "the target sampled this token").
  Acceptance length = tokens / rounds over all prompts, the bonus counted. float32, bf16 weights as shipped.
- {v['torch']} torch, {v['transformers']} transformers, Python {v['python']}, CPU ({out['processors']} cores, shared with other work: minutes are not a benchmark).
"""


def settings_text(out):
    """What each pair was trained with."""
    told = {"responses": "records", "their longest, tokens": "new_tokens"}
    for of, prefix in (("baseline", "base_"), ("cells", "")):
        names = {"steps": "steps", "records a step": "batch", "anchors a record": "anchors", "AdamW's rate": "lr", "Muon's rate (0: AdamW for all)": "muon_lr"}
        told |= {f"{of}: {name}": prefix + key for name, key in names.items()}
    told |= {"mark's rate": "mark_lr", "part of branches that carry": "share", "part of anchors drawn where drafts were rejected": "carrying"}
    pairs = [p for p in out["pairs"].values() if "measures" in p]
    return table(["setting", *(called(p).lower() for p in pairs)],
                 [[name, *(f"{p['settings'][key]:g}" for p in pairs)] for name, key in told.items()])


def plots(out, folder):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(6, 4))
    for pair in out["pairs"].values():
        for t, m in pair.get("measures", {}).items():
            c = m["contrasts"].get("carryover on / none off", {})
            kinds = [k for k in KINDS if k in c and f"{k} {t}" in pair["potential"]]
            if not kinds:
                continue
            x = [100 * (pair["potential"][f"{k} {t}"]["oracle"] / pair["potential"][f"{k} {t}"]["tokens"] - 1) for k in kinds]
            y = [100 * c[k]["gain"] for k in kinds]
            error = [[100 * (c[k]["gain"] - c[k]["low"]) for k in kinds], [100 * (c[k]["high"] - c[k]["gain"]) for k in kinds]]
            axes.errorbar(x, y, error, fmt="o" if t == "0" else "s", capsize=3, label=f"{called(pair).lower()}, T {t}")
            for k, a, b in zip(kinds, x, y, strict=True):
                axes.annotate(k, (a, b), fontsize=7, xytext=(4, 3), textcoords="offset points")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(xlabel="oracle's gain in tokens a round, %", ylabel="carryover over control, acceptance length, %")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "potential.png", dpi=110)
    plt.close(figure)
    titles = {name: f"{called(pair)}, greedy" for name, pair in out["pairs"].items()} | {"shipped": "the embedded pair, greedy"}
    for name, pair in {**out["pairs"], **({"shipped": out["shipped"]} if "shipped" in out else {})}.items():
        if "measures" not in pair:
            continue
        figure, axes = plt.subplots(figsize=(6, 3.5))
        for key, values in pair["measures"]["0"]["by_position"].items():
            axes.plot(range(1, len(values) + 1), [100 * v for v in values], marker=".", label=key.replace("_", " "))
        axes.set(xlabel="draft", ylabel="rounds that accept it, %", title=titles[name])
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(folder / f"{name}_position.png", dpi=110)
        plt.close(figure)


def card(name, pair, out):
    """A model card of one of the pair that differs by carry alone; every number comes from study.json."""
    m, s = pair["measures"]["0"], pair["settings"]
    carries = name == "carryover"
    seed = min(c["seed"] for c in pair["cells"].values())
    key = f"{name}_{seed} {'on' if carries else 'off'}"
    contrast = m["contrasts"]["carryover on / none off"]
    kinds = [k for k in ("all", *KINDS) if k in contrast]
    rows = [[k, f"{m['acceptance_length'][key][k]:.2f}", interval(contrast[k])] for k in kinds]
    what = "with the states of rejected drafts (carryover, mark added before hidden_norm)" if carries else "without carry"
    return (
        "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n"
        f"# Embedded DFlash drafter of {pair['layers']} layer, trained {what}\n\n"
        "z-lab DFlash layout; embeddings and head are the embedded target's. One of two drafters that differ by carry alone: same start, "
        f"steps, data order and anchors. They are weaker than the embedded three-layer drafter and show what carry does.\n\n"
        f"Training: {s['base_steps']} steps without carry, then {s['steps']} of {s['batch']} responses x {s['anchors']} anchors, seed {seed}; "
        f"data and licences as the target's card. Weights: Apache-2.0.\n\n"
        + table(["kind", "acceptance length (greedy, bonus counted)", "gain of carry over the control, 95 % interval, all seeds"], rows)
        + f"\n\nMade by `make study` with torch {out['versions']['torch']}, transformers {out['versions']['transformers']}; all measures are in "
        "docs/study.md. A toy for demonstrations and tests.\n"
    )


def ship(out, work, models):
    """Copies the control and the carryover drafter of the first pair into the embedded models, with cards."""
    name, pair = next((n, p) for n, p in out["pairs"].items() if "measures" in p)
    seed = min(c["seed"] for c in pair["cells"].values())
    for cell, folder in SHIPPED.items():
        shutil.copytree(work / name / f"{cell}_{seed}" / "model", models / folder, dirs_exist_ok=True)
        (models / folder / "README.md").write_text(card(cell, pair, out), encoding="utf-8")
        for file in (models / folder).iterdir():
            file.chmod(0o644)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", type=Path, help="study.json")
    parser.add_argument("out", type=Path, help="study.md; plots go into a folder of its name")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--ship", type=Path, nargs=2, metavar=("WORK", "MODELS"), help="also copy the pair's drafters into MODELS")
    arguments = parser.parse_args(argv)
    out = json.loads(arguments.study.read_text())
    for pair in out["pairs"].values():
        pair.setdefault("prompts", out.get("prompts"))
        pair.setdefault("settings", out.get("settings"))
    folder = arguments.out.with_suffix("")
    if not arguments.no_plots:
        try:
            plots(out, folder)
        except ImportError:
            print("study_docs: matplotlib is not installed, no plots (pip install matplotlib)", file=sys.stderr)
    arguments.out.write_text(text(out, folder), encoding="utf-8")
    if arguments.ship:
        ship(out, *arguments.ship)
    print(f"study_docs: written {arguments.out}")


if __name__ == "__main__":
    main()
