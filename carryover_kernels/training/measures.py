"""What the study measures beside recall and chained decoding: how much there is to carry, attention on carried rows, contrasts."""

import torch

from carryover_kernels.training import corpus, data, rollout
from carryover_kernels.training.carry import acceptance_length, paired_bootstrap

BONUSES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@torch.no_grad()
def potential(model, store, count, anchors=8, batch=16):
    """How much a drafter could gain from what the target says along its rejected branches, without training anything.

    After the correction, slot k is told by the rejected row one position before it: the target's own greedy token there. Of
    branches that carry something, of `count` records a kind and temperature, by kind: tokens that a round emits
    (right drafts in a row + 1) by the drafter alone; with a bonus on that token's logit, one number a slot chosen on half of
    the branches and measured on the other; and by an oracle that takes whichever of the two is right. Also the share of
    slots where the drafter, the target along the branch, and the branch's own draft are right, by position.
    """
    generator, p = torch.Generator().manual_seed(5), model.c.proposals
    out = {}
    for temperature in (0.0, 0.7):
        for kind in corpus.KINDS:
            chosen = [j for j in store.by_length if (store.records[j].kind, store.records[j].temperature) == (kind, temperature)]
            stride = max(1, len(chosen) // count)
            found = [_branches(model, store, chosen[::stride][i : i + batch], anchors, generator)
                     for i in range(0, len(chosen[::stride]), batch)]
            if found:
                logits, labels, kept, predicted, there, drafts = (torch.cat(x) for x in zip(*found, strict=True))
                out[f"{kind} {temperature:g}"] = _potential_of(logits, labels, kept, predicted, there, drafts, p)
    return out


def _branches(model, store, chosen, anchors, generator):
    p = model.c.proposals
    ids, lengths, b = store.batch(chosen, anchors, generator, carrying=1.0)
    carries = b.rejected.any(-1)
    labels, kept = data.block_labels(ids, lengths, b.anchors, carries, p)
    with data.autocast():
        rows = rollout.draft_rows(model, b.features, lengths, ids, b.anchors)
        logits = torch.log_softmax(model.logits(rows, rollout.previous_tokens(ids, b.anchors, labels)).float(), -1)
    at = b.accepted[..., None] + torch.arange(p)
    predicted = torch.gather(b.predicted, 2, at.clamp_max(p - 1))
    drafts = torch.gather(b.drafts, 2, (at + 1).clamp_max(p - 1))
    drafts = torch.where(at + 1 < p, drafts, -1)
    return tuple(x[carries] for x in (logits, labels, kept, predicted, at < p, drafts))


def _potential_of(logits, labels, kept, predicted, there, drafts, p):
    half = torch.arange(len(labels)) % 2 == 0

    def tokens(right, rows):
        return 1 + torch.cumprod((right & kept)[rows].long(), -1).sum(-1).float().mean().item()

    bonus = torch.zeros(p)
    for k in range(p):
        scores = []
        for value in BONUSES:
            mixed = logits[half, k].clone()
            mixed[torch.arange(len(mixed)), predicted[half, k]] += value * there[half, k]
            scores.append(((mixed.argmax(-1) == labels[half, k]) & kept[half, k]).sum().item())
        bonus[k] = BONUSES[scores.index(max(scores))]
    mixed = logits.scatter_add(2, predicted[..., None], (bonus * there)[..., None])
    alone, told = logits.argmax(-1) == labels, (predicted == labels) & there
    slots = (there & kept).sum(0).clamp_min(1)
    return {
        "branches": len(labels), "tokens": tokens(alone, ~half), "with_bonus": tokens(mixed.argmax(-1) == labels, ~half),
        "oracle": tokens(alone | told, ~half), "slots": slots.tolist(),
        **{name: ((x & there & kept).sum(0) / slots).tolist()
           for name, x in (("drafter_right", alone), ("target_right", told), ("draft_right", drafts == labels))},
    }


@torch.no_grad()
def attention_on_carried(model, target, records, anchors=8, seed=1, batch=16):
    """Share of the block rows' attention that lies on carried rows, mean over heads and proposing rows, by layer and by number
    of carried rows. Branches that carry nothing are left out."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(len(model.layers), model.c.proposals + 1)
    counts = torch.zeros(model.c.proposals + 1)
    ordered = sorted(records, key=lambda r: len(r.ids))
    for i in range(0, len(ordered), batch):
        part = ordered[i : i + batch]
        ids, lengths = data.pad_records(part)
        first, keep = data.sample_anchors(part, anchors, generator)
        b = rollout.draft_and_verify(model, target, ids, lengths, first, keep, logits=model.c.carried == "target_tokens")
        rows = b.rejected.sum(-1)
        for layer in model.layers:
            layer.self_attn.watch = []
        rollout.draft_rows(model, b.features, lengths, ids, b.anchors, b.carry(model=model))
        for depth, layer in enumerate(model.layers):
            (mass,) = layer.self_attn.watch or [torch.zeros(*rows.shape, model.c.block)]
            layer.self_attn.watch = None
            sums[depth].index_add_(0, rows.flatten(), model.proposal_rows(mass[..., None])[..., 0].mean(-1).flatten())
        counts.index_add_(0, rows.flatten(), torch.ones(rows.numel()))
    some = slice(1, None)
    return {
        "share": (sums[:, some].sum(1) / counts[some].sum()).tolist(),
        "by_rows": (sums[:, some].mean(0) / counts[some].clamp_min(1)).tolist(),
        "branches": counts[some].tolist(),
    }


def summary(rows, held, cells, seeds):
    """Of chained decoding: acceptance lengths by kind, acceptance by position, the planned contrasts with 95 % intervals (pooled
    over seeds: a prompt's rounds of all seeds together), per-seed gains, and gain against reconvergence by prompt."""
    out = {}
    for t, records in held.items():
        kinds = [r.kind for r in records]

        def pick(key, side, kind, kinds=kinds, t=t):
            return [x for x, k in zip(rows[key][t][side], kinds, strict=True) if kind in ("all", k)]

        def pooled(name, side, kind, some, pick=pick):
            each = [pick("base" if name == "base" else f"{name}_{s}", side, kind) for s in some]
            return [[sum(x[0] for x in r), sum(x[1] for x in r), [m for x in r for m in x[2]]] for r in zip(*each, strict=True)]

        names = ["all", *(kind for kind in corpus.KINDS if kind in kinds)]
        lengths, positions, contrasts, verified = {}, {}, {}, {}
        for key in rows:
            for side in rows[key][t]:
                lengths[f"{key} {side}"] = {kind: acceptance_length(pick(key, side, kind)) for kind in names}
                positions[f"{key} {side}"] = by_position(pick(key, side, "all"))
                if side.endswith("_cut"):
                    verified[f"{key} {side}"] = {kind: sum(x[4] for x in r) / sum(x[1] for x in r)
                                                 for kind in names for r in [pick(key, side, kind)]}
        planned = []
        for name in cells:
            if "on" in rows[f"{name}_{seeds[0]}"][t]:
                planned += [(name, "on", other, "off") for other in ("none", "plain", "base")
                            if other in cells or other in rows]
                first = rows[f"{name}_{seeds[0]}"][t]
                planned += [(name, "on", name, side) for side in ("off", "shuffled", "zero", "stale", "two_rounds") if side in first]
                if name == "carryover":
                    planned += [(name, "on", other, "on") for other in cells if other != name and "on" in rows[f"{other}_{seeds[0]}"][t]]
                planned += [(name, "on", name, "on_cut")] * ("on_cut" in first) + [(name, "on_cut", "none", "off_cut")] * ("none" in cells)
            elif "base" in rows:
                planned.append((name, "off", "base", "off"))
        for one, a, other, b in planned:
            some = [s for s in seeds if a in rows[f"{one}_{s}"][t] and (other == "base" or b in rows[f"{other}_{s}"][t])]
            if not some:
                continue
            found = {kind: paired_bootstrap(pooled(one, a, kind, some), pooled(other, b, kind, some)) for kind in names}
            for kind in names:
                found[kind]["seeds"] = {
                    s: acceptance_length(pick(f"{one}_{s}", a, kind))
                    / acceptance_length(pick("base" if other == "base" else f"{other}_{s}", b, kind)) - 1
                    for s in some
                }
            contrasts[f"{one} {a} / {other} {b}"] = found
        out[t] = {"acceptance_length": lengths, "by_position": positions, "contrasts": contrasts}
        if verified:
            out[t]["verified"] = verified  # drafts a round
        if t == "0" and {"none", "carryover"} <= set(cells):
            out[t]["reconvergence"] = reconvergence(rows[f"none_{seeds[0]}"][t]["off"], pooled("carryover", "on", "all", seeds),
                                                    pooled("none", "off", "all", seeds), kinds)
    return out


def by_position(results):
    """Share of rounds that accept draft 1, 2, ..."""
    history = [m for _, _, accepted, *_ in results for m in accepted]
    most = max(history, default=0)
    return [sum(m > k for m in history) / max(1, len(history)) for k in range(most)]


def reconvergence(control, one, other, kinds):
    """Drafts after the first rejected one that agree with the record, a round of the control; and the gain of `one` over
    `other`; by kind and as a correlation over prompts."""
    per_prompt = torch.tensor([c[3] / max(1, c[1]) for c in control], dtype=torch.float64)
    gains = torch.tensor([(a[0] / max(1, a[1])) / (b[0] / max(1, b[1])) - 1 for a, b in zip(one, other, strict=True)], dtype=torch.float64)
    found = {}
    for kind in corpus.KINDS:
        at = torch.tensor([k == kind for k in kinds])
        if at.any():
            found[kind] = {"reconverged": per_prompt[at].mean().item(), "gain": gains[at].mean().item()}
    both = torch.stack([per_prompt, gains])
    return {"kinds": found, "correlation": torch.corrcoef(both)[0, 1].item() if len(control) > 2 else None}


