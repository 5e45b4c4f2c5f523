"""Inputs of every op: builders that poison all they do not use, and the named cases that tests and bench share.

A builder takes a torch.Generator and options, and gives the op's arguments by name, on the CPU. Floats outside the valid region are NaN,
ids outside it are garbage. ``clean(args)`` is what the reference gets: the same with zeros instead of NaN.
"""

import torch
from poison import nan_like

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GARBAGE = (-1, -7, 2**31 - 1, -(2**31), 123456789)


def clean(args: dict) -> dict:
    """Contiguous copies without NaN; ints as they are."""

    def one(value):
        if isinstance(value, (list, tuple)):
            return [one(v) for v in value]
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            wide = value.double()
            return torch.where(wide.isnan(), 0.0, wide).to(value.dtype)
        return value.clone() if isinstance(value, torch.Tensor) else value

    return {name: one(value) for name, value in args.items()}


def wide(args: dict) -> dict:
    """Clean arguments with every float in float64: in-place results then come back unrounded."""

    def one(value):
        if isinstance(value, list):
            return [one(v) for v in value]
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {name: one(value) for name, value in clean(args).items()}


def integers(rng, low, high, shape=()):
    return torch.randint(low, high, shape, generator=rng)


def randn(rng, *shape, dtype=F32, scale=1.0):
    return (torch.randn(*shape, generator=rng) * scale).to(dtype)


def i32(values):
    return torch.as_tensor(values, dtype=torch.int32)


def garbage(rng, *shape):
    return i32(GARBAGE)[integers(rng, 0, len(GARBAGE), shape)]


