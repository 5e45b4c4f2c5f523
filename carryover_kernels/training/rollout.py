"""Drafting from many anchors of recorded responses at once, plain and as parallel draft-verify-draft."""

from dataclasses import dataclass

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
    if carry is not None and not carry[2].any():
        carry = None  # masked keys would still move the order of sums: an empty carry is the baseline bit for bit
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


# parallel draft-verify-draft (TRAINING_FACTS section 3; arXiv 2609.14717)


@dataclass(frozen=True)
class Branches:
    """What the first draft and its verification left behind, all of it without gradient.

    features [N, S, F] tap states of the record; drafts [N, A, P]; accepted [N, A]; anchors, keep [N, A]: the moved
    anchors and which of them have a next token; states [N, A, P, F] tap states of the branch rows, positions
    [N, A, P], rejected [N, A, P] bool: the rows that are carried.
    """

    features: torch.Tensor
    drafts: torch.Tensor
    accepted: torch.Tensor
    anchors: torch.Tensor
    keep: torch.Tensor
    states: torch.Tensor
    positions: torch.Tensor
    rejected: torch.Tensor

    def carry(self, chosen=None):
        """The `carry` of draft_rows; chosen [N, A] bool leaves the others' carry empty."""
        valid = self.rejected if chosen is None else self.rejected & chosen[..., None]
        return self.states, self.positions, valid


def _taps(hidden_states, taps):
    return torch.cat([hidden_states[tap + 1] for tap in taps], -1)


@torch.no_grad()
def record_pass(target, ids, taps):
    """One pass over recorded ids [N, S] (padded on the right): tap states [N, S, F] and the target's own KV cache."""
    out = target.model(input_ids=ids, output_hidden_states=True, use_cache=True)
    return _taps(out.hidden_states, taps), out.past_key_values


@torch.no_grad()
def verify_branches(target, past, lengths, anchors, drafts, taps):
    """Tap states [N, A, P, F] of every branch's draft rows (the anchor's row is the recorded one), all branches in one
    pass over the shared record. `past` is left with the branch rows appended: it is used up."""
    n, count, proposals = drafts.shape
    length = past.get_seq_length()
    valid = torch.arange(length) < lengths[:, None]
    sight = masks.branch_sight(valid, anchors, proposals)
    mask = sight.dense()
    if target.config._attn_implementation != "sdpa":
        mask = torch.where(mask, 0.0, torch.finfo(target.dtype).min).to(target.dtype)
    out = target.model(
        input_ids=drafts.flatten(1), position_ids=sight.position, attention_mask=mask, past_key_values=past,
        output_hidden_states=True, use_cache=True,
    )
    return _taps(out.hidden_states, taps).unflatten(1, (count, proposals))


@torch.no_grad()
def draft_and_verify(model, target, ids, lengths, anchors, keep, temperature=0.0, generator=None, states=True):
    """First draft at all anchors by the drafter's real sampler, without carry; agreement with the record decides what
    is accepted (for a sampled record this is exact: the recorded token is the target's sample). -> Branches. states
    False: the anchors move all the same but the branches aren't verified, and nothing can be carried."""
    features, past = record_pass(target, ids, model.c.taps)
    rows = draft_rows(model, features, lengths, ids, anchors)
    drafts, _ = model.propose(rows, torch.gather(ids, 1, anchors), temperature, generator)
    labels, kept = block_labels(ids, lengths, anchors, keep, model.c.proposals)
    accepted = torch.cumprod(((drafts == labels) & kept).long(), -1).sum(-1)
    left = verify_branches(target, past, lengths, anchors, drafts, model.c.taps) if states else None
    moved = anchors + accepted + 1
    keep = keep & (moved + 1 < lengths[:, None])  # without a next token there is nothing to learn: dropped, not clamped
    steps = torch.arange(model.c.proposals)
    return Branches(
        features=features, drafts=drafts, accepted=accepted,
        anchors=torch.where(keep, moved, anchors), keep=keep, states=left,
        positions=anchors[..., None] + 1 + steps,
        rejected=keep[..., None] & (steps >= accepted[..., None]),
    )


def plain_branches(features, anchors, keep, proposals):
    """Branches of a plain training step: anchors where they are, nothing drafted, nothing carried."""
    none = torch.zeros(*anchors.shape, proposals, dtype=torch.bool)
    return Branches(features, None, torch.zeros_like(anchors), anchors, keep, None, None, none)
