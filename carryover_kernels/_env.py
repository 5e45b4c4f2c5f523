"""The environment variables this package reads, all of them, each at the moment it matters (docs/ops.md has the table)."""

import os


def check_values() -> bool:
    """``CARRYOVER_CHECK=1``: public ops also check what only a host sync can tell."""
    return os.environ.get("CARRYOVER_CHECK", "") not in ("", "0")


def backend() -> str:
    """``CARRYOVER_BACKEND``: 'auto' (default), 'cpu', 'triton' or 'cuda', read once, when the ops are first imported."""
    return os.environ.get("CARRYOVER_BACKEND", "") or "auto"


def triton_interprets() -> bool:
    """``TRITON_INTERPRET=1``: Triton's own switch, under which its kernels run on CPU tensors. Set it before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"
