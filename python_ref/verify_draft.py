"""``verify_draft``: how many drafts the target keeps, and the token after them."""

import torch

from .markov_sample import first_argmax
from .random import STREAM_ACCEPT, STREAM_NEXT, gumbels, uniforms


def residual(p, q):
    """Unnormalised distribution of the token that replaces a draft from q: max(p - q, 0), or p where that has no mass."""
    left = (p - q).clamp(min=0)
    return left if left.sum() > 0 else p


def accept_by_rejection(drafts, p, q, u):
    """Leviathan et al. 2023. p [n, V], q [n-1, V], u [n-1]: number accepted, weights of the next token."""
    for i, d in enumerate(drafts):
        if not u[i] * q[i, d] < p[i, d]:
            return i, residual(p[i], q[i])
    return len(drafts), p[len(drafts)]


def accept_by_block(drafts, p, q, u):
    """Sun et al. 2024: the longest prefix whose own coin says yes; u[i - 1] is the coin of the prefix of i drafts."""
    count = len(drafts)
    accepted, prefix = 0, 1.0
    weights = residual(p[0], q[0]) if count else p[0]
    for i, d in enumerate(drafts, start=1):
        x = prefix * float(p[i - 1, d])
        prefix = 1.0 if 0 < x and float(q[i - 1, d]) <= x else (x / float(q[i - 1, d]) if x > 0 else 0.0)
        if i < count:
            mass = float((prefix * p[i] - q[i]).clamp(min=0).sum())
            # No mass left over and prefix 1: rejecting the next draft has probability 0, so this coin is never the last one.
            h = mass / (mass + 1.0 - prefix) if mass + 1.0 - prefix > 0 else 1.0
        else:
            h = prefix
        if u[i - 1] < h:
            accepted = i
            weights = residual(prefix * p[i], q[i]) if i < count else p[i]
    return accepted, weights


def verify_draft(
    draft_tokens, query_start_loc, target_logits=None, target_argmax=None, draft_probs=None, seeds=None, offsets=None, method="greedy",
    *, dtype=torch.float64,
):  # fmt: skip
    requests, columns = draft_tokens.shape
    num_accepted = torch.zeros(requests, dtype=torch.int32)
    next_token = torch.full((requests,), -1, dtype=torch.int64)
    num_rejected = torch.zeros(requests, dtype=torch.int32)
    starts = query_start_loc.tolist()

    for r in range(requests):
        n = starts[r + 1] - starts[r]
        if n <= 0:
            continue
        rows = slice(starts[r], starts[r + 1])
        drafts = draft_tokens[r, : min(n - 1, columns)].tolist()
        vocab = None if target_logits is None else target_logits.shape[1]
        for i, d in enumerate(drafts):  # a draft that is no token ends the list: the next token comes from its row's own distribution
            if d < 0 or (vocab is not None and d >= vocab):
                drafts = drafts[:i]
                break

        if method == "greedy":
            best = [first_argmax(row) for row in target_logits[rows]] if target_argmax is None else target_argmax[rows].tolist()
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == best[accepted]:
                accepted += 1
            token = best[accepted]
        else:
            p = torch.softmax(target_logits[rows].to(dtype), dim=1)
            if draft_probs is None:
                q = torch.zeros(len(drafts), vocab, dtype=dtype)
                for i, d in enumerate(drafts):
                    q[i, d] = 1.0
            else:
                q = draft_probs[r].to(dtype)
            seed, offset = int(seeds[r]), int(offsets[r])
            u = [float(uniforms(seed, offset, i, STREAM_ACCEPT, 1)) for i in range(len(drafts))]
            accept = accept_by_rejection if method == "rejection" else accept_by_block
            accepted, weights = accept(drafts, p, q, u)
            token = first_argmax(torch.log(weights) + gumbels(seed, offset, accepted, STREAM_NEXT, vocab).to(dtype))

        num_accepted[r], next_token[r], num_rejected[r] = accepted, token, n - 1 - accepted
    return num_accepted, next_token, num_rejected
