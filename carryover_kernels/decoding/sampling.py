"""From the target's logits to the distribution that ``verify_draft`` judges by, and the seeds of requests."""

import numbers

import torch

MASK64 = 2**64 - 1


def request_seed(seed: int, index: int) -> int:
    """Seed of request ``index`` of a call seeded with ``seed``: 63 bits, distinct streams for neighbours (SplitMix64's finaliser)."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return (x ^ (x >> 31)) >> 1


def check_whole(name: str, value, least: int):
    """Raises TypeError or ValueError with one sentence unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"generate: {name} is {value!r}, must be a whole number")
    if value < least:
        raise ValueError(f"generate: {name} is {value}, must be at least {least}")


def check_sampling(temperature: float, top_p: float, seed: int):
    """Raises ValueError or TypeError with the sentence of the argument that is out of range or no number."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if not isinstance(value, numbers.Real):
            raise TypeError(f"generate: {name} is {value!r}, must be a number")
    if not isinstance(seed, numbers.Integral):
        raise TypeError(f"generate: seed is {seed!r}, must be a whole number")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"generate: temperature is {temperature}, must be 0 (greedy) or more, and finite")
    if not 0 < top_p <= 1:
        raise ValueError(f"generate: top_p is {top_p}, must be above 0 and at most 1")
    if not 0 <= seed < 2**63:
        raise ValueError(f"generate: seed is {seed}, must be 0 to 2**63 - 1")


def target_logits(logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor | None = None) -> torch.Tensor:
    """Logits whose softmax is the distribution wanted of each row: temperature, then top-p; a removed token is -inf.

    Args:
        logits: [T, V] of the target, any float dtype; every row has a finite maximum.
        temperature: [T] f32; 0 keeps the argmax alone (the lowest id of equals).
        top_p: [T] f32 in (0, 1] or None: the smallest set of likeliest tokens whose probability reaches it, the one that crosses
            included; equals by lowest id first.

    Returns: [T, V] f32.
    """
    wide = logits.float()
    greedy = (temperature <= 0).unsqueeze(1)
    # The maximum goes first: a tiny temperature would turn large logits into inf, and inf - inf into NaN.
    scaled = (wide - wide.max(dim=1, keepdim=True).values) / temperature.unsqueeze(1).masked_fill(greedy, 1.0)
    if top_p is not None:
        ranked, ids = torch.sort(scaled, dim=1, descending=True, stable=True)
        probabilities = torch.softmax(ranked, dim=1)
        before = probabilities.cumsum(dim=1) - probabilities
        # A whole nucleus is never cut: float32 sums may pass 1 before the last token is counted.
        removed = (before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
        removed[:, 0] = False
        scaled = scaled.masked_fill(torch.zeros_like(removed).scatter_(1, ids, removed), float("-inf"))
    best = wide.argmax(dim=1, keepdim=True)
    others = torch.arange(wide.shape[1], device=wide.device) != best
    return scaled.masked_fill(greedy & others, float("-inf"))
