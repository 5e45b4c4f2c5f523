"""``block_attention`` against the float64 reference, and the reference against a dense mask."""

import functools
import itertools
import math

import cases
import pytest
import torch
from cases import BF16, F16, F32
from compare import ORDERS, assert_as_good_as_torch
from doors import compiled, opcheck, opcheck_dynamic, refused, run
from hypothesis import given
from hypothesis import strategies as st

import python_ref.block_attention as definition
from python_ref import eager

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
NAME = "block_attention"


def reordered(args, seed):
    """The same attention with q.k summed in another order: the head dimension of q and of all keys permuted alike."""
    if seed == 0:
        return args
    order = torch.randperm(args["q"].shape[-1], generator=torch.Generator().manual_seed(seed))
    names = [name for name in ("q", "k_block", "k_cache", "carry_k") if args.get(name) is not None]
    return args | {name: args[name].float()[..., order].to(args[name].dtype) for name in names}


def check(args, device):
    (out, lse), _ = run(NAME, args, device)
    clean = cases.clean(args)
    ref_out, ref_lse = definition.block_attention(**clean)
    again = functools.cache(lambda seed: eager.block_attention(**reordered(clean, seed)))
    assert_as_good_as_torch(out, (again(seed)[0] for seed in range(ORDERS)), ref_out, "out")
    assert_as_good_as_torch(lse, (again(seed)[1] for seed in range(ORDERS)), ref_lse, "lse")
    return out, lse


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", cases.ATTENTION)
def test_named_case(name, dtype, rng, device):
    args = cases.attention_case(rng, dtype, **cases.ATTENTION[name])
    check(args, device)
    if dtype == BF16:
        opcheck(NAME, args, device)


@st.composite
def ragged(draw):
    """Options of one call, drawn over every axis at once."""
    requests = draw(st.integers(1, 4))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    page = draw(st.sampled_from([1, 2, 5, 16, 32]))
    length = st.integers(-1, 50) if page > 1 else st.integers(-1, 20)
    windowed = draw(st.booleans())
    return {
        "committed": draw(st.lists(length, min_size=requests, max_size=requests)),
        "carried": draw(st.none() | st.lists(st.none() | st.integers(0, 8), min_size=requests, max_size=requests)),
        "capacity": 8,
        "kv_heads": kv_heads,
        "q_heads": kv_heads * draw(st.sampled_from([1, 2, 4])),
        "dim": draw(st.sampled_from([8, 16, 20, 64])),
        "block": draw(st.sampled_from([1, 2, 7, 8])),
        "page": page,
        "layout": draw(st.sampled_from(cases.CACHE_LAYOUTS)),
        "fused_qkv": draw(st.booleans()),
        "block_segment": draw(st.booleans()),
        "cache": draw(st.sampled_from([None, F32, BF16, F16, cases.E4M3, cases.E5M2])),
        "carry_dtype": draw(st.sampled_from([None, F32, BF16])),
        "causal": draw(st.booleans()),
        "left": draw(st.integers(0, 12)) if windowed else -1,
        "right": draw(st.integers(0, 12)) if windowed else -1,
        "tree": draw(st.booleans()),
        "sinks": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 5.0])),
        "scale": draw(st.sampled_from([None, 1.0])),
        "kv_scales": draw(st.booleans()),
        "splits": draw(st.sampled_from([0, 0, 1, 2, 5])),
        "lost_pages": draw(st.booleans()),
        "start": draw(st.none() | st.just([3 * r for r in range(requests)])),
    }


@given(options=ragged(), dtype=st.sampled_from([F32, BF16, F16]), number=st.integers(0, 2**31))
def test_ragged(options, dtype, number, device):
    args = cases.attention_case(torch.Generator().manual_seed(number), dtype, **options)
    check(args, device)
    opcheck(NAME, args, device, ("test_faketensor",))


