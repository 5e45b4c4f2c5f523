"""Builds the native libraries with CMake. Everything else about the package is in pyproject.toml."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST = {"python": (3, 11), "cmake": (3, 20), "g++": (11,)}


def stop(sentence: str):
    raise SystemExit(f"carryover_kernels: {sentence}")


def version_of(command: list[str]) -> tuple[int, ...] | None:
    """The first dotted number that ``command --version`` prints, or None where it cannot be run."""
    if shutil.which(command[0]) is None:
        return None
    text = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else None


def compiler() -> str:
    return os.environ.get("CXX") or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), "g++")


def check_tools():
    """One sentence that says what to install, instead of a page of a failed build."""
    if sys.version_info < OLDEST["python"]:
        stop("Python is {}.{}, must be 3.11 or newer: install python3.11 and make the virtual environment with it".format(*sys.version_info))
    cmake = version_of(["cmake"])
    if cmake is None or cmake < OLDEST["cmake"]:
        was = "missing" if cmake is None else "version " + ".".join(map(str, cmake))
        stop(f"CMake is {was}, must be 3.20 or newer: install it with 'apt install cmake', 'brew install cmake' or 'pip install cmake'")
    cxx = compiler()
    found = version_of(cxx.split())
    if found is None:
        stop(f"the C++ compiler {cxx} is missing, must be g++ 11 or clang 14 or newer: install it with 'apt install g++' or set CXX")
    if "clang" not in cxx and found < OLDEST["g++"]:
        stop(f"the C++ compiler {cxx} is version {found[0]}, must be g++ 11 or newer: install a newer one or set CXX")
    try:
        import torch  # noqa: F401
    except ImportError:
        stop("torch is not importable by the build, must be 2.11 or newer: install torch first, then use 'pip install --no-build-isolation .'")


class CMakeBuild(build_ext):
    """Runs CMake once and puts the libraries beside the package's Python files."""

    def run(self):
        check_tools()
        package = ROOT if self.inplace or self.editable_mode else Path(self.build_lib).resolve()
        build = ROOT / "build" / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DCARRYOVER_PYTHON={sys.executable}"]
        configure += [f"-DCARRYOVER_OUTPUT={package / 'carryover_kernels'}", f"-DCMAKE_CXX_COMPILER={compiler()}"]
        ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
        if ninja:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        self._cmake(configure, build)
        self._cmake(["cmake", "--build", str(build), "--parallel", os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))], build)

    def _cmake(self, command, build):
        done = subprocess.run(command)
        if done.returncode and (build / "CMakeCache.txt").exists():
            stop(f"'{' '.join(command[:2])}' failed with status {done.returncode}: the messages above say why; remove {build} to start afresh")
        if done.returncode:
            stop(f"'{' '.join(command[:2])}' failed with status {done.returncode}: the messages above say why")

    def get_outputs(self):
        return []


class NativeDistribution(Distribution):
    def has_ext_modules(self):  # a wheel of one platform, though setuptools compiles nothing itself
        return True


setup(ext_modules=[Extension("carryover_kernels._build", [])], cmdclass={"build_ext": CMakeBuild}, distclass=NativeDistribution)
