"""``markov_sample`` against the float64 reference: logits, tokens, distributions, confidence; and that samples follow the distribution."""

import functools

import cases
import pytest
import torch
from cases import BF16, F16, F32
from compare import ORDERS, assert_as_good_as_torch, assert_equal, chi_squared, chi_squared_limit
from doors import compiled, opcheck, opcheck_dynamic, refused, run
from hypothesis import given
from hypothesis import strategies as st

import python_ref.markov_sample as definition
from carryover_kernels import ops
from python_ref import eager
from python_ref.random import STREAM_DRAFT, gumbels

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
NAME = "markov_sample"
# Two scores closer than this share of the larger may swap: float32 logits / T, plus a float32 logarithm of a logarithm.
NEAR_TIE = 1e-5


def sibling(args, turn):
    """Inputs of the same kind: base logits rolled over the vocabulary, hidden features and ranks permuted alike wherever they occur."""
    hidden, w1 = args.get("hidden"), args.get("markov_w1")
    rng = torch.Generator().manual_seed(turn)
    h = torch.randperm(0 if hidden is None else hidden.shape[2], generator=rng)
    r = torch.randperm(0 if w1 is None else w1.shape[1], generator=rng)
    columns = {"gated": [h, len(h) + r], "rnn": [r, len(r) + r, 2 * len(r) + h]}.get(args["head"])
    rows = torch.cat([r, len(r) + r, 2 * len(r) + r]) if args["head"] == "rnn" else r
    same = args | {"base_logits": args["base_logits"].roll(turn, dims=2)}
    if hidden is not None:
        same["hidden"] = hidden[:, :, h]
    if w1 is not None:
        same |= {"markov_w1": w1[:, r], "markov_w2": args["markov_w2"][:, r]}
    if columns is not None:
        same["head_weight"] = args["head_weight"][rows][:, torch.cat(columns)]
        same["head_bias"] = None if args["head_bias"] is None else args["head_bias"][rows]
    if args.get("confidence_weight") is not None:
        width = args["confidence_weight"].shape[1]
        same["confidence_weight"] = args["confidence_weight"][:, torch.cat([h, len(h) + r])[:width]]
    return same


def check(args, device):
    """Floats against the reference fed with the op's own earlier tokens; each token against the op's own logits of its step."""
    (tokens, logits, probs, confidence), _ = run(NAME, args, device)
    ref = definition.markov_sample(**cases.clean(args), forced_tokens=tokens)
    low = eager.markov_sample(**cases.clean(args), forced_tokens=tokens)

    @functools.cache
    def other(turn):
        same = sibling(cases.clean(args), turn)
        return [f.markov_sample(**same, forced_tokens=tokens) for f in (eager, definition)]

    for i, name, got in ((1, "logits", logits), (3, "confidence", confidence)):
        assert_as_good_as_torch(got, low[i], ref[i], name, ([y[i] for y in other(turn)] for turn in range(1, ORDERS)))

    offsets, temperature = args.get("draft_to_target"), args.get("temperature")
    for r, anchor in enumerate(args["anchor_tokens"].tolist()):
        if anchor < 0:
            assert (tokens[r] == -1).all() and not logits[r].any() and not probs[r : r + 1].any() and not confidence[r : r + 1].any()
            continue
        for i in range(tokens.shape[1]):
            draft = int(tokens[r, i])
            if offsets is not None:
                (draft,) = (torch.arange(len(offsets)) + offsets == draft).nonzero()[:, 0].tolist()
            t = 0.0 if temperature is None else float(temperature[r])
            if t > 0:
                noise = gumbels(int(args["seeds"][r]), int(args["offsets"][r]), i, STREAM_DRAFT, logits.shape[2])
                scores = logits[r, i].double() / t + noise
                assert scores[draft] >= scores.max() - NEAR_TIE * max(1.0, float(scores.max().abs())), (r, i)
                continue
            assert draft == definition.first_argmax(logits[r, i]), (r, i)
            if args["return_probs"]:
                assert_equal(probs[r, i], torch.eye(logits.shape[2])[draft], f"probs[{r}, {i}]")
    if temperature is not None and args["return_probs"]:
        warm = (temperature > 0) & (args["anchor_tokens"] >= 0)
        pairs = ([y[2][warm] for y in other(turn)] for turn in range(1, ORDERS))
        assert_as_good_as_torch(probs[warm], low[2][warm], ref[2][warm], "probs", pairs)
    return tokens, logits, probs, confidence


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", cases.MARKOV)
def test_named_case(name, dtype, rng, device):
    args = cases.markov_case(rng, **{"dtype": dtype} | cases.MARKOV[name])
    check(args, device)
    if dtype == F32:
        opcheck(NAME, args, device)


