"""Which implementation of an op runs: by device, unless ``CARRYOVER_BACKEND`` or ``use_backend`` says otherwise.

The C++ libraries register themselves with PyTorch's dispatcher when they are loaded; Triton launchers are registered here. A choice
that cannot be honoured raises the reason: there is no silent fallback.
"""

import importlib
import importlib.util
import warnings

import torch

from . import _env, _native

BACKENDS = ("cpu", "triton", "cuda")
_fakes: dict = {}  # op -> its fake, which checks the arguments and allocates the outputs
_override = None  # (backend, Library) of the choice in force


def reason(backend: str, op: str | None = None) -> str | None:
    """Why ``backend`` cannot run (``op``, or anything at all) here; None where it can."""
    if backend not in BACKENDS:
        return f"backend is '{backend}', must be one of auto, {', '.join(BACKENDS)}"
    if backend != "triton":
        absent = _native.load(backend)
        if absent is None and backend == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device, must see one"
        return absent
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, must be 3.6 or newer"
    if op is not None and not (_native.FOLDER / "triton" / f"{op}.py").exists():
        return f"{op} has no Triton kernel"
    if not torch.cuda.is_available() and not _env.triton_interprets():
        return "torch sees no CUDA device and TRITON_INTERPRET is not 1, must have one of them"
    return None


def _key(backend: str) -> str:
    """The dispatch key whose tensors ``backend`` runs on."""
    return "CPU" if backend == "cpu" or (backend == "triton" and _env.triton_interprets()) else "CUDA"


def _launcher(op: str):
    """``op`` on Triton: its fake checks and allocates, ``{op}_triton(*outputs, *arguments)`` fills. Triton is imported by the first call."""
    fake, launch = _fakes[op], None
    defaults, count = fake.__defaults__ or (), fake.__code__.co_argcount

    def run(*args):
        nonlocal launch
        if launch is None:
            launch = getattr(importlib.import_module(f"carryover_kernels.triton.{op}"), f"{op}_triton")
        if len(args) < count:  # the dispatcher leaves out trailing defaults
            args += defaults[len(args) - count :]
        outputs = fake(*args)
        launch(*(outputs or ()), *args)
        return outputs

    return run


def _refuser(backend: str, op: str):
    def run(*args):
        raise RuntimeError(f"{op}: backend '{backend}' cannot run: {reason(backend, op)}")

    return run


def attach(fakes: dict, library: torch.library.Library):
    """Give every op of ``fakes`` its default implementations; called once, by ``carryover_kernels.ops``."""
    _fakes.update(fakes)
    if _native.load("cpu") is not None:
        for op in fakes:
            library.impl(op, _refuser("cpu", op), "CPU")
    if _native.load("cuda") is not None:
        for op in fakes:
            library.impl(op, _launcher(op) if reason("triton", op) is None else _refuser("triton", op), "CUDA")
    if _env.backend() != "auto":
        use_backend(_env.backend())


class use_backend:
    """Run every op on ``backend`` from here on, or inside a ``with`` block; 'auto' takes the choice back.

    Args:
        backend: 'auto', 'cpu', 'triton' or 'cuda'. 'triton' runs on CPU tensors under ``TRITON_INTERPRET=1``.

    Raises:
        RuntimeError: the backend cannot run here; the sentence says why.

    Example:
        >>> import carryover_kernels as ck
        >>> with ck.use_backend("cpu"):
        ...     pass
    """

    def __init__(self, backend: str):
        from . import ops  # noqa: F401  (the ops attach themselves)

        self._before = current()
        _switch(backend)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        _switch(self._before)


def _switch(backend: str):
    global _override
    if backend != "auto":
        for op in _fakes:
            why = reason(backend, op)
            if why is not None:
                raise RuntimeError(f"use_backend: '{backend}' cannot run {op}: {why}")
    if _override is not None:
        _override[1]._destroy()
        _override = None
    if backend == "auto":
        return
    chosen = torch.library.Library("carryover_kernels", "IMPL")
    if backend == "triton":
        with warnings.catch_warnings():  # PyTorch warns of every override; this one was asked for
            warnings.simplefilter("ignore", UserWarning)
            for op in _fakes:
                chosen.impl(op, _launcher(op), _key(backend), allow_override=True)
    _override = (backend, chosen)


def current() -> str:
    """The choice in force: 'auto' or a backend's name."""
    return _override[0] if _override is not None else "auto"


def chosen(op: str, device: str) -> str:
    """The backend that ``op`` would run on for tensors of ``device`` ('cpu' or 'cuda'), or the reason why there is none."""
    if _override is not None and _key(_override[0]) == device.upper():
        return _override[0]
    order = ("cpu",) if device == "cpu" else ("cuda", "triton")
    why = None
    for backend in order:
        why = reason(backend, op)
        if why is None:
            return backend
    return f"none: {why}"


def explain() -> list[dict[str, str]]:
    """One row an op for ``carryover info``: what it runs on by device, and what each backend says of itself."""
    from . import ops  # noqa: F401

    return [
        {"op": op, "cpu": chosen(op, "cpu"), "cuda": chosen(op, "cuda"), **{f"backend {b}": reason(b, op) or "available" for b in BACKENDS}}
        for op in _fakes
    ]
