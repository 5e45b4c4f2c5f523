"""``verify_draft``: rows are reduced over vocabulary splits, then one program a request decides, then the next token is sampled by splits.

A coin needs one probability a row (rejection) or one sum a row (block), so no request ever walks the vocabulary alone.
"""

import torch
import triton
import triton.language as tl

from ._common import STREAM_ACCEPT, STREAM_NEXT, gumbels, softmax_shift, uniforms
from ._configs import config


@triton.jit
def rows_kernel(
    most_ptr, most_id_ptr, sum_ptr,

    logits_ptr, stride_logits, vocab,

    BLOCK_V: tl.constexpr,
):  # fmt: skip
    # Grid (ceil(V / BLOCK_V), T). Maximum, its lowest id and the sum of exponentials of one split of one row.
    split, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v = split * BLOCK_V + tl.arange(0, BLOCK_V)
    logit = tl.load(logits_ptr + t * stride_logits + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
    most = tl.max(logit)
    at = t * tl.num_programs(0) + split
    tl.store(most_ptr + at, most)
    tl.store(most_id_ptr + at, tl.argmax(logit, axis=0) + split * BLOCK_V)
    tl.store(sum_ptr + at, tl.sum(tl.exp(logit - softmax_shift(most))))


@triton.jit
def merged(most_ptr, most_id_ptr, sum_ptr, t, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """(maximum, its lowest id, sum of exponentials) of row t."""
    split = tl.arange(0, BLOCK_SPLITS)
    value = tl.load(most_ptr + t * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    most = tl.max(value)
    first = tl.min(tl.where((value == most) & (split < SPLITS), split, BLOCK_SPLITS))
    best = tl.load(most_id_ptr + t * SPLITS + first, mask=first < SPLITS, other=0)
    part = tl.load(sum_ptr + t * SPLITS + split, mask=split < SPLITS, other=0.0)
    total = tl.sum(tl.where(value == float("-inf"), 0.0, part * tl.exp(value - softmax_shift(most))))
    return most, best.to(tl.int64), total


@triton.jit
def request_rows(query_start_loc_ptr, draft_tokens_ptr, r, total_rows, columns, vocab):
    """(first row, rows, drafts that count) of request r: a draft that is no token ends the list."""
    first = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + r), 0), total_rows)
    n = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + r + 1), first), total_rows) - first
    most = tl.minimum(n - 1, columns)
    count = 0
    going = most > 0
    for i in range(0, columns):
        draft = tl.load(draft_tokens_ptr + r * columns + i)
        going = going & (i < most) & (draft >= 0) & (draft < vocab)
        count += going.to(tl.int32)
    return first, n, count


