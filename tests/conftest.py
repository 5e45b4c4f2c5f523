"""Options and fixtures of every test: the backend under test, a fresh seed each run, and outputs that start poisoned.

``--backend cpu`` (default) runs the native library, ``triton`` its kernels (in the interpreter where there is no GPU), ``cuda`` the CUDA
library on a GPU, ``simt`` the same kernels on the CPU (tests/simt; ops that csrc/cuda lacks stay with ``cpu``), ``reference`` python_ref registered as if it were a backend: a check of the tests themselves.
"""

import os
import random
import zlib

import pytest

BACKENDS = ("cpu", "triton", "cuda", "simt", "reference")
SEED = int(os.environ.get("CARRYOVER_SEED") or random.SystemRandom().randrange(2**31))


def pytest_addoption(parser):
    parser.addoption("--backend", choices=BACKENDS, default="cpu", help="backend that the op tests run")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.getoption("--backend") == "triton":
        import torch

        if not torch.cuda.is_available():  # must be set before triton is imported
            os.environ["TRITON_INTERPRET"] = "1"
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    import hypothesis

    hypothesis.settings.register_profile("carryover", deadline=None, database=None, max_examples=25)
    hypothesis.settings.load_profile("carryover")


def pytest_report_header(config):
    return f"carryover: backend {config.getoption('--backend')}, seed {SEED} (replay: CARRYOVER_SEED={SEED})"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("seed", f"CARRYOVER_SEED={SEED} replays this run"))
    return report


@pytest.fixture
def seed(request) -> int:
    """This test's own seed: the same whether the test runs alone or among others."""
    return (SEED + zlib.crc32(request.node.nodeid.encode())) % 2**31


@pytest.fixture
def rng(seed):
    import torch

    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def backend(request):
    """Name of the backend; it is active until the session ends."""
    name = request.config.getoption("--backend")
    if name == "reference":
        import reference_backend

        with reference_backend.registered():
            yield name
        return
    import torch

    import carryover_kernels

    if name == "simt":
        from simt import backend as simt

        simt.load()
        yield name
        return
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if name == "cpu":
        yield name  # what the dispatcher picks for CPU tensors
        return
    with carryover_kernels.use_backend(name):
        yield name


@pytest.fixture(scope="session")
def device(backend) -> str:
    import torch

    return "cuda" if backend in ("triton", "cuda") and torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned_outputs():
    """Every tensor that an op allocates starts as NaN or the largest integer: an element it forgets to write is seen."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
