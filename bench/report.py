"""Runs cases, keeps what they gave as JSON, prints one table, writes docs/performance.md from the JSON.

    python -m bench.report [--quick] [--only OP ...] [--cpu-time]
                                                         run, print, write bench/results/{full,quick}.json and docs/performance.md
    python -m bench.report --docs                        write docs/performance.md from the JSON that is there
"""

import argparse
import importlib
import itertools
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import floors, timing

FOLDER = pathlib.Path(__file__).resolve().parent / "results"
DOCS = FOLDER.parent.parent / "docs" / "performance.md"
BENCHES = (
    "block_attention", "project_states", "qk_norm_rope", "markov_sample", "verify_draft", "plan_round", "carry_to_pages", "clear_carry",
    "round",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One shape: our call, the peers' calls, a check that both agree (it raises), and what must at least move and multiply."""

    name: str
    ours: Callable
    peers: dict[str, Callable]
    check: Callable[[], None]
    num_bytes: int
    flops: int = 0
    dtype: torch.dtype = torch.bfloat16
    axes: dict = field(default_factory=dict)  # model, batch, context, page, rows: for fits over one of them
    phases: dict[str, Callable] = field(default_factory=dict)  # what ours is made of, timed one by one


def run(op: str, case: Case, budget: float) -> dict:
    """Floor first, then the check, then the times."""
    rate = floors.rates(case.dtype)
    floor, by = floors.floor_us(case.num_bytes, case.flops, rate)
    case.check()
    times = timing.interleaved({"ours": case.ours} | case.peers, budget)
    ours = times["ours"]["median"]
    phases = timing.interleaved(case.phases, budget) if case.phases else {}
    return {
        "op": op, "case": case.name, "dtype": str(case.dtype).removeprefix("torch."), "axes": case.axes, "times_us": times,
        "floor_us": floor, "floor_by": by, "share_of_floor": floor / ours, "bytes": case.num_bytes, "flops": case.flops,
        "gflops": case.flops / ours / 1e3, "gbs": case.num_bytes / ours / 1e3, "rates": rate, "load": timing.load(),
        "phases_us": {name: phases[name]["median"] for name in phases},
        "speedup": {name: times[name]["median"] / ours for name in case.peers},
    }  # fmt: skip


def pytest_case(benchmark, op: str, cases, number: int) -> None:
    """Case ``number`` under pytest-benchmark: ours is its figure, the rest is in extra_info."""
    case = next(itertools.islice(cases, number, None))
    row = run(op, case, 0.2)
    benchmark.extra_info.update({key: row[key] for key in ("floor_us", "floor_by", "share_of_floor", "speedup", "load")})
    benchmark.pedantic(case.ours, rounds=5, warmup_rounds=1)


def assert_close(ours, eager, truth, what: str) -> None:
    """At most twice as far from ``truth`` (a wider dtype) as plain PyTorch in the same dtype is, plus one rounding of the largest value."""
    own, other = (ours.double() - truth).abs().max(), (eager.double() - truth).abs().max()
    allowed = 2 * other + truth.abs().max() * torch.finfo(ours.dtype).eps
    if not own <= allowed:
        told = f"error {float(own):.3g}, allowed {float(allowed):.3g}"
        raise AssertionError(f"{what}: {told}: no time is taken of a wrong result")


def machine() -> dict:
    from carryover_kernels import _native

    cpu = platform.processor() or platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if pathlib.Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    isa = _native.cpu_isa()[0] if hasattr(_native, "cpu_isa") else os.environ.get("CARRYOVER_CPU_ISA", "default")
    return {
        "cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "isa": isa, "torch": torch.__version__,
        "python": platform.python_version(), "clock": timing.clock,
    }  # fmt: skip


def line(row: dict) -> str:
    times, rate = row["times_us"]["ours"], row["gflops"] if row["flops"] else 0
    against = "  ".join(f"{name} x{value:.2f}" for name, value in row["speedup"].items())
    return (
        f"{row['op']:16} {row['case']:44} {times['median']:>10.1f} us [{times['q1']:.1f}, {times['q3']:.1f}]  "
        f"floor {row['floor_us']:.1f} ({row['floor_by']}, {100 * row['share_of_floor']:.0f} %)  {rate:.0f} GFLOP/s  "
        f"{row['gbs']:.1f} GB/s  {against}  load {row['load']:.1f}"
    )


def save(kind: str, rows: list[dict]) -> pathlib.Path:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{kind}.json"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps({"machine": machine(), "when": time.strftime("%Y-%m-%d %H:%M"), "rows": rows}, indent=1) + "\n")
    fresh.replace(path)  # a run that is stopped leaves the last complete file
    return path


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few shapes, about two minutes")
    parser.add_argument("--only", nargs="+", choices=BENCHES, help="these ops; the others' rows stay as they were")
    parser.add_argument("--docs", action="store_true", help="only write docs/performance.md from the JSON")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, timed by the CPU time it got: for a shared machine")
    args = parser.parse_args(argv)
    if args.cpu_time:
        torch.set_num_threads(1)
        timing.clock = "cpu"
    kind = "quick" if args.quick else "full"
    if not args.docs:
        path = FOLDER / f"{kind}.json"
        chosen = args.only or BENCHES
        rows = json.loads(path.read_text())["rows"] if args.only and path.exists() else []
        rows = [row for row in rows if row["op"] not in chosen]
        try:
            for op in chosen:
                for case in importlib.import_module(f"bench.bench_{op}").cases(args.quick):
                    rows.append(run(op, case, 0.6 if args.quick else 2.0))
                    print(line(rows[-1]), flush=True)
        except KeyboardInterrupt:
            print("stopped: what was measured so far is kept")
        rows.sort(key=lambda row: BENCHES.index(row["op"]))
        print(f"wrote {save(kind, rows)}")
    from . import document

    document.write(FOLDER, DOCS)
    print(f"wrote {DOCS}")


if __name__ == "__main__":
    main()
