"""csrc/cuda compiled by g++ over the shim, as a library that takes the CPU's tensors: one more backend for the op tests."""

import ctypes
import pathlib
import subprocess
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils import cpp_extension

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SHIM = ROOT / "tests" / "simt"
OPS = sorted(path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
FLAGS = ["-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def newest(*folders) -> float:
    return max(path.stat().st_mtime for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())


def build(folder: pathlib.Path, seen=(), told=()) -> pathlib.Path:
    """The library in ``folder``; ``seen``: flags of instrumented files, ``told``: of the runtime, which is none."""
    library = folder / "libcarryover_kernels_simt.so"
    if library.exists() and library.stat().st_mtime > newest("csrc/common", "csrc/cuda", "tests/simt"):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{SHIM}", "-isystem", cpp_extension.include_paths()[0], "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    sources = {ROOT / "csrc" / "cuda" / f"{op}.cu": list(seen) for op in OPS}
    sources |= {ROOT / "csrc" / "common" / "split_planner.cpp": [], SHIM / "copies.cpp": list(seen), SHIM / "simt.cpp": list(told)}

    def compiled(source):
        to = folder / f"{source.stem}.o"
        command = ["g++", *FLAGS, *sources[source], *includes, "-x", "c++", "-c", str(source), "-o", str(to)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return str(to)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    torch_at = cpp_extension.library_paths()[0]
    link = ["g++", "-shared", *seen, *objects, f"-L{torch_at}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_at}", "-o", str(library)]
    subprocess.run(link, check=True)
    return library


def load(library: pathlib.Path | None = None):
    """Take the ops that csrc/cuda has over from the CPU library, until the process ends."""
    from carryover_kernels import ops  # registers the CPU library first

    library = library or build(ROOT / "build" / "simt")
    torch.ops.load_library(str(library))
    launches = ctypes.CDLL(str(library)).simt_launches
    before = launches()
    ops.clear_carry(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert launches() == before + 1, "the shim's library did not take over"
