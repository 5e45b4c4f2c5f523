"""``project_states`` against the float64 reference: what is stored where, what is not touched, both places of the mark."""

import functools
import itertools

import cases
import pytest
import torch
from cases import BF16, F16, F32
from compare import ORDERS, assert_as_good_as_torch, assert_equal
from doors import compiled, opcheck, opcheck_dynamic, refused, run
from hypothesis import given
from hypothesis import strategies as st
from poison import Guards, raw_bytes

import python_ref.project_states as definition
from python_ref import eager

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
NAME = "project_states"
WRITES = ("k_cache", "v_cache", "carry_k", "carry_v")


def stored_rows(args):
    """(row, flat cache slot or None, flat carry slot or None) of every row that must be stored."""
    pages, page = args["k_cache"][0].shape[:2]
    carry = args.get("carry_k")
    slots = 0 if carry is None else carry.shape[1] * carry.shape[2]
    for t in range(args["states"].shape[0]):
        cache_slot, carry_slot, position = (int(args[name][t]) for name in ("row_cache_slot", "row_carry_slot", "row_position"))
        cache_slot = cache_slot if 0 <= cache_slot < pages * page else None
        carry_slot = carry_slot if 0 <= carry_slot < slots else None
        if 0 <= position < args["rope_table"].shape[0] and not cache_slot is carry_slot is None:
            yield t, cache_slot, carry_slot


def gather(args):
    """Stored K and V: from pages [rows, 2 L, Hkv, D] and from the carry buffer, each in its own dtype."""
    page = args["k_cache"][0].shape[1]
    in_pages, in_carry = [], []
    for _, cache_slot, carry_slot in stored_rows(args):
        if cache_slot is not None:
            in_pages.append(torch.stack([c[divmod(cache_slot, page)].clone() for c in args["k_cache"] + args["v_cache"]]))
        if carry_slot is not None:
            at = divmod(carry_slot, args["carry_k"].shape[2])
            in_carry.append(torch.cat([c[(slice(None), *at)] for c in (args["carry_k"], args["carry_v"])]))
    return [torch.stack(rows) if rows else None for rows in (in_pages, in_carry)]


def assert_rest_untouched(args, after):
    """Every byte of every buffer but the named slots is what it was, the gaps of strided views included."""
    page = args["k_cache"][0].shape[1]
    for name in WRITES:
        if args.get(name) is None:
            continue
        is_cache = name.endswith("cache")
        for layer, before in enumerate(args[name]):
            got = after[name][layer]
            expected = Guards().put(before)
            for _, cache_slot, carry_slot in stored_rows(args):
                slot = cache_slot if is_cache else carry_slot
                if slot is not None:
                    at = divmod(slot, page if is_cache else before.shape[1])
                    expected[at] = got[at]
            assert torch.equal(raw_bytes(got), raw_bytes(expected)), f"{name}[{layer}]: bytes beside the named slots changed"


def expected(args):
    """What PyTorch in the same dtype stores and what the float64 reference stores: ((pages, carry), (pages, carry))."""
    low, ref = cases.clean(args), cases.wide(args)
    eager.project_states(**low)
    definition.project_states(**ref)
    return gather(low), gather(ref)


def reordered(args, seed):
    """The same projection with its sums in another order: features and hidden dimensions permuted wherever they occur."""
    rng = torch.Generator().manual_seed(seed)
    f, h = (torch.randperm(args[name].shape[1], generator=rng) for name in ("states", "kv_weight"))
    same = args | {"kv_weight": args["kv_weight"][:, h], "mark": None if args["mark"] is None else args["mark"][h]}
    if args["fc_weight"] is None:
        return same | {"states": args["states"][:, h]}
    return same | {"states": args["states"][:, f], "fc_weight": args["fc_weight"][h][:, f]}


