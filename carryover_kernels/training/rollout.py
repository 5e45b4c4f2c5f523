"""Drafting from many anchors of recorded responses at once, plain and as parallel draft-verify-draft."""

import torch

from carryover_kernels.training import masks
from carryover_kernels.training.data import block_labels


def draft_rows(model, features, lengths, ids, anchors, carry=None):
    """Proposing rows [N, A, P, H] of the blocks at all anchors. features [N, S, taps * H_target] raw tap states,
    lengths [N], ids [N, S], anchors [N, A]. carry: None or (states [N, A, G, taps * H_target], positions [N, A, G],
    valid [N, A, G]): rejected rows that each anchor alone sees, in front of its block."""
    n, length = ids.shape
    count, block = anchors.shape[1], model.c.block
    record = torch.arange(length).expand(n, length)
    outside = model.outside_keys(model.features(features), record)
    valid = record < lengths[:, None]
    if carry is None:
        sight = masks.draft_sight(record, valid, anchors, block)
    else:
        states, positions, carried = carry
        rows = model.outside_keys(model.features(states.flatten(1, 2), carried=True), positions.flatten(1))
        outside = [tuple(torch.cat(p, 1) for p in zip(a, b, strict=True)) for a, b in zip(outside, rows, strict=True)]
        sight = masks.draft_sight(record, valid, anchors, block, positions, carried)
    tokens = model.block_tokens(torch.gather(ids, 1, anchors)).flatten(1)
    hidden = model(tokens, masks.rows_of(anchors, block)[0], outside, sight.dense())
    return model.proposal_rows(hidden.unflatten(1, (count, block)))


def previous_tokens(ids, anchors, labels):
    """The token before each proposed slot, teacher-forced: [N, A, P]."""
    return torch.cat([torch.gather(ids, 1, anchors)[..., None], labels[..., :-1]], -1)


@torch.no_grad()
def accepted_everywhere(model, features, ids, length, start):
    """Accepted drafts from every anchor start..length-2 of one record, greedy and without carry: [length - 1 - start].
    features [1, S, F], ids [1, S]. Agreement with the record, as far as it goes."""
    anchors = torch.arange(start, length - 1)[None]
    lengths = torch.tensor([length])
    rows = draft_rows(model, features, lengths, ids, anchors)
    tokens, _ = model.propose(rows, torch.gather(ids, 1, anchors))
    labels, kept = block_labels(ids, lengths, anchors, torch.ones_like(anchors, dtype=torch.bool), model.c.proposals)
    return torch.cumprod(((tokens == labels) & kept).long(), -1).sum(-1)[0]


def walk(accepted, start, length):
    """Rounds that a decoder makes over a greedy record, and tokens they emit: the first token of the response is the
    first anchor, a round emits accepted + 1 tokens. accepted[i] belongs to anchor start + i. -> (tokens, rounds,
    list of accepted)."""
    at, rounds, tokens, history = start, 0, 0, []
    while at < length - 1:
        gained = min(int(accepted[at - start]) + 1, length - 1 - at)
        history.append(int(accepted[at - start]))
        tokens, rounds, at = tokens + gained, rounds + 1, at + gained
    return tokens, rounds, history
