"""docs/performance.md, written from the JSON of bench/results; no figure in it is typed by hand."""

import json
import pathlib

import torch

HEAD = """# Performance on a CPU

Written by `python -m bench.report` from `bench/results/*.json`; run `make bench` to measure your own machine, `make bench-quick` for two
minutes of it. Times are medians of calls interleaved with the peers' in one process, with quartiles. The floor is the larger of bytes over
measured bandwidth and flops over the rate of `F.linear` (1024 x 2048 x 2048, in the case's dtype or in float32, whichever is quicker on
the machine), both the best of a few runs just before the case; beyond 100 % means that the floor's rate was measured while something else ran. GPU: not yet run on hardware.
"""

WHAT = {
    "block_attention": "Peers: gather pages, cat, `scaled_dot_product_attention` (eager), and torch.compile of it where shown.",
    "project_states": "Peers: the unfused launches of engines today, and the two bare GEMMs (`F.linear`), which write no cache.",
    "qk_norm_rope": "Peer: RMSNorm and rotation from stock tensor operations.",
    "markov_sample": "Peer: the stock loop, one linear, add and argmax a step.",
    "verify_draft": "Peer: argmax and a cumulative product over a batch of equal lengths.",
    "plan_round": "Peer: the same bookkeeping in tensor operations, for a batch of equal lengths.",
    "carry_to_pages": "Peer: the same slots in tensor operations, for a batch of equal lengths.",
    "clear_carry": "Peer: an indexed assignment.",
    "round": "off: the same round whose rejected rows are skipped; eager: an ordinary drafter of stock modules, without carryover.",
}


CLOCKS = {"wall": "wall time", "cpu": "CPU time of the one thread (the machine was shared: wall time would count other processes too)"}


def duration(us: float) -> str:
    return f"{us:.1f} µs" if us < 1000 else f"{us / 1000:.2f} ms"


def table(rows: list[dict]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["speedup"]))
    lines = ["| case | ours | quartiles | floor | of floor | GFLOP/s | " + " | ".join(f"x {name}" for name in names) + " | load |"]
    lines.append("|---" * (7 + len(names)) + "|")
    for row in rows:
        ours = row["times_us"]["ours"]
        peers = " | ".join(f"{row['speedup'][name]:.2f}" if name in row["speedup"] else "" for name in names)
        rate = f"{row['gflops']:.0f}" if row["flops"] else ""
        lines.append(
            f"| {row['case']} | {duration(ours['median'])} | {duration(ours['q1'])} - {duration(ours['q3'])} | {duration(row['floor_us'])} "
            f"({row['floor_by']}) | {100 * row['share_of_floor']:.0f} % | {rate} | {peers} | {row['load']:.1f} |"
        )
    return lines


def phases(row: dict) -> list[str]:
    total = sum(row["phases_us"].values())
    lines = ["| phase | time | share |", "|---|---|---|"]
    return lines + [f"| {name} | {duration(us)} | {100 * us / total:.0f} % |" for name, us in row["phases_us"].items()]


def fit(rows: list[dict], op: str, axis: str, **fixed) -> str | None:
    """Least squares of time = a + b * axis over the rows that differ in that axis alone, as one sentence."""
    chosen = [r for r in rows if r["op"] == op and r["dtype"] == "bfloat16" and all(r["axes"].get(k) == v for k, v in fixed.items())]
    x = torch.tensor([r["axes"][axis] for r in chosen], dtype=torch.float64)
    y = torch.tensor([r["times_us"]["ours"]["median"] for r in chosen], dtype=torch.float64)
    if len(set(x.tolist())) < 3:
        return None
    design = torch.stack([torch.ones_like(x), x], 1)
    a, b = torch.linalg.lstsq(design / y[:, None], torch.ones_like(y)[:, None]).solution[:, 0].tolist()  # relative errors
    off = float(((design @ torch.tensor([a, b], dtype=torch.float64)) / y - 1).abs().max())
    where = ", ".join(f"{k} {v}" for k, v in fixed.items())
    law = f"{duration(a)} + {b * 1000:.1f} ns x {axis}"
    return f"- `{op}` ({where}): {law}; the largest deviation is {100 * off:.0f} % over {len(chosen)} points."


def write(results: pathlib.Path, path: pathlib.Path) -> None:
    parts = [HEAD]
    for kind in ("full", "quick"):
        source = results / f"{kind}.json"
        if not source.exists():
            continue
        data = json.loads(source.read_text())
        rows, machine = data["rows"], data["machine"]
        rates = [row["rates"] for row in rows if row["dtype"] == "bfloat16"]
        parts.append(
            f"## {kind.capitalize()} run of {data['when']}\n\n{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
            f"kernels `{machine['isa']}`, {CLOCKS[machine['clock']]}, torch {machine['torch']}, Python {machine['python']}. "
            f"Best rates: {max(r['gemm_gflops'] for r in rates):.0f} GFLOP/s bf16, read {max(r['read_gbs'] for r in rates):.1f} GB/s, copy "
            f"{max(r['copy_gbs'] for r in rates):.1f} GB/s; worst: {min(r['gemm_gflops'] for r in rates):.0f} GFLOP/s, "
            f"{min(r['read_gbs'] for r in rates):.1f} GB/s. Load average {min(r['load'] for r in rows):.1f} to "
            f"{max(r['load'] for r in rows):.1f} (above {machine['cores']}: other processes took part of the cores).\n"
        )
        for op in dict.fromkeys(row["op"] for row in rows):
            own = [row for row in rows if row["op"] == op]
            parts.append("\n".join([f"### {op}", "", WHAT[op], "", *table(own), ""]))
            for row in own:
                if row.get("phases_us"):
                    parts.append("\n".join([f"Where the time of {row['case']} goes, each phase timed alone:", "", *phases(row), ""]))
        fits = [
            fit(rows, "block_attention", "context", model="qwen3-4b", batch=1, page=16, carry=7),
            fit(rows, "project_states", "rows", model="qwen3-4b", carried=7),
            fit(rows, "plan_round", "batch"),
            fit(rows, "carry_to_pages", "batch"),
        ]
        if any(fits):
            parts.append("\n".join(["### Growth", "", *(line for line in fits if line), ""]))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(parts))