@triton.jit
def greedy_kernel(
    num_accepted_ptr, next_token_ptr, num_rejected_ptr,

    draft_tokens_ptr, target_argmax_ptr, most_ptr, most_id_ptr, sum_ptr, query_start_loc_ptr,

    total_rows, columns, vocab,

    HAS_ARGMAX: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    # Grid (R).
    r = tl.program_id(0).to(tl.int64)
    first, n, count = request_rows(query_start_loc_ptr, draft_tokens_ptr, r, total_rows, columns, vocab)
    accepted = 0
    token = tl.full((), -1, tl.int64)
    going = n > 0
    for i in range(0, tl.where(n > 0, count + 1, 0)):
        t = (first + i).to(tl.int64)
        if HAS_ARGMAX:
            best = tl.load(target_argmax_ptr + t)
        else:
            _, best, _ = merged(most_ptr, most_id_ptr, sum_ptr, t, SPLITS, BLOCK_SPLITS)
        token = tl.where(going, best, token)
        draft = tl.load(draft_tokens_ptr + r * columns + i, mask=i < count, other=-1)
        going = going & (i < count) & (draft == best)
        accepted += going.to(tl.int32)
    tl.store(num_accepted_ptr + r, accepted)
    tl.store(next_token_ptr + r, token)
    tl.store(num_rejected_ptr + r, tl.where(n > 0, n - 1 - accepted, 0))


@triton.jit
def draft_probability(draft_probs_ptr, stride_q_request, stride_q_row, r, i, v, chosen, mask, HAS_PROBS: tl.constexpr):
    """q(v) of draft i: given, or one-hot on the draft that was chosen."""
    if HAS_PROBS:
        return tl.load(draft_probs_ptr + r * stride_q_request + i.to(tl.int64) * stride_q_row + v, mask=mask, other=0.0)
    else:
        return tl.where(v == chosen, 1.0, 0.0)


@triton.jit
def decide_kernel(
    num_accepted_ptr, num_rejected_ptr, weight_ptr, prefix_ptr,

    draft_tokens_ptr, logits_ptr, draft_probs_ptr, most_ptr, most_id_ptr, sum_ptr, mass_ptr, seeds_ptr, offsets_ptr, query_start_loc_ptr,

    stride_logits, stride_q_request, stride_q_row,

    total_rows, columns, vocab,

    BLOCK_METHOD: tl.constexpr, PREFIX_ONLY: tl.constexpr, HAS_PROBS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    # Grid (R). Rejection: the number accepted. Block: with PREFIX_ONLY the weights P_i, and once the masses are known the number accepted.
    r = tl.program_id(0).to(tl.int64)
    first, n, count = request_rows(query_start_loc_ptr, draft_tokens_ptr, r, total_rows, columns, vocab)
    accepted = 0
    weight = 1.0
    prefix = 1.0
    going = n > 0
    zero = tl.arange(0, 1)
    for i in range(0, count):
        t = (first + i).to(tl.int64)
        draft = tl.load(draft_tokens_ptr + r * columns + i)
        most, _, total = merged(most_ptr, most_id_ptr, sum_ptr, t, SPLITS, BLOCK_SPLITS)
        logit = tl.load(logits_ptr + t * stride_logits + draft).to(tl.float32)
        p = tl.exp(logit - softmax_shift(most)) / total
        q = 1.0
        if HAS_PROBS:
            q = tl.load(draft_probs_ptr + r * stride_q_request + (t - first) * stride_q_row + draft)
        coin = tl.sum(uniforms(tl.load(seeds_ptr + r), tl.load(offsets_ptr + r), i, STREAM_ACCEPT, zero))
        if BLOCK_METHOD:
            x = prefix * p
            prefix = tl.where(x > 0, tl.where(q <= x, 1.0, x / tl.where(q > 0, q, 1.0)), 0.0)
            if PREFIX_ONLY:
                tl.store(prefix_ptr + r * columns + i, prefix)
            else:
                h = prefix
                if i + 1 < count:
                    split = tl.arange(0, BLOCK_SPLITS)
                    mass = tl.sum(tl.load(mass_ptr + (r * columns + i) * SPLITS + split, mask=split < SPLITS, other=0.0))
                    below = mass + 1.0 - prefix
                    # Without mass and with prefix 1 the next draft cannot be rejected, so this coin is never the last one.
                    h = tl.where(below > 0, mass / tl.where(below > 0, below, 1.0), 1.0)
                yes = coin < h
                accepted = tl.where(yes, i + 1, accepted)
                weight = tl.where(yes, prefix, weight)
        else:
            going = going & (coin * q < p)
            accepted += going.to(tl.int32)
    if not PREFIX_ONLY:
        tl.store(num_accepted_ptr + r, accepted)
        tl.store(num_rejected_ptr + r, tl.where(n > 0, n - 1 - accepted, 0))
        tl.store(weight_ptr + r, weight)


@triton.jit
def mass_kernel(
    mass_ptr,

    draft_tokens_ptr, logits_ptr, draft_probs_ptr, most_ptr, most_id_ptr, sum_ptr, prefix_ptr, query_start_loc_ptr,

    stride_logits, stride_q_request, stride_q_row,

    total_rows, columns, vocab,

    HAS_PROBS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # Grid (splits, N, R). One split of the sum over v of max(P_i p_{i+1}(v) - q_{i+1}(v), 0), i = draft index + 1.
    split, i, r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, n, count = request_rows(query_start_loc_ptr, draft_tokens_ptr, r, total_rows, columns, vocab)
    if i + 1 < count:
        t = (first + i + 1).to(tl.int64)
        most, _, total = merged(most_ptr, most_id_ptr, sum_ptr, t, SPLITS, BLOCK_SPLITS)
        v = split * BLOCK_V + tl.arange(0, BLOCK_V)
        logit = tl.load(logits_ptr + t * stride_logits + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
        p = tl.exp(logit - softmax_shift(most)) / total
        chosen = tl.load(draft_tokens_ptr + r * columns + i + 1)
        q = draft_probability(draft_probs_ptr, stride_q_request, stride_q_row, r, i + 1, v, chosen, v < vocab, HAS_PROBS)
        left = tl.maximum(tl.load(prefix_ptr + r * columns + i) * p - q, 0.0)
        tl.store(mass_ptr + (r * columns + i) * SPLITS + split, tl.sum(tl.where(v < vocab, left, 0.0)))


@triton.jit
def sample_kernel(
    best_ptr, best_id_ptr,

    num_accepted_ptr, weight_ptr, draft_tokens_ptr, logits_ptr, draft_probs_ptr, most_ptr, most_id_ptr, sum_ptr, seeds_ptr, offsets_ptr,
    query_start_loc_ptr,

    stride_logits, stride_q_request, stride_q_row,

    total_rows, columns, vocab,

    HAS_PROBS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # Grid (splits, R). The best of one split by the residual and by p itself: [r, 0] and [r, 1] of best, -inf where there is none.
    split, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, n, count = request_rows(query_start_loc_ptr, draft_tokens_ptr, r, total_rows, columns, vocab)
    if n > 0:
        accepted = tl.load(num_accepted_ptr + r)
        t = (first + accepted).to(tl.int64)
        most, _, total = merged(most_ptr, most_id_ptr, sum_ptr, t, SPLITS, BLOCK_SPLITS)
        v = split * BLOCK_V + tl.arange(0, BLOCK_V)
        there = v < vocab
        logit = tl.load(logits_ptr + t * stride_logits + v, mask=there, other=float("-inf")).to(tl.float32)
        p = tl.exp(logit - softmax_shift(most)) / total
        noise = gumbels(tl.load(seeds_ptr + r), tl.load(offsets_ptr + r), accepted, STREAM_NEXT, v)
        left = p * 0.0
        if accepted < count:
            chosen = tl.load(draft_tokens_ptr + r * columns + accepted)
            q = draft_probability(draft_probs_ptr, stride_q_request, stride_q_row, r, accepted, v, chosen, there, HAS_PROBS)
            left = tl.load(weight_ptr + r) * p - q
        by_residual = tl.where(there & (left > 0), tl.log(tl.where(left > 0, left, 1.0)) + noise, float("-inf"))
        by_p = tl.where(there & (p > 0), tl.log(tl.where(p > 0, p, 1.0)) + noise, float("-inf"))
        at = r * 2 * SPLITS + split
        tl.store(best_ptr + at, tl.max(by_residual))
        tl.store(best_id_ptr + at, tl.argmax(by_residual, axis=0) + split * BLOCK_V)
        tl.store(best_ptr + at + SPLITS, tl.max(by_p))
        tl.store(best_id_ptr + at + SPLITS, tl.argmax(by_p, axis=0) + split * BLOCK_V)


@triton.jit
def pick_kernel(
    next_token_ptr,

    best_ptr, best_id_ptr, query_start_loc_ptr,

    total_rows,

    SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    # Grid (R). The residual's token, or p's where the residual has no mass.
    r = tl.program_id(0).to(tl.int64)
    first = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + r), 0), total_rows)
    n = tl.minimum(tl.load(query_start_loc_ptr + r + 1), total_rows) - first
    token = tl.full((), -1, tl.int64)
    if n > 0:
        split = tl.arange(0, BLOCK_SPLITS)
        base = r * 2 * SPLITS
        value = tl.load(best_ptr + base + split, mask=split < SPLITS, other=float("-inf"))
        if tl.max(value) == float("-inf"):
            base += SPLITS
            value = tl.load(best_ptr + base + split, mask=split < SPLITS, other=float("-inf"))
        at = tl.min(tl.where((value == tl.max(value)) & (split < SPLITS), split, BLOCK_SPLITS))
        token = tl.load(best_id_ptr + base + at, mask=at < SPLITS, other=0).to(tl.int64)
    tl.store(next_token_ptr + r, token)


def verify_draft_triton(
    num_accepted, next_token, num_rejected,
    draft_tokens, query_start_loc, target_logits, target_argmax, draft_probs, seeds, offsets, method,
):  # fmt: skip
    requests, columns = draft_tokens.shape
    if requests == 0:
        return
    source = target_argmax if target_logits is None else target_logits
    total_rows = source.shape[0]
    vocab = 2**62 if target_logits is None else target_logits.shape[1]
    block_v = config("verify_draft").BLOCK_V
    splits = 1 if target_logits is None else triton.cdiv(vocab, block_v)
    block_splits = triton.next_power_of_2(splits)
    most = total = most_id = None
    if target_logits is not None:
        most, total = (source.new_empty((total_rows, splits), dtype=torch.float32) for _ in range(2))
        most_id = source.new_empty((total_rows, splits), dtype=torch.int32)
        if total_rows:
            rows_kernel[(splits, total_rows)](most, most_id, total, target_logits, target_logits.stride(0), vocab, block_v)
    if method == "greedy":
        greedy_kernel[(requests,)](
            num_accepted, next_token, num_rejected, draft_tokens, target_argmax, most, most_id, total, query_start_loc, total_rows, columns,
            vocab, target_argmax is not None, splits, block_splits,
        )  # fmt: skip
        return

    has_probs = draft_probs is not None
    weight = source.new_empty(requests, dtype=torch.float32)
    prefix = source.new_empty((requests, columns), dtype=torch.float32)
    mass = source.new_empty((requests, columns, splits), dtype=torch.float32) if method == "block" else None
    strides = (target_logits.stride(0), *(draft_probs.stride()[:2] if has_probs else (0, 0)))
    bounds = (total_rows, columns, vocab)

    def decide(prefix_only):
        decide_kernel[(requests,)](
            num_accepted, num_rejected, weight, prefix, draft_tokens, target_logits, draft_probs, most, most_id, total, mass, seeds, offsets,
            query_start_loc, *strides, *bounds, method == "block", prefix_only, has_probs, splits, block_splits,
        )  # fmt: skip

    if method == "block" and columns:
        decide(True)
        mass_kernel[(splits, columns, requests)](
            mass, draft_tokens, target_logits, draft_probs, most, most_id, total, prefix, query_start_loc, *strides, *bounds, has_probs,
            block_splits, block_v, splits,
        )  # fmt: skip
    decide(False)
    best = source.new_empty((requests, 2, splits), dtype=torch.float32)
    best_id = source.new_empty((requests, 2, splits), dtype=torch.int32)
    sample_kernel[(splits, requests)](
        best, best_id, num_accepted, weight, draft_tokens, target_logits, draft_probs, most, most_id, total, seeds, offsets, query_start_loc,
        *strides, *bounds, has_probs, block_splits, block_v, splits,
    )  # fmt: skip
    pick_kernel[(requests,)](next_token, best, best_id, query_start_loc, total_rows, splits, block_splits)