NANS = {"quiet": 0x7FC00000, "all_ones": 0x7FFFFFFF, "signalling": 0x7F800001}  # a NaN's payload may not be taken for a number


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("bits", NANS)
@pytest.mark.parametrize("name", ["q", "k_block", "v_block", "k_cache", "v_cache", "carry_k", "carry_v", "all_q"])
def test_nan_in_what_is_seen_is_nan(name, bits, dtype, rng, device):
    """A target gone NaN must show: the same rows, heads and columns are NaN as in PyTorch, and all others are what they were to the bit."""
    options_of_calls = [{}, {"splits": 3, "sinks": True}, {"softcap": 5.0}]
    if not name.startswith("v_"):  # V of a key that only some rows see meets the others' weight of 0: 0 x NaN, as in PyTorch under a mask
        options_of_calls.append({"left": 3, "right": 2})
    for options in options_of_calls:
        args = cases.attention_case(rng, dtype, committed=(9, 5), carried=(2, 1), **options)
        (clean_out, clean_lse), _ = run(NAME, args, device)
        nan = torch.tensor(NANS[bits], dtype=torch.int32).view(F32).to(dtype)
        slot, page = int(args["carry_slot_ids"][0]), int(args["block_table"][0, 2])
        at = {"q": (0, 2, 1, 3), "all_q": 0, "k_block": (0, 1, 1, 5), "v_block": (0, 1, 1, 5)}
        at |= {"k_cache": (page, 0, 1, 5), "v_cache": (page, 0, 1, 5), "carry_k": (slot, 1, 1, 5), "carry_v": (slot, 1, 1, 5)}
        where = name.removeprefix("all_")
        args[where][at[name]] = nan
        (out, lse), _ = run(NAME, args, device)
        # Zeros in all that is not seen, but NaN where it was put.
        seen = cases.clean(args)
        seen[where][at[name]] = nan
        ref_out, ref_lse = definition.block_attention(**seen)
        assert ref_out.isnan().any() and not ref_out.isnan().all()
        assert torch.equal(out.isnan(), ref_out.isnan()) and torch.equal(lse.isnan(), ref_lse.isnan())
        assert torch.equal(out[~ref_out.isnan()], clean_out[~ref_out.isnan()])
        assert torch.equal(lse[~ref_lse.isnan()], clean_lse[~ref_lse.isnan()])


# --- the reference itself


