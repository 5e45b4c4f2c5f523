"""``verify_draft``: against the reference, and the reference against the law it must keep: the output has the target's distribution.

The law is checked exactly, by enumeration over all drafts, coins and next tokens of a tiny vocabulary, and on the op by chi-squared.
"""

import itertools

import cases
import pytest
import torch
from cases import BF16, F16, F32, i32
from compare import assert_equal, chi_squared, chi_squared_limit
from doors import compiled, opcheck, opcheck_dynamic, refused, run
from hypothesis import given
from hypothesis import strategies as st

import python_ref.verify_draft as definition
from python_ref.random import gumbels, uniforms

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
NAME = "verify_draft"
OUTPUTS = ("num_accepted", "next_token", "num_rejected")


def undecided(args, seed):
    """[R] requests whose result in float64 hangs on less than float32's rounding of a coin, a probability or a noise."""
    results = []
    noise = torch.Generator().manual_seed(seed)
    real = definition.uniforms, definition.gumbels
    for shift in (0.0, -1e-5, 1e-5, 0.0, 0.0):
        definition.uniforms = lambda *a, shift=shift: uniforms(*a) + shift
        definition.gumbels = lambda *a: gumbels(*a) + 1e-4 * torch.randn(a[-1], generator=noise)
        changed = dict(args)
        if args.get("target_logits") is not None:
            changed["target_logits"] = args["target_logits"].double() + 1e-6 * torch.randn(args["target_logits"].shape, generator=noise)
        try:
            results.append(torch.stack([t.long() for t in definition.verify_draft(**changed)]))
        finally:
            definition.uniforms, definition.gumbels = real
    return (torch.stack(results) != results[0]).any(dim=(0, 1))


def check(args, device):
    out, _ = run(NAME, args, device)
    clean = cases.clean(args)
    expected = definition.verify_draft(**clean)
    close = undecided(clean, 0) if args["method"] != "greedy" else torch.zeros(len(expected[0]), dtype=torch.bool)
    for name, got, wanted in zip(OUTPUTS, out, expected):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert_equal(torch.where(close, wanted, got), wanted, name)
    return dict(zip(OUTPUTS, out)), close


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", cases.VERIFY)
def test_named_case(name, dtype, rng, device):
    args = cases.verify_case(rng, dtype=dtype, **cases.VERIFY[name])
    check(args, device)
    if dtype == F32:
        opcheck(NAME, args, device)


def test_most_results_are_decided(rng, device):
    """Leaving out undecided requests hides nothing: they are a few in a hundred (a fifth of 30 allowed)."""
    for method in ("rejection", "block"):
        _, close = check(cases.verify_case(rng, method, rows=(5,) * 30), device)
        assert close.float().mean() < 0.2


@st.composite
def ragged(draw):
    drafts = draw(st.integers(1, 6))
    return {
        "method": draw(st.sampled_from(["greedy", "rejection", "block"])),
        "rows": draw(st.lists(st.integers(0, drafts + 1), min_size=1, max_size=5)),
        "drafts": drafts,
        "vocab": draw(st.integers(2, 40)),
        "one_hot": draw(st.booleans()),
        "close": draw(st.sampled_from([0.3, 1.0, 3.0])),
        "bad_drafts": draw(st.booleans()),
        "removed": draw(st.sampled_from([0, 1])),
        "strided": draw(st.booleans()),
        "lead": draw(st.integers(0, 2)),
        "tail": draw(st.integers(0, 2)),
    }


@given(options=ragged(), dtype=st.sampled_from([F32, BF16, F16]), number=st.integers(0, 2**31))
def test_ragged(options, dtype, number, device):
    args = cases.verify_case(torch.Generator().manual_seed(number), dtype=dtype, **options)
    check(args, device)
    opcheck(NAME, args, device, ("test_faketensor",))


# --- the law, exactly


VOCAB, DRAFTS = 3, 3


