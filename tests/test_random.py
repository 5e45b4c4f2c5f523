"""The random numbers: known answers of Philox4x32-10, the map to floats, and what the ops draw from it."""

import pytest
import torch
from cases import i32

from carryover_kernels import ops
from python_ref.random import STREAM_ACCEPT, STREAM_DRAFT, STREAM_NEXT, gumbels, philox, uniforms

ALL = 0xFFFFFFFF
# Counter, key and output words from the test vectors of Random123 (Salmon et al. 2011), ten rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_known_answers(counter, key, words):
    assert philox(counter, key) == words
    as_tensors = philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(int(word) for word in as_tensors) == words


def test_uniforms_are_inside_the_interval_and_exact_in_float32():
    u = uniforms(-3, 2**35 + 1, 2, STREAM_DRAFT, 4001)
    assert (0 < u).all() and (u < 1).all()
    assert torch.equal(u.float().double(), u)
    # 4001 uniforms: the mean's standard error is 1 / sqrt(12 * 4001) = 0.0046; five of them.
    assert abs(float(u.mean()) - 0.5) < 0.023
    assert gumbels(1, 2, 3, STREAM_NEXT, 50).isfinite().all()
    for count in range(1, 70):  # both ways of computing them
        assert torch.equal(uniforms(-3, 2**35 + 1, 2, STREAM_DRAFT, count), u[:count])


def test_every_coordinate_changes_the_numbers():
    base = uniforms(5, 6, 1, STREAM_DRAFT, 8)
    for other in ((6, 6, 1, 0), (5, 7, 1, 0), (5, 6, 2, 0), (5, 6, 1, 1), (5 + 2**32, 6, 1, 0), (5, 6 + 2**32, 1, 0), (-5, 6, 1, 0)):
        assert (uniforms(*other, 8) != base).all(), other


@pytest.mark.usefixtures("poisoned_outputs")
def test_ops_draw_these_numbers(rng, device):
    """Flat logits: the sampled token is the argmax of the noise itself, for every request, step, seed sign and 64-bit offset."""
    seeds = torch.tensor([0, 1, -1, 2**62 + 3, -(2**63)])
    offsets = torch.tensor([0, 7, 2**32, 2**40 + 1, 12345])
    vocab, steps = 401, 3
    tokens, *_ = ops.markov_sample(
        torch.zeros(5, steps, vocab, device=device), torch.zeros(5, dtype=torch.int64, device=device),
        temperature=torch.ones(5, device=device), seeds=seeds.to(device), offsets=offsets.to(device),
    )  # fmt: skip
    for r in range(5):
        for i in range(steps):
            noise = gumbels(int(seeds[r]), int(offsets[r]), i, STREAM_DRAFT, vocab)
            assert noise[tokens[r, i]] >= noise.max() - 1e-5 * noise.max().abs(), (r, i)  # float32 logs near a tie

    accepted, token, _ = ops.verify_draft(
        torch.zeros(5, 1, dtype=torch.int64, device=device), i32(range(0, 11, 2)).to(device),
        torch.zeros(10, vocab, device=device), draft_probs=torch.full((5, 1, vocab), 1 / vocab, device=device),
        seeds=seeds.to(device), offsets=offsets.to(device), method="rejection",
    )  # fmt: skip
    assert accepted.tolist() == [1] * 5  # p = q: every coin below 1 accepts
    for r in range(5):
        noise = gumbels(int(seeds[r]), int(offsets[r]), 1, STREAM_NEXT, vocab)
        assert noise[token[r]] >= noise.max() - 1e-5 * noise.max().abs(), r


def test_accept_coin_is_stream_1(device):
    """p(d) / q(d) = 1/2: accepted exactly where the coin is below a half."""
    count = 64
    seeds, offsets = torch.arange(count), torch.full((count,), 3)
    accepted, *_ = ops.verify_draft(
        torch.zeros(count, 1, dtype=torch.int64, device=device), i32(range(0, 2 * count + 1, 2)).to(device),
        torch.zeros(2 * count, 2, device=device), seeds=seeds.to(device), offsets=offsets.to(device), method="rejection",
    )  # fmt: skip
    coins = [float(uniforms(s, 3, 0, STREAM_ACCEPT, 1)) for s in range(count)]
    assert accepted.tolist() == [int(u < 0.5) for u in coins]
    assert 0 < sum(accepted.tolist()) < count
