"""``qk_norm_rope`` against the float64 reference; layouts, tables and the rounding of ``rope_parity``."""

import functools

import cases
import pytest
import torch
from cases import BF16, F16, F32
from compare import ORDERS, assert_as_good_as_torch, assert_equal
from doors import compiled, opcheck, opcheck_dynamic, refused, run
from hypothesis import given
from hypothesis import strategies as st

import python_ref.qk_norm_rope as definition
from python_ref import eager

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
NAME = "qk_norm_rope"


def check(args, device):
    out, _ = run(NAME, args, device)

    @functools.cache
    def expected(turn):  # float64 inputs: parity has nothing to round
        other = args | {"qkv": args["qkv"].roll(turn, dims=1)}
        return list(zip(eager.qk_norm_rope(**cases.clean(other)), definition.qk_norm_rope(**cases.wide(other))))

    for i, name in enumerate("qkv"):
        assert_as_good_as_torch(out[i], *expected(0)[i], name, (expected(turn)[i] for turn in range(1, ORDERS)))
    ref = [wanted for _, wanted in expected(0)]
    if not args["v_norm"]:
        assert_equal(out[2], ref[2].to(out[2].dtype), "v")  # a copy, to the bit
    return out


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", cases.QK)
def test_named_case(name, dtype, rng, device):
    args = cases.qk_case(rng, dtype, **cases.QK[name])
    check(args, device)
    if dtype == F32:
        opcheck(NAME, args, device)


