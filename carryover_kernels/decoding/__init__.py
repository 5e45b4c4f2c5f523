"""Decoding with a drafter over Hugging Face causal LMs: the target's own output, in fewer of its passes."""

from .generate import generate
from .request import ORIGINS, DecodingError, Interrupted, Request
from .session import DecodingSession
from .stats import RequestStats
from .target import Target

__all__ = ["ORIGINS", "DecodingError", "DecodingSession", "Interrupted", "Request", "RequestStats", "Target", "generate"]
