"""Training with carryover, and how its gain is measured: recall at fixed anchors on and off, and chained decoding."""

from dataclasses import dataclass

import torch

from carryover_kernels.training import data, losses, parallel, rollout
from carryover_kernels.training.loop import step_seed


@dataclass(frozen=True)
class CarrySettings:
    """mode: "carryover" (rejected rows are carried), "none" (the control: the same moved anchors, nothing carried) or
    "plain" (anchors as sampled: more of the baseline's training). share: the part of branches that carry, reached in a
    line over the first `ramp` steps. temperature: of the first draft. parts, decay: see losses. chunk: rows whose logits
    are held at once. autocast: bf16 for matrix products where the device has it."""

    mode: str = "carryover"
    share: float = 1.0
    ramp: int = 0
    temperature: float = 0.0
    decay: float = losses.DECAY
    parts: losses.Parts = losses.Parts()
    chunk: int = 4096
    autocast: bool = True

    def share_at(self, step):
        return self.share * min(1.0, (step + 1) / self.ramp) if self.ramp else self.share

    def precision(self, device):
        return data.autocast(device.type, self.autocast)


@torch.no_grad()
def set_mark(model, scale, seed, features):
    """Starts the mark at N(0, scale x the size of what it is added to), measured on tap states [N, T, F] of a record:
    after fc (pre_norm; the embedded drafter's is 93 a component, where a mark of 0.02 is nothing) or after hidden_norm.
    A zero mark leaves rejected rows looking like committed ones. Returns the measured size; a step of the mark's
    optimiser must be in its proportion."""
    rows = model.fc(features)
    if model.c.mark == "post_norm":
        rows = model.hidden_norm(rows)
    size = rows.square().mean().sqrt().item()
    generator = torch.Generator().manual_seed(seed)
    model.carryover_mark.normal_(0, 1, generator=generator).mul_(scale * size)
    return size


@torch.no_grad()
def size_projector(model, features):
    """Starts a projector of token embeddings so that their rows are as large as fc's rows of tap states [N, T, F]."""
    embedded = model.carry_proj(model.embed).square().mean().sqrt()
    model.carry_proj.weight.mul_(model.fc(features).square().mean().sqrt() / embedded)


def second_sums(model, ids, lengths, branches, settings, chosen=None, head=None):
    """The second draft at the moved anchors; only this pass has a gradient. chosen [N, A] bool: which branches carry what
    they may. head [V, H_t]: the target's, where settings.parts.of_target.
    -> the sum of the losses, and [sum of weights, tokens right in a row, anchors, rejected rows]."""
    labels, kept = data.block_labels(ids, lengths, branches.anchors, branches.keep, model.c.proposals)
    weights = losses.position_weights(kept, settings.decay)
    left = branches.carry(chosen, model) if settings.mode == "carryover" else None
    rows = rollout.draft_rows(model, branches.features, lengths, ids, branches.anchors, left)
    previous = rollout.previous_tokens(ids, branches.anchors, labels)
    bias = target = guesses = None
    if model.c.markov_rank:
        bias = model.markov_head.factors(previous, rows).flatten(0, 2), model.markov_head.markov_w2.weight
    if settings.parts.of_target:
        at = branches.anchors[..., None] + torch.arange(model.c.proposals, device=ids.device)  # row t tells token t + 1
        at = at.clamp_max(ids.shape[1] - 1).flatten(1)
        target = torch.gather(branches.last, 1, at[..., None].expand(-1, -1, branches.last.shape[-1])).flatten(0, 1), head
    if settings.parts.confidence:
        guesses = model.confidence_logits(rows.detach(), previous).flatten()
    total, tokens = losses.chunked(
        rows.flatten(0, 2), model.head, labels.flatten(), weights.flatten(), bias=bias, target=target, confidence_logits=guesses,
        parts=settings.parts, chunk=settings.chunk,
    )
    right = torch.cumprod(((tokens.view_as(labels) == labels) & kept).long(), -1).sum(-1)
    sums = [weights.sum(), right[branches.keep].sum(), branches.keep.sum(), branches.rejected.sum(-1)[branches.keep].sum()]
    return total, torch.stack([x.double() for x in sums])


def reduced(total, sums):
    """The loss whose mean gradient over processes is that of the whole batch's mean, and the whole batch's metrics."""
    loss, weights, right, anchors, rejected = parallel.total(torch.cat([total.detach().double()[None], sums])).tolist()
    metrics = {"loss": loss / max(weights, 1e-6), "accepted": right / max(1, anchors), "rejected": rejected / max(1, anchors)}
    return total * (parallel.size() / max(weights, 1e-6)), metrics


