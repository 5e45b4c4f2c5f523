"""The reference drafter computes what the public drafters computed: golden/README.md says how those numbers were made.

Nothing in the files was rounded; their authors' own arithmetic is float32, so hidden states and logits agree to 2e-5 and tokens exactly.
``test_drafter.py`` holds the package's drafter to the same files.
"""

import pathlib

import pytest
import torch

from python_ref.drafter import Drafter, load_safetensors

GOLDEN = pathlib.Path(__file__).parent / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
KINDS = ("baseline", "carryover", "carryover_post_norm")
TOLERANCE = 2e-5  # stated by golden/README.md


def replay(folder, kind, dtype):
    """Run every round of ``folder``; largest errors of hidden states, logits and confidence, and all tokens beside the expected."""
    rounds = load_safetensors(GOLDEN / folder / "rounds.safetensors")
    mark = None if kind == "baseline" else rounds["carryover_marker"]
    drafter = Drafter(GOLDEN / folder, dtype, mark, post_norm=kind.endswith("post_norm"))
    errors = {"block_hidden": 0.0, "draft_logits": 0.0, "confidence_logits": 0.0}
    tokens, expected_tokens = [], []
    start = drafter.absorb(rounds["prompt_features"], 0, 0)
    count = sum(name.endswith(".start") for name in rounds)
    for r in range(count):
        if r > 0:
            features = rounds[f"round{r - 1}.verify_features"]
            rejected = features.shape[0] - 1 - int(rounds[f"round{r - 1}.num_accepted"])
            start = drafter.absorb(features, start, rejected)
        if kind == "baseline":
            drafter.forget()
        assert start == int(rounds[f"round{r}.start"]), f"{folder} round {r}: the block starts elsewhere"
        hidden, logits, proposal, confidence = drafter.propose(int(rounds[f"round{r}.anchor_token"]), start)
        got = {"block_hidden": hidden, "draft_logits": logits, "confidence_logits": confidence}
        for name, value in got.items():
            expected = rounds.get(f"{kind}.round{r}.{name}")
            if expected is not None:
                assert value.isfinite().all(), f"{folder} {kind} round {r}: {name} has a NaN or Inf"
                errors[name] = max(errors[name], float((value.double() - expected.double()).abs().max()))
        tokens.append(proposal.tolist())
        expected_tokens.append(rounds[f"{kind}.round{r}.draft_tokens"].tolist())
    return errors, tokens, expected_tokens


@pytest.mark.parametrize("kind, dtype", [(kind, torch.float64) for kind in KINDS] + [("carryover", torch.float32)])
@pytest.mark.parametrize("folder", FOLDERS)
def test_reference_drafter_matches(folder, kind, dtype):
    errors, tokens, expected = replay(folder, kind, dtype)
    print(f"golden {folder:32s} {kind:20s} {str(dtype)[6:]} " + " ".join(f"{name} {value:.2e}" for name, value in errors.items()))
    assert tokens == expected
    for name, error in errors.items():
        assert error <= TOLERANCE, f"{folder} {kind}: {name} is {error:.2e} off"


def test_wrong_drafters_are_seen():
    """Each of these slips leaves the tolerance: the golden files can tell."""

    def error(kind, change):
        rounds = load_safetensors(GOLDEN / FOLDERS[-1] / "rounds.safetensors")
        drafter = Drafter(GOLDEN / FOLDERS[-1], torch.float64, rounds["carryover_marker"])
        change(drafter)
        start = drafter.absorb(rounds["prompt_features"], 0, 0)
        features = rounds["round0.verify_features"]
        start = drafter.absorb(features, start, features.shape[0] - 1 - int(rounds["round0.num_accepted"]))
        hidden = drafter.propose(int(rounds["round1.anchor_token"]), start)[0]
        return float((hidden - rounds[f"{kind}.round1.block_hidden"]).abs().max())

    def no_mark(drafter):
        drafter.mark = None

    def mark_on_all_rows_of_the_norm(drafter):
        drafter.mark, drafter.mark_kv = None, (drafter.kv_weight / drafter.w["hidden_norm.weight"]) @ drafter.mark

    def no_carry(drafter):
        drafter.carry_slot_ids = torch.tensor([-1], dtype=torch.int32)

    assert error("carryover", lambda drafter: None) < TOLERANCE
    for change in (no_mark, mark_on_all_rows_of_the_norm, no_carry):
        assert error("carryover", change) > 10 * TOLERANCE, change.__name__
