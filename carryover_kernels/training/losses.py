"""Losses of a drafter: cross-entropy with position decay, total variation to the target, confidence."""

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


def chunked_cross_entropy(hidden, head, labels, weights, bias=None, chunk=4096):
    """Cross-entropy of hidden [M, H] @ head [V, H]^T (+ bias(slice) [m, V]) without holding all logits: each chunk's
    are made again in the backward pass. labels, weights [M]. Returns the weighted mean and the number right [M]."""
    labels = torch.where(weights > 0, labels, 0)

    def one(h, y, w, b):
        logits = F.linear(h, head.to(h.dtype)).float()
        if b is not None:
            logits = logits + b.float()
        return (F.cross_entropy(logits, y, reduction="none") * w).sum(), logits.detach().argmax(-1)

    total, guesses = hidden.new_zeros((), dtype=torch.float32), []
    for i in range(0, hidden.shape[0], chunk):
        s = slice(i, i + chunk)
        b = None if bias is None else bias(s)
        if hidden.shape[0] <= chunk:
            loss, guess = one(hidden[s], labels[s], weights[s], b)
        else:
            loss, guess = checkpoint(one, hidden[s], labels[s], weights[s], b, use_reentrant=False)
        total = total + loss
        guesses.append(guess)
    return total / weights.sum().clamp_min(1e-6), torch.cat(guesses) == labels