def models(rng):
    """Random next-token tables of target and drafter by prefix, as float64 distributions; some probabilities are 0."""
    tables = []
    for _ in range(2):
        table = {}
        for length in range(DRAFTS + 1):
            for prefix in itertools.product(range(VOCAB), repeat=length):
                p = torch.rand(VOCAB, generator=rng, dtype=torch.float64)
                if torch.rand((), generator=rng) < 0.4:
                    p[int(cases.integers(rng, 0, VOCAB))] = 0
                table[prefix] = p / p.sum()
        tables.append(table)
    return tables


def joint(table, length):
    """Probability of every sequence of ``length`` tokens."""
    result = {}
    for tokens in itertools.product(range(VOCAB), repeat=length):
        chance = 1.0
        for i in range(length):
            chance *= float(table[tokens[:i]][tokens[i]])
        result[tokens] = chance
    return result


def outcomes(accept, method, drafts, p, q):
    """(chance, accepted, next-token weights) of a chain of drafts, all coins integrated out exactly.

    Each coin only matters by whether it is under a threshold; bisection finds it with the other coins held where this one decides.
    """
    count = len(drafts)

    def accepted_with(i, u):
        coins = [(0.0 if method == "rejection" and j < i else 1.0) for j in range(count)]
        coins[i] = u
        return accept(drafts, p, q, coins)[0] > i

    thresholds = []
    for i in range(count):
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if accepted_with(i, middle) else (low, middle)
        thresholds.append(low)
    for signs in itertools.product((True, False), repeat=count):  # every coin under or over its threshold
        chance = 1.0
        for under, t in zip(signs, thresholds):
            chance *= t if under else 1 - t
        if chance > 0:
            yield chance, *accept(drafts, p, q, [0.0 if under else 1.0 for under in signs])


def output_law(accept, method, target, drafter, drafts_law):
    """Distribution of the first DRAFTS + 1 output tokens: drafts kept, the next token, the target's own continuation; mean accepted."""
    law = dict.fromkeys(itertools.product(range(VOCAB), repeat=DRAFTS + 1), 0.0)
    mean = 0.0
    for drafts, chain in drafts_law.items():
        if chain == 0:
            continue
        p = torch.stack([target[drafts[:i]] for i in range(DRAFTS + 1)])
        q = torch.stack([drafter(drafts, i) for i in range(DRAFTS)])
        for chance, accepted, weights in outcomes(accept, method, list(drafts), p, q):
            mean += chain * chance * accepted
            for token in range(VOCAB):
                kept = drafts[:accepted] + (token,)
                share = chain * chance * float(weights[token] / weights.sum())
                for rest in itertools.product(range(VOCAB), repeat=DRAFTS + 1 - len(kept)):
                    tokens, tail = kept + rest, 1.0
                    for i in range(len(kept), DRAFTS + 1):
                        tail *= float(target[tokens[:i]][tokens[i]])
                    law[tokens] += share * tail
    return law, mean


def distance(a, b):
    return max(abs(a[key] - b[key]) for key in a)


EXACT = 1e-9  # sums of 81 products in float64, coins' thresholds to 2**-60


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_reference_keeps_the_targets_distribution_exactly(method, rng):
    accept = {"rejection": definition.accept_by_rejection, "block": definition.accept_by_block}[method]
    target, drafter = models(rng)
    wanted = joint(target, DRAFTS + 1)
    law, _ = output_law(accept, method, target, lambda drafts, i: drafter[drafts[:i]], joint(drafter, DRAFTS))
    assert distance(law, wanted) < EXACT

    def one_hot(drafts, i):
        return torch.eye(VOCAB, dtype=torch.float64)[drafts[i]]

    for chosen in itertools.product(range(VOCAB), repeat=DRAFTS):  # drafts chosen, not sampled
        law, _ = output_law(accept, method, target, one_hot, {chosen: 1.0})
        assert distance(law, wanted) < EXACT


