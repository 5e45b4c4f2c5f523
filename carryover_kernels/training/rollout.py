"""Drafting from many anchors of recorded responses at once, plain and as parallel draft-verify-draft."""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers.cache_utils import DynamicLayer

from carryover_kernels.training import masks
from carryover_kernels.training.data import block_labels


def context_keys(model, features):
    """Every layer's K and V of recorded rows [N, S, taps * H_target]: the `outside` of draft_rows."""
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    return model.outside_keys(model.features(features), positions)


def draft_rows(model, features, lengths, ids, anchors, carry=None, outside=None, attention=None):
    """Proposing rows [N, A, P, H] of the blocks at all anchors. features [N, S, taps * H_target] raw tap states,
    lengths [N], ids [N, S], anchors [N, A]. carry: None or (states [N, A, G, taps * H_target], positions [N, A, G],
    valid [N, A, G]): rejected rows that each anchor alone sees, in front of its block. outside: context_keys, where a
    caller drafts over the same record more than once. attention: "apart" (the default), "dense" (SDPA with the whole mask) or
    "flex" (the default on a GPU, not yet run on hardware); all follow one description of who sees what."""
    attention = attention or ("flex" if ids.is_cuda else "apart")
    n, length = ids.shape
    count, block = anchors.shape[1], model.c.block
    record = torch.arange(length, device=ids.device).expand(n, length)
    outside = outside or context_keys(model, features)
    valid = record < lengths[:, None]
    if carry is not None and not carry[2].any():
        carry = None  # masked keys would still move the order of sums: an empty carry is the baseline bit for bit
    sight = masks.draft_sight(record, valid, anchors, block, *(carry[1:] if carry else ()))
    tokens = model.block_tokens(torch.gather(ids, 1, anchors)).flatten(1)
    positions = masks.rows_of(anchors, block)[0]
    kept = carried_keys(model, *carry) if carry else None
    if attention == "apart":
        hidden = model(tokens, positions, outside, sight.apart(length, count), kept)
    else:
        if kept:
            rows = [tuple(t.flatten(1, 2) for t in pair) for pair in kept]
            outside = [tuple(torch.cat(p, 1) for p in zip(a, b, strict=True)) for a, b in zip(outside, rows, strict=True)]
        if attention == "flex":
            size = n, None, tokens.shape[1], outside[0][0].shape[1] + tokens.shape[1]
            mask = create_block_mask(sight.flex(), *size, device=ids.device)
        else:
            mask = sight.dense()
        hidden = model(tokens, positions, outside, mask)
    return model.proposal_rows(hidden.unflatten(1, (count, block)))


def carried_keys(model, states, positions, valid):
    """Every layer's K and V of carried rows, [N, A, G, kv_heads, D] each: only valid rows are computed, the rest is 0."""
    at = positions[valid][None]
    keys = model.outside_keys(model.features(states[valid][None], carried=True), at)
    out = []
    for pair in keys:
        out.append(tuple(t.new_zeros(*valid.shape, *t.shape[2:]).index_put((valid,), t[0]) for t in pair))
    return out


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
    predicted: torch.Tensor | None = None  # [N, A, P]: the target's own greedy token after each branch row, if asked for
    last: torch.Tensor | None = None  # [N, S, H_target]: what the target's head reads, on the recorded tokens, if asked for

    def rows(self, chosen):
        """The branches of some of the sequences (a slice of the first dimension)."""
        return Branches(*(t if t is None else t[chosen] for t in vars(self).values()))

    def carry(self, chosen=None, model=None):
        """The `carry` of draft_rows; chosen [N, A] bool leaves the others' carry empty. model: whose config says what rows are
        carried and where they stand (default: tap states at their own positions)."""
        valid = self.rejected if chosen is None else self.rejected & chosen[..., None]
        if model is None:
            return self.states, self.positions, valid
        return carried_rows(model, self.states, self.drafts, self.predicted), self.positions + model.c.carry_pos_offset, valid


def carried_rows(model, states, drafts, predicted):
    """What a drafter carries of rejected rows: tap states [..., F], or embeddings [..., H_t] of the drafts, or of the target's
    greedy token after each (row i's stands one position later)."""
    tokens = {"draft_tokens": drafts, "target_tokens": predicted}
    return states if model.c.carried == "states" else torch.nn.functional.embedding(tokens[model.c.carried], model.embed)


def _taps(hidden_states, taps):
    return torch.cat([hidden_states[tap + 1] for tap in taps], -1)


