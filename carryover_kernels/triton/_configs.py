"""Tile sizes by architecture and shape class, from the checked-in table configs.json. Nothing is tuned at serving time."""

import contextlib
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import torch

from .. import _env, _native

TABLE = Path(__file__).with_name("configs.json")


@functools.cache
def table() -> dict:
    return json.loads(TABLE.read_text())


_assumed: int | None = None  # an architecture that is compiled for without being there
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}  # A100, H100 and H200, B200


@contextlib.contextmanager
def assumed(arch: int):
    """Inside, tiles and splits are those of architecture ``arch`` (80, 90, 100), whatever this machine has."""
    global _assumed
    before, _assumed = _assumed, arch
    try:
        yield
    finally:
        _assumed = before


def architecture() -> str:
    """'sm_90' and the like for this GPU; 'interpreter', whose tiles are small so that small tests cross their edges. Else the default's rows serve."""
    if _assumed is not None:
        return f"sm_{_assumed}"
    return _present()


@functools.cache
def _present() -> str:
    if _env.triton_interprets():
        return "interpreter"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"
    return "default"


def config(kernel: str, arch: str | None = None, **shape) -> SimpleNamespace:
    """The first row of ``kernel`` whose bounds hold for ``shape``; a bound is the largest value it serves, absent = any.

    Rows are searched for the architecture, then for 'default'.
    """
    values = {name: value for name, value in shape.items() if name != "dtype"}
    bits = 32 if shape.get("dtype") == torch.float32 else 16
    for name in (arch or architecture(), "default"):
        for row in table()[kernel].get(name, ()):
            if row.get("bits", bits) == bits and all(values[key] <= most for key, most in row.get("at_most", {}).items()):
                return SimpleNamespace(**row["tile"])
    raise LookupError(f"{kernel}: no row of configs.json serves {shape}, must have a default row without bounds")


def workers(device: torch.device) -> int:
    """Programs that run at once; a round number under the interpreter, so that splits are tried there too."""
    if _assumed is not None:
        return 2 * MULTIPROCESSORS.get(_assumed, 132)
    return 2 * _multiprocessors(device) if device.type == "cuda" else 8


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_splits(tasks: int, length: int, device: torch.device, tile: int) -> int:
    """In how many parts each of ``tasks`` cuts its ``length`` keys or ids: the C++ planner, or 1 where it is not built.

    From shapes alone: a captured graph keeps its count when lengths change.
    """
    build = _native.build_info()
    return build.plan_splits(tasks, length, workers(device), tile) if build is not None else 1