@st.composite
def ragged(draw):
    requests = draw(st.integers(1, 4))
    vocab = draw(st.integers(1, 70))
    hot = st.sampled_from([0.0, 0.3, 1.0, 2.5])
    return {
        "requests": requests,
        "steps": draw(st.integers(1, 5)),
        "vocab": vocab,
        "target_vocab": vocab + draw(st.sampled_from([0, 0, 17])),
        "head": draw(st.sampled_from(["none", "vanilla", "gated", "rnn"])),
        "rank": draw(st.integers(1, 20)),
        "hidden": draw(st.integers(1, 30)),
        "bias": draw(st.booleans()),
        "confidence": draw(st.sampled_from([None, "hidden", "markov"])),
        "temperature": draw(st.none() | st.lists(hot, min_size=requests, max_size=requests)),
        "padding": draw(st.sets(st.integers(0, requests - 1))),
        "strided": draw(st.booleans()),
        "weights": draw(st.sampled_from([None, F32, BF16])),
        "hidden_dtype": draw(st.sampled_from([None, F32, F16])),
        "probs": draw(st.booleans()),
    }


@given(options=ragged(), dtype=st.sampled_from([F32, BF16, F16]), number=st.integers(0, 2**31))
def test_ragged(options, dtype, number, device):
    args = cases.markov_case(torch.Generator().manual_seed(number), dtype, **options)
    check(args, device)
    opcheck(NAME, args, device, ("test_faketensor",))


# --- the reference itself


def test_reference_recurrences(rng):
    """Two steps of each head written out: what the second step sees of the first."""
    for head in ("vanilla", "gated", "rnn"):
        args = cases.markov_case(rng, torch.float64, requests=1, steps=2, vocab=9, head=head, rank=3, hidden=4)
        tokens, logits, _, confidence = definition.markov_sample(**args)
        state, previous = torch.zeros(3, dtype=torch.float64), int(args["anchor_tokens"][0])
        for i in range(2):
            w, h = args["markov_w1"][previous], args["hidden"][0, i]
            if head == "vanilla":
                z = w
            elif head == "gated":
                z = w / (1 + torch.exp(-(args["head_weight"] @ torch.cat([h, w]) + args["head_bias"])))
            else:
                a, c, o = (args["head_weight"] @ torch.cat([state, w, h]) + args["head_bias"]).split(3)
                keep = 1 / (1 + torch.exp(-a))
                state = keep * state + (1 - keep) * torch.tanh(c)
                z = torch.tanh(o)
            expected = args["base_logits"][0, i] + args["markov_w2"] @ z
            assert torch.allclose(logits[0, i], expected, rtol=1e-12)
            sure = args["confidence_weight"][0].double() @ torch.cat([h, w]) + args["confidence_bias"][0].double()
            assert torch.allclose(confidence[0, i], sure, rtol=1e-12)
            previous = int(tokens[0, i])
            assert previous == int(expected.argmax())


def test_ties_go_to_the_lowest_id(device):
    base = torch.zeros(1, 2, 50)
    base[0, 0, [7, 31, 44]] = 3.0
    (tokens, *_), _ = run(NAME, {"base_logits": base.bfloat16(), "anchor_tokens": torch.tensor([0])}, device)
    assert tokens.tolist() == [[7, 0]]