@torch.no_grad()
def record_pass(target, ids, taps, last=False):
    """One pass over recorded ids [N, S] (padded on the right): tap states [N, S, F] and the target's own KV cache. last
    True: also the states that the target's head reads, [N, S, H_target]."""
    out = target.model(input_ids=ids, output_hidden_states=True, use_cache=True)
    found = _taps(out.hidden_states, taps), out.past_key_values
    return (*found, out.last_hidden_state) if last else found


class ReusedLayer(DynamicLayer):
    """One layer's recorded K and V [N, heads, S, D] with room for `rows` branch rows behind them, written in place: every pass
    overwrites the last one's, so that a cache which serves many passes is neither copied nor cropped."""

    def __init__(self, layer, rows):
        if type(layer) is not DynamicLayer:
            raise ValueError(f"train: a layer's cache is {type(layer).__name__}, must be DynamicLayer (full attention)")
        super().__init__()
        self.is_initialized, self.length = True, layer.keys.shape[-2]
        self.keys, self.values = (torch.cat([t, t.new_zeros(*t.shape[:2], rows, t.shape[-1])], 2) for t in (layer.keys, layer.values))

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys[:, :, self.length :] = key_states
        self.values[:, :, self.length :] = value_states
        return self.keys, self.values

    def get_seq_length(self):
        return self.length


def reuse(past, rows):
    """The cache that record_pass gave, for any number of verify_branches passes of `rows` branch rows a sequence."""
    past.layers = [ReusedLayer(layer, rows) for layer in past.layers]
    return past


@torch.no_grad()
def verify_branches(target, past, lengths, anchors, drafts, taps, logits=False):
    """Tap states [N, A, P, F] of every branch's draft rows (the anchor's row is the recorded one), all branches in one
    pass over the shared record. `past` is left with the branch rows appended: it is used up, unless `reuse` made it. logits
    True: also the target's greedy tokens after each row, [N, A, P]."""
    n, count, proposals = drafts.shape
    length = past.get_seq_length()
    valid = torch.arange(length, device=lengths.device) < lengths[:, None]
    sight = masks.branch_sight(valid, anchors, proposals)
    mask = sight.dense()
    if target.config._attn_implementation != "sdpa":
        mask = torch.where(mask, 0.0, torch.finfo(target.dtype).min).to(target.dtype)
    out = target.model(
        input_ids=drafts.flatten(1), position_ids=sight.position, attention_mask=mask, past_key_values=past,
        output_hidden_states=True, use_cache=True,
    )
    states = _taps(out.hidden_states, taps).unflatten(1, (count, proposals))
    if not logits:
        return states
    return states, target.get_output_embeddings()(out.last_hidden_state).argmax(-1).unflatten(1, (count, proposals))


@torch.no_grad()
def draft_and_verify(model, target, ids, lengths, anchors, keep, temperature=0.0, generator=None, states=True, logits=False, last=False):
    """First draft at all anchors by the drafter's real sampler, without carry; agreement with the record decides what
    is accepted (for a sampled record this is exact: the recorded token is the target's sample). -> Branches. states
    False: the anchors move all the same but the branches aren't verified, and nothing can be carried. logits True: the
    target's own next tokens along the branches are told too; last True: and its last states on the record."""
    features, past, final = record_pass(target, ids, model.c.taps, last=True)
    rows = draft_rows(model, features, lengths, ids, anchors)
    drafts, _ = model.propose(rows, torch.gather(ids, 1, anchors), temperature, generator)
    labels, kept = block_labels(ids, lengths, anchors, keep, model.c.proposals)
    accepted = torch.cumprod(((drafts == labels) & kept).long(), -1).sum(-1)
    left = verify_branches(target, past, lengths, anchors, drafts, model.c.taps, logits) if states else None
    left, predicted = left if states and logits else (left, None)
    moved = anchors + accepted + 1
    keep = keep & (moved + 1 < lengths[:, None])  # without a next token there is nothing to learn: dropped, not clamped
    steps = torch.arange(model.c.proposals, device=ids.device)
    return Branches(
        features=features, drafts=drafts, accepted=accepted,
        anchors=torch.where(keep, moved, anchors), keep=keep, states=left,
        positions=anchors[..., None] + 1 + steps,
        rejected=keep[..., None] & (steps >= accepted[..., None]), predicted=predicted,
        last=final if last else None,
    )


def plain_branches(features, anchors, keep, proposals, last=None):
    """Branches of a plain training step: anchors where they are, nothing drafted, nothing carried."""
    none = torch.zeros(*anchors.shape, proposals, dtype=torch.bool, device=anchors.device)
    return Branches(features, None, torch.zeros_like(anchors), anchors, keep, None, None, none, last=last)