def stored_step(trainee, store, settings, *, seed, batch, anchors, carrying=0.0):
    """A step function for Loop over branches that a cache.Store holds: their first draft is that of the drafter it was
    built with. trainee: parallel.wrap of the drafter. carrying: see Store.batch."""
    if settings.parts.of_target:
        raise ValueError("train: parts asks for the target's distribution, must be cross_entropy alone: stored branches lack it")

    def step(i):
        generator = torch.Generator().manual_seed(step_seed(seed, i, 5))
        chosen = store.similar_lengths(batch, generator)
        ids, lengths, branches = store.batch(chosen, anchors, generator, settings.mode == "plain", carrying)
        carries = torch.rand(branches.keep.shape, generator=generator) < settings.share_at(i)
        mine = parallel.share(batch)
        ids, lengths, branches, carries = ids[mine], lengths[mine], branches.rows(mine), carries[mine]
        with settings.precision(ids.device):
            return reduced(*trainee(lambda model: second_sums(model, ids, lengths, branches, settings, carries)))

    return step


def carry_step(trainee, target, records, settings, *, seed, batch, anchors):
    """A step function for Loop: draft, verify, draft again over `batch` records and `anchors` anchors each (the global
    batch of all processes). trainee: parallel.wrap of the drafter."""
    device = target.device
    head = target.get_output_embeddings().weight.detach()

    def sums(model, ids, lengths, first, keep, carries, generator):
        last = settings.parts.of_target
        if settings.mode == "plain":
            found = rollout.record_pass(target, ids, model.c.taps, last=last)
            branches = rollout.plain_branches(found[0], first, keep, model.c.proposals, found[2] if last else None)
        else:
            branches = rollout.draft_and_verify(
                model, target, ids, lengths, first, keep, settings.temperature, generator,
                states=settings.mode == "carryover", logits=model.c.carried == "target_tokens", last=last,
            )
        return second_sums(model, ids, lengths, branches, settings, carries, head)

    def step(i):
        generator = torch.Generator().manual_seed(step_seed(seed, i, 5))
        part = [records[j] for j in data.similar_lengths(records, batch, generator)]
        ids, lengths = data.pad_records(part)
        first, keep = data.sample_anchors(part, anchors, generator)
        carries = torch.rand(keep.shape, generator=generator) < settings.share_at(i)
        mine = parallel.share(batch)
        own = [t[mine].to(device) for t in (ids, lengths, first, keep, carries)]
        # a sampled first draft has its own noise in each process
        generator = torch.Generator(device).manual_seed(step_seed(seed, i, 6 + parallel.rank()))
        with settings.precision(device):
            return reduced(*trainee(lambda model: sums(model, *own, generator)))

    return step


@torch.no_grad()
def recall(model, target, records, *, anchors, seed, ks=(1, 16), batch=16, drafter=None):
    """Share of proposals whose recorded token is among the top k, carry on and off at the same moved anchors, same
    weights. drafter: who makes the first draft (default: the model itself). Only branches that carry something count.
    -> {pairs, on: {k: share}, off: {k: share}, on_by_position, off_by_position (k = 1)}."""
    hits = {side: torch.zeros(len(ks), model.c.proposals) for side in ("on", "off")}
    counts, pairs = torch.zeros(model.c.proposals), 0
    generator = torch.Generator().manual_seed(seed)
    ordered = sorted(records, key=lambda r: len(r.ids))
    for i in range(0, len(ordered), batch):
        part = ordered[i : i + batch]
        ids, lengths = data.pad_records(part)
        first, keep = data.sample_anchors(part, anchors, generator)
        with data.autocast():
            branches = rollout.draft_and_verify(drafter or model, target, ids, lengths, first, keep, logits=model.c.carried == "target_tokens")
            carrying = branches.rejected.any(-1)
            labels, kept = data.block_labels(ids, lengths, branches.anchors, carrying, model.c.proposals)
            for side, carry in (("on", branches.carry(model=model)), ("off", None)):
                rows = rollout.draft_rows(model, branches.features, lengths, ids, branches.anchors, carry)
                logits = model.logits(rows, rollout.previous_tokens(ids, branches.anchors, labels)).float()
                rank = (logits > torch.gather(logits, -1, labels[..., None])).sum(-1)
                for j, k in enumerate(ks):
                    hits[side][j] += ((rank < k) & kept).sum((0, 1))
        counts += kept.sum((0, 1))
        pairs += int(carrying.sum())
    out = {"pairs": pairs, "slots": int(counts.sum())}
    for side, h in hits.items():
        out[side] = {str(k): (h[j].sum() / counts.sum()).item() for j, k in enumerate(ks)}
        out[f"{side}_by_position"] = (h[0] / counts.clamp_min(1)).tolist()
    return out


SIDES = ("on", "off", "shuffled", "zero", "stale", "two_rounds")


