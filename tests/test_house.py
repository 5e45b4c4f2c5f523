"""The house's own rules: who imports whom, one name on every floor, signatures that match schemas, what the repository may hold."""

import ast
import doctest
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import carryover_kernels
from carryover_kernels import ops

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "carryover_kernels"
OPS = set(ops.__all__)

# Each floor may import those with a smaller number. Two on one storey do not know each other.
FLOORS = {
    "cli": 6, "training": 5, "integrations": 5, "decoding": 4, "drafter": 3, "ops": 2, "backend": 1, "triton": 1,
    "_native": 0, "_env": 0, "_build": 0, "__version__": 0,
}  # fmt: skip

# Weights may be large files; all that the package ships stay together under 24 MB, so that a wheel stays light.
WEIGHTS, LARGEST_FILE, ALL_WEIGHTS = ".safetensors", 4 * 2**20, 24 * 2**20

# The one import upwards, inside functions alone: whoever chooses a backend makes sure that the ops have attached themselves to it.
UPWARDS = {("carryover_kernels/backend.py", "carryover_kernels.ops")}

KNOBS_OF_OTHERS = {"TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION", "CARRYOVER_SEED"}


def tracked() -> list[pathlib.Path]:
    """The repository's files: git's list, or all but what builds and runs leave, where this is no checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    left = {".venv", "build", "dist", "__pycache__", ".pytest_cache", ".hypothesis", ".benchmarks", ".git"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not left & set(path.parts) and path.suffix != ".so"]


def texts():
    """(path, text) of every tracked text file."""
    for path in tracked():
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            continue


def imports(path: pathlib.Path) -> set[str]:
    """Full dotted names that a module imports, at its top or inside functions; a name from a package counts as its submodule."""
    module = path.relative_to(ROOT).with_suffix("").parts
    package = module[:-1]  # of a relative import: the folder, for __init__ as for others
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def floor_of(name: str) -> str | None:
    """The floor that a full dotted name of the package lies on; public names count as their home."""
    parts = name.split(".")
    if parts[0] != "carryover_kernels" or len(parts) < 2:
        return None
    return carryover_kernels._HOME.get(parts[1], parts[1])


def test_floors_are_all_that_there_is():
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} - {"__init__"}
    assert there <= set(FLOORS), f"without a floor: {there - set(FLOORS)}"


def test_imports_go_down():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if mine == "__init__":
            continue
        for name in imports(path):
            other = floor_of(name)
            if other is not None and other != mine and not FLOORS.get(other, 99) < FLOORS[mine]:
                wrong.append((str(path.relative_to(ROOT)), name))
    wrong = [f"{path} imports {name}" for path, name in wrong if (path, name) not in UPWARDS]
    assert not wrong, "\n".join(wrong)


def test_an_import_that_goes_up_is_seen():
    """The test above can fail: an op that imported the drafter is found out."""
    names = {floor_of(name) for name in ("carryover_kernels.drafter.model", "carryover_kernels.generate", "carryover_kernels")}
    assert names == {"drafter", "decoding", None} and FLOORS["drafter"] > FLOORS["ops"]


def test_package_never_imports_reference_tests_or_bench():
    outside = {"python_ref", "tests", "bench", "conftest", "cases"}
    wrong = [f"{p.relative_to(ROOT)}: {n}" for p in PACKAGE.rglob("*.py") for n in imports(p) if n.split(".")[0] in outside]
    assert not wrong, "\n".join(wrong)


def test_reference_imports_torch_alone():
    allowed = {"torch", "python_ref"} | set(sys.stdlib_module_names)
    files = (ROOT / "python_ref").glob("*.py")
    wrong = [f"{p.relative_to(ROOT)}: {n}" for p in files for n in imports(p) if n.split(".")[0] not in allowed]
    assert not wrong, "\n".join(wrong)


def test_one_name_on_every_floor():
    assert len(OPS) == 8
    floors = {
        "carryover_kernels/ops": "{}.py", "carryover_kernels/triton": "{}.py", "python_ref": "{}.py", "csrc/cpu": "{}.cpp",
        "tests": "test_{}.py", "bench": "bench_{}.py",
    }  # fmt: skip
    wanted = [f"{folder}/{name.format(op)}" for folder, name in floors.items() for op in sorted(OPS)]
    missing = [path for path in wanted if not (ROOT / path).exists()]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("op", sorted(OPS))
def test_signature_is_schema(op):
    schema = getattr(torch.ops.carryover_kernels, op).default._schema
    parameters = inspect.signature(getattr(ops, op)).parameters.values()
    wanted = [(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in schema.arguments]
    assert [(p.name, p.default) for p in parameters] == wanted


@pytest.mark.parametrize("op", sorted(OPS))
def test_cpp_header_is_schema(op):
    """csrc/include/carryover_kernels/ops.h declares each op with the schema's names, order, types and defaults."""
    text = (ROOT / "csrc/include/carryover_kernels/ops.h").read_text()
    found = re.search(rf"CARRYOVER_API (\S.*?) {op}\((.*?)\);", text, re.S)
    assert found, f"ops.h does not declare {op}"
    types = {
        "Tensor": "Tensor", "Optional[Tensor]": "OptionalTensor", "List[Tensor]": "std::vector<Tensor>", "int": "int64_t",
        "float": "double", "Optional[float]": "std::optional<double>", "bool": "bool", "str": "std::string",
    }  # fmt: skip
    literals = {"std::nullopt": None, "true": True, "false": False}
    declared = []
    for parameter in re.sub(r"\s+", " ", found[2]).strip().split(", "):
        declaration, _, default = parameter.partition(" = ")
        kind, name = declaration.rsplit(" ", 1)
        value = literals[default] if default in literals else ast.literal_eval(default) if default else "none"
        declared.append((kind, name, value))
    schema = getattr(torch.ops.carryover_kernels, op).default._schema
    wanted = [(types[str(a.type)], a.name, a.default_value if a.has_default_value() else "none") for a in schema.arguments]
    assert declared == wanted


