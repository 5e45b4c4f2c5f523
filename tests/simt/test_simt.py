"""The SIMT shim itself: collectives by definition, rules that it is strict in, and faults that a sanitizer must find in device code."""

import pathlib
import subprocess

import pytest

HERE = pathlib.Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
SANITIZERS = {"none": ([], []), "thread": (["-fsanitize=thread"], ["-DSIMT_THREAD_SANITIZER"]),
              "address": (["-fsanitize=address"], ["-DSIMT_ADDRESS_SANITIZER"])}  # fmt: skip
SOUND = ("mma", "warp", "barrier", "copies", "strict", "ordered", "inside")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Builds and runs self.cpp: ``program(sanitizer, name)`` is the finished process."""
    folder, built = tmp_path_factory.mktemp("simt"), {}

    def compiled(sanitizer):
        if sanitizer not in built:
            seen, told = SANITIZERS[sanitizer]
            runtime, path = folder / f"simt_{sanitizer}.o", folder / f"self_{sanitizer}"
            sources = [str(HERE / "self.cpp"), str(HERE / "copies.cpp")]
            subprocess.run(["g++", *FLAGS, *told, "-c", str(HERE / "simt.cpp"), "-o", str(runtime)], check=True)
            subprocess.run(["g++", *FLAGS, *seen, f"-I{HERE}", *sources, str(runtime), "-o", str(path)], check=True)
            built[sanitizer] = path
        return built[sanitizer]

    return lambda sanitizer, name: subprocess.run([str(compiled(sanitizer)), name], capture_output=True, text=True, timeout=60)


# "strict" leaves fibers behind in the middle of their work, which a sanitizer may not like.
@pytest.mark.parametrize("name, sanitizer", [(n, s) for n in SOUND for s in SANITIZERS if n != "strict" or s == "none"])
def test_sound(name, sanitizer, program):
    done = program(sanitizer, name)
    assert done.returncode == 0 and f"{name} done" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "data race" not in done.stderr and "ERROR" not in done.stderr


@pytest.mark.parametrize("name", ["race", "race_of_blocks"])
def test_planted_race_is_found(name, program):
    done = program("thread", name)
    assert done.returncode != 0 and "ThreadSanitizer: data race" in done.stderr


@pytest.mark.parametrize("name", ["outside_shared", "outside_global"])
def test_planted_write_out_of_bounds_is_found(name, program):
    done = program("address", name)
    assert done.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in done.stderr
