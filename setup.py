"""Builds the native libraries with CMake. Everything else about the package is in pyproject.toml.

``python3 setup.py check_tools`` says in one sentence what is missing on this machine, before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig

OLDEST = {"python": (3, 11), "cmake": (3, 20), "g++": (11, 0)}


def stop(sentence):
    raise SystemExit("carryover_kernels: " + sentence)


def version_of(command: list[str]) -> tuple[int, ...] | None:
    """The first dotted number that ``command --version`` prints, or None where it cannot be run."""
    try:
        text = subprocess.run([*command, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    except OSError:
        return None
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else None


def dotted(version) -> str:
    return ".".join(map(str, version))


def compiler() -> str:
    return os.environ.get("CXX") or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), "g++")


def check_tools():
    """One sentence that says what to install, instead of a page of a failed build."""
    if sys.version_info < OLDEST["python"]:  # old Pythons read this far: no newer syntax above
        was = dotted(sys.version_info[:2])
        stop(f"Python is {was}, must be 3.11 or newer: install python3.11 and name it, as in 'make PYTHON=python3.11'")
    headers = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(headers, "Python.h")):
        stop(f"Python's headers are missing from {headers}, must be there: install them with 'apt install python3-dev'")
    cmake = version_of(["cmake"])
    if cmake is None or cmake < OLDEST["cmake"]:
        was = "missing" if cmake is None else "version " + dotted(cmake)
        stop(f"CMake is {was}, must be 3.20 or newer: install it with 'apt install cmake', 'brew install cmake' or 'pip install cmake'")
    cxx = compiler()
    found = version_of(cxx.split())
    if found is None:
        stop(f"the C++ compiler {cxx} is missing, must be g++ 11 or clang 14 or newer: install it with 'apt install g++' or set CXX")
    if "clang" not in cxx and found < OLDEST["g++"]:
        stop(f"the C++ compiler {cxx} is version {dotted(found)}, must be g++ 11 or newer: install a newer one or set CXX")


if sys.argv[1:] == ["check_tools"]:
    check_tools()
    try:
        import ensurepip  # noqa: F401  (Debian ships it apart, and without it no virtual environment can be made)
    except ImportError:
        stop("Python's venv module is incomplete, must have ensurepip: install it with 'apt install python3-venv'")
    raise SystemExit(0)

from pathlib import Path  # noqa: E402

from setuptools import Distribution, Extension, setup  # noqa: E402
from setuptools.command.build import build  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

ROOT = Path(__file__).resolve().parent


class CleanBuild(build):
    """Starts with an empty folder: setuptools would put every file of an earlier build into the wheel, deleted modules too."""

    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Builds in build/cmake, whoever asks, and installs from there: an in-place build and a wheel share every object file."""

    def run(self):
        check_tools()
        try:
            import torch  # noqa: F401
        except ImportError:
            stop("torch is not importable, must be 2.11 or newer: install it first, then 'pip install --no-build-isolation .'")
        package = (ROOT if self.inplace or self.editable_mode else Path(self.build_lib).resolve()) / "carryover_kernels"
        folder = ROOT / "build" / "cmake"
        cache = folder / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(folder)  # the checkout was moved or copied, and CMake refuses the old cache
        ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        facts = [f"-DCARRYOVER_PYTHON={sys.executable}", f"-DCMAKE_CXX_COMPILER={compiler()}"]
        self._cmake("-S", str(ROOT), "-B", str(folder), *facts, *generator)
        self._cmake("--build", str(folder), "--parallel", os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1))
        self._cmake("--install", str(folder), "--prefix", str(package))

    def _cmake(self, *arguments: str):
        quiet = {"stdout": subprocess.DEVNULL} if arguments[0] == "--install" else {}
        status = subprocess.run(["cmake", *arguments], **quiet).returncode
        if status:
            stop(f"'cmake {arguments[0]}' failed with status {status}: the messages above say why; remove build/cmake if they persist")

    def get_outputs(self):
        return []


class NativeDistribution(Distribution):
    def has_ext_modules(self):  # a wheel of one platform, though setuptools compiles nothing itself
        return True


setup(
    ext_modules=[Extension("carryover_kernels._build", [])],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild},
    distclass=NativeDistribution,
)
