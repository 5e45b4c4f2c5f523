"""``verify_draft``: statistics of the target's rows by vocabulary split, then the verdict and the next token of each request.

Launches: greedy 2 (1 with target_argmax), rejection 3, block 4. Every program that needs the verdict works it out again from the rows'
statistics: N values a request are cheaper to recompute than another launch.
"""

import torch
import triton
import triton.language as tl

from ._common import STREAM_ACCEPT, STREAM_NEXT, gumbels, softmax_shift, uniforms
from ._configs import config, plan_splits

FAR = tl.constexpr(2147483647)


@triton.jit
def first_best(value, index):
    """The largest value and the lowest index that has it."""
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, index, FAR), axis=0)


@triton.jit
def request_rows(query_start_loc_ptr, r, rows, ROWS_MOST: tl.constexpr):
    """(first row, number of rows) of request r, within the target's rows."""
    first = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + r), 0), rows)
    last = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + r + 1), first), rows)
    return first, last - first


@triton.jit
def row_statistics_kernel(
    maximum_ptr, total_ptr, best_ptr,

    logits_ptr,

    query_start_loc_ptr,

    rows, vocab, stride_logits,

    DRAFTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Grid (R * (N + 1), SPLITS). A program owns a share of one row: its largest logit, the lowest id that has it, and the sum of exp.
    task, split = tl.program_id(0), tl.program_id(1)
    r, i = task // (DRAFTS + 1), task % (DRAFTS + 1)
    first, count = request_rows(query_start_loc_ptr, r, rows, DRAFTS + 1)
    if i < count:
        row_ptr = logits_ptr + (first + i).to(tl.int64) * stride_logits
        each = tl.cdiv(tl.cdiv(vocab, BLOCK), SPLITS) * BLOCK
        maximum = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        best = tl.full((), 2147483647, tl.int32)
        for begin in range(split * each, tl.minimum((split + 1) * each, vocab), BLOCK):
            v = begin + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
            top, at = first_best(x, v)
            best = tl.where((top > maximum) | (best == FAR), at, best)
            grown = tl.maximum(maximum, top)
            shift = softmax_shift(grown)
            total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift), axis=0)
            maximum = grown
        at = task.to(tl.int64) * SPLITS + split
        tl.store(maximum_ptr + at, maximum)
        tl.store(total_ptr + at, total)
        tl.store(best_ptr + at, best)