def test_samples_follow_the_distribution(rng, device, backend):
    """Chi-squared over draws of one slot; a threshold that a wrong temperature or a doubled noise fails."""
    draws = 3000 if backend in ("reference", "simt") else 20000
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, -0.4, 0.9])
    (tokens, *_), _ = run(
        NAME,
        {
            "base_logits": logits.expand(draws, 1, 6), "anchor_tokens": torch.zeros(draws, dtype=torch.int64),
            "temperature": torch.full((draws,), 0.8), "seeds": cases.integers(rng, -(2**62), 2**62, (draws,)),
            "offsets": torch.arange(draws),
        },
        device,
    )  # fmt: skip
    counts = torch.bincount(tokens[:, 0], minlength=6)
    assert chi_squared(counts, torch.softmax(logits / 0.8, 0)) < chi_squared_limit(5)
    assert chi_squared(counts, torch.softmax(logits / 1.0, 0)) > chi_squared_limit(5)  # the test can fail


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-45])
def test_the_coldest_temperatures_take_the_largest_logit(temperature, device):
    """Many logits over T pass float32's largest value; and a GPU that flushes denormals sees T = 0."""
    base = torch.tensor([1.0, 39.0, 40.0, 3.0, 2.0]).expand(2, 3, 5)
    requests = {"temperature": torch.full((2,), temperature), "seeds": torch.arange(2), "offsets": torch.arange(2)}
    (tokens, _, probs, _), _ = run(NAME, {"base_logits": base, "anchor_tokens": torch.zeros(2, dtype=torch.int64), "return_probs": True} | requests, device)
    assert (tokens == 2).all() and torch.equal(probs, torch.eye(5)[2].expand(2, 3, 5))


def test_neighbouring_seeds_offsets_and_steps_are_independent(device, backend):
    """Pairs of tokens of adjacent seeds, offsets and steps: uniform over the square, by chi-squared."""
    count = 1500 if backend in ("reference", "simt") else 6000
    index = torch.arange(count)
    for seeds, offsets in ((index, torch.zeros_like(index)), (torch.zeros_like(index), index)):
        (tokens, *_), _ = run(
            NAME,
            {
                "base_logits": torch.zeros(1, 1, 4).expand(count, 2, 4), "anchor_tokens": torch.zeros_like(index),
                "temperature": torch.ones(count), "seeds": seeds, "offsets": offsets,
            },
            device,
        )  # fmt: skip
        for pairs in (tokens[:, 0] * 4 + tokens[:, 1], tokens[0::2, 0] * 4 + tokens[1::2, 0]):
            assert chi_squared(torch.bincount(pairs, minlength=16), torch.full((16,), 1 / 16)) < chi_squared_limit(15)


def test_tests_can_fail(rng, device):
    args = cases.markov_case(rng, BF16, head="rnn")
    (tokens, logits, _, confidence), _ = run(NAME, args, device)
    for change in (
        {"anchor_tokens": (args["anchor_tokens"] + 1) % 37}, {"head_bias": None}, {"hidden": args["hidden"].flip(1)},
        {"head_weight": args["head_weight"].roll(8, dims=0)}, {"base_logits": args["base_logits"].flip(1)},
    ):  # fmt: skip
        ref = definition.markov_sample(**args | change, forced_tokens=tokens)
        low = eager.markov_sample(**args | change, forced_tokens=tokens)
        with pytest.raises(AssertionError):
            assert_as_good_as_torch(logits, low[1], ref[1])
            pytest.fail(f"not seen: {list(change)}", pytrace=False)
    with pytest.raises(AssertionError):
        change = {"confidence_bias": None}
        low, ref = (f.markov_sample(**args | change, forced_tokens=tokens) for f in (eager, definition))
        assert_as_good_as_torch(confidence, low[3], ref[3])


def test_r51_ids_outside_the_tables_are_never_read(rng, device):
    """A long run under sampling read past the tables: an anchor outside of W1 has a zero row, next to a guard band of NaN."""
    for head in ("vanilla", "gated", "rnn"):
        check(cases.markov_case(rng, BF16, head=head, outside=True), device)


def test_r07_slot_0_is_corrected_by_the_anchor(rng, device):
    """Another anchor gives other logits in slot 0 (the vanilla head sees nothing else there)."""
    args = cases.markov_case(rng, F32, requests=1, steps=1)
    _, first, _, _ = check(args, device)
    _, second, _, _ = check(args | {"anchor_tokens": (args["anchor_tokens"] + 1) % 37}, device)
    assert not torch.equal(first, second)


def test_all_of_opcheck(rng, device):
    for name in ("vanilla", "rnn", "sampled_no_head"):
        opcheck_dynamic(NAME, cases.markov_case(rng, **cases.MARKOV[name]), device)


