"""``project_states``: target states of verify rows to the drafter's K/V, committed and carried in one pass."""

import torch

from ._check import ACTIVATIONS, CACHES, FLOAT32, INT64, Checker, Values
from ._define import call, define

SCHEMA = (
    "(Tensor states, Tensor? fc_weight, Tensor kv_weight, Tensor? kv_bias, Tensor? k_norm_weight, Tensor? mark, Tensor? mark_kv, "
    "Tensor rope_table, Tensor row_cache_slot, Tensor row_carry_slot, Tensor row_position, Tensor(a!)[] k_cache, "
    "Tensor(b!)[] v_cache, Tensor(c!)? carry_k=None, Tensor(d!)? carry_v=None, float norm_eps=1e-06, float k_norm_eps=1e-06, "
    "bool neox=True, bool share_kv=False, bool v_norm=False, bool rope_parity=False, Tensor? k_scale=None, Tensor? v_scale=None) -> ()"
)


def _check(
    states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot, row_position,
    k_cache, v_cache, carry_k, carry_v, norm_eps, k_norm_eps, share_kv, k_scale, v_scale,
):  # fmt: skip
    check = Checker("project_states")
    check.tensor("states", states, "T F", ACTIVATIONS, last_contiguous=True)
    same = (states.dtype,)
    if fc_weight is None:
        check.sizes["H"] = check.sizes["F"]
    else:
        check.tensor("fc_weight", fc_weight, "H F", same, contiguous=True)
    check.tensor("kv_weight", kv_weight, "W H", same, contiguous=True)
    check.optional("kv_bias", kv_bias, "W", FLOAT32, contiguous=True)
    check.require(len(k_cache) >= 1, "k_cache has 0 layers, must have at least 1")
    check.require(len(v_cache) == len(k_cache), f"v_cache has {len(v_cache)} layers, must have {len(k_cache)} as k_cache has")
    check.sizes["L"] = len(k_cache)
    if k_cache[0].dim() == 4:
        check.sizes["Hkv"], check.sizes["D"] = k_cache[0].shape[2], k_cache[0].shape[3]
        wanted = check.sizes["L"] * (1 if share_kv else 2) * check.sizes["Hkv"] * check.sizes["D"]
        check.require(
            kv_weight.shape[0] == wanted,
            f"kv_weight has {kv_weight.shape[0]} rows, must have {wanted}: L * {1 if share_kv else 2} * Hkv * D",
        )
    check.optional("k_norm_weight", k_norm_weight, "L D", FLOAT32, contiguous=True)
    check.optional("mark", mark, "H", FLOAT32, contiguous=True)
    check.optional("mark_kv", mark_kv, "W", FLOAT32, contiguous=True)
    check.require(mark is None or mark_kv is None, "mark_kv is given beside mark, must be None: the mark has one place")
    check.tensor("rope_table", rope_table, "max_position rotary_dim", FLOAT32, contiguous=True)
    check.tensor("row_cache_slot", row_cache_slot, "T", INT64, contiguous=True)
    check.tensor("row_carry_slot", row_carry_slot, "T", INT64, contiguous=True)
    check.tensor("row_position", row_position, "T", INT64, contiguous=True)
    for layer, (k, v) in enumerate(zip(k_cache, v_cache)):
        check.tensor(f"k_cache[{layer}]", k, "pages page Hkv D", CACHES, last_contiguous=True)
        check.tensor(f"v_cache[{layer}]", v, "pages page Hkv D", (k_cache[0].dtype,), last_contiguous=True)
        check.require(
            k.dtype == k_cache[0].dtype, f"k_cache[{layer}] has dtype {k.dtype}, must be {k_cache[0].dtype} as k_cache[0] is"
        )
    rotary_dim = rope_table.shape[1]
    check.require(
        rotary_dim % 2 == 0 and 0 < rotary_dim <= check.sizes["D"],
        f"rope_table has {rotary_dim} columns, must be even and at most the head dim {check.sizes['D']}",
    )
    check.together(carry_k=carry_k, carry_v=carry_v)
    check.optional("carry_k", carry_k, "L slots C Hkv D", ACTIVATIONS, last_contiguous=True)
    if carry_k is not None:
        check.optional("carry_v", carry_v, "L slots C Hkv D", (carry_k.dtype,), last_contiguous=True)
    check.finite_and_not_negative("norm_eps", norm_eps)
    check.finite_and_not_negative("k_norm_eps", k_norm_eps)
    check.optional("k_scale", k_scale, "L", FLOAT32, contiguous=True)
    check.optional("v_scale", v_scale, "L", FLOAT32, contiguous=True)


def _fake(
    states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot, row_position,
    k_cache, v_cache, carry_k=None, carry_v=None, norm_eps=1e-6, k_norm_eps=1e-6,
    neox=True, share_kv=False, v_norm=False, rope_parity=False, k_scale=None, v_scale=None,
):  # fmt: skip
    _check(
        states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot, row_position,
        k_cache, v_cache, carry_k, carry_v, norm_eps, k_norm_eps, share_kv, k_scale, v_scale,
    )  # fmt: skip


