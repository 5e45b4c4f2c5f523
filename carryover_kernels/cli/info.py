"""``carryover info``: versions, what is built, and what each op would run on."""

import importlib.metadata
import os
import platform
import sys

import torch
from rich.table import Table

from .. import __version__, _native, backend
from .show import new_console, say

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def run_info() -> int:
    console = new_console()
    say(console, f"carryover_kernels {__version__}, Python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} CPUs")
    say(console, ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that PyTorch sees"
    say(console, f"GPU: {gpu}")

    built = _native.build_info()
    if built is None:
        say(console, "native module: not built")
    else:
        say(console, f"native module: built with {built.compiler} against torch {built.torch_version}")
        say(console, f"CPU code for: {built.cpu_isas}")
    if _native.load("cpu") is None:
        used, usable = _native.cpu_isa()
        say(console, f"CPU code in use: {used}; this machine could use {', '.join(usable)} (CARRYOVER_CPU_ISA picks one)")
    for name in _native.LIBRARIES:
        say(console, f"{name} library: {_native.load(name) or 'loaded'}")
    rows = backend.explain()
    say(console, f"backend choice: {backend.current()} (CARRYOVER_BACKEND or use_backend changes it)")
    table = Table("op", "on CPU tensors", "on CUDA tensors (not yet run on hardware)")
    reasons: dict[str, str] = {}
    for row in rows:
        table.add_row(row["op"], row["cpu"].split(":")[0], row["cuda"].split(":")[0])
        for name in ("cpu", "triton", "cuda"):
            reason = row.get(f"backend {name}", "available")
            if reason != "available":
                reasons.setdefault(f"{name}: {reason.replace(row['op'], 'an op')}", row["op"])
    console.print(table)
    for reason in reasons:
        say(console, reason)
    return 0 if all(not row["cpu"].startswith("none") for row in rows) else 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(run_info())
