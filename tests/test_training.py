"""Training: the torch drafter against the golden rounds, masks by brute force, losses, the loop's resume."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from carryover_kernels.training import losses, masks
from carryover_kernels.training.model import DraftModel

GOLDEN = Path(__file__).parent / "golden"
PARITY = 2e-5  # the golden rounds' own promise, golden/README.md: float32, nothing rounded


def golden_drafter(name, mark=None):
    folder = GOLDEN / name
    borrowed = {}
    if (folder / "target.safetensors").exists():
        target = load_file(folder / "target.safetensors")
        borrowed = dict(embed=target["embed_tokens.weight"], head=target["lm_head.weight"])
    drafter = DraftModel.load(folder, mark=mark, **borrowed)
    return drafter.eval(), load_file(folder / "rounds.safetensors")


@pytest.mark.parametrize("variant", ["baseline", "carryover", "carryover_post_norm"])
@pytest.mark.parametrize(
    "name",
    ["zlab_dflash_qwen3", "deepspec_dspark_qwen3_vanilla", "deepspec_dspark_qwen3_gated", "deepspec_dspark_qwen3_rnn"],
)
def test_golden_rounds(name, variant):
    site = {"baseline": None, "carryover": "pre_norm", "carryover_post_norm": "post_norm"}[variant]
    drafter, rounds = golden_drafter(name, site)
    if site:
        drafter.carryover_mark.data.copy_(rounds["carryover_marker"])
    context, carry, carry_positions = rounds["prompt_features"], None, None
    for r in range(5):
        start = rounds[f"round{r}.start"].reshape(1, 1)
        anchor = rounds[f"round{r}.anchor_token"].reshape(1)
        positions = torch.arange(context.shape[0])
        assert context.shape[0] == start.item()
        outside = drafter.outside_keys(drafter.features(context[None]), positions[None])
        valid = torch.ones(1, len(positions), dtype=torch.bool)
        if site and carry is not None and carry.shape[0]:
            kept = drafter.outside_keys(drafter.features(carry[None], carried=True), carry_positions[None])
            outside = [tuple(torch.cat(p, 1) for p in zip(a, b)) for a, b in zip(outside, kept)]
            seen = masks.draft_sight(
                positions, valid, start, drafter.c.block, carry_positions[None, None],
                torch.ones(1, 1, len(carry_positions), dtype=torch.bool),
            )
        else:
            seen = masks.draft_sight(positions, valid, start, drafter.c.block)
        tokens = drafter.block_tokens(anchor[None])[0]
        hidden = drafter(tokens, start + torch.arange(drafter.c.block), outside, seen.dense())
        proposed, logits = drafter.propose(drafter.proposal_rows(hidden), anchor, allow_mask=True)
        key = f"{variant}.round{r}"
        assert (hidden[0] - rounds[f"{key}.block_hidden"]).abs().max() < PARITY
        assert (logits[0] - rounds[f"{key}.draft_logits"]).abs().max() < PARITY
        assert torch.equal(proposed[0], rounds[f"{key}.draft_tokens"])
        if drafter.c.confidence:
            previous = torch.cat([anchor[:, None], proposed[:, :-1]], 1)
            confidence = drafter.confidence_logits(drafter.proposal_rows(hidden), previous)
            assert (confidence[0] - rounds[f"{key}.confidence_logits"]).abs().max() < PARITY
            taught = drafter.logits(drafter.proposal_rows(hidden), previous)
            assert (taught[0] - rounds[f"{key}.draft_logits"]).abs().max() < PARITY
        if f"round{r}.verify_features" in rounds:
            verified, accepted = rounds[f"round{r}.verify_features"], rounds[f"round{r}.num_accepted"].item()
            context = torch.cat([context, verified[: accepted + 1]])
            carry = verified[accepted + 1 :]
            carry_positions = start.item() + accepted + 1 + torch.arange(len(carry))
