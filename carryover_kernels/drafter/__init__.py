"""The drafter: published checkpoints, their cache with carried rows, and one block's forward pass."""

from .cache import DrafterState
from .config import CheckpointError, DrafterConfig
from .model import CarryoverDrafter, Proposal

__all__ = ["CarryoverDrafter", "CheckpointError", "DrafterConfig", "DrafterState", "Proposal"]