@st.composite
def ragged(draw):
    dim = draw(st.integers(2, 80))
    return {
        "rows": draw(st.integers(4, 9)) + 64 // dim,  # enough elements for the yardstick's error not to be luck
        "q_heads": draw(st.integers(1, 5)),
        "kv_heads": draw(st.integers(1, 3)),
        "dim": dim,
        "rotary": 2 * draw(st.integers(1, dim // 2)),
        "neox": draw(st.booleans()),
        "share_kv": draw(st.booleans()),
        "v_norm": draw(st.booleans()),
        "parity": draw(st.booleans()),
        "q_norm": draw(st.booleans()),
        "k_norm": draw(st.booleans()),
        "outside": draw(st.booleans()),
        "gap": draw(st.integers(0, 3)),
    }


@given(options=ragged(), dtype=st.sampled_from([F32, BF16, F16]), number=st.integers(0, 2**31))
def test_ragged(options, dtype, number, device):
    args = cases.qk_case(torch.Generator().manual_seed(number), dtype, **options)
    check(args, device)
    opcheck(NAME, args, device, ("test_faketensor",))


def test_reference_turns_pairs_by_a_complex_number(rng):
    """Rotation by angle a is multiplication by exp(ia) of pair (x, y) taken as x + iy; scores then depend on distances alone."""
    for neox in (True, False):
        args = cases.qk_case(rng, torch.float64, rows=2, q_heads=1, kv_heads=1, dim=8, rotary=6, neox=neox, q_norm=False, k_norm=False)
        q, k, v = definition.qk_norm_rope(**args)
        for m in range(2):
            row = args["rope_table"][args["positions"][m]].double()
            raw = args["qkv"][m, :8]
            first, second = (raw[:3], raw[3:6]) if neox else (raw[0:6:2], raw[1:6:2])
            turned = torch.complex(first, second) * torch.complex(row[:3], row[3:])
            got_first, got_second = (q[m, 0, :3], q[m, 0, 3:6]) if neox else (q[m, 0, 0:6:2], q[m, 0, 1:6:2])
            assert torch.allclose(torch.complex(got_first, got_second), turned, rtol=1e-13)
            assert torch.equal(q[m, 0, 6:], raw[6:]) and torch.equal(v[m, 0], args["qkv"][m, 16:])


def test_reference_norm_has_unit_rms(rng):
    args = cases.qk_case(rng, torch.float64, q_norm=False, v_norm=True) | {"k_norm_weight": torch.ones(16), "eps": 0.0}
    _, k, v = definition.qk_norm_rope(**args)
    ones = torch.ones(6, 2, dtype=torch.float64)
    assert torch.allclose(v.pow(2).mean(-1), ones, rtol=1e-12)
    row = args["rope_table"][args["positions"]].double()  # rounded to float32, so cos^2 + sin^2 is 1 to 1e-7 only
    turned = k.view(6, 2, 2, 8).pow(2).sum(2) / row.view(6, 1, 2, 8).pow(2).sum(2)
    assert torch.allclose(turned.mean(-1) / 2, ones, rtol=1e-12)


def test_r01_r02_rope_layout_was_inherited_from_the_target(rng, device):
    """The layout is an argument: the two give different keys, each its own reference's, and a wrong one is far out of tolerance."""
    args = cases.qk_case(rng, BF16)
    neox = check(args, device)
    interleaved = check(args | {"neox": False}, device)
    other = args | {"neox": False}
    with pytest.raises(AssertionError):
        assert_as_good_as_torch(neox[1], eager.qk_norm_rope(**other)[1], definition.qk_norm_rope(**cases.wide(other))[1])
    assert not torch.equal(neox[0], interleaved[0])


def test_r35_position_beyond_the_table(rng, device):
    """A context longer than the table, or a negative padding position: zeros, and never a read outside."""
    args = cases.qk_case(rng, BF16, outside=True)
    q, k, v = check(args, device)
    for out in (q, k, v):
        assert_equal(out[:4], torch.zeros_like(out[:4]))
        assert (out[4:] != 0).any()


def test_r55_tables_in_bf16_lose_positions(rng, device):
    """bf16 cannot tell position 257 from 256: the op reads a float32 table, and its error stays that of one rounding."""
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    angles = torch.arange(5000, dtype=torch.float64)[:, None] * frequencies
    args = cases.qk_case(rng, BF16, dim=8) | {"rope_table": torch.cat([angles.cos(), angles.sin()], 1).float()}
    args["positions"] = torch.tensor([255, 256, 257, 258, 4097, 4999])
    q, *_ = check(args, device)
    coarse = args | {"positions": args["positions"].bfloat16().long()}
    with pytest.raises(AssertionError):
        assert_as_good_as_torch(q, eager.qk_norm_rope(**coarse)[0], definition.qk_norm_rope(**cases.wide(coarse))[0])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_parity_rounds_as_transformers_does(dtype, neox, rng, device):
    """Bit for bit, but for sums of squares added in another order: those may move one rounding in a hundred elements."""
    args = cases.qk_case(rng, dtype, rows=40, dim=64, q_heads=4, kv_heads=2, parity=True, neox=neox)
    (q, k, _), _ = run(NAME, args, device)
    hf_q, hf_k, _ = eager.qk_norm_rope(**args)
    (plain_q, _, _), _ = run(NAME, args | {"rope_parity": False}, device)
    assert (q == hf_q).float().mean() > 0.99 and (k == hf_k).float().mean() > 0.99
    assert (plain_q == hf_q).float().mean() < 0.9  # so the flag does something, and the test can fail


def test_more_accurate_than_parity(rng, device):
    """Off, one rounding at the end: half a unit in the last place of bf16, which is 2**-9 of the value."""
    args = cases.qk_case(rng, BF16, rows=40, dim=64)
    (q, k, _), _ = run(NAME, args, device)
    for got, wanted in zip((q, k), definition.qk_norm_rope(**args)):
        error = (got.double() - wanted).abs()
        assert (error <= 2.0**-8 * wanted.abs() + 1e-5).all()  # float32's own error shows where products cancel


def test_all_of_opcheck(rng, device):
    for name in ("qwen3", "gemma4", "no_norms"):
        opcheck_dynamic(NAME, cases.qk_case(rng, **cases.QK[name]), device)


def test_fullgraph(rng, device):
    args = cases.qk_case(rng, BF16)
    out, _ = run(NAME, args, device)
    for a, b in zip(out, compiled(NAME, args, device)[0]):
        assert_equal(b, a)


def bad(**changes):
    return lambda args: args | {name: change(args[name]) if callable(change) else change for name, change in changes.items()}


REFUSALS = {
    "eps is nan, must be finite and at least 0": bad(eps=float("nan")),
    "eps is -1e-06, must be finite and at least 0": bad(eps=-1e-6),
    "eps is inf, must be finite and at least 0": bad(eps=float("inf")),
    "qkv has 3 dimensions, must have 2: [M, width]": bad(qkv=lambda t: t[None]),
    "qkv has dtype float64, must be float32, bfloat16 or float16": bad(qkv=lambda t: t.double()),
    "qkv has stride 2 in its last dimension, must be 1": bad(qkv=lambda t: t.repeat_interleave(2, dim=1)[:, ::2]),
    "qkv has 127 columns, must be a positive multiple of its 8 heads": bad(qkv=lambda t: t[:, :127]),
    "positions has dtype int32, must be int64": bad(positions=lambda t: t.int()),
    "positions has shape [5], must be [6]: [M]": bad(positions=lambda t: t[:5]),
    "rope_table has dtype bfloat16, must be float32": bad(rope_table=lambda t: t.bfloat16()),
    "rope_table has 15 columns, must be even and at most the head dim 16": bad(rope_table=lambda t: t[:, :15].contiguous()),
    "rope_table has 32 columns, must be even and at most the head dim 16": bad(rope_table=lambda t: t.repeat(1, 2)),
    "rope_table has strides [16, 1], must be contiguous": bad(rope_table=lambda t: t[:, :8]),
    "num_q_heads is 0, must be at least 1": bad(num_q_heads=0),
    "num_kv_heads is -1, must be at least 1": bad(num_kv_heads=-1),
    "q_norm_weight has shape [8], must be [16]: [D]": bad(q_norm_weight=lambda t: t[:8]),
    "q_norm_weight has dtype bfloat16, must be float32": bad(q_norm_weight=lambda t: t.bfloat16()),
    "k_norm_weight has shape [17], must be [16]: [D]": bad(k_norm_weight=torch.ones(17)),
    "k_norm_weight has dtype float16, must be float32": bad(k_norm_weight=lambda t: t.half()),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refuses(sentence, rng, device):
    refused(NAME, REFUSALS[sentence](cases.qk_case(rng)), sentence, device)