def test_fullgraph(rng, device):
    args = cases.markov_case(rng, BF16, head="gated", temperature=cases.WARM)
    out, _ = run(NAME, args, device)
    for a, b in zip(out, compiled(NAME, args, device)[0]):
        assert_equal(b, a)


def bad(**changes):
    return lambda args: args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


GATED = {"head": "gated"}
HOT = {"temperature": cases.WARM}
REFUSALS = {
    "base_logits has 2 dimensions, must have 3: [R, N, V]": ({}, bad(base_logits=lambda t: t[0])),
    "base_logits has dtype float64, must be float32, bfloat16 or float16": ({}, bad(base_logits=lambda t: t.double())),
    "base_logits has stride 2 in its last dimension, must be 1": ({}, bad(base_logits=lambda t: t.repeat_interleave(2, 2)[..., ::2])),
    "base_logits' vocabulary is 0, must be at least 1": ({}, bad(base_logits=lambda t: t[..., :0])),
    "anchor_tokens has dtype int32, must be int64": ({}, bad(anchor_tokens=lambda t: t.int())),
    "anchor_tokens has shape [2], must be [3]: [R]": ({}, bad(anchor_tokens=lambda t: t[:2])),
    "head is 'lstm', must be one of none, vanilla, gated, rnn": ({}, bad(head="lstm")),
    "markov_w1 is given with head 'none', must be None": ({}, bad(head="none")),
    "markov_w1 is None, must be given with head 'vanilla'": ({}, bad(markov_w1=None)),
    "markov_w2 is None, must be given with head 'vanilla'": ({}, bad(markov_w2=None)),
    "markov_w2 has shape [36, 8], must be [37, 8]: [V, r]": ({}, bad(markov_w2=lambda t: t[:36])),
    "markov_w2 has dtype bfloat16, must be float32": ({}, bad(markov_w2=lambda t: t.bfloat16())),
    "hidden is None, must be given with a gated or rnn head or a confidence head": (GATED, bad(hidden=None)),
    "hidden has shape [3, 3, 32], must be [3, 4, 32]: [R, N, H]": (GATED, bad(hidden=lambda t: t[:, :3])),
    "head_weight is None, must be given with head 'gated'": (GATED, bad(head_weight=None)),
    "head_weight is given with head 'vanilla', must be None": ({}, bad(head_weight=torch.zeros(8, 40))),
    "head_weight has shape [8, 19], must be [8, 40]: [head_rows, head_columns]": (GATED, bad(head_weight=lambda t: t[:, :19].contiguous())),
    "head_weight has dtype bfloat16, must be float32": (GATED, bad(head_weight=lambda t: t.bfloat16())),
    "head_bias has shape [7], must be [8]: [head_rows]": (GATED, bad(head_bias=lambda t: t[:7])),
    "head_bias has dtype bfloat16, must be float32": (GATED, bad(head_bias=lambda t: t.bfloat16())),
    "confidence_weight has dtype bfloat16, must be float32": ({}, bad(confidence_weight=lambda t: t.bfloat16())),
    "confidence_weight has 13 columns, must have 32 (hidden) or 40 (hidden and markov_w1 row)": (
        {}, bad(confidence_weight=torch.zeros(1, 13)),
    ),
    "confidence_bias has shape [2], must be [1]: [1]": ({}, bad(confidence_bias=torch.zeros(2))),
    "draft_to_target has dtype int32, must be int64": ({}, bad(draft_to_target=torch.zeros(37, dtype=torch.int32))),
    "draft_to_target has shape [36], must be [37]: [V]": ({}, bad(draft_to_target=torch.zeros(36, dtype=torch.int64))),
    "temperature has dtype float64, must be float32": (HOT, bad(temperature=lambda t: t.double())),
    "seeds is None, must be given when temperature is": (HOT, bad(seeds=None)),
    "offsets is None, must be given when temperature is": (HOT, bad(offsets=None)),
    "seeds has dtype int32, must be int64": (HOT, bad(seeds=lambda t: t.int())),
    "offsets has shape [2], must be [3]: [R]": (HOT, bad(offsets=lambda t: t[:2])),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refuses(sentence, rng, device):
    options, change = REFUSALS[sentence]
    refused(NAME, change(cases.markov_case(rng, **options)), sentence, device)