def _check_values(
    states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot, row_position,
    k_cache, v_cache, carry_k, carry_v, norm_eps, k_norm_eps, neox, share_kv, v_norm, rope_parity, k_scale, v_scale,
):  # fmt: skip
    check = Values("project_states")
    stored = (row_cache_slot >= 0) | (row_carry_slot >= 0)
    check.finite("states", states, where=stored)
    weights = dict(
        fc_weight=fc_weight, kv_weight=kv_weight, kv_bias=kv_bias, k_norm_weight=k_norm_weight, mark=mark, mark_kv=mark_kv,
        rope_table=rope_table, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    for name, weight in weights.items():
        if weight is not None:
            check.finite(name, weight)
    slots = k_cache[0].shape[0] * k_cache[0].shape[1]
    check.below("row_cache_slot", row_cache_slot, slots, "pages * page")
    check.distinct("row_cache_slot", row_cache_slot, slots)
    if carry_k is not None:
        slots = carry_k.shape[1] * carry_k.shape[2]
        check.below("row_carry_slot", row_carry_slot, slots, "slots * C")
        check.distinct("row_carry_slot", row_carry_slot, slots)
    check.at_least("row_position", row_position, 0, where=stored)
    check.below("row_position", row_position, rope_table.shape[0], "rows of rope_table", where=stored)


_OP = define("project_states", SCHEMA, _fake, _check_values)


def project_states(
    states: torch.Tensor,
    fc_weight: torch.Tensor | None,
    kv_weight: torch.Tensor,
    kv_bias: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    mark: torch.Tensor | None,
    mark_kv: torch.Tensor | None,
    rope_table: torch.Tensor,
    row_cache_slot: torch.Tensor,
    row_carry_slot: torch.Tensor,
    row_position: torch.Tensor,
    k_cache: list[torch.Tensor],
    v_cache: list[torch.Tensor],
    carry_k: torch.Tensor | None = None,
    carry_v: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    k_norm_eps: float = 1e-6,
    neox: bool = True,
    share_kv: bool = False,
    v_norm: bool = False,
    rope_parity: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Turn the target's states of all verify rows into the drafter's K/V of all layers (DESIGN sections 1 and 2; arXiv 2609.14717).

    For row t, with c = hidden_norm(fc(states[t]) + mark if carried): k_l = RoPE(k_norm_l(W_k,l c + bias), row_position[t]),
    v_l = W_v,l c + bias. hidden_norm's weight is folded into ``kv_weight``, so the op only divides by the RMS. A row with
    ``row_carry_slot >= 0`` is carried: it gets the mark. A row is stored wherever it has a slot: in the pages where ``row_cache_slot >= 0``, in
    the carry buffer where ``row_carry_slot >= 0`` and a buffer is given. Rows with neither are skipped, and so are rows whose
    slot is beyond the buffers or whose position is outside the RoPE table.

    Args:
        states: [T, F] f32|bf16|f16 (any row stride): taps concatenated in the checkpoint's order, F = taps * target hidden; or [T, H],
            fc's output before hidden_norm, when the engine ran fc (``fc_weight`` None).
        fc_weight: [H, F] in states' dtype, or None.
        kv_weight: [L * 2 * Hkv * D, H] in states' dtype, per layer the K rows, then the V rows, each times hidden_norm's weight (fold in
            float32, round once). With share_kv [L * Hkv * D, H]: K rows alone.
        kv_bias: [rows of kv_weight] f32 or None.
        k_norm_weight: [L, D] f32, or None = no norm on k.
        mark: [H] f32 or None: the mark before the norm (the default place); not rounded, added to fc's float32 result.
        mark_kv: [rows of kv_weight] f32 or None: the mark after the norm, W_k e and W_v e of every layer. At most one of the two marks.
        rope_table: [max_position, rotary_dim] f32, as for ``qk_norm_rope``.
        row_cache_slot, row_carry_slot, row_position: [T] i64, from ``plan_round`` (or ``carry_to_pages``).
        k_cache, v_cache: L views [pages, page, Hkv, D] each, f32|bf16|f16|fp8 e4m3|fp8 e5m2, any outer strides, inner stride 1.
        carry_k, carry_v: [L, slots, C, Hkv, D] f32|bf16|f16, any outer strides, inner stride 1; or None, where carried rows live in pages.
        norm_eps: hidden_norm's epsilon. k_norm_eps: that of k_norm and v_norm.
        neox, share_kv, v_norm, rope_parity: as for ``qk_norm_rope``.
        k_scale, v_scale: [L] f32 or None: pages store value / scale (the carry buffer is never scaled). fp8 saturates at its largest finite.

    Layers of another geometry (head dim, KV heads, RoPE table) take a call of their own, with fc's output as states.
    float16 states never overflow on the way: fc's result stays in float32 until it is normed.

    Writes: k_cache, v_cache, carry_k, carry_v at the named slots; nothing else of them.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or layout, named in one sentence.
    """
    call(
        _OP, states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot,
        row_position, k_cache, v_cache, carry_k, carry_v, norm_eps, k_norm_eps, neox, share_kv, v_norm, rope_parity, k_scale, v_scale,
    )  # fmt: skip