def rope_table(rng, max_position, rotary_dim, still=0):
    """[cos | sin] of random frequencies; the last ``still`` pairs don't turn (a proportional table)."""
    frequencies = torch.rand(rotary_dim // 2, generator=rng, dtype=torch.float64)
    if still:
        frequencies[-still:] = 0
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


CACHE_LAYOUTS = ("nhd", "hnd", "packed", "pool", "wide_rows")


def empty_caches(pages, page, heads, dim, dtype, layout):
    """K and V views [pages, page, Hkv, D] full of NaN, in the memory layouts that engines have."""

    def storage(*shape):
        return nan_like(torch.empty(*shape, dtype=torch.float32)).to(dtype)

    if layout == "packed":  # K and V side by side in one row
        both = storage(pages, page, heads, 2 * dim)
        return both[..., :dim], both[..., dim:]
    views = []
    for _ in range(2):
        if layout == "nhd":
            views.append(storage(pages, page, heads, dim))
        elif layout == "hnd":  # heads outside of tokens
            views.append(storage(pages, heads, page, dim).transpose(1, 2))
        elif layout == "pool":  # a layer's slice of a buffer that all layers share
            views.append(storage(pages, 3, page, heads, dim)[:, 1])
        else:  # wide_rows: rows and heads with room between them
            views.append(storage(pages, page + 1, heads + 1, dim + 3)[:, :page, :heads, :dim])
    return views


def attention_case(
    rng, dtype=F32, cache=None, carry_dtype=None, committed=(5,), carried=(2,), block=4, q_heads=4, kv_heads=2, dim=16, page=4,
    layout="nhd", fused_qkv=False, block_segment=True, capacity=None, start=None, tree=False, causal=False, left=-1, right=-1,
    sinks=False, softcap=0.0, scale=None, kv_scales=False, splits=0, lse=True, lost_pages=False, wide_table=3,
):  # fmt: skip
    """``committed`` and ``carried``: keys of each request; committed -1 = padding;
    carried None = no slot; carried None for all = no carry."""
    requests = len(committed)
    cache, carry_dtype = cache or dtype, carry_dtype or dtype
    need = [-(-max(n, 0) // page) for n in committed]
    columns, pages = max(need + [0]) + wide_table, sum(need) + 3
    free = torch.randperm(pages, generator=rng).tolist()
    table = garbage(rng, requests, columns + 2)[:, :columns]  # rows have a stride of their own
    k_cache, v_cache = empty_caches(pages, page, kv_heads, dim, cache, layout)
    for r, n in enumerate(committed):
        for index in range(max(n, 0)):
            column = index // page
            if index % page == 0:
                table[r, column] = free.pop()
            at = (int(table[r, column]), index % page)
            k_cache[at] = randn(rng, kv_heads, dim).to(cache)
            v_cache[at] = randn(rng, kv_heads, dim).to(cache)
        if lost_pages and need[r] > 1:  # an evicted page inside the sequence: its keys are masked
            table[r, int(integers(rng, 0, need[r]))] = (-1, -5, pages, 2**31 - 1)[int(integers(rng, 0, 4))]

    rows = randn(rng, requests, block, q_heads + 2 * kv_heads, dim, dtype=dtype)
    if fused_qkv:
        q, k, v = rows[:, :, :q_heads], rows[:, :, q_heads:-kv_heads], rows[:, :, -kv_heads:]
    else:
        q, k, v = (part.contiguous() for part in rows.split([q_heads, kv_heads, kv_heads], dim=2))
    if not block_segment:
        k, v = k[:, :0], v[:, :0]
    args = {
        "q": q, "k_block": k, "v_block": v, "k_cache": k_cache, "v_cache": v_cache,
        "block_table": table, "seq_lens": i32(list(committed)),
    }  # fmt: skip
    starts = torch.tensor(list(committed)).clamp(min=0)
    if start is not None:
        starts = starts + torch.as_tensor(start)
        args["block_start"] = starts

    if carried is not None:
        most = max([m or 0 for m in carried] + [1])
        capacity = capacity or most
        slots = requests + 2
        order = torch.randperm(slots, generator=rng).tolist()
        carry_k = nan_like(torch.empty(slots, capacity, kv_heads, dim)).to(carry_dtype)
        carry_v = carry_k.clone()
        lens = garbage(rng, slots)  # other slots' lengths are garbage too
        ids = []
        positions = torch.full((slots, capacity), -(2**40))
        for r, m in enumerate(carried):
            if m is None:
                ids.append((-1, -9, slots, 2**31 - 1)[int(integers(rng, 0, 4))])
                continue
            slot = order[r]
            ids.append(slot)
            lens[slot] = m
            kept = min(max(m, 0), capacity)
            carry_k[slot, :kept] = randn(rng, kept, kv_heads, dim, dtype=carry_dtype)
            carry_v[slot, :kept] = randn(rng, kept, kv_heads, dim, dtype=carry_dtype)
            positions[slot, :kept] = starts[r] + integers(rng, 0, 4, (kept,)).sort().values
        args |= {"carry_k": carry_k, "carry_v": carry_v, "carry_lens": lens, "carry_slot_ids": i32(ids)}
        if tree:
            args["carry_positions"] = positions
    if kv_scales:
        args["k_scale"] = torch.rand(1, generator=rng) + 0.5
        args["v_scale"] = torch.rand(1, generator=rng) + 0.5
    if sinks:
        args["sinks"] = randn(rng, q_heads)
    return args | {
        "scale": scale, "causal": causal, "window_left": left, "window_right": right, "softcap": softcap,
        "num_splits": splits, "return_lse": lse,
    }  # fmt: skip


RAGGED = {"committed": (9, 0, 4, 17), "carried": (3, 0, None, 5)}
ATTENTION = {
    "plain": {},
    "ragged_batch": RAGGED,
    "no_carry_arguments": {"committed": (6, 11), "carried": None},
    "empty_carry": {"committed": (6, 3), "carried": (0, 0)},
    "empty_context": {"committed": (0, 0), "carried": (3, 0)},
    "no_keys_at_all": {"committed": (0, 7), "carried": (0, None), "block_segment": False},
    "no_keys_but_sinks": {"committed": (0, 7), "carried": (0, None), "block_segment": False, "sinks": True},
    "pages_hold_the_block": {"committed": (9, 5), "carried": None, "block_segment": False, "start": (-4, -4)},
    "padding_row": {"committed": (5, -1, 3, -1), "carried": (2, 2, None, None)},
    "page_1": RAGGED | {"page": 1},
    "page_3": RAGGED | {"page": 3, "lost_pages": True},
    "page_64": {"committed": (70, 64, 63), "carried": (1, 2, 3), "page": 64},
    "table_tail_garbage": {"committed": (4, 5), "carried": (1, 1), "wide_table": 40},
    "carry_len_over_capacity": {"committed": (4, 5), "carried": (9, -3), "capacity": 4},
    "negative_and_huge_pages": {"committed": (13, 22), "carried": (1, 2), "lost_pages": True},
    "causal": RAGGED | {"causal": True},
    "causal_tree_positions": RAGGED | {"causal": True, "tree": True},
    "window_left": RAGGED | {"left": 6, "right": 6},
    "window_by_position": RAGGED | {"left": 3, "right": 1, "tree": True},
    "window_causal": RAGGED | {"left": 5, "causal": True},
    "window_0": RAGGED | {"left": 0, "right": 0},
    "window_hides_everything_in_pages": {"committed": (30, 9), "carried": (2, 0), "left": 1, "right": 1},
    "block_start_after_prefix": RAGGED | {"start": (100, 0, 7, 2**33), "left": 6, "causal": True},
    "one_row_sees_nothing": {"committed": (9, 9), "carried": None, "block_segment": False, "start": (4, 0), "left": 5},
    "sinks": RAGGED | {"sinks": True},
    "softcap": RAGGED | {"softcap": 3.0, "scale": 1.0},
    "gemma_scale_1": {"committed": (6,), "carried": (2,), "scale": 1.0, "dim": 64, "kv_heads": 1},
    "mha": RAGGED | {"q_heads": 2, "kv_heads": 2},
    "gqa_8": RAGGED | {"q_heads": 8, "kv_heads": 1},
    "head_dim_128_block_16": {"committed": (33, 2), "carried": (15, 0), "block": 16, "dim": 128},
    "long_context": {"committed": (270, 64), "carried": (15, 7), "block": 16, "dim": 64, "q_heads": 8, "page": 16, "sinks": True},
    "long_context_window": {"committed": (301,), "carried": (7,), "block": 8, "dim": 80, "page": 16, "left": 130, "splits": 3},
    "head_dim_36": RAGGED | {"dim": 36},
    "head_dim_5": RAGGED | {"dim": 5, "q_heads": 3, "kv_heads": 3},
    "head_dim_512": {"committed": (5,), "carried": (2,), "dim": 512, "q_heads": 2, "kv_heads": 1},
    "block_1": RAGGED | {"block": 1},
    "layout_hnd": RAGGED | {"layout": "hnd"},
    "layout_packed": RAGGED | {"layout": "packed", "fused_qkv": True},
    "layout_pool": RAGGED | {"layout": "pool"},
    "layout_wide_rows": RAGGED | {"layout": "wide_rows", "fused_qkv": True},
    "one_split": {"committed": (65, 7), "carried": (3, 1), "splits": 1},
    "three_splits": {"committed": (65, 7), "carried": (3, 1), "splits": 3},
    "more_splits_than_keys": {"committed": (2, 0), "carried": (1, 0), "splits": 16},
    "splits_emptied_by_window": {"committed": (65, 40), "carried": (3, 1), "splits": 8, "left": 4, "sinks": True},
    "cache_fp8_e4m3": RAGGED | {"cache": E4M3, "kv_scales": True},
    "cache_fp8_e5m2": RAGGED | {"cache": E5M2, "kv_scales": True},
    "cache_fp8_unscaled": RAGGED | {"cache": E4M3},
    "cache_bf16_carry_f32": RAGGED | {"cache": BF16, "carry_dtype": F32},
    "cache_f16_carry_bf16": RAGGED | {"cache": F16, "carry_dtype": BF16, "kv_scales": True},
    "no_lse": RAGGED | {"lse": False},
    "no_requests": {"committed": (), "carried": ()},
}


def qk_case(
    rng, dtype=F32, rows=6, q_heads=4, kv_heads=2, dim=16, rotary=None, still=0, neox=True, share_kv=False, v_norm=False,
    parity=False, q_norm=True, k_norm=True, max_position=32, outside=False, gap=0,
):  # fmt: skip
    width = (q_heads + (1 if share_kv else 2) * kv_heads) * dim
    positions = integers(rng, 0, max_position, (rows,))
    qkv = nan_like(torch.empty(rows, width + gap)).to(dtype)[:, :width]
    qkv[:] = randn(rng, rows, width, dtype=dtype, scale=2.0)
    if outside:  # padding rows hold NaN, and still give zeros
        for row, position in ((0, -1), (1, max_position), (2, 2**40), (3, -(2**40))):
            positions[row] = position
            qkv[row] = float("nan")
    return {
        "qkv": qkv, "positions": positions, "rope_table": rope_table(rng, max_position, rotary or dim, still),
        "q_norm_weight": randn(rng, dim) if q_norm else None, "k_norm_weight": randn(rng, dim) if k_norm else None,
        "num_q_heads": q_heads, "num_kv_heads": kv_heads, "eps": 1e-5, "neox": neox, "share_kv": share_kv, "v_norm": v_norm,
        "rope_parity": parity,
    }  # fmt: skip


QK = {
    "qwen3": {},
    "interleaved": {"neox": False},
    "partial_rope": {"rotary": 6},
    "partial_interleaved": {"rotary": 6, "neox": False},
    "proportional_rope": {"still": 6},
    "gemma4": {"share_kv": True, "v_norm": True, "still": 6, "kv_heads": 1},
    "share_kv": {"share_kv": True},
    "v_norm": {"v_norm": True},
    "no_norms": {"q_norm": False, "k_norm": False},
    "k_norm_only": {"q_norm": False},
    "positions_outside_the_table": {"outside": True},
    "padding_with_v_norm": {"outside": True, "v_norm": True, "share_kv": True},
    "rows_apart": {"gap": 5},
    "mha_head_dim_128": {"q_heads": 2, "kv_heads": 2, "dim": 128},
    "head_dim_512": {"q_heads": 2, "kv_heads": 1, "dim": 512},
    "head_dim_2": {"dim": 2},
    "odd_head_dim": {"dim": 7, "rotary": 4},
    "parity": {"parity": True},
    "parity_interleaved_partial": {"parity": True, "neox": False, "rotary": 6, "gap": 1},
    "no_rows": {"rows": 0},
}


def project_case(
    rng, dtype=F32, cache=None, carry_dtype=None, kinds="cccrrs", layers=2, taps=2, hidden=24, kv_heads=2, dim=16, page=4, pages=5,
    layout="nhd", fc=True, bias=False, k_norm=True, mark="pre", rotary=None, still=0, neox=True, share_kv=False, v_norm=False,
    parity=False, scales=False, carry_buffer=True, slots=3, capacity=4, max_position=40, gap=0, scale=1.0,
):  # fmt: skip
    """``kinds``: a letter a row. c committed, r carried, p carried in pages, b carried in both, s skipped, n skipped by position,
    o slot beyond the buffers."""
    rows, width = len(kinds), taps * hidden if fc else hidden
    states = nan_like(torch.empty(rows, width + gap)).to(dtype)[:, :width]
    states[:] = randn(rng, rows, width, dtype=dtype, scale=scale)
    cache_slots = torch.randperm(pages * page, generator=rng)[:rows]
    carry_slots = torch.randperm(slots * capacity, generator=rng)[:rows]
    cache_slot, carry_slot = torch.full((rows,), -1), torch.full((rows,), -1)
    position = integers(rng, 0, max_position, (rows,))
    for t, kind in enumerate(kinds):
        if kind in "cpbn":
            cache_slot[t] = cache_slots[t]
        if kind in "rb":
            carry_slot[t] = carry_slots[t]
        if kind == "p":
            carry_slot[t] = 10**6 if carry_buffer else carry_slots[t]  # a flag alone
        if kind == "o":
            cache_slot[t], carry_slot[t] = (pages * page, -1) if t % 2 else (2**40, slots * capacity)
        if kind == "n":
            position[t] = (-1, max_position, 2**40)[t % 3]
        if kind in "so":
            states[t] = float("nan")  # what is skipped may hold anything
    caches = [empty_caches(pages, page, kv_heads, dim, cache or dtype, layout) for _ in range(layers)]
    parts = 1 if share_kv else 2
    out_rows = layers * parts * kv_heads * dim
    args = {
        "states": states, "fc_weight": randn(rng, hidden, width, dtype=dtype, scale=width**-0.5) if fc else None,
        "kv_weight": randn(rng, out_rows, hidden, dtype=dtype, scale=hidden**-0.5),
        "kv_bias": randn(rng, out_rows) if bias else None, "k_norm_weight": randn(rng, layers, dim) if k_norm else None,
        "mark": randn(rng, hidden) if mark == "pre" else None, "mark_kv": randn(rng, out_rows) if mark == "post" else None,
        "rope_table": rope_table(rng, max_position, rotary or dim, still), "row_cache_slot": cache_slot, "row_carry_slot": carry_slot,
        "row_position": position, "k_cache": [k for k, _ in caches], "v_cache": [v for _, v in caches],
    }  # fmt: skip
    if carry_buffer:
        carry = nan_like(torch.empty(layers, slots, capacity, kv_heads, dim)).to(carry_dtype or dtype)
        args |= {"carry_k": carry, "carry_v": carry.clone()}
    args |= {"norm_eps": 1e-5, "k_norm_eps": 1e-6, "neox": neox, "share_kv": share_kv, "v_norm": v_norm, "rope_parity": parity}
    if scales:
        args |= {"k_scale": torch.rand(layers, generator=rng) + 0.5, "v_scale": torch.rand(layers, generator=rng) + 0.5}
    return args


PROJECT = {
    "qwen3": {},
    "one_committed_row": {"kinds": "c"},
    "all_rejected": {"kinds": "rrrr"},
    "all_accepted": {"kinds": "cccc"},
    "every_kind_of_row": {"kinds": "csrbonsrcno", "bias": True},
    "nothing_stored": {"kinds": "sons"},
    "no_rows": {"kinds": ""},
    "many_rows": {"kinds": "c" * 8 + "r" * 5 + "s" * 6, "pages": 9, "slots": 6},
    "whole_tiles": {"kinds": "c" * 20 + "r" * 15, "pages": 12, "slots": 9, "hidden": 160, "dim": 64, "layers": 1},
    "mark_after_norm": {"mark": "post"},
    "no_mark": {"mark": "none"},
    "carried_in_pages": {"kinds": "ccpps", "carry_buffer": False},
    "carried_in_pages_beside_a_buffer": {"kinds": "ccppb"},
    "engine_ran_fc": {"fc": False},
    "bias": {"bias": True, "mark": "post"},
    "interleaved": {"neox": False},
    "partial_rope": {"rotary": 6},
    "gemma4": {"share_kv": True, "v_norm": True, "still": 6, "kv_heads": 1},
    "share_kv_mark_after_norm": {"share_kv": True, "mark": "post", "bias": True},
    "no_k_norm": {"k_norm": False},
    "page_1": {"page": 1, "pages": 17},
    "page_3": {"page": 3},
    "layout_hnd": {"layout": "hnd"},
    "layout_packed": {"layout": "packed"},
    "layout_pool": {"layout": "pool"},
    "layout_wide_rows": {"layout": "wide_rows", "gap": 3},
    "head_dim_128": {"dim": 128, "kv_heads": 1, "hidden": 40},
    "odd_sizes": {"dim": 10, "kv_heads": 3, "hidden": 23, "rotary": 4, "taps": 3},
    "parity": {"parity": True},
    "cache_fp8_e4m3": {"cache": E4M3, "scales": True},
    "cache_fp8_e5m2": {"cache": E5M2, "scales": True, "carry_dtype": F32},
    "cache_bf16_carry_f32": {"cache": BF16, "carry_dtype": F32, "scales": True},
    "cache_f16_carry_bf16": {"cache": F16, "carry_dtype": BF16},
    "one_layer": {"layers": 1},
    "five_layers": {"layers": 5, "dim": 8},
}


def plan_case(rng, rows=(4, 1, 6), rejected=(2, 0, 5), no_slot=(), capacity=4, slots=5, lead=0, tail=0, flat=0, spaced=0, tree=True):
    """``lead``/``tail``: rows that no request owns; ``flat``/``spaced``: padding requests with an empty or a one-row range."""
    counts = list(rows) + [0] * flat + [1] * spaced
    requests = len(counts)
    starts = torch.tensor([lead] + counts).cumsum(0)
    total = int(starts[-1]) + tail
    ids = torch.randperm(slots, generator=rng)[: len(rows)].tolist()
    ids = [(-1, slots, -4, 2**31 - 1)[r % 4] if r in no_slot else ids[r] for r in range(len(rows))] + [-1] * (flat + spaced)
    slot_mapping = torch.randperm(1000, generator=rng)[:total] + integers(rng, 0, 2, (total,)) * 2**35
    slot_mapping[torch.rand(total, generator=rng) < 0.2] = -1
    for r in range(len(rows), requests):
        slot_mapping[starts[r] : starts[r + 1]] = -1
    args = {
        "query_start_loc": i32(starts), "num_rejected": i32(list(rejected) + [0] * (flat + spaced)),
        "positions": integers(rng, 0, 2**40, (total,)), "slot_mapping": slot_mapping, "carry_slot_ids": i32(ids),
        "carry_lens": garbage(rng, slots), "carry_capacity": capacity,
    }  # fmt: skip
    if requests == 0:
        args["num_rejected"], args["carry_slot_ids"] = i32([]), i32([])
    if tree:
        args["carry_positions"] = integers(rng, -(2**40), 0, (slots, capacity))
    return args


PLAN = {
    "ragged": {},
    "all_accepted": {"rows": (4, 4), "rejected": (0, 0)},
    "all_rejected": {"rows": (4, 2), "rejected": (4, 2)},
    "rejected_out_of_range": {"rows": (3, 3, 3), "rejected": (9, -2, 2**31 - 1)},
    "more_rejected_than_capacity": {"rows": (8,), "rejected": (7,), "capacity": 3},
    "capacity_0": {"rows": (4,), "rejected": (2,), "capacity": 0},
    "request_without_rows": {"rows": (0, 3, 0), "rejected": (0, 1, 2)},
    "no_carry_slot": {"rows": (4, 4, 4, 4), "rejected": (2, 1, 2, 3), "no_slot": (0, 1, 2, 3)},
    "rows_of_no_request": {"lead": 3, "tail": 4},
    "padding_flat": {"flat": 3, "tail": 3},
    "padding_spaced": {"spaced": 3},
    "no_positions_kept": {"tree": False},
    "no_requests": {"rows": (), "rejected": (), "tail": 2},
    "no_rows": {"rows": (0, 0), "rejected": (0, 0)},
}


def pages_case(rng, committed=(6, 1), rows=((2, 1), (1, 3)), block=2, page=4, columns=4, spare=None, holes=False, lead=0, tail=0):
    """``rows``: committed and carried verify rows of each request; ``spare``: slots reserved after the committed ones (None: the table)."""
    requests = len(committed)
    starts = torch.tensor([lead] + [a + b for a, b in rows]).cumsum(0)
    total = int(starts[-1]) + tail
    cache_slot, carry_slot = torch.full((total,), -1), torch.full((total,), -1)
    for r, (a, b) in enumerate(rows):
        cache_slot[starts[r] : starts[r] + a] = integers(rng, 0, 2**35, (a,))
        carry_slot[starts[r] + a : starts[r] + a + b] = torch.arange(b) + 8 * r
    table = i32(integers(rng, 0, 2**31 - 1, (requests, columns + 1)))[:, :columns]
    if holes:
        for r in range(requests):
            table[r, int(integers(rng, 0, columns))] = -1
    return {
        "row_cache_slot": cache_slot, "row_carry_slot": carry_slot, "query_start_loc": i32(starts), "block_table": table,
        "seq_lens": i32(list(committed)), "page_size": page, "num_block_rows": block,
        "slot_capacity": None if spare is None else i32([max(n, 0) + s for n, s in zip(committed, spare)]),
    }  # fmt: skip


PAGES = {
    "room_for_all": {},
    "page_1": {"page": 1, "columns": 20},
    "page_3": {"page": 3, "columns": 6},
    "carried_rows_dropped_first": {"spare": (4, 3), "rows": ((2, 3), (1, 4))},
    "then_block_rows": {"spare": (1, 0), "rows": ((2, 3), (1, 4))},
    "capacity_below_committed": {"spare": (-2, -100)},
    "capacity_over_the_table": {"spare": (1000, 2**30)},
    "table_full": {"committed": (16, 15)},
    "seq_len_over_the_table": {"committed": (17, 400)},
    "padding": {"committed": (-1, 5)},
    "negative_pages": {"committed": (6, 9, 0), "rows": ((2, 3), (1, 4), (0, 0)), "holes": True},
    "no_carried_rows": {"rows": ((2, 0), (3, 0))},
    "no_block_rows": {"block": 0},
    "no_context": {"committed": (0, 0)},
    "rows_of_no_request": {"lead": 2, "tail": 3},
    "no_requests": {"committed": (), "rows": (), "tail": 2},
}


def markov_case(
    rng, dtype=F32, weights=None, requests=3, steps=4, vocab=37, head="vanilla", rank=8, hidden=32, bias=True, confidence="markov",
    target_vocab=None, temperature=None, padding=(), outside=False, strided=False, probs=True, hidden_dtype=None,
):  # fmt: skip
    weights = weights or dtype
    target_vocab = target_vocab or vocab
    base = randn(rng, requests, steps, vocab + 3, dtype=dtype, scale=2.0)
    base[..., vocab:] = float("nan")
    base = base[..., :vocab] if strided else base[..., :vocab].contiguous()
    anchors = integers(rng, 0, target_vocab, (requests,))
    for r in padding:
        anchors[r] = -1
        base[r] = float("nan")
    if outside:
        anchors[0] = target_vocab + 5
    args = {"base_logits": base, "anchor_tokens": anchors}
    if head != "none":
        args |= {"markov_w1": randn(rng, target_vocab, rank, dtype=weights), "markov_w2": randn(rng, vocab, rank, dtype=weights)}
    args["head"] = head
    if head in ("gated", "rnn") or confidence:
        args["hidden"] = randn(rng, requests, steps, hidden, dtype=hidden_dtype or dtype)
    if head in ("gated", "rnn"):
        shape = (rank, hidden + rank) if head == "gated" else (3 * rank, 2 * rank + hidden)
        args["head_weight"] = randn(rng, *shape, dtype=weights, scale=0.3)
        args["head_bias"] = randn(rng, shape[0]) if bias else None
    if confidence:
        args["confidence_weight"] = randn(rng, 1, hidden + (rank if confidence == "markov" and head != "none" else 0))
        args["confidence_bias"] = randn(rng, 1) if bias else None
    if target_vocab != vocab:
        args["draft_to_target"] = integers(rng, 0, target_vocab - vocab + 1, (vocab,)).sort().values
    if temperature is not None:
        args["temperature"] = torch.tensor(temperature, dtype=F32)
        args["seeds"] = integers(rng, -(2**62), 2**62, (requests,))
        args["offsets"] = integers(rng, 0, 2**40, (requests,))
    return args | {"return_logits": True, "return_probs": probs}


WARM = (0.7, 0.0, 1.5)
MARKOV = {
    "vanilla": {},
    "gated": {"head": "gated"},
    "rnn": {"head": "rnn"},
    "no_head": {"head": "none", "confidence": None},
    "no_head_confidence": {"head": "none"},
    "confidence_on_hidden_alone": {"head": "rnn", "confidence": "hidden"},
    "no_biases": {"head": "gated", "bias": False},
    "draft_vocabulary": {"head": "vanilla", "target_vocab": 90},
    "draft_vocabulary_rnn": {"head": "rnn", "target_vocab": 50, "temperature": WARM},
    "sampled": {"temperature": WARM},
    "sampled_gated": {"head": "gated", "temperature": WARM, "probs": False},
    "sampled_no_head": {"head": "none", "confidence": None, "temperature": WARM},
    "padding": {"padding": (0, 2), "head": "rnn"},
    "padding_sampled": {"padding": (1,), "temperature": WARM},
    "anchor_outside_the_table": {"outside": True, "head": "gated"},
    "rows_apart": {"strided": True},
    "one_step": {"steps": 1, "requests": 16},
    "no_steps": {"steps": 0},
    "no_requests": {"requests": 0},
    "vocabulary_1": {"vocab": 1},
    "vocabulary_1003": {"vocab": 1003, "temperature": WARM},
    "weights_f32_logits_bf16": {"dtype": BF16, "weights": F32, "hidden_dtype": F16, "head": "gated"},
}


def verify_case(
    rng, method="rejection", rows=(5, 1, 3, 5), drafts=4, vocab=11, one_hot=False, dtype=F32, close=1.0, bad_drafts=False, removed=0,
    ties=False, argmax=False, strided=False, lead=0, tail=0,
):  # fmt: skip
    """``close``: how near the drafter is to the target (0 = equal). ``removed``: tokens with logit -inf in the target."""
    requests = len(rows)
    starts = torch.tensor([lead] + list(rows)).cumsum(0)
    total = int(starts[-1]) + tail
    logits = randn(rng, total, vocab + 2, dtype=F32, scale=1.5)
    if ties:
        logits = logits.round()
    if removed:
        for t in range(total):
            logits[t, torch.randperm(vocab, generator=rng)[:removed]] = float("-inf")
    logits[:, vocab:] = float("nan")
    logits = logits.to(dtype)
    logits = logits[:, :vocab] if strided else logits[:, :vocab].contiguous()
    probs = torch.rand(requests, drafts, vocab, generator=rng)
    tokens = integers(rng, 0, vocab, (requests, drafts))
    for r in range(requests):
        for i in range(drafts):
            if i < rows[r] - 1:
                row = logits[starts[r] + i].float().nan_to_num(neginf=-1e4)
                probs[r, i] = torch.softmax(row + close * randn(rng, vocab), dim=0)
                best = row.argmax() if one_hot or method == "greedy" else torch.multinomial(probs[r, i], 1, generator=rng)[0]
                if not (method == "greedy" and torch.rand((), generator=rng) < 0.3):
                    tokens[r, i] = best
            else:  # never verified: anything may stand there
                probs[r, i] = float("nan")
                tokens[r, i] = GARBAGE[i % len(GARBAGE)]
    if bad_drafts:
        for r in range(requests):
            tokens[r, int(integers(rng, 0, drafts))] = (-1, -(2**40), vocab, 2**40)[r % 4]
    args = {"draft_tokens": tokens, "query_start_loc": i32(starts)}
    if argmax:
        args["target_argmax"] = logits.float().argmax(dim=1)
    else:
        args["target_logits"] = logits
    if method != "greedy":
        args["draft_probs"] = None if one_hot else probs
        args["seeds"] = integers(rng, -(2**62), 2**62, (requests,))
        args["offsets"] = integers(rng, 0, 2**40, (requests,))
    return args | {"method": method}


VERIFY = {
    "greedy": {"method": "greedy"},
    "greedy_argmax": {"method": "greedy", "argmax": True},
    "greedy_ties_lowest_id": {"method": "greedy", "ties": True, "vocab": 64},
    "greedy_bad_drafts": {"method": "greedy", "bad_drafts": True},
    "greedy_removed_tokens": {"method": "greedy", "removed": 6},
    "padding": {"rows": (0, 5, 0, 2)},
    "padding_greedy": {"rows": (0, 5, 0, 2), "method": "greedy"},
    "rows_of_no_request": {"lead": 2, "tail": 3},
    "rows_apart": {"strided": True},
    "one_hot": {"one_hot": True},
    "one_hot_block": {"one_hot": True, "method": "block"},
    "drafter_equals_target": {"close": 0.0},
    "drafter_equals_target_block": {"close": 0.0, "method": "block"},
    "removed_tokens": {"removed": 6},
    "removed_tokens_block": {"removed": 6, "method": "block"},
    "bad_drafts": {"bad_drafts": True},
    "bad_drafts_block": {"bad_drafts": True, "method": "block"},
    "block": {"method": "block"},
    "fewer_rows_than_drafts": {"rows": (2, 1, 3)},
    "vocabulary_1001": {"vocab": 1001, "method": "block"},
    "vocabulary_4099": {"vocab": 4099, "method": "block", "rows": (3, 5), "removed": 2},
    "no_requests": {"rows": ()},
}
