"""Loads the compiled libraries, and keeps the reason where one is absent."""

import ctypes
import importlib
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
LIBRARIES = {"cpu": "libcarryover_kernels_cpu.so", "cuda": "libcarryover_kernels_cuda.so"}
_reasons: dict[str, str | None] = {}


def load(backend: str) -> str | None:
    """Load the library of ``backend`` ('cpu' or 'cuda') once; None when it is loaded, else the reason why it is not."""
    if backend not in _reasons:
        path = FOLDER / LIBRARIES[backend]
        if not path.exists():
            remedy = {
                "cpu": "run 'make native' in a checkout, or reinstall the package with a C++ compiler",
                "cuda": "this version has no CUDA C++",
            }
            _reasons[backend] = f"{path.name} is not built: {remedy[backend]}"
        else:
            try:
                torch.ops.load_library(str(path))
                _reasons[backend] = None
            except OSError as error:
                _reasons[backend] = f"{path.name} does not load: {error}"
    return _reasons[backend]


def build_info():
    """The pybind11 module with facts of the build and the split planner, or None where it is not built."""
    try:
        return importlib.import_module("carryover_kernels._build")
    except ImportError:
        return None


def cpu_isa() -> tuple[str, list[str]]:
    """The instruction set that the CPU library uses (or the sentence why none), and those that it could use here, slowest first."""
    library = ctypes.CDLL(str(FOLDER / LIBRARIES["cpu"]))
    library.carryover_cpu_isa.restype = library.carryover_cpu_isas.restype = ctypes.c_char_p
    return library.carryover_cpu_isa().decode(), library.carryover_cpu_isas().decode().split(", ")


def cmake_prefix() -> str:
    """The folder to add to CMAKE_PREFIX_PATH for find_package(carryover_kernels)."""
    return str(FOLDER)
