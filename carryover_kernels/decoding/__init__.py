"""Decoding with a drafter over Hugging Face causal LMs: the target's own output, in fewer of its passes."""

from .generate import generate
from .session import ORIGINS, DecodingError, DecodingSession, Interrupted, Request
from .stats import RequestStats
from .target import Target

__all__ = ["ORIGINS", "DecodingError", "DecodingSession", "Interrupted", "Request", "RequestStats", "Target", "generate"]