def test_block_verification_accepts_at_least_as_many(rng):
    for _ in range(3):
        target, drafter = models(rng)
        mean = {}
        for method, accept in (("rejection", definition.accept_by_rejection), ("block", definition.accept_by_block)):
            _, mean[method] = output_law(accept, method, target, lambda d, i: drafter[d[:i]], joint(drafter, DRAFTS))
        assert mean["block"] >= mean["rejection"] - EXACT


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_wrong_residual_breaks_the_law(method, rng, monkeypatch):
    """The enumeration has teeth: sampling the target itself after a rejection is not lossless."""
    monkeypatch.setattr(definition, "residual", lambda p, q: p)
    accept = {"rejection": definition.accept_by_rejection, "block": definition.accept_by_block}[method]
    target, drafter = models(rng)
    law, _ = output_law(accept, method, target, lambda drafts, i: drafter[drafts[:i]], joint(drafter, DRAFTS))
    assert distance(law, joint(target, DRAFTS + 1)) > 1e-3


# --- the law, on the op


def sampled_law(method, rng, device, draws, wrong_q=False):
    """Counts over the 64 sequences of 3 tokens (vocabulary 4) that two verified drafts give, and their probabilities under the target."""
    target = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.05, 0.6, 0.05, 0.3], [0.25, 0.25, 0.4, 0.1]])
    drafter = torch.tensor([[0.2, 0.4, 0.3, 0.1], [0.3, 0.3, 0.2, 0.2]])
    drafts = torch.stack([torch.multinomial(q, draws, replacement=True, generator=rng) for q in drafter], dim=1)
    args = {
        "draft_tokens": drafts, "query_start_loc": i32(range(0, 3 * draws + 1, 3)), "target_logits": target.log().repeat(draws, 1),
        "draft_probs": (torch.full_like(drafter, 0.25) if wrong_q else drafter).expand(draws, 2, 4),
        "seeds": cases.integers(rng, -(2**62), 2**62, (draws,)), "offsets": torch.arange(draws), "method": method,
    }  # fmt: skip
    (accepted, token, _), _ = run(NAME, args, device)
    output = torch.stack([torch.multinomial(p, draws, replacement=True, generator=rng) for p in target], dim=1)
    for r in range(draws):
        a = int(accepted[r])
        output[r, :a], output[r, a] = drafts[r, :a], token[r]
    counts = torch.bincount(output @ torch.tensor([16, 4, 1]), minlength=64)
    return counts, (target[0][:, None, None] * target[1][:, None] * target[2]).flatten()


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_samples_have_the_targets_distribution(method, rng, device, backend):
    draws = {"reference": 500, "simt": 1000}.get(backend, 15000)
    assert chi_squared(*sampled_law(method, rng, device, draws)) < chi_squared_limit(63)
    assert chi_squared(*sampled_law(method, rng, device, draws, wrong_q=True)) > chi_squared_limit(63)  # a wrong residual is seen


# --- reports and rules


def greedy(drafts, argmax, starts):
    return {
        "draft_tokens": torch.tensor(drafts), "query_start_loc": i32(starts), "target_argmax": torch.tensor(argmax), "method": "greedy",
    }  # fmt: skip


def test_r14_r16_padding_requests_give_nothing(device):
    got, _ = check(greedy([[5, 6], [5, 6], [0, 0]], [5, 6, 7], [0, 3, 3, 3]), device)
    assert got["num_accepted"].tolist() == [2, 0, 0]
    assert got["next_token"].tolist() == [7, -1, -1]
    assert got["num_rejected"].tolist() == [0, 0, 0]


def test_r47_rejected_counts_rows_not_drafts(device):
    """Adaptive verification trims drafts: the trimmed ones never ran, so they are no rejected rows."""
    got, _ = check(greedy([[5, 6, 7, 8]], [5, 9, 1], [0, 3]), device)
    assert got["num_accepted"].tolist() == [1] and got["num_rejected"].tolist() == [1] and got["next_token"].tolist() == [9]


def test_prefill_step_has_no_draft(device):
    got, _ = check(greedy([[5, 6, 7, 8]], [3], [0, 1]), device)
    assert [got[name].tolist() for name in OUTPUTS] == [[0], [3], [0]]


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_no_token_outside_the_targets_support(method, rng, device):
    """Tokens removed by top-p (-inf) are neither accepted nor sampled, even where the drafter is sure of them."""
    args = cases.verify_case(rng, method, rows=(5,) * 40, removed=5, close=4.0)
    (accepted, token, _), _ = run(NAME, args, device)
    for r in range(40):
        logits = args["target_logits"][5 * r : 5 * r + 5]
        assert logits[accepted[r], token[r]] > float("-inf")
        for i in range(int(accepted[r])):
            assert logits[i, args["draft_tokens"][r, i]] > float("-inf")


