"""The build: one sentence for a missing tool, instruction sets chosen by name, and what the library says of itself."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from carryover_kernels import _native

ROOT = pathlib.Path(__file__).resolve().parent.parent
ISAS = _native.cpu_isa()[1]


def program(folder: pathlib.Path, name: str, version: str):
    """A stand-in that prints ``version``."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)


def run(command, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True)


def check_tools(path: pathlib.Path, **environment):
    return run([sys.executable, "setup.py", "check_tools"], PATH=str(path), **environment)


GOOD = {"cmake": "cmake version 3.20.1", "g++": "g++ (GCC) 11.2.0"}


@pytest.mark.parametrize(
    "tools, sentence",
    [
        ({}, "CMake is missing, must be 3.20 or newer: install it with 'apt install cmake', 'brew install cmake' or 'pip install cmake'"),
        ({"cmake": "cmake version 3.18.4"}, "CMake is version 3.18, must be 3.20 or newer: "),
        ({"cmake": GOOD["cmake"]}, "the C++ compiler g++ is missing, must be g++ 11 or clang 14 or newer: install it with 'apt install g++'"),
        ({**GOOD, "g++": "g++ (Debian) 10.2.1 20210110"}, "the C++ compiler g++ is version 10.2, must be g++ 11 or newer: "),
    ],
    ids=["no_cmake", "old_cmake", "no_compiler", "old_compiler"],
)
def test_missing_or_old_tool_is_one_sentence(tmp_path, tools, sentence):
    for name, version in tools.items():
        program(tmp_path, name, version)
    done = check_tools(tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"carryover_kernels: {sentence}") and len(done.stderr.strip().splitlines()) == 1


def test_good_tools_pass(tmp_path):
    for name, version in GOOD.items():
        program(tmp_path, name, version)
    assert (check_tools(tmp_path).returncode, check_tools(tmp_path, CXX="no-such-compiler").returncode) == (0, 1)


def test_old_python_is_one_sentence():
    """setup.py must read under an old Python up to its check, so the version is replaced and the file run as it is."""
    code = "import sys; sys.version_info = (3, 9, 2, 'final', 0); sys.argv = ['setup.py', 'check_tools']; exec(open('setup.py').read())"
    done = run([sys.executable, "-c", code])
    assert done.returncode == 1
    assert done.stderr.startswith("carryover_kernels: Python is 3.9, must be 3.11 or newer: install python3.11")
    assert len(done.stderr.strip().splitlines()) == 1


def test_make_without_python_is_one_sentence(tmp_path):
    done = run(["make", "--silent", "test", "PYTHON=no-such-python", f"VENV={tmp_path}/venv"])
    assert done.returncode == 2 and not (tmp_path / "venv").exists()
    assert done.stderr.startswith("carryover_kernels: Python (no-such-python) is missing, must be 3.11 or newer: ")


def test_make_without_compiler_installs_nothing(tmp_path):
    """The tools are looked at before a virtual environment is made."""
    for name in ("make", "sh", "sed", "uname", "find", "touch"):
        found = next(folder for folder in os.environ["PATH"].split(":") if (pathlib.Path(folder) / name).exists())
        (tmp_path / name).symlink_to(pathlib.Path(found) / name)
    program(tmp_path, "cmake", GOOD["cmake"])
    done = run(["make", "--silent", "native", f"PYTHON={sys.executable}", f"VENV={tmp_path}/venv"], PATH=str(tmp_path))
    assert done.returncode == 2 and not (tmp_path / "venv").exists()
    assert done.stderr.startswith("carryover_kernels: the C++ compiler g++ is missing")


@pytest.mark.parametrize("isa", ISAS[:-1])  # the last is the default, which every other test runs
def test_forced_instruction_set_runs_right(isa):
    """The op tests' named cases of the four kernels that are compiled once per instruction set, each under every one this machine has."""
    tests = [f"tests/test_{op}.py" for op in ("block_attention", "markov_sample", "project_states", "qk_norm_rope")]
    used = run([sys.executable, "-c", "from carryover_kernels import _native; print(_native.cpu_isa()[0])"], CARRYOVER_CPU_ISA=isa)
    assert used.stdout.strip() == isa, used.stderr
    pytest_run = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", "named_case and (f32 or bf16)", *tests]
    done = run(pytest_run, CARRYOVER_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout[-4000:]


def test_unknown_instruction_set_is_refused():
    code = (
        "import torch, carryover_kernels as ck\n"
        "from carryover_kernels import _native\n"
        "print(_native.cpu_isa()[0])\n"
        "ck.qk_norm_rope(torch.ones(3, 32), torch.arange(3), torch.ones(16, 8), None, None, 2, 1)"
    )
    done = run([sys.executable, "-c", code], CARRYOVER_CPU_ISA="mmx")
    sentence = f"CARRYOVER_CPU_ISA is 'mmx', must be one of those this machine has: {', '.join(ISAS)}"
    assert done.returncode != 0 and sentence in done.stdout and sentence in done.stderr


def test_default_is_the_fastest_set():
    assert ISAS[0] == "portable"
    if not os.environ.get("CARRYOVER_CPU_ISA"):
        assert _native.cpu_isa()[0] == ISAS[-1]


def test_build_info():
    built = _native.build_info()
    assert built is not None
    assert built.torch_version.split("+")[0] == torch.__version__.split("+")[0]
    assert built.compiler.split()[0] in ("GNU", "Clang", "AppleClang") and set(ISAS) <= set(built.cpu_isas.split())
    # 4 units of 1000 keys for 8 workers in tiles of 16: at least two parts each, and never more parts than tiles.
    assert 2 <= built.plan_splits(4, 1000, 8, 16) <= 63 and built.plan_splits(1, 16, 8, 16) == 1
