"""How things are timed: variants interleaved call by call in one process, so that a busy machine slows all of them alike."""

import os
import time

import torch


CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
clock = "wall"  # "cpu": time the calling thread ran, for one-thread runs on a machine that others use too; report.py sets it


def quartiles(seconds: list[float]) -> dict:
    """Median and quartiles in microseconds."""
    times = torch.tensor(seconds, dtype=torch.float64) * 1e6
    low, middle, high = torch.quantile(times, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return {"median": middle, "q1": low, "q3": high, "best": float(times.min()), "calls": len(seconds)}


def interleaved(variants: dict, budget: float = 1.0, least: int = 5, most: int = 400) -> dict:
    """Call every variant once a turn until ``budget`` seconds are spent. Gives {name: quartiles}."""
    for call in variants.values():  # allocations, lazy initialisation
        call()
        call()
    now = CLOCKS[clock]
    spent = {name: [] for name in variants}
    start = time.perf_counter()
    for turn in range(most):
        for name, call in variants.items():
            before = now()
            call()
            spent[name].append(now() - before)
        if turn + 1 >= least and time.perf_counter() - start > budget:
            break
    return {name: quartiles(seconds) for name, seconds in spent.items()}


def load() -> float:
    """Runnable processes of the last minute: above the number of cores, times are of a shared machine."""
    return os.getloadavg()[0]
