"""The environment variables this package reads, all of them, each at the moment it matters (docs/ops.md has the table)."""

import os


def check_values() -> bool:
    """``CARRYOVER_CHECK=1``: public ops also check what only a host sync can tell."""
    return os.environ.get("CARRYOVER_CHECK", "") not in ("", "0")
