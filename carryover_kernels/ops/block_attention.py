"""``block_attention``: the drafter's attention over [committed | carried | block]."""

import torch

from ._check import ACTIVATIONS, CACHES, FLOAT32, INT32, INT64, Checker, Values
from ._define import call, define

SCHEMA = (
    "(Tensor q, Tensor k_block, Tensor v_block, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor? carry_k=None, Tensor? carry_v=None, Tensor? carry_lens=None, Tensor? carry_slot_ids=None, Tensor? block_start=None, "
    "Tensor? carry_positions=None, float? scale=None, bool causal=False, int window_left=-1, int window_right=-1, Tensor? sinks=None, "
    "float softcap=0.0, Tensor? k_scale=None, Tensor? v_scale=None, int num_splits=0, bool return_lse=False) -> (Tensor out, Tensor lse)"
)


def _check(
    q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k, carry_v, carry_lens, carry_slot_ids, block_start,
    carry_positions, scale, window_left, window_right, sinks, softcap, k_scale, v_scale, num_splits,
):  # fmt: skip
    check = Checker("block_attention")
    check.tensor("q", q, "R B Hq D", ACTIVATIONS, last_contiguous=True)
    same = (q.dtype,)
    check.tensor("k_block", k_block, "R Bk Hkv D", same, last_contiguous=True)
    check.require(
        k_block.shape[1] in (0, q.shape[1]), f"k_block has {k_block.shape[1]} rows a request, must have {q.shape[1]} as q has, or 0"
    )
    hq, hkv = q.shape[2], k_block.shape[2]
    check.require(hkv > 0 and hq % hkv == 0, f"k_block has {hkv} heads, must divide the {hq} heads of q")
    check.tensor("v_block", v_block, "R Bk Hkv D", same, last_contiguous=True)
    check.tensor("k_cache", k_cache, "pages page Hkv D", CACHES, last_contiguous=True)
    check.tensor("v_cache", v_cache, "pages page Hkv D", (k_cache.dtype,), last_contiguous=True)
    check.at_least("k_cache's page size", k_cache.shape[1], 1)
    check.tensor("block_table", block_table, "R P", INT32, last_contiguous=True)
    check.tensor("seq_lens", seq_lens, "R", INT32, contiguous=True)
    check.together(carry_k=carry_k, carry_v=carry_v, carry_lens=carry_lens, carry_slot_ids=carry_slot_ids)
    if carry_k is not None:
        check.tensor("carry_k", carry_k, "slots C Hkv D", ACTIVATIONS, last_contiguous=True)
        check.tensor("carry_v", carry_v, "slots C Hkv D", (carry_k.dtype,), last_contiguous=True)
        check.tensor("carry_lens", carry_lens, "slots", INT32, contiguous=True)
        check.tensor("carry_slot_ids", carry_slot_ids, "R", INT32, contiguous=True)
    check.optional("block_start", block_start, "R", INT64, contiguous=True)
    check.optional("carry_positions", carry_positions, "slots C", INT64, contiguous=True)
    if scale is not None:
        check.finite("scale", scale)
    check.at_least("window_left", window_left, -1)
    check.at_least("window_right", window_right, -1)
    check.optional("sinks", sinks, "Hq", FLOAT32, contiguous=True)
    check.finite_and_not_negative("softcap", softcap, " (0 = off)")
    check.optional("k_scale", k_scale, "1", FLOAT32)
    check.optional("v_scale", v_scale, "1", FLOAT32)
    check.at_least("num_splits", num_splits, 0)


def _fake(
    q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k=None, carry_v=None, carry_lens=None, carry_slot_ids=None,
    block_start=None, carry_positions=None, scale=None, causal=False, window_left=-1, window_right=-1, sinks=None, softcap=0.0,
    k_scale=None, v_scale=None, num_splits=0, return_lse=False,
):  # fmt: skip
    _check(
        q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k, carry_v, carry_lens, carry_slot_ids, block_start,
        carry_positions, scale, window_left, window_right, sinks, softcap, k_scale, v_scale, num_splits,
    )  # fmt: skip
    lse_shape = q.shape[:3] if return_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)


