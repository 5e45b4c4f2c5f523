"""Tile sizes by architecture and shape class, from the checked-in table configs.json. Nothing is tuned at serving time."""

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


@functools.cache
def architecture() -> str:
    """'sm_90' and the like for this GPU; 'interpreter', whose tiles are small so that small tests cross their edges. Else the default's rows serve."""
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


@functools.cache
def workers(device: torch.device) -> int:
    """Programs that run at once; a round number under the interpreter, so that splits are tried there too."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def plan_splits(tasks: int, length: int, device: torch.device, tile: int) -> int:
    """In how many parts each of ``tasks`` cuts its ``length`` keys or ids: the C++ planner, or 1 where it is not built.

    From shapes alone: a captured graph keeps its count when lengths change.
    """
    build = _native.build_info()
    return build.plan_splits(tasks, length, workers(device), tile) if build is not None else 1