def test_r51_ids_outside_the_vocabulary_are_never_read(rng, device):
    for method in ("greedy", "rejection", "block"):
        check(cases.verify_case(rng, method, rows=(5,) * 6, bad_drafts=True), device)


def test_same_seed_same_result(rng, device):
    args = cases.verify_case(rng, "block", rows=(5,) * 8)
    first, second = (run(NAME, args, device)[0] for _ in range(2))
    for a, b in zip(first, second):
        assert_equal(a, b)


def test_all_of_opcheck(rng, device):
    for name in ("greedy_argmax", "greedy", "one_hot", "block"):
        opcheck_dynamic(NAME, cases.verify_case(rng, **cases.VERIFY[name]), device)


def test_fullgraph(rng, device):
    args = cases.verify_case(rng, "block")
    out, _ = run(NAME, args, device)
    for a, b in zip(out, compiled(NAME, args, device)[0]):
        assert_equal(b, a)


def bad(**changes):
    return lambda args: args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


GREEDY = {"method": "greedy"}
REFUSALS = {
    "draft_tokens has dtype int32, must be int64": ({}, bad(draft_tokens=lambda t: t.int())),
    "draft_tokens has 1 dimensions, must have 2: [R, N]": ({}, bad(draft_tokens=lambda t: t[0])),
    "draft_tokens has strides [1, 4], must be contiguous": ({}, bad(draft_tokens=lambda t: t.T.contiguous().T)),
    "query_start_loc has dtype int64, must be int32": ({}, bad(query_start_loc=lambda t: t.long())),
    "query_start_loc has shape [4], must be [5]: [R+1]": ({}, bad(query_start_loc=lambda t: t[:4])),
    "method is 'typical', must be one of greedy, rejection, block": ({}, bad(method="typical")),
    "target_argmax is None, must be given with method 'greedy' unless target_logits is": (GREEDY, bad(target_logits=None)),
    "target_argmax is given, must be given with method 'greedy' unless target_logits is": (
        GREEDY, bad(target_argmax=torch.zeros(14, dtype=torch.int64)),
    ),
    "target_logits is None, must be given with method 'rejection'": ({}, bad(target_logits=None)),
    "target_argmax is given, must be None with method 'rejection'": ({}, bad(target_argmax=torch.zeros(14, dtype=torch.int64))),
    "target_logits' vocabulary is 0, must be at least 1": ({}, bad(target_logits=lambda t: t[:, :0])),
    "target_logits has dtype float64, must be float32, bfloat16 or float16": ({}, bad(target_logits=lambda t: t.double())),
    "target_logits has stride 2 in its last dimension, must be 1": ({}, bad(target_logits=lambda t: t.repeat_interleave(2, 1)[:, ::2])),
    "target_argmax has dtype int32, must be int64": (GREEDY, bad(target_logits=None, target_argmax=torch.zeros(14, dtype=torch.int32))),
    "draft_probs is given, must be None with method 'greedy'": (GREEDY, bad(draft_probs=torch.zeros(4, 4, 11))),
    "draft_probs has dtype bfloat16, must be float32": ({}, bad(draft_probs=lambda t: t.bfloat16())),
    "draft_probs has shape [4, 3, 11], must be [4, 4, 11]: [R, N, V]": ({}, bad(draft_probs=lambda t: t[:, :3])),
    "seeds is None, must be given with method 'rejection'": ({}, bad(seeds=None)),
    "offsets is None, must be given with method 'rejection'": ({}, bad(offsets=None)),
    "seeds has dtype int32, must be int64": ({}, bad(seeds=lambda t: t.int())),
    "offsets has shape [3], must be [4]: [R]": ({}, bad(offsets=lambda t: t[:3])),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refuses(sentence, rng, device):
    options, change = REFUSALS[sentence]
    refused(NAME, change(cases.verify_case(rng, **options)), sentence, device)
