"""The choice of a backend: what is picked, what an override does, and that nothing falls back in silence."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import carryover_kernels
from carryover_kernels import _native, backend, ops

ROOT = pathlib.Path(__file__).resolve().parent.parent


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run ``code`` in a fresh interpreter that has this checkout on its path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CARRYOVER_", "TRITON_"))}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=kept | environment, capture_output=True, text=True)


def last_line(done: subprocess.CompletedProcess) -> str:
    return done.stderr.strip().splitlines()[-1]


def clear(slots: int = 4) -> list[int]:
    """Run the smallest op."""
    lens = torch.arange(1, slots + 1, dtype=torch.int32)
    ops.clear_carry(torch.tensor([1], dtype=torch.int32), lens)
    return lens.tolist()


CLEAR = """
import torch, carryover_kernels as ck
lens = torch.tensor([1, 2], dtype=torch.int32)
ck.clear_carry(torch.tensor([0], dtype=torch.int32), lens)
print(lens.tolist())
"""


def test_import_is_light():
    """Importing the package imports nothing heavy; using an op imports torch, but neither Triton nor Transformers."""
    done = python(
        "import json, sys\n"
        "heavy = ('torch', 'triton', 'transformers', 'numpy')\n"
        "loaded = lambda: [name for name in heavy if name in sys.modules]\n"
        "import carryover_kernels\n"
        "seen = [loaded()]\n"
        "carryover_kernels.block_attention\n"
        "seen.append(loaded() + [name for name in sys.modules if name.startswith('carryover_kernels.triton')])\n"
        "import torch\n"
        "print(json.dumps([*seen, torch.cuda.is_initialized()]))"
    )
    assert done.returncode == 0, done.stderr
    first, second, cuda = json.loads(done.stdout)
    assert first == []
    assert "torch" in second and not {"triton", "transformers"} & set(second) and len(second) <= 2
    assert cuda is False


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'carryover_kernels' has no attribute 'no_such_op'"):
        carryover_kernels.no_such_op  # noqa: B018
    assert set(ops.__all__) < set(dir(carryover_kernels))


def test_use_backend_in_a_with_block_and_as_a_call():
    before = backend.current()
    try:
        with carryover_kernels.use_backend("cpu"):
            assert backend.current() == "cpu" and clear() == [1, 0, 3, 4]
            with carryover_kernels.use_backend("auto"):
                assert backend.current() == "auto" and clear() == [1, 0, 3, 4]
            assert backend.current() == "cpu"
        assert backend.current() == before
        carryover_kernels.use_backend("cpu")
        assert backend.current() == "cpu" and clear() == [1, 0, 3, 4]
    finally:
        carryover_kernels.use_backend(before)
    assert backend.current() == before


def test_an_exception_inside_the_block_takes_the_choice_back():
    before = backend.current()
    with pytest.raises(KeyError), carryover_kernels.use_backend("cpu"):
        raise KeyError
    assert backend.current() == before


@pytest.mark.parametrize(
    "name, sentence", [("cuda", "'cuda' cannot run"), ("opencl", "backend is 'opencl', must be one of auto, cpu, triton, cuda")]
)
def test_a_refused_choice_changes_nothing(name, sentence):
    if name == "cuda" and backend.reason("cuda") is None:
        pytest.skip("needs a machine without an NVIDIA GPU")
    before = backend.current()
    with pytest.raises(RuntimeError, match=f"^use_backend: .*{sentence}"):
        carryover_kernels.use_backend(name)
    assert backend.current() == before and clear() == [1, 0, 3, 4]


def test_triton_runs_in_the_interpreter_and_hands_back():
    """The launchers take over CPU tensors under TRITON_INTERPRET=1, and the native library is back afterwards."""
    done = python(
        "import sys, torch, carryover_kernels as ck\n"
        "def clear():\n"
        "    lens = torch.tensor([1, 2], dtype=torch.int32)\n"
        "    ck.clear_carry(torch.tensor([0], dtype=torch.int32), lens)\n"
        "    return lens.tolist()\n"
        "assert clear() == [0, 2] and 'triton' not in sys.modules\n"
        "for i in range(2):\n"
        "    with ck.use_backend('triton'):\n"
        "        assert clear() == [0, 2] and 'carryover_kernels.triton.clear_carry' in sys.modules\n"
        "    module = sys.modules['carryover_kernels.triton.clear_carry']\n"
        "    launch, module.clear_carry_triton = module.clear_carry_triton, None\n"
        "    assert clear() == [0, 2]\n"
        "    module.clear_carry_triton = launch\n"
        "print('done')",
        TRITON_INTERPRET="1",
    )
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("cpu", None),
        ("", None),
        ("opencl", "backend is 'opencl', must be one of auto, cpu, triton, cuda"),
        ("cuda", "libcarryover_kernels_cuda.so is not built"),
    ],
)
def test_environment_chooses(name, wanted):
    done = python(CLEAR, CARRYOVER_BACKEND=name)
    if wanted is None:
        assert done.returncode == 0 and done.stdout.strip() == "[0, 2]", done.stderr
    else:
        assert done.returncode != 0 and wanted in last_line(done)


def test_missing_library_gives_the_reason(tmp_path):
    """Without the native library the package imports and traces; running an op says what to do, in one sentence."""
    done = python(f"import pathlib\nfrom carryover_kernels import _native\n_native.FOLDER = pathlib.Path({str(tmp_path)!r})\n{CLEAR}")
    assert done.returncode != 0
    assert last_line(done) == (
        "RuntimeError: clear_carry: backend 'cpu' cannot run: libcarryover_kernels_cpu.so is not built: "
        "run 'make native' in a checkout, or reinstall the package with a C++ compiler"
    )


def test_broken_library_gives_the_reason(tmp_path):
    (tmp_path / "libcarryover_kernels_cpu.so").write_text("no library")
    done = python(f"import pathlib\nfrom carryover_kernels import _native\n_native.FOLDER = pathlib.Path({str(tmp_path)!r})\n{CLEAR}")
    assert done.returncode != 0 and "libcarryover_kernels_cpu.so does not load: " in last_line(done)


def test_explain_tells_of_every_op():
    rows = backend.explain()
    assert [row["op"] for row in rows] == list(backend._fakes) and {row["op"] for row in rows} == set(ops.__all__)
    for row in rows:
        assert row["backend cpu"] == "available" and row["cpu"] in ("cpu", "triton")
        assert row["cuda"] in backend.BACKENDS or row["cuda"].startswith("none: ")
    assert _native.load("cpu") is None