def check(args, device):
    _, after = run(NAME, args, device, WRITES)
    low, ref = expected(args)

    @functools.cache
    def again(seed):
        other = cases.clean(reordered(args, seed))
        eager.project_states(**other)
        return gather(other)

    for i, where in enumerate(("pages", "carry")):
        if ref[i] is not None:
            assert ref[i].isfinite().all()
            orders = itertools.chain([low[i]], (again(seed)[i] for seed in range(1, ORDERS)))
            assert_as_good_as_torch(gather(after)[i], orders, ref[i], where)
    assert_rest_untouched(args, after)
    return after


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", cases.PROJECT)
def test_named_case(name, dtype, rng, device):
    args = cases.project_case(rng, dtype, **cases.PROJECT[name])
    check(args, device)
    if dtype == F32:
        opcheck(NAME, args, device)


@st.composite
def ragged(draw):
    dim = draw(st.integers(16, 40))  # enough elements a row for the yardstick's error not to be luck
    share = draw(st.booleans())
    return {
        "kinds": draw(st.text("crpbsno", max_size=11)),
        "slots": 4,
        "pages": 12,
        "page": draw(st.sampled_from([1, 2, 5])),
        "layers": draw(st.integers(1, 3)),
        "taps": draw(st.integers(1, 3)),
        "hidden": draw(st.integers(3, 40)),
        "kv_heads": draw(st.integers(1, 3)),
        "dim": dim,
        "rotary": 2 * draw(st.integers(1, dim // 2)),
        "layout": draw(st.sampled_from(cases.CACHE_LAYOUTS)),
        "fc": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "k_norm": draw(st.booleans()),
        "mark": draw(st.sampled_from(["pre", "post", "none"])),
        "neox": draw(st.booleans()),
        "share_kv": share,
        "v_norm": draw(st.booleans()),
        "parity": draw(st.booleans()),
        "scales": draw(st.booleans()),
        "cache": draw(st.sampled_from([None, F32, BF16, F16, cases.E4M3, cases.E5M2])),
        "carry_dtype": draw(st.sampled_from([None, F32, BF16])),
        "gap": draw(st.integers(0, 3)),
    }


@given(options=ragged(), dtype=st.sampled_from([F32, BF16, F16]), number=st.integers(0, 2**31))
def test_ragged(options, dtype, number, device):
    if options["page"] == 1:
        options = options | {"pages": 60}
    args = cases.project_case(torch.Generator().manual_seed(number), dtype, **options)
    check(args, device)


# --- the reference itself


def test_reference_is_the_unfolded_model(rng):
    """hidden_norm with its own weight, k_proj and v_proj of each layer, k_norm: written out for one committed and one carried row."""
    args = cases.project_case(rng, torch.float64, kinds="cr", hidden=6, kv_heads=1, dim=4, rotary=4, taps=2)
    norm_weight = torch.rand(6, generator=rng, dtype=torch.float64) + 0.5
    unfolded = args["kv_weight"].clone()
    args["kv_weight"] = unfolded * norm_weight
    definition.project_states(**args)
    for t in range(2):
        x = args["fc_weight"] @ args["states"][t] + (args["mark"].double() if t == 1 else 0)
        c = norm_weight * x / (x.pow(2).mean() + 1e-5).sqrt()
        for layer in range(2):
            k = unfolded[8 * layer : 8 * layer + 4] @ c
            v = unfolded[8 * layer + 4 : 8 * layer + 8] @ c
            k = args["k_norm_weight"][layer] * k / (k.pow(2).mean() + 1e-6).sqrt()
            cos, sin = args["rope_table"][args["row_position"][t]].double().chunk(2)
            k = torch.cat([k[:2] * cos - k[2:] * sin, k[2:] * cos + k[:2] * sin])
            if t == 0:
                at = divmod(int(args["row_cache_slot"][0]), 4)
                got_k, got_v = args["k_cache"][layer][at][0], args["v_cache"][layer][at][0]
            else:
                at = (layer, *divmod(int(args["row_carry_slot"][1]), 4))
                got_k, got_v = args["carry_k"][at][0], args["carry_v"][at][0]
            assert torch.allclose(got_k, k, rtol=1e-12) and torch.allclose(got_v, v, rtol=1e-12)


def test_mark_before_and_after_the_norm_differ(rng, device):
    """The same e in its two places gives two models: each matches its own reference, neither the other's, committed rows match both."""
    before = cases.project_case(rng, BF16, kinds="ccrr")
    after = before | {"mark": None, "mark_kv": before["kv_weight"].float() @ before["mark"]}
    got = check(before, device)
    check(after, device)
    pages, carry = zip(gather(got), *expected(after))
    assert_as_good_as_torch(*pages, "committed rows")
    with pytest.raises(AssertionError):
        assert_as_good_as_torch(*carry, "carried rows")


def test_tests_can_fail(rng, device):
    """Dropping the mark, marking all rows, another layout, another position: each is out of tolerance."""
    args = cases.project_case(rng, BF16, kinds="ccrr", bias=True)
    got = gather(check(args, device))
    for change in (
        {"mark": None}, {"mark": -args["mark"]}, {"kv_bias": None}, {"k_norm_weight": args["k_norm_weight"].flip(0)}, {"neox": False},
        {"row_position": args["row_position"] ^ 1}, {"share_kv": False, "kv_weight": args["kv_weight"].flip(0)},
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            for g, y, w in zip(got, *expected(args | change)):
                assert_as_good_as_torch(g, y, w)
            pytest.fail(f"not seen: {list(change)}", pytrace=False)


# --- reports


def test_r28_slot_times_row_stride_over_32_bits(rng, device):
    """A pool whose last page starts past 2**31 elements: the row lands there and nowhere else."""
    if device != "cpu":
        pytest.skip("sparse memory is a matter of the CPU's page tables")
    from test_block_attention import sparse_storage

    from carryover_kernels import ops

    args = cases.project_case(rng, BF16, kinds="cc", layers=1, pages=3, page=4)
    args["row_cache_slot"] = torch.tensor([9, 2])
    compact = check(args, device)
    sparse = dict(args)
    for name in ("k_cache", "v_cache"):
        sparse[name] = [sparse_storage((3, 4, 2, 16), (2**31 + 64, 32, 16, 1), BF16)]
    ops.project_states(**sparse)
    for name in ("k_cache", "v_cache"):
        for at in ((2, 1), (0, 2)):
            assert_equal(sparse[name][0][at], compact[name][0][at], name)
        assert not sparse[name][0][1].any() and not sparse[name][0][0, :2].any()


def test_r36_null_and_evicted_slots_are_not_written(rng, device):
    """Committed rows whose page was evicted have slot -1: page 0 keeps its bytes (assert_rest_untouched), and so does all else."""
    args = cases.project_case(rng, BF16, kinds="sscr")
    after = check(args, device)
    assert sum((~c.isnan()).flatten(2).all(-1).sum() for c in after["k_cache"]) == 2  # one row, two layers


def test_r46_float16_overflowed_in_the_fusion_projection(rng, device):
    """Target outliers make fc's result larger than 65504: float16 states still give the float64 reference's K and V."""
    args = cases.project_case(rng, F16, kinds="ccrr")
    args["states"] = (args["states"].float() * 3000).clamp(-60000, 60000).half()
    args["fc_weight"] = (args["fc_weight"].float() * 30).half()
    x = args["states"].double() @ args["fc_weight"].double().T
    assert x.abs().max() > 65504
    _, after = run(NAME, args, device, WRITES)
    ref = cases.wide(args)
    definition.project_states(**ref)
    yardstick = cases.clean({k: v for k, v in args.items()})  # PyTorch with fc in float32, for fc in float16 is Inf
    low = cases.clean(args)
    x32 = args["states"].float() @ args["fc_weight"].float().T + torch.where((args["row_carry_slot"] >= 0)[:, None], args["mark"], 0)
    yardstick = low | {"states": eager.rms_norm(x32, 1e-5).half(), "fc_weight": None, "mark": None, "norm_eps": 0.0}
    eager.project_states(**yardstick)
    for got, y, wanted in zip(gather(after), gather(yardstick), gather(ref)):
        assert_as_good_as_torch(got, y, wanted)


def test_r43_r44_fp8_pages_saturate_and_the_carry_buffer_does_not(rng, device):
    """Values over fp8's largest finite one are stored as that one, never NaN; the carry buffer of its own dtype keeps them."""
    args = cases.project_case(rng, BF16, kinds="cccb", cache=cases.E4M3, carry_dtype=F32, layers=1)
    args["k_norm_weight"] = torch.full((1, 16), 1e4)
    args |= {"k_scale": torch.ones(1), "v_scale": torch.full((1,), 1e-4)}
    _, after = run(NAME, args, device, WRITES)
    ref = cases.wide(args)
    definition.project_states(**ref)
    got, wanted = gather(after)[0].float(), gather(ref)[0]
    over = wanted.abs() > 500
    assert over.any() and got.isfinite().all()
    assert (got[over] == 448.0 * wanted[over].sign()).all()
    assert gather(after)[1].abs().max() > 448


def test_r08_packed_weights_are_refused(rng, device):
    args = cases.project_case(rng, BF16)
    refused(NAME, args | {"kv_weight": args["kv_weight"].to(torch.int8)}, "kv_weight has dtype int8, must be bfloat16", device)


def test_huge_state_rows_are_read_with_64_bits(rng, device):
    """R32: row number times the states' row stride over 2**31."""
    if device != "cpu":
        pytest.skip("sparse memory is a matter of the CPU's page tables")
    from test_block_attention import sparse_storage

    args = cases.project_case(rng, BF16, kinds="crc")
    compact = check(args, device)
    states = sparse_storage(args["states"].shape, (2**31 + 64, 1), BF16)
    states[:] = args["states"]
    from carryover_kernels import ops

    fresh = {name: Guards().put(args[name]) for name in WRITES}
    ops.project_states(**args | {"states": states} | fresh)
    for a, b in zip(gather(args | fresh), gather(compact)):
        assert_equal(a, b)


def test_all_of_opcheck(rng, device):
    for name in ("qwen3", "gemma4", "carried_in_pages", "engine_ran_fc"):
        opcheck_dynamic(NAME, cases.project_case(rng, **cases.PROJECT[name]), device)


def test_fullgraph(rng, device):
    args = cases.project_case(rng, BF16)
    _, after = run(NAME, args, device, WRITES)
    _, placed = compiled(NAME, args, device)
    for a, b in zip(gather(after), gather(placed)):
        assert_equal(b, a)


def bad(**changes):
    return lambda args: args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


def first(change):
    return lambda caches: [change(caches[0])] + caches[1:]


REFUSALS = {
    "norm_eps is nan, must be finite and at least 0": bad(norm_eps=float("nan")),
    "norm_eps is -0.5, must be finite and at least 0": bad(norm_eps=-0.5),
    "k_norm_eps is inf, must be finite and at least 0": bad(k_norm_eps=float("inf")),
    "k_norm_eps is -1e+20, must be finite and at least 0": bad(k_norm_eps=-1e20),
    "states has 1 dimensions, must have 2: [T, F]": bad(states=lambda t: t[0]),
    "states has dtype float64, must be float32, bfloat16 or float16": bad(states=lambda t: t.double()),
    "states has stride 2 in its last dimension, must be 1": bad(states=lambda t: t.repeat_interleave(2, dim=1)[:, ::2]),
    "fc_weight has shape [24, 47], must be [24, 48]: [H, F]": bad(fc_weight=lambda t: t[:, :47]),
    "fc_weight has dtype bfloat16, must be float32": bad(fc_weight=lambda t: t.bfloat16()),
    "fc_weight has strides [1, 24], must be contiguous": bad(fc_weight=lambda t: t.T.contiguous().T),
    "kv_weight has shape [128, 23], must be [128, 24]: [W, H]": bad(kv_weight=lambda t: t[:, :23]),
    "kv_weight has 126 rows, must have 128: L * 2 * Hkv * D": bad(kv_weight=lambda t: t[:126], mark=None),
    "kv_weight has 128 rows, must have 64: L * 1 * Hkv * D": bad(share_kv=True),
    "kv_bias has shape [127], must be [128]: [W]": bad(kv_bias=torch.zeros(127)),
    "kv_bias has dtype bfloat16, must be float32": bad(kv_bias=torch.zeros(128, dtype=BF16)),
    "k_cache has 0 layers, must have at least 1": bad(k_cache=[], v_cache=[]),
    "v_cache has 1 layers, must have 2 as k_cache has": bad(v_cache=lambda c: c[:1]),
    "k_norm_weight has shape [1, 16], must be [2, 16]: [L, D]": bad(k_norm_weight=lambda t: t[:1]),
    "k_norm_weight has dtype bfloat16, must be float32": bad(k_norm_weight=lambda t: t.bfloat16()),
    "mark has shape [23], must be [24]: [H]": bad(mark=lambda t: t[:23]),
    "mark has dtype bfloat16, must be float32": bad(mark=lambda t: t.bfloat16()),
    "mark_kv has shape [24], must be [128]: [W]": bad(mark=None, mark_kv=torch.zeros(24)),
    "mark_kv is given beside mark, must be None: the mark has one place": bad(mark_kv=torch.zeros(128)),
    "rope_table has dtype float16, must be float32": bad(rope_table=lambda t: t.half()),
    "rope_table has 32 columns, must be even and at most the head dim 16": bad(rope_table=lambda t: t.repeat(1, 2)),
    "row_cache_slot has dtype int32, must be int64": bad(row_cache_slot=lambda t: t.int()),
    "row_cache_slot has shape [5], must be [6]: [T]": bad(row_cache_slot=lambda t: t[:5]),
    "row_carry_slot has dtype int32, must be int64": bad(row_carry_slot=lambda t: t.int()),
    "row_position has shape [7], must be [6]: [T]": bad(row_position=torch.zeros(7, dtype=torch.int64)),
    "k_cache[0] has dtype int8, must be float32, bfloat16, float16, float8_e4m3fn or float8_e5m2": bad(
        k_cache=first(lambda t: t.to(torch.int8))
    ),
    "v_cache[0] has dtype bfloat16, must be float32": bad(v_cache=first(lambda t: t.bfloat16())),
    "v_cache[1] has shape [5, 4, 1, 16], must be [5, 4, 2, 16]: [pages, page, Hkv, D]": bad(v_cache=lambda c: [c[0], c[1][:, :, :1]]),
    "k_cache[0] has stride 8 in its last dimension, must be 1": bad(
        k_cache=first(lambda t: t.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1))
    ),
    "carry_v is None, must be given when carry_k is": bad(carry_v=None),
    "carry_k has shape [1, 3, 4, 2, 16], must be [2, 3, 4, 2, 16]: [L, slots, C, Hkv, D]": bad(carry_k=lambda t: t[:1]),
    "carry_k has dtype float8_e4m3fn, must be float32, bfloat16 or float16": bad(carry_k=lambda t: t.to(cases.E4M3)),
    "carry_v has dtype bfloat16, must be float32": bad(carry_v=lambda t: t.bfloat16()),
    "k_scale has shape [1], must be [2]: [L]": bad(k_scale=torch.ones(1)),
    "v_scale has dtype bfloat16, must be float32": bad(v_scale=torch.ones(2, dtype=BF16)),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refuses(sentence, rng, device):
    refused(NAME, REFUSALS[sentence](cases.project_case(rng)), sentence, device)