def dense(args):
    """The definition again, as one softmax over an explicit mask of all keys of request 0."""
    n, m = int(args["seq_lens"][0]), int(args["carry_lens"][args["carry_slot_ids"][0]])
    page, slot = args["k_cache"].shape[1], int(args["carry_slot_ids"][0])
    pages = [int(args["block_table"][0, i // page]) for i in range(n)]
    k = torch.cat([
        torch.stack([args["k_cache"][p, i % page] for i, p in enumerate(pages)]), args["carry_k"][slot, :m], args["k_block"][0]
    ])  # fmt: skip
    v = torch.cat([
        torch.stack([args["v_cache"][p, i % page] for i, p in enumerate(pages)]), args["carry_v"][slot, :m], args["v_block"][0]
    ])  # fmt: skip
    q = args["q"][0]
    block, heads, dim = q.shape
    keys, group = k.shape[0], heads // k.shape[1]
    positions = list(range(n)) + [n + j for j in range(m)] + [n + j for j in range(block)]
    out = torch.zeros(block, heads, dim, dtype=torch.float64)
    lse = torch.zeros(block, heads, dtype=torch.float64)
    for b, h in itertools.product(range(block), range(heads)):
        total, weighted = torch.exp(args["sinks"][h].double()), torch.zeros(dim, dtype=torch.float64)
        for t in range(keys):
            distance = n + b - positions[t]
            allowed = not (args["causal"] and distance < 0) and distance <= args["window_left"] and -distance <= args["window_right"]
            score = sum(float(q[b, h, d]) * float(k[t, h // group, d]) for d in range(dim)) * args["scale"]
            weight = math.exp(args["softcap"] * math.tanh(score / args["softcap"])) * allowed
            total, weighted = total + weight, weighted + weight * v[t, h // group].double()
        out[b, h], lse[b, h] = weighted / total, torch.log(total)
    return out, lse


def test_reference_is_a_dense_masked_softmax(rng):
    for causal in (False, True):
        args = cases.attention_case(
            rng, torch.float64, committed=(5,), carried=(2,), block=3, dim=4, page=2, causal=causal, left=4, right=1, sinks=True,
            softcap=2.0, scale=0.7,
        )  # fmt: skip
        out, lse = definition.block_attention(**cases.clean(args))
        expected_out, expected_lse = dense(cases.clean(args))
        assert torch.allclose(out[0], expected_out, rtol=1e-12)
        assert torch.allclose(lse[0], expected_lse, rtol=1e-12)


def test_tests_can_fail(rng, device, monkeypatch):
    """A reference with one thing wrong is told from the op: the comparison has teeth."""
    args = cases.attention_case(rng, BF16, committed=(9, 30), carried=(3, 1), left=6, right=1, page=8)
    check(args, device)
    wrong = [
        {"window_left": 5}, {"window_left": 7}, {"window_right": 0}, {"window_right": 2}, {"causal": True}, {"scale": 0.3},
        {"seq_lens": args["seq_lens"] - 1}, {"carry_lens": args["carry_lens"] - 1}, {"sinks": torch.ones(4)}, {"softcap": 3.0},
    ]  # fmt: skip
    (out, _), _ = run(NAME, args, device)
    clean = cases.clean(args)
    for change in wrong:
        torch_out, _ = eager.block_attention(**clean | change)
        ref, _ = definition.block_attention(**clean | change)
        with pytest.raises(AssertionError):
            assert_as_good_as_torch(out, torch_out, ref)
            pytest.fail(f"not seen: {list(change)}", pytrace=False)


# --- engines


def test_repeated_calls_agree(rng, device):
    """Split-KV parts merge in a fixed order: the same call gives the same bits."""
    args = cases.attention_case(rng, BF16, committed=(300, 5), carried=(3, 1), dim=64, page=16, splits=7)
    first, second = (run(NAME, args, device)[0] for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_all_of_opcheck(rng, device):
    for name in ("ragged_batch", "no_carry_arguments", "sinks", "cache_bf16_carry_f32", "no_lse"):
        opcheck_dynamic(NAME, cases.attention_case(rng, **cases.ATTENTION[name]), device)


def test_fullgraph(rng, device):
    args = cases.attention_case(rng, BF16, **cases.ATTENTION["ragged_batch"])
    (out, lse), _ = run(NAME, args, device)
    (traced_out, traced_lse), _ = compiled(NAME, args, device)
    assert torch.equal(out, traced_out.cpu()) and torch.equal(lse, traced_lse.cpu())


def test_inductor(rng, device):
    """One op through the default compiler: the schema's outputs must survive its memory planning."""
    args = cases.attention_case(rng, F32, **cases.ATTENTION["ragged_batch"])
    (out, _), _ = run(NAME, args, device)
    (traced_out, _), _ = compiled(NAME, args, device, backend="inductor")
    assert torch.equal(out, traced_out.cpu())


def test_strides_over_32_bits(rng, device):
    """R30, R28: page number times page stride goes past 2**31 elements. The storage is one page seen many times, so no memory is taken."""
    args = cases.attention_case(rng, BF16, committed=(7,), carried=(2,), page=4)
    expected, _ = run(NAME, args, device)
    moved = dict(args)
    for name in ("k_cache", "v_cache"):
        compact = args[name]
        pages, page, heads, dim = compact.shape
        sparse = sparse_storage((pages, page, heads, dim), (2**31 + 64, heads * dim, dim, 1), compact.dtype)
        for p in range(pages):
            sparse[p] = compact[p]
        moved[name] = sparse
    if device != "cpu":
        pytest.skip("sparse memory is a matter of the CPU's page tables")
    from carryover_kernels import ops

    out, lse = ops.block_attention(**moved)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def sparse_storage(shape, stride, dtype):
    """A tensor whose strides span many GB of a file without contents: only the bytes that are written take room."""
    import tempfile

    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    file = tempfile.NamedTemporaryFile()
    file.truncate(extent * dtype.itemsize)
    flat = torch.from_file(file.name, shared=True, size=extent, dtype=dtype)
    return flat.as_strided(shape, stride)


# --- refusals


def bad(**changes):
    return lambda args: args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


REFUSALS = {
    "q has 3 dimensions, must have 4: [R, B, Hq, D]": bad(q=lambda q: q[0]),
    "q has dtype float64, must be float32, bfloat16 or float16": bad(q=lambda q: q.double()),
    "q has stride 2 in its last dimension, must be 1": bad(q=lambda q: q.repeat_interleave(2, dim=3)[..., ::2]),
    "k_block has shape [2, 4, 2, 16], must be [1, 4, 2, 16]: [R, Bk, Hkv, D]": bad(k_block=lambda k: k.repeat(2, 1, 1, 1)),
    "k_block has shape [1, 4, 2, 8], must be [1, 4, 2, 16]: [R, Bk, Hkv, D]": bad(k_block=lambda k: k[..., :8]),
    "k_block has dtype bfloat16, must be float32": bad(k_block=lambda k: k.bfloat16()),
    "k_block has 3 rows a request, must have 4 as q has, or 0": bad(k_block=lambda k: k[:, :3]),
    "k_block has 3 heads, must divide the 4 heads of q": bad(k_block=lambda k: k[:, :, [0, 1, 1]]),
    "v_block has shape [1, 0, 2, 16], must be [1, 4, 2, 16]: [R, Bk, Hkv, D]": bad(v_block=lambda v: v[:, :0]),
    "k_cache has shape [5, 4, 1, 16], must be [5, 4, 2, 16]: [pages, page, Hkv, D]": bad(k_cache=lambda k: k[:, :, :1]),
    "k_cache has dtype int8, must be float32, bfloat16, float16, float8_e4m3fn or float8_e5m2": bad(k_cache=lambda k: k.to(torch.int8)),
    "v_cache has dtype bfloat16, must be float32": bad(v_cache=lambda v: v.bfloat16()),
    "v_cache has stride 8 in its last dimension, must be 1": bad(v_cache=lambda v: v.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)),
    "k_cache's page size is 0, must be at least 1": bad(k_cache=lambda k: k[:, :0], v_cache=lambda v: v[:, :0]),
    "block_table has dtype int64, must be int32": bad(block_table=lambda t: t.long()),
    "block_table has 1 dimensions, must have 2: [R, P]": bad(block_table=lambda t: t[0]),
    "seq_lens has dtype int64, must be int32": bad(seq_lens=lambda t: t.long()),
    "seq_lens has shape [2], must be [1]: [R]": bad(seq_lens=lambda t: t.repeat(2)),
    "carry_v is None, must be given when carry_k is": bad(carry_v=None),
    "carry_k is None, must be given when carry_v is": bad(carry_k=None),
    "carry_k has dtype float8_e4m3fn, must be float32, bfloat16 or float16": bad(carry_k=lambda k: k.to(cases.E4M3)),
    "carry_v has shape [3, 1, 2, 16], must be [3, 2, 2, 16]: [slots, C, Hkv, D]": bad(carry_v=lambda v: v[:, :1]),
    "carry_lens has shape [2], must be [3]: [slots]": bad(carry_lens=lambda t: t[:2]),
    "carry_lens has dtype int64, must be int32": bad(carry_lens=lambda t: t.long()),
    "carry_slot_ids has dtype int64, must be int32": bad(carry_slot_ids=lambda t: t.long()),
    "block_start has dtype int32, must be int64": bad(block_start=torch.zeros(1, dtype=torch.int32)),
    "carry_positions has shape [3, 3], must be [3, 2]: [slots, C]": bad(carry_positions=torch.zeros(3, 3, dtype=torch.int64)),
    "window_left is -2, must be at least -1": bad(window_left=-2),
    "window_right is -9, must be at least -1": bad(window_right=-9),
    "sinks has shape [2], must be [4]: [Hq]": bad(sinks=torch.zeros(2)),
    "sinks has dtype bfloat16, must be float32": bad(sinks=torch.zeros(4, dtype=BF16)),
    "scale is nan, must be finite": bad(scale=float("nan")),
    "scale is -inf, must be finite": bad(scale=float("-inf")),
    "softcap is -1.0, must be finite and at least 0 (0 = off)": bad(softcap=-1.0),
    "softcap is -1e-09, must be finite and at least 0 (0 = off)": bad(softcap=-1e-9),
    "softcap is inf, must be finite and at least 0 (0 = off)": bad(softcap=float("inf")),
    "softcap is nan, must be finite and at least 0 (0 = off)": bad(softcap=float("nan")),
    "k_scale has shape [2], must be [1]: [1]": bad(k_scale=torch.ones(2)),
    "v_scale has dtype float16, must be float32": bad(v_scale=torch.ones(1, dtype=F16)),
    "num_splits is -1, must be at least 0": bad(num_splits=-1),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refuses(sentence, rng, device):
    args = cases.attention_case(rng, F32, committed=(5,), carried=(2,))
    refused(NAME, REFUSALS[sentence](args), sentence, device)