def literal_tolerances(source: str) -> list[int]:
    """Lines that pass a number as a tolerance, or compare floats by a default one.

    Up to 1e-12 is let through: between two float64 definitions that is equality, with sums in another order.
    """

    def typed(keyword) -> bool:
        return keyword.arg in ("atol", "rtol", "abs", "rel") and isinstance(keyword.value, ast.Constant)

    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        numbers = [keyword.value.value for keyword in node.keywords if typed(keyword)]
        by_default = name in ("allclose", "isclose", "approx", "assert_close") and not numbers
        if by_default or any(number > 1e-12 for number in numbers):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("op", sorted(OPS))
def test_no_literal_tolerance(op):
    found = literal_tolerances((ROOT / "tests" / f"test_{op}.py").read_text())
    assert not found, f"tests/test_{op}.py has literal tolerances in lines {found}: the rule is compare.py's"


def test_literal_tolerances_are_found():
    source = "f(x, atol=1e-3)\ntorch.allclose(a, b)\nassert_close(a, b, atol=0, rtol=1e-13)\nassert_close(a, b)"
    assert literal_tolerances(source) == [1, 2, 4]


def knobs() -> set[str]:
    """Variables that the package reads, from where it may read them."""
    python = re.findall(r'environ\.get\("(\w+)"', (PACKAGE / "_env.py").read_text())
    return set(python) | set(re.findall(r'getenv\("(\w+)"', (ROOT / "csrc/cpu/isa.cpp").read_text()))


def test_environment_is_read_in_one_module():
    allowed = {PACKAGE / "_env.py", ROOT / "csrc/cpu/isa.cpp"}
    files = [*PACKAGE.rglob("*.py"), *(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    reads = re.compile(r"os\.environ\b|\bgetenv\(")
    wrong = [str(path.relative_to(ROOT)) for path in files if path not in allowed and reads.search(path.read_text())]
    assert not wrong, f"read the environment, which only _env.py may: {wrong}"


def test_knobs_are_few_and_documented():
    ours = {name for name in knobs() if name.startswith("CARRYOVER_")}
    assert {"CARRYOVER_CHECK", "CARRYOVER_BACKEND", "CARRYOVER_CPU_ISA"} <= ours and len(ours) < 10
    table = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/ops.md").read_text(), re.M))
    assert knobs() | {"CARRYOVER_SEED"} == table & (knobs() | KNOBS_OF_OTHERS) == table - {"TRITON_DEFAULT_FP_FUSION"}


def test_no_unknown_knob_is_promised():
    """A variable that a text or a script names is one that something reads."""
    build = {"CARRYOVER_PYTHON", "CARRYOVER_CUDA_ARCHS"}  # CMake's own
    for path, text in texts():
        if path.suffix in (".py", ".md") or path.name == "Makefile":
            unknown = set(re.findall(r"\bCARRYOVER_[A-Z_]+\b", text)) - knobs() - KNOBS_OF_OTHERS - build - {"CARRYOVER_API"}
            assert not unknown, f"{path.relative_to(ROOT)} names {unknown}"


def test_no_path_of_one_machine():
    private = re.compile("|".join("/" + folder + "/" for folder in ("root", "work", r"home/\w+", "opt/wheels", "opt/pypi", "mnt")))
    for path, text in texts():
        found = private.search(text)
        assert not found, f"{path.relative_to(ROOT)} has a path of one machine: {text[found.start() : found.start() + 40]!r}"


def test_files_are_small():
    large = [f"{p.relative_to(ROOT)} {p.stat().st_size}" for p in tracked() if p.stat().st_size > LARGEST_FILE and p.suffix != WEIGHTS]
    assert not large, f"over 4 MB: {large}"
    weights = sum(path.stat().st_size for path in tracked() if path.suffix == WEIGHTS and PACKAGE in path.parents)
    assert weights <= ALL_WEIGHTS, f"embedded weights take {weights} bytes, must be at most {ALL_WEIGHTS}"


def examples():
    yield from (PACKAGE / "ops").glob("[a-z]*.py")
    yield ROOT / "docs" / "ops.md"


@pytest.mark.parametrize("path", list(examples()), ids=lambda path: path.name)
def test_examples_in_docs_are_true(path):
    if path.suffix == ".md":
        failed, tried = doctest.testfile(str(path), module_relative=False)
        assert tried > 20
    else:
        failed, tried = doctest.testmod(importlib.import_module(f"carryover_kernels.ops.{path.stem}"))
    assert failed == 0