@torch.no_grad()
def chained(model, target, records, *, carry, batch=32, details=False, cut=0.0):
    """Decoding replayed over records: each round drafts greedily with what its own last round left behind. Agreement with the
    record is verification: of a greedy record exactly, of a sampled one by the coupling "the target sampled this".

    carry: True or "on", False or "off", or at the places of the own rows other ones: "shuffled" (another prompt's), "zero"
    (tap states of zero: the mark alone), "stale" (those of the round before the last). "two_rounds": also those of the round
    before the last whose positions aren't committed yet. cut: drafts are verified only as far as the product of the drafter's
    own probabilities stays at or above it; the first one always is.
    -> list of (tokens, rounds, accepted each); details adds how many drafts after the first rejected one agree all the same,
    and how many drafts were verified.
    """
    on = carry is not False and carry != "off"
    order = sorted(range(len(records)), key=lambda i: len(records[i].ids))
    steps = torch.arange(model.c.proposals)
    asks = model.c.carried == "target_tokens"
    history, tokens, again, verified = [[] for _ in records], *([0] * len(records) for _ in range(3))
    for begin in range(0, len(order), batch):
        part = order[begin : begin + batch]
        ids, lengths = data.pad_records([records[j] for j in part])
        features, past = rollout.record_pass(target, ids, model.c.taps)
        past = rollout.reuse(past, model.c.proposals)
        outside = rollout.context_keys(model, features)
        anchors = torch.tensor([[records[j].start] for j in part])
        left = before = None  # the last round's rows as draft_rows takes them; and the round's before, for "stale" and "two_rounds"
        while True:
            active = anchors[:, 0] < lengths - 1
            if not active.any():
                break
            # Finished rows are dropped once they are a quarter: each time costs one copy. Shuffled, a neighbour must stay.
            if carry != "shuffled" and active.sum() <= 0.75 * len(part):
                part = [j for j, live in zip(part, active.tolist(), strict=True) if live]
                ids, lengths, features, anchors = (t[active] for t in (ids, lengths, features, anchors))
                outside = [(k[active], v[active]) for k, v in outside]
                left, before = (x and tuple(t[active] for t in x) for x in (left, before))
                past.batch_select_indices(active)
                active = active[active]
            rows = rollout.draft_rows(model, features, lengths, ids, anchors, left, outside)
            drafts, logits = model.propose(rows, torch.gather(ids, 1, anchors))
            labels, kept = data.block_labels(ids, lengths, anchors, active[:, None], model.c.proposals)
            checked = _trusted(logits, drafts, cut)
            agrees = (drafts == labels) & kept
            accepted = torch.cumprod((agrees & checked).long(), -1).sum(-1)
            after = (agrees & checked & (steps > accepted[..., None])).sum(-1)
            moved = torch.where(active[:, None], anchors + accepted + 1, anchors)
            if on:
                states = rollout.verify_branches(target, past, lengths, anchors, drafts, model.c.taps, asks)
                states, predicted = states if asks else (states, None)
                made = rollout.carried_rows(model, states, drafts, predicted)
                valid = (steps >= accepted[..., None]) & checked & active[:, None, None]
                own = made, anchors[..., None] + 1 + steps + model.c.carry_pos_offset, valid
                left, before = _left_behind(carry, own, before, moved), own
            for row, j in enumerate(part):
                if active[row]:
                    m = int(accepted[row, 0])
                    tokens[j] += min(m + 1, int(lengths[row]) - 1 - int(anchors[row, 0]))
                    history[j].append(m)
                    again[j] += int(after[row, 0])
                    verified[j] += int(checked[row, 0].sum())
            anchors = moved.clamp_max(ids.shape[1] - 1)
    extra = zip(again, verified, strict=True) if details else [()] * len(records)
    return [(t, len(h), h, *more) for t, h, more in zip(tokens, history, extra, strict=True)]


def _trusted(logits, drafts, cut):
    """Which drafts [N, A, P] are verified under chained's `cut`."""
    if not cut:
        return torch.ones_like(drafts, dtype=torch.bool)
    chance = torch.gather(torch.softmax(logits, -1), -1, drafts[..., None])[..., 0].cumprod(-1)
    return (chance >= cut) | (torch.arange(drafts.shape[-1]) == 0)


def _left_behind(carry, own, before, moved):
    """What the next round at anchors `moved` carries: `own` rows, or what stands in their place; see chained."""
    made, positions, valid = own
    if carry == "shuffled":
        return made.roll(1, 0), positions, valid
    if carry == "zero":
        return torch.zeros_like(made), positions, valid
    if carry == "stale":
        return (before[0], positions, valid) if before else None
    if carry == "two_rounds" and before:
        older = before[0], before[1], before[2] & (before[1] >= moved[..., None])
        return tuple(torch.cat(pair, 2) for pair in zip(older, own, strict=True))
    return own


def acceptance_length(results):
    """Tokens / rounds over all results: micro-averaged, the bonus counted."""
    return sum(x[0] for x in results) / max(1, sum(x[1] for x in results))


def paired_bootstrap(one, other, draws=10000, seed=0):
    """Relative gain of `one` over `other` in acceptance length and its 95 % interval; the unit is the prompt."""
    a = torch.tensor([x[:2] for x in one], dtype=torch.float64)
    b = torch.tensor([x[:2] for x in other], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(one), (draws, len(one)), generator=generator)
    ratio = [x[picks].sum(1) for x in (a, b)]
    gains = (ratio[0][:, 0] / ratio[0][:, 1]) / (ratio[1][:, 0] / ratio[1][:, 1]) - 1
    low, high = torch.quantile(gains, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"gain": acceptance_length(one) / acceptance_length(other) - 1, "low": low, "high": high}