def _check_values(
    q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k, carry_v, carry_lens, carry_slot_ids, block_start,
    carry_positions, scale, causal, window_left, window_right, sinks, softcap, k_scale, v_scale, num_splits, return_lse,
):  # fmt: skip
    check = Values("block_attention")
    live = seq_lens >= 0
    for name, tensor in (("q", q), ("k_block", k_block), ("v_block", v_block)):
        check.finite(name, tensor, where=live)
    pages, page = k_cache.shape[:2]
    check.at_most("seq_lens", seq_lens, block_table.shape[1] * page, "P * page")
    used = torch.arange(block_table.shape[1], device=seq_lens.device) * page < seq_lens[:, None]
    check.at_least("block_table", block_table, 0, where=used)
    check.below("block_table", block_table, pages, "pages", where=used)
    for r, length in enumerate(seq_lens.tolist()):
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            keys = cache[block_table[r, : -(-max(length, 0) // page)].long()].float().flatten(0, 1)[: max(length, 0)]
            if not bool(keys.isfinite().all()):
                check.fail(f"{name} has a value that is not finite among the {length} committed keys of request {r}, must be finite")
    if carry_k is not None:
        check.at_least("carry_lens", carry_lens, 0)
        check.at_most("carry_lens", carry_lens, carry_k.shape[1], "C")
        check.below("carry_slot_ids", carry_slot_ids, carry_k.shape[0], "carry slots")
        for r, slot in enumerate(carry_slot_ids.tolist()):
            rows = int(carry_lens[slot]) if slot >= 0 and bool(live[r]) else 0
            for name, carried in (("carry_k", carry_k), ("carry_v", carry_v)):
                if not bool(carried[slot, :rows].float().isfinite().all()):
                    check.fail(f"{name} has a value that is not finite among the {rows} carried keys of slot {slot}, must be finite")
    if block_start is not None:
        check.at_least("block_start", block_start, 0, where=live)
    for name, vector in (("sinks", sinks), ("k_scale", k_scale), ("v_scale", v_scale)):
        if vector is not None:
            check.finite(name, vector, allow_minus_inf=name == "sinks")


_OP = define("block_attention", SCHEMA, _fake, _check_values)


def block_attention(
    q: torch.Tensor,
    k_block: torch.Tensor,
    v_block: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    carry_k: torch.Tensor | None = None,
    carry_v: torch.Tensor | None = None,
    carry_lens: torch.Tensor | None = None,
    carry_slot_ids: torch.Tensor | None = None,
    block_start: torch.Tensor | None = None,
    carry_positions: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a block's rows over three segments: committed pages, carried rows, the block itself (DESIGN sections 1 to 3).

    Every row of request r sees ``seq_lens[r]`` committed keys, ``carry_lens[carry_slot_ids[r]]`` carried keys and the block's B keys::

        keys       [ committed 0 .. n-1 | carried 0 .. m-1 | block 0 .. B-1 ]
        positions    s-n .. s-1           s .. s+m-1         s .. s+B-1        with s = block_start[r]

    Masks are by position, never by key index: carried row j and block row j share one. ``causal``: key position <= query position.
    Window: query - key <= window_left and key - query <= window_right (-1 = unlimited; a config's W counts the token itself: window_left = W - 1).
    A key out of range is masked by select and its value never enters arithmetic: NaN in unused slots reaches nothing.
    NaN in what a row does see makes that row's result NaN, as in PyTorch (and in V that of all rows of the block, for 0 x NaN is NaN).

    Args:
        q: [R, B, Hq, D] f32|bf16|f16, inner stride 1, normed and rotated.
        k_block, v_block: [R, B, Hkv, D] in q's dtype, Hkv divides Hq; or [R, 0, Hkv, D]: no block segment (its rows are in the pages).
        k_cache, v_cache: [pages, page, Hkv, D] f32|bf16|f16|fp8 e4m3|fp8 e5m2, any outer strides, any page size >= 1.
        block_table: [R, P] i32 (any row stride). Keys of a negative or too large page are masked; entries past the length are never read.
        seq_lens: [R] i32, committed keys, clamped to P * page; 0 = none; negative = padding: the request's rows give 0 and -inf.
        carry_k, carry_v: [slots, C, Hkv, D] f32|bf16|f16, this layer's; all four carry arguments or none.
        carry_lens: [slots] i32, rows carried, clamped to 0..C. carry_slot_ids: [R] i32; negative or >= slots = nothing carried.
        block_start: [R] i64, position s of block row 0; None: seq_lens. Give it where the pages lack a prefix (keys then end at s-1 all the same).
        carry_positions: [slots, C] i64 or None (s + j): positions of carried rows, for causal or windowed layers under tree verification.
        scale: of q.k; None: D ** -0.5. Gemma 4 uses 1.0.
        causal, window_left, window_right: this layer's mask.
        sinks: [Hq] f32 or None: a logit each head adds to the softmax denominator; it brings no value.
        softcap: 0 = off, else scores become softcap * tanh(score / softcap), after the scale.
        k_scale, v_scale: [1] f32 or None: pages hold value / scale. Block and carried rows are never scaled.
        num_splits: split-KV parts; 0 = planned from shapes alone, so that a captured graph stays valid.
        return_lse: also give lse.

    Returns:
        out [R, B, Hq, D] in q's dtype; 0 where a row sees no key.
        lse [R, B, Hq] f32, natural log of the softmax denominator, the sink included; -inf where a row sees no key. [0] without return_lse.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or layout, named in one sentence.
    """
    return call(
        _OP, q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k, carry_v, carry_lens, carry_slot_ids, block_start,
        carry_positions, scale, causal, window_left, window_right, sinks, softcap, k_scale, v_scale, num_splits, return_lse,
    )  # fmt: skip
