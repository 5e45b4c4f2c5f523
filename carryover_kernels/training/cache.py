"""What a frozen target says about records, computed once and kept on disk: tap states and rejected branches.

Parallel draft-verify-draft drafts with the weights of the moment, so its branches are new in every step. Where the
first draft comes from one fixed drafter instead (off-policy), all of it can be kept: cells of a study then share the
very same moved anchors and rejected rows, and a step costs one drafter pass. Only rejected rows are stored.
"""

from pathlib import Path

import torch

from carryover_kernels.training import data, rollout
from carryover_kernels.training.loop import step_seed, write_atomically

SHARD = 256  # records a file; a run that is stopped goes on at the next file


def largest_bytes(records, anchors, proposals, features):
    """Upper bound of the folder's size: bf16 rows of all recorded tokens, and of all drafts as if each were rejected."""
    rows = sum(len(r.ids) for r in records) + len(records) * anchors * proposals
    return rows * features * 2 + len(records) * anchors * proposals * 8


@torch.no_grad()
def build(folder, model, target, records, *, anchors, seed, limit, batch=16, share=(0, 1), on_records=None):
    """Writes branches of every record at up to `anchors` anchors, drafted greedily by `model` without carry.

    limit: bytes; a run whose largest size is over it raises ValueError before anything is computed. share (k, n): only
    every n-th file from the k-th on, for n processes. A file that is there is not made again.
    """
    folder = Path(folder)
    most = largest_bytes(records, anchors, model.c.proposals, len(model.c.taps) * model.c.target_hidden)
    if most > limit:
        raise ValueError(
            f"cache: {len(records)} records at {anchors} anchors may take {most / 1e9:.2f} GB, must be at most the limit of "
            f"{limit / 1e9:.2f} GB: fewer records or anchors, a larger limit, or no cache"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for number, begin in enumerate(range(0, len(records), SHARD)):
        file = folder / f"{number:05d}.pt"
        if number % share[1] == share[0] and not file.exists():
            part = records[begin : begin + SHARD]
            content = _shard(model, target, part, anchors, step_seed(seed, number, 8), batch)
            write_atomically(file, lambda tmp, content=content: torch.save(content, tmp))
        if on_records is not None:
            on_records(min(begin + SHARD, len(records)))


def _shard(model, target, records, anchors, seed, batch):
    generator = torch.Generator().manual_seed(seed)
    first, keep = data.sample_anchors(records, anchors, generator)
    order = sorted(range(len(records)), key=lambda i: len(records[i].ids))
    states, rows = [None] * len(records), [None] * len(records)
    out = {k: [None] * len(records) for k in ("anchors", "keep", "accepted", "drafts", "predicted")}
    for i in range(0, len(order), batch):
        chosen = order[i : i + batch]
        ids, lengths = data.pad_records([records[j] for j in chosen])
        with data.autocast():
            b = rollout.draft_and_verify(model, target, ids, lengths, first[chosen], keep[chosen], logits=True)
        for row, j in enumerate(chosen):
            states[j] = b.features[row, : lengths[row]].to(torch.bfloat16)
            rows[j] = b.states[row][b.rejected[row]].to(torch.bfloat16)
            for key in out:
                out[key][j] = getattr(b, key)[row]
    stacked = {key: torch.stack(values) for key, values in out.items()}
    counts = torch.tensor([len(r) for r in rows])
    return {
        "first": first.short(), "anchors": stacked["anchors"].short(), "keep": stacked["keep"],
        "accepted": stacked["accepted"].to(torch.int8),
        "drafts": stacked["drafts"].int(), "predicted": stacked["predicted"].int(), "states": torch.cat(states),
        "rows": torch.cat(rows), "row_starts": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        "lengths": torch.tensor([len(r.ids) for r in records]),
    }


class Store:
    """Reads a folder that `build` wrote, by memory map: batches of records with their branches."""

    def __init__(self, folder, records):
        files = [Path(folder) / f"{number:05d}.pt" for number in range(-(-len(records) // SHARD))]
        missing = [f for f in files if not f.exists()]
        if missing:
            raise ValueError(f"cache: {missing[0]} is missing, must be there: build it first")
        self.records = records
        self.shards = [torch.load(f, mmap=True, weights_only=True) for f in files]
        self.starts = [torch.cat([torch.zeros(1, dtype=torch.int64), s["lengths"].cumsum(0)]).tolist() for s in self.shards]
        told = [n for s in self.shards for n in s["lengths"].tolist()]
        if told != [len(r.ids) for r in records]:
            raise ValueError(f"cache: {folder} was made from other records, must be from these: use another folder")
        self.by_length = sorted(range(len(records)), key=lambda i: (len(records[i].ids), i))

    def similar_lengths(self, count, generator):
        """As data.similar_lengths, with the order kept."""
        return data.window_of(self.by_length, count, generator)

    def batch(self, chosen, anchors, generator, first=False, carrying=0.0):
        """ids, lengths, Branches of records `chosen` with `anchors` of their branches each, drawn by `generator`.
        first: the anchors before they moved, nothing carried (a plain training step). carrying: this share is drawn from
        branches with rejected rows as long as there are such; where nearly all drafts are accepted they are few."""
        ids, lengths = data.pad_records([self.records[j] for j in chosen])
        n, width = ids.shape
        shard = self.shards[0]
        proposals, size = shard["drafts"].shape[-1], shard["states"].shape[-1]
        features = torch.zeros(n, width, size, dtype=torch.bfloat16)
        states = torch.zeros(n, anchors, proposals, size, dtype=torch.bfloat16)
        picked = {k: [] for k in ("first", "anchors", "keep", "accepted", "drafts", "predicted")}
        steps = torch.arange(proposals)
        rejected = torch.zeros(n, anchors, proposals, dtype=torch.bool)
        for row, j in enumerate(chosen):
            shard, at = self.shards[j // SHARD], j % SHARD
            begin = self.starts[j // SHARD][at]
            features[row, : lengths[row]] = shard["states"][begin : begin + int(lengths[row])]
            keep, accepted = shard["keep"][at], shard["accepted"][at].long()
            there = keep[:, None] & (steps >= accepted[:, None])
            live = keep.nonzero()[:, 0]
            live = live[torch.randperm(len(live), generator=generator)]
            ahead = (there[live].any(-1).cumsum(0) <= round(carrying * anchors)) & there[live].any(-1)
            live = torch.cat([live[ahead], live[~ahead]])[:anchors].sort().values
            dead = live.new_zeros(anchors - len(live))  # too few branches: the rest repeats one and is not kept
            branch = torch.cat([live, dead])
            for key in picked:
                picked[key].append(shard[key][at][branch].long())
            picked["keep"][-1] = torch.arange(anchors) < len(live)
            rows = shard["rows"][shard["row_starts"][at] : shard["row_starts"][at + 1]]
            where = torch.cat([torch.zeros(1, dtype=torch.int64), there.sum(-1).cumsum(0)])
            for a, k in enumerate(live.tolist()):
                m = int(accepted[k])
                states[row, a, m:] = rows[where[k] : where[k + 1]]
                rejected[row, a, m:] = True
        p = {key: torch.stack(values) for key, values in picked.items()}
        keep = p["keep"].bool()
        if first:
            return ids, lengths, rollout.plain_branches(features, p["first"], keep, proposals)
        positions = p["first"][..., None] + 1 + steps
        return ids, lengths, rollout.Branches(
            features, p["drafts"], p["accepted"], p["anchors"], keep, states, positions, rejected, p["predicted"]
        )
