"""Who sees what, written once: context up to a limit, carried rows of the own branch, the own block.

Every query and every key is described by a few integers, and `sees` is the only rule. The dense mask (CPU) evaluates
it on all pairs, flex_attention (GPU) on pairs of indices, the serving op's tests on the rows of one request.
"""

from dataclasses import dataclass

import torch

CONTEXT, BRANCH, NOBODY = 0, 1, 2  # kinds of keys; a key of kind NOBODY is padding


@dataclass(frozen=True)
class Sight:
    """All queries and keys of a packed pass; N sequences, Q queries, K keys. Integers are i64.

    limit    [N, Q]  a query sees the context at positions < limit
    owner    [N, Q]  the branch (anchor number) of a query; a negative owner is padding
    position [N, Q]  used only where `causal`
    kind     [N, K]  CONTEXT: anyone below the limit; BRANCH: rows (carried or block) of one owner; NOBODY
    key_owner, key_position [N, K]
    causal   within a branch a query sees keys at positions up to its own (target verification); else all of them
    """

    limit: torch.Tensor
    owner: torch.Tensor
    position: torch.Tensor
    kind: torch.Tensor
    key_owner: torch.Tensor
    key_position: torch.Tensor
    causal: bool = False

    def dense(self):
        """[N, 1, Q, K] bool, True = seen."""
        q = [t[:, :, None] for t in (self.limit, self.owner, self.position)]
        k = [t[:, None, :] for t in (self.kind, self.key_owner, self.key_position)]
        return sees(*q, *k, self.causal)[:, None]

    def apart(self, context, count):
        """The same in two pieces, where the first `context` keys are context and the rest are `count` branches' own rows
        (carried, then blocks): seen [N, 1, Q, context] and seen [N, A, 1, Q / A, own keys of a branch]. A branch sees none
        of the others' rows, so that those pairs need not be computed."""
        q = [t[:, :, None] for t in (self.limit, self.owner, self.position)]
        k = [t[:, None, :context] for t in (self.kind, self.key_owner, self.key_position)]
        rows = self.limit.shape[1] // count
        carried = (self.kind.shape[1] - context) // count - rows
        own = []
        for t in (self.kind, self.key_owner, self.key_position):
            pieces = t[:, context:].split([count * carried, count * rows], 1)
            own.append(torch.cat([p.unflatten(1, (count, -1)) for p in pieces if p.shape[1]], -1)[:, :, None, :])
        each = [t.unflatten(1, (count, rows))[..., None] for t in (self.limit, self.owner, self.position)]
        return sees(*q, *k, self.causal)[:, None], sees(*each, *own, self.causal)[:, :, None]

    def flex(self):
        """mask_mod for torch.nn.attention.flex_attention.create_block_mask(mod, B=N, H=None, Q_LEN=Q, KV_LEN=K)."""

        def mod(n, head, q, k):
            return sees(
                self.limit[n, q], self.owner[n, q], self.position[n, q],
                self.kind[n, k], self.key_owner[n, k], self.key_position[n, k], self.causal,
            )

        return mod


def sees(limit, owner, position, kind, key_owner, key_position, causal):
    """The rule. Tensors of any shapes that broadcast."""
    context = (kind == CONTEXT) & (key_position < limit)
    branch = (kind == BRANCH) & (key_owner == owner)
    if causal:
        branch = branch & (key_position <= position)
    return context | branch


def rows_of(anchors, rows):
    """Positions anchors + 0..rows-1 and owners for every anchor: anchors [N, A] -> two of [N, A * rows]."""
    positions = anchors[:, :, None] + torch.arange(rows, device=anchors.device)
    owners = torch.arange(anchors.shape[1], device=anchors.device)[None, :, None].expand_as(positions)
    return positions.flatten(1), owners.flatten(1)


def draft_sight(context_positions, context_valid, anchors, block, carry_positions=None, carry_valid=None):
    """Sight of the drafter's blocks: keys are [context | carried rows | blocks].

    context_positions [S] or [N, S], context_valid [N, S] bool (False = padding); anchors [N, A]: a block of `block`
    rows starts at each and sees the context before it; carry_positions, carry_valid [N, A, G] (row owned by anchor).
    """
    n, count = anchors.shape
    position, owner = rows_of(anchors, block)
    limit = anchors[:, :, None].expand(n, count, block).flatten(1)
    context_positions = context_positions.expand(context_valid.shape)
    kind = [torch.where(context_valid, CONTEXT, NOBODY)]
    key_owner = [torch.full_like(context_positions, -1)]
    key_position = [context_positions]
    if carry_positions is not None:
        kind.append(torch.where(carry_valid, BRANCH, NOBODY).flatten(1))
        key_owner.append(torch.arange(count, device=anchors.device)[None, :, None].expand(carry_valid.shape).flatten(1))
        key_position.append(carry_positions.flatten(1))
    kind.append(torch.full_like(position, BRANCH))
    key_owner.append(owner)
    key_position.append(position)
    return Sight(limit, owner, position, torch.cat(kind, 1), torch.cat(key_owner, 1), torch.cat(key_position, 1))


def branch_sight(context_valid, anchors, rows):
    """Sight of the target's verification: branch row i (0-based) of anchor a stands at position anchor + 1 + i, sees
    the recorded tokens up to the anchor and its own branch up to itself. Keys are [record S | branches A * rows]."""
    n, length = context_valid.shape
    position, owner = rows_of(anchors + 1, rows)
    limit = (anchors + 1)[:, :, None].expand(*anchors.shape, rows).flatten(1)
    record = torch.arange(length, device=anchors.device).expand(n, length)
    kind = torch.cat([torch.where(context_valid, CONTEXT, NOBODY), torch.full_like(position, BRANCH)], 1)
    key_owner = torch.cat([torch.full_like(record, -1), owner], 1)
    return Sight(limit, owner, position, kind, key_owner, torch.cat([record, position], 1), causal=True)
