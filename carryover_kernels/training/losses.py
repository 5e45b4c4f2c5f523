"""Losses of a drafter: cross-entropy with position decay, total variation to the target, confidence."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DECAY = 4.0  # the public trainers' constant: weight exp(-k / 4) for the k-th proposal of a block


def position_weights(keep, decay=DECAY):
    """keep [..., P] bool -> weights f32: exp(-k / decay) where kept. From the first slot that is not kept a block
    counts no more, since acceptance cannot reach beyond it."""
    kept = torch.cumprod(keep.to(torch.float32), -1)
    k = torch.arange(keep.shape[-1], device=keep.device, dtype=torch.float32)
    return kept * torch.exp(-k / decay)


def _weighted_mean(values, weights):
    return (values * weights).sum() / weights.sum().clamp_min(1e-6)


def cross_entropy(logits, labels, weights):
    """logits [..., V], labels [...] i64 (any value where the weight is 0), weights [...] -> scalar."""
    labels = torch.where(weights > 0, labels, 0)
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return _weighted_mean(losses, weights.flatten())


def total_variation(logits, target_logits, weights):
    """Half the L1 distance of the two distributions; 1 minus it is the chance that a sampled draft is accepted."""
    p = torch.softmax(target_logits.float(), -1)
    q = torch.softmax(logits.float(), -1)
    return _weighted_mean(0.5 * (p - q).abs().sum(-1), weights)


def confidence(confidence_logits, logits, target_logits, weights):
    """Binary cross-entropy of the confidence head against the acceptance chance 1 - TV (no gradient into it)."""
    with torch.no_grad():
        p, q = torch.softmax(target_logits.float(), -1), torch.softmax(logits.float(), -1)
        chance = 1 - 0.5 * (p - q).abs().sum(-1)
    losses = F.binary_cross_entropy_with_logits(confidence_logits.float(), chance, reduction="none")
    return _weighted_mean(losses, weights)


@dataclass(frozen=True)
class Parts:
    """How much of each loss. DFlash as published: cross-entropy alone. DSpark: (0.1, 1.8, 1.0), since its 0.9 is of the
    whole L1 distance and total variation is half of it."""

    cross_entropy: float = 1.0
    total_variation: float = 0.0
    confidence: float = 0.0

    @property
    def of_target(self):
        """Whether the target's own distribution is needed."""
        return self.total_variation > 0 or self.confidence > 0


def chunked(hidden, head, labels, weights, *, bias=None, target=None, confidence_logits=None, parts=Parts(), chunk=4096):
    """The weighted sum of losses of rows hidden [M, H] @ head [V, H]^T without holding all logits: where there is more
    than one chunk, each one's are made again in the backward pass.

    labels, weights [M]; bias: (factors [M, r], W2 [V, r]) of a Markov head; target: (last hidden states [M, H_t], head
    [V, H_t]) of the target, where parts.of_target. Returns the sum (divide by the sum of weights) and the greedy tokens [M].
    """
    labels = torch.where(weights > 0, labels, 0)
    columns = [hidden, labels, weights, bias[0] if bias else None, target[0] if target else None, confidence_logits]

    def one(h, y, w, factors, seen, guess):
        logits = F.linear(h, head.to(h.dtype)).float()
        if factors is not None:
            logits = logits + F.linear(factors, bias[1].to(factors.dtype)).float()
        total = (F.cross_entropy(logits, y, reduction="none") * w).sum() * parts.cross_entropy
        if parts.of_target:
            with torch.no_grad():
                p = torch.softmax(F.linear(seen, target[1].to(seen.dtype)).float(), -1)
            distance = 0.5 * (p - torch.softmax(logits, -1)).abs().sum(-1)
            total = total + parts.total_variation * (distance * w).sum()
            if parts.confidence:
                of_guess = F.binary_cross_entropy_with_logits(guess.float(), 1 - distance.detach(), reduction="none")
                total = total + parts.confidence * (of_guess * w).sum()
        return total, logits.detach().argmax(-1)

    total, guesses = hidden.new_zeros((), dtype=torch.float32), []
    for i in range(0, hidden.shape[0], chunk):
        part = [None if c is None else c[i : i + chunk] for c in columns]
        if hidden.shape[0] <= chunk:
            loss, guess = one(*part)
        else:
            loss, guess = checkpoint(one, *part, use_reentrant=False)
        total = total + loss
        guesses.append(guess)
    return total, torch.cat(guesses)