@triton.jit
def verify_greedy_kernel(
    num_accepted_ptr, next_token_ptr, num_rejected_ptr,

    target_argmax_ptr, maximum_ptr, best_ptr,

    draft_tokens_ptr, query_start_loc_ptr,

    rows, vocab,

    DRAFTS: tl.constexpr, SPLITS: tl.constexpr, HAS_ARGMAX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Grid (R). A program gives one request's verdict.
    r = tl.program_id(0)
    first, count = request_rows(query_start_loc_ptr, r, rows, DRAFTS + 1)
    i = tl.arange(0, BLOCK_N)
    judged = i < tl.minimum(count, DRAFTS + 1)
    if HAS_ARGMAX:
        best = tl.load(target_argmax_ptr + first + i, mask=judged, other=-1)
    else:
        s = tl.arange(0, BLOCK_S)
        at = (r.to(tl.int64) * (DRAFTS + 1) + i)[:, None] * SPLITS + s[None, :]
        there = judged[:, None] & (s < SPLITS)[None, :]
        value = tl.load(maximum_ptr + at, mask=there, other=float("-inf"))
        index = tl.load(best_ptr + at, mask=there, other=2147483647)
        best = tl.min(tl.where(value == tl.max(value, axis=1)[:, None], index, FAR), axis=1).to(tl.int64)
    drafts = tl.minimum(count - 1, DRAFTS)
    draft = tl.load(draft_tokens_ptr + r.to(tl.int64) * DRAFTS + i, mask=i < drafts, other=-1)
    refused = (i >= drafts) | (draft < 0) | (draft != best)
    accepted = tl.min(tl.where(refused, i, BLOCK_N), axis=0)
    token = tl.sum(tl.where(i == accepted, best, 0), axis=0)
    live = count > 0
    tl.store(num_accepted_ptr + r, tl.where(live, accepted, 0))
    tl.store(next_token_ptr + r, tl.where(live, token, -1))
    tl.store(num_rejected_ptr + r, tl.where(live, count - 1 - accepted, 0))


@triton.jit
def judge_drafts(
    logits_ptr, draft_probs_ptr, maximum_ptr, total_ptr, draft_tokens_ptr, r, first, count, vocab,
    stride_logits, stride_probs_request, stride_probs_row,
    DRAFTS: tl.constexpr, SPLITS: tl.constexpr, ONE_HOT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """By draft i, in vectors [BLOCK_N]: the token, its target and draft probability, the row's shift and sum of exp; and how many drafts count.

    A draft that is no token ends the list. A split without any of the vocabulary has maximum -inf and counts nothing.
    """
    i = tl.arange(0, BLOCK_N)
    drafts = tl.minimum(count - 1, DRAFTS)
    draft = tl.load(draft_tokens_ptr + r.to(tl.int64) * DRAFTS + i, mask=i < drafts, other=-1)
    drafts = tl.minimum(drafts, tl.min(tl.where((draft < 0) | (draft >= vocab), i, BLOCK_N), axis=0))
    s = tl.arange(0, BLOCK_S)
    at = (r.to(tl.int64) * (DRAFTS + 1) + i)[:, None] * SPLITS + s[None, :]
    there = (i <= drafts)[:, None] & (s < SPLITS)[None, :]
    maxima = tl.load(maximum_ptr + at, mask=there, other=float("-inf"))
    shift = softmax_shift(tl.max(maxima, axis=1))
    total = tl.sum(tl.load(total_ptr + at, mask=there, other=0.0) * tl.exp(maxima - shift[:, None]), axis=1)
    mine = i < drafts
    logit = tl.load(logits_ptr + (first + i).to(tl.int64) * stride_logits + draft, mask=mine, other=float("-inf")).to(tl.float32)
    p = tl.exp(logit - shift) / tl.where(mine, total, 1.0)
    if ONE_HOT:
        q = tl.where(mine, 1.0, 0.0)
    else:
        q = tl.load(draft_probs_ptr + r.to(tl.int64) * stride_probs_request + i.to(tl.int64) * stride_probs_row + draft, mask=mine, other=0.0)
    return drafts, draft, p, q, shift, total


@triton.jit
def prefix_chances(p, q, drafts, BLOCK_N: tl.constexpr):
    """P_i of block verification at lane i: P_0 = 1, P_i = min(1, P_{i-1} p_i / q_i). Up to N scalar steps in registers."""
    lane = tl.arange(0, BLOCK_N)
    chances = tl.where(lane == 0, 1.0, 0.0)
    chance = tl.full((), 1.0, tl.float32)
    for i in range(0, drafts):
        x = chance * tl.sum(tl.where(lane == i, p, 0.0), axis=0)
        drafted = tl.sum(tl.where(lane == i, q, 0.0), axis=0)
        chance = tl.where(x > 0, tl.where(drafted <= x, 1.0, x / drafted), 0.0)
        chances = tl.where(lane == i + 1, chance, chances)
    return chances


@triton.jit
def residual(
    logits_row_ptr, probs_row_ptr, v, vocab, shift, total, chance, draft, subtract, ONE_HOT: tl.constexpr
):
    """(p, max(chance p - q, 0)) of ids v; q counts where ``subtract`` holds."""
    there = v < vocab
    p = tl.exp(tl.load(logits_row_ptr + v, mask=there, other=float("-inf")).to(tl.float32) - shift) / total
    if ONE_HOT:
        q = tl.where(subtract & (v == draft), 1.0, 0.0)
    else:
        q = tl.load(probs_row_ptr + v, mask=there & (v < tl.where(subtract, vocab, 0)), other=0.0)
    return p, tl.maximum(chance * p - q, 0.0)


@triton.jit
def lane_of(vector, i, BLOCK_N: tl.constexpr):
    """Element i of a vector."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_N) == i, vector, 0), axis=0)


@triton.jit
def residual_mass_kernel(
    mass_ptr,

    logits_ptr, draft_probs_ptr, maximum_ptr, total_ptr,

    draft_tokens_ptr, query_start_loc_ptr,

    rows, vocab, stride_logits, stride_probs_request, stride_probs_row,

    DRAFTS: tl.constexpr, SPLITS: tl.constexpr, ONE_HOT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Grid (R * N, SPLITS). A program sums a share of M_i = sum max(P_i p_{i+1} - q_{i+1}, 0), for 1 <= i < the number of drafts.
    r, i, split = tl.program_id(0) // DRAFTS, tl.program_id(0) % DRAFTS, tl.program_id(1)
    first, count = request_rows(query_start_loc_ptr, r, rows, DRAFTS + 1)
    drafts, draft, p, q, shift, total = judge_drafts(
        logits_ptr, draft_probs_ptr, maximum_ptr, total_ptr, draft_tokens_ptr, r, first, count, vocab,
        stride_logits, stride_probs_request, stride_probs_row, DRAFTS, SPLITS, ONE_HOT, BLOCK, BLOCK_N, BLOCK_S,
    )  # fmt: skip
    if (i >= 1) & (i < drafts):
        chance = lane_of(prefix_chances(p, q, drafts, BLOCK_N), i, BLOCK_N)
        logits_row_ptr = logits_ptr + (first + i).to(tl.int64) * stride_logits
        probs_row_ptr = draft_probs_ptr
        if not ONE_HOT:
            probs_row_ptr = draft_probs_ptr + r.to(tl.int64) * stride_probs_request + i.to(tl.int64) * stride_probs_row
        row_shift, row_total = lane_of(shift, i, BLOCK_N), lane_of(total, i, BLOCK_N)
        token = lane_of(draft, i, BLOCK_N)
        each = tl.cdiv(tl.cdiv(vocab, BLOCK), SPLITS) * BLOCK
        mass = tl.zeros((), tl.float32)
        for begin in range(split * each, tl.minimum((split + 1) * each, vocab), BLOCK):
            v = begin + tl.arange(0, BLOCK)
            _, left = residual(logits_row_ptr, probs_row_ptr, v, vocab, row_shift, row_total, chance, token, i < drafts, ONE_HOT)
            mass += tl.sum(left, axis=0)
        tl.store(mass_ptr + (r.to(tl.int64) * DRAFTS + i) * SPLITS + split, mass)


@triton.jit
def next_token_kernel(
    num_accepted_ptr, num_rejected_ptr, score_ptr, index_ptr,

    logits_ptr, draft_probs_ptr, maximum_ptr, total_ptr, mass_ptr,

    draft_tokens_ptr, query_start_loc_ptr, seeds_ptr, offsets_ptr,

    rows, vocab, stride_logits, stride_probs_request, stride_probs_row,

    BY_BLOCK: tl.constexpr, DRAFTS: tl.constexpr, SPLITS: tl.constexpr, ONE_HOT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Grid (R, SPLITS). Every program finds the request's verdict; each then searches a share of the vocabulary for the next token, once
    # in the residual and once in p, which serves where the residual has no mass. The first split writes the verdict.
    r, split = tl.program_id(0), tl.program_id(1)
    first, count = request_rows(query_start_loc_ptr, r, rows, DRAFTS + 1)
    if count > 0:
        drafts, draft, p, q, shift, total = judge_drafts(
            logits_ptr, draft_probs_ptr, maximum_ptr, total_ptr, draft_tokens_ptr, r, first, count, vocab,
            stride_logits, stride_probs_request, stride_probs_row, DRAFTS, SPLITS, ONE_HOT, BLOCK, BLOCK_N, BLOCK_S,
        )  # fmt: skip
        seed, offset = tl.load(seeds_ptr + r), tl.load(offsets_ptr + r)
        lane = tl.arange(0, BLOCK_N)
        if BY_BLOCK:
            # The prefix of i drafts is judged by draft i - 1's coin; the longest prefix that any coin keeps is accepted.
            chances = prefix_chances(p, q, drafts, BLOCK_N)
            s = tl.arange(0, BLOCK_S)
            at = (r.to(tl.int64) * DRAFTS + lane)[:, None] * SPLITS + s[None, :]
            inside = (lane >= 1) & (lane < drafts)
            mass = tl.sum(tl.load(mass_ptr + at, mask=inside[:, None] & (s < SPLITS)[None, :], other=0.0), axis=1)
            below = mass + 1.0 - chances
            keep = tl.where(inside, tl.where(below > 0, mass / tl.where(below > 0, below, 1.0), 1.0), chances)
            coin = uniforms(seed, offset, tl.maximum(lane - 1, 0), STREAM_ACCEPT, lane * 0)
            accepted = tl.max(tl.where((lane >= 1) & (lane <= drafts) & (coin < keep), lane, 0), axis=0)
            chance = lane_of(chances, accepted, BLOCK_N)
        else:
            coin = uniforms(seed, offset, lane, STREAM_ACCEPT, lane * 0)
            accepted = tl.min(tl.where((lane < drafts) & (coin * q < p), BLOCK_N, lane), axis=0)
            chance = tl.full((), 1.0, tl.float32)
        if split == 0:
            tl.store(num_accepted_ptr + r, accepted)
            tl.store(num_rejected_ptr + r, count - 1 - accepted)

        rejects = accepted < drafts
        logits_row_ptr = logits_ptr + (first + accepted).to(tl.int64) * stride_logits
        probs_row_ptr = draft_probs_ptr
        if not ONE_HOT:
            probs_row_ptr = draft_probs_ptr + r.to(tl.int64) * stride_probs_request + accepted.to(tl.int64) * stride_probs_row
        row_shift, row_total = lane_of(shift, accepted, BLOCK_N), lane_of(total, accepted, BLOCK_N)
        token = lane_of(draft, accepted, BLOCK_N)
        each = tl.cdiv(tl.cdiv(vocab, BLOCK), SPLITS) * BLOCK
        score_left, score_p = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
        at_left, at_p = tl.full((), 2147483647, tl.int32), tl.full((), 2147483647, tl.int32)
        for begin in range(split * each, tl.minimum((split + 1) * each, vocab), BLOCK):
            v = begin + tl.arange(0, BLOCK)
            weight, left = residual(logits_row_ptr, probs_row_ptr, v, vocab, row_shift, row_total, chance, token, rejects, ONE_HOT)
            noise = gumbels(seed, offset, accepted, STREAM_NEXT, v)
            top, at = first_best(tl.where(left > 0, tl.log(left) + noise, float("-inf")), v)
            at_left = tl.where(top > score_left, at, at_left)
            score_left = tl.maximum(score_left, top)
            top, at = first_best(tl.where(weight > 0, tl.log(weight) + noise, float("-inf")), v)
            at_p = tl.where(top > score_p, at, at_p)
            score_p = tl.maximum(score_p, top)
        out = (r.to(tl.int64) * SPLITS + split) * 2
        tl.store(score_ptr + out, score_left)
        tl.store(index_ptr + out, at_left)
        tl.store(score_ptr + out + 1, score_p)
        tl.store(index_ptr + out + 1, at_p)


@triton.jit
def next_token_merge_kernel(
    num_accepted_ptr, next_token_ptr, num_rejected_ptr,

    score_ptr, index_ptr,

    query_start_loc_ptr,

    rows,

    DRAFTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Grid (R). A program picks the winner among the splits; a request without rows is padding.
    r = tl.program_id(0)
    _, count = request_rows(query_start_loc_ptr, r, rows, DRAFTS + 1)
    s = tl.arange(0, BLOCK_S)
    there = (s < SPLITS) & (s < tl.where(count > 0, SPLITS, 0))
    at = (r.to(tl.int64) * SPLITS + s) * 2
    score, index = first_best(tl.load(score_ptr + at, mask=there, other=float("-inf")), tl.load(index_ptr + at, mask=there, other=2147483647))
    _, index_p = first_best(tl.load(score_ptr + at + 1, mask=there, other=float("-inf")), tl.load(index_ptr + at + 1, mask=there, other=2147483647))
    token = tl.where(score > float("-inf"), index, index_p).to(tl.int64)
    tl.store(next_token_ptr + r, tl.where(count > 0, token, -1))
    if count <= 0:
        tl.store(num_accepted_ptr + r, 0)
        tl.store(num_rejected_ptr + r, 0)


def verify_draft_triton(
    num_accepted, next_token, num_rejected,
    draft_tokens, query_start_loc, target_logits, target_argmax, draft_probs, seeds, offsets, method,
):  # fmt: skip
    requests, drafts = draft_tokens.shape
    if requests == 0:
        return
    lanes = triton.next_power_of_2(drafts + 1)
    if target_argmax is not None:
        verify_greedy_kernel[(requests,)](
            num_accepted, next_token, num_rejected, target_argmax, None, None, draft_tokens, query_start_loc,
            target_argmax.shape[0], 0, drafts, 1, True, lanes, 1, num_warps=1,
        )  # fmt: skip
        return
    rows, vocab = target_logits.shape
    tile = config("verify_draft", vocab=vocab, dtype=target_logits.dtype)
    splits = plan_splits(requests * (drafts + 1), vocab, target_logits.device, tile.BLOCK)
    split_lanes = triton.next_power_of_2(splits)
    maximum, total, mass, score = (
        target_logits.new_empty(shape, dtype=torch.float32)
        for shape in ((requests * (drafts + 1), splits), (requests * (drafts + 1), splits), (requests * drafts, splits), (requests, splits, 2))
    )
    best, index = (query_start_loc.new_empty(t.shape) for t in (maximum, score))
    warps = {"num_warps": tile.num_warps}
    row_statistics_kernel[(requests * (drafts + 1), splits)](
        maximum, total, best, target_logits, query_start_loc, rows, vocab, target_logits.stride(0), drafts, splits, tile.BLOCK, **warps
    )
    if method == "greedy":
        verify_greedy_kernel[(requests,)](
            num_accepted, next_token, num_rejected, None, maximum, best, draft_tokens, query_start_loc, rows, vocab,
            drafts, splits, False, lanes, split_lanes, num_warps=1,
        )  # fmt: skip
        return
    one_hot = draft_probs is None
    probs_strides = (0, 0) if one_hot else draft_probs.stride()[:2]
    sizes = (rows, vocab, target_logits.stride(0), *probs_strides)
    if method == "block" and drafts > 1:
        residual_mass_kernel[(requests * drafts, splits)](
            mass, target_logits, draft_probs, maximum, total, draft_tokens, query_start_loc, *sizes, drafts, splits, one_hot,
            tile.BLOCK, lanes, split_lanes, **warps,
        )  # fmt: skip
    next_token_kernel[(requests, splits)](
        num_accepted, num_rejected, score, index, target_logits, draft_probs, maximum, total, mass, draft_tokens, query_start_loc, seeds,
        offsets, *sizes, method == "block", drafts, splits, one_hot, tile.BLOCK, lanes, split_lanes, **warps,
    )  # fmt: skip
    next_token_merge_kernel[(requests,)](
        num_accepted, next_token, num_rejected, score, index, query_start_loc, rows, drafts, splits, split_lanes, num_warps=1
    )
