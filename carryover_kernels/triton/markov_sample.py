"""``markov_sample``: per step a few programs a request for the head, then the vocabulary split across programs; nothing returns to the host.

The argmax of a step is merged from its splits by the next step's head program, so N steps are 2 N + 1 launches in a row.
"""

import torch
import triton
import triton.language as tl

from ._common import STREAM_DRAFT, gumbels, tanh
from ._configs import config


@triton.jit
def coldest(temperature):
    """At least 1e-30 where it is over 0: logit / T stays finite, or every token over 0 would tie at infinity."""
    return tl.where(temperature > 0, tl.maximum(temperature, 1e-30), 0.0)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def matvec(weight_ptr, rows, columns, x_ptr, count, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_R] dot products of ``rows`` of a weight (first element of each row, as pointers) with ``count`` float32 of x, from ``columns`` on."""
    total = tl.zeros((BLOCK_R,), tl.float32)
    for begin in range(0, count, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < count, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + rows[:, None] + (columns + k)[None, :], mask=(rows >= 0)[:, None] & (k < count)[None, :], other=0.0)
        total += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    return total


@triton.jit(do_not_specialize=["step"])  # one compilation for all steps of a block
def head_kernel(
    tokens_ptr, confidence_ptr, z_ptr, state_ptr,

    best_ptr, best_id_ptr, anchor_tokens_ptr, draft_to_target_ptr, markov_w1_ptr, hidden_ptr, head_weight_ptr, head_bias_ptr,
    confidence_weight_ptr, confidence_bias_ptr,

    stride_hidden_request, stride_hidden_row,

    step, steps, table_rows, rank, hidden_size, confidence_width,

    HEAD: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_REMAP: tl.constexpr, HAS_CONFIDENCE: tl.constexpr, HAS_CONFIDENCE_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Grid (R, ceil(rank / BLOCK_R)). A program merges token step - 1 of its request, then owns BLOCK_R units of z (and of the state) of
    # step `step`; the first of a request also writes the token and the confidence. step == steps only writes the token.
    r, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    anchor = tl.load(anchor_tokens_ptr + r)
    previous = anchor
    if step > 0:
        split = tl.arange(0, BLOCK_SPLITS)
        value = tl.load(best_ptr + r * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
        most = tl.max(value)
        first = tl.min(tl.where((value == most) & (split < SPLITS), split, BLOCK_SPLITS))
        token = tl.load(best_id_ptr + r * SPLITS + first, mask=first < SPLITS, other=0).to(tl.int64)
        if HAS_REMAP:
            token += tl.load(draft_to_target_ptr + token)
        token = tl.where(anchor < 0, -1, token)
        if part == 0:
            tl.store(tokens_ptr + r * steps + step - 1, token)
        previous = token
    if step < steps:
        if HEAD == "gated" or HEAD == "rnn" or HAS_CONFIDENCE:  # no other reads hidden, which may be absent
            h_ptr = hidden_ptr + r * stride_hidden_request + step.to(tl.int64) * stride_hidden_row
        known = (anchor >= 0) & (previous >= 0) & (previous < table_rows)
        row = tl.where(known, previous, 0).to(tl.int64) * rank  # of W1; a token without a row counts as zeros
        known_rank = tl.where(known, rank, 0)
        unit = part * BLOCK_R + tl.arange(0, BLOCK_R)
        there = unit < rank
        live = unit < tl.where(anchor >= 0, rank, 0)
        if HAS_TABLE:
            w = tl.load(markov_w1_ptr + row + unit, mask=unit < known_rank, other=0.0).to(tl.float32)
        if HEAD == "vanilla":
            tl.store(z_ptr + r * rank + unit, w, mask=there)
        if HEAD == "gated":
            columns = (hidden_size + rank).to(tl.int64)
            rows = tl.where(live, unit * columns, -1)
            x = matvec(head_weight_ptr, rows, 0, h_ptr, hidden_size, BLOCK_R, BLOCK_K)
            x += matvec(head_weight_ptr, rows, hidden_size, markov_w1_ptr + row, known_rank, BLOCK_R, BLOCK_K)
            if HAS_BIAS:
                x += tl.load(head_bias_ptr + unit, mask=there, other=0.0)
            tl.store(z_ptr + r * rank + unit, sigmoid(x) * w, mask=there)
        if HEAD == "rnn":
            columns = (hidden_size + 2 * rank).to(tl.int64)
            # Two copies of the state: the step reads one whole while it writes the other.
            old_ptr, new_ptr = state_ptr + (2 * r + step % 2) * rank, state_ptr + (2 * r + (step + 1) % 2) * rank
            for gate in tl.static_range(3):  # forget, candidate, output: the rows of one weight
                rows = tl.where(live, (gate * rank + unit) * columns, -1)
                x = matvec(head_weight_ptr, rows, 0, old_ptr, rank, BLOCK_R, BLOCK_K)
                x += matvec(head_weight_ptr, rows, rank, markov_w1_ptr + row, known_rank, BLOCK_R, BLOCK_K)
                x += matvec(head_weight_ptr, rows, 2 * rank, h_ptr, hidden_size, BLOCK_R, BLOCK_K)
                if HAS_BIAS:
                    x += tl.load(head_bias_ptr + gate * rank + unit, mask=there, other=0.0)
                if gate == 0:
                    forget = sigmoid(x)
                elif gate == 1:
                    before = tl.load(old_ptr + unit, mask=there, other=0.0)
                    tl.store(new_ptr + unit, forget * before + (1.0 - forget) * tanh(x), mask=there)
                else:
                    tl.store(z_ptr + r * rank + unit, tanh(x), mask=there)
        if HAS_CONFIDENCE and part == 0:
            total = tl.zeros((BLOCK_K,), tl.float32)
            for begin in range(0, tl.where(anchor >= 0, hidden_size, 0), BLOCK_K):
                k = begin + tl.arange(0, BLOCK_K)
                h = tl.load(h_ptr + k, mask=k < hidden_size, other=0.0).to(tl.float32)
                total += h * tl.load(confidence_weight_ptr + k, mask=k < hidden_size, other=0.0)
            if HAS_TABLE and confidence_width > hidden_size:
                for begin in range(0, known_rank, BLOCK_K):
                    k = begin + tl.arange(0, BLOCK_K)
                    w_all = tl.load(markov_w1_ptr + row + k, mask=k < known_rank, other=0.0).to(tl.float32)
                    total += w_all * tl.load(confidence_weight_ptr + hidden_size + k, mask=k < known_rank, other=0.0)
            logit = tl.sum(total)
            if HAS_CONFIDENCE_BIAS:
                logit += tl.load(confidence_bias_ptr)
            tl.store(confidence_ptr + r * steps + step, tl.where(anchor >= 0, logit, 0.0))


@triton.jit(do_not_specialize=["step"])  # one compilation for all steps of a block
def vocab_kernel(
    logits_ptr, best_ptr, best_id_ptr, most_ptr, sum_ptr,

    base_logits_ptr, markov_w2_ptr, z_ptr, anchor_tokens_ptr, temperature_ptr, seeds_ptr, offsets_ptr,

    stride_base_request, stride_base_row,

    step, steps, vocab, rank,

    HAS_HEAD: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, KEEP_LOGITS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Grid (ceil(V / BLOCK_V), R). A program owns BLOCK_V logits of one request: bias, noise, and the best of them.
    split, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v = split * BLOCK_V + tl.arange(0, BLOCK_V)
    live = tl.load(anchor_tokens_ptr + r) >= 0
    there = v < tl.where(live, vocab, 0)
    logit = tl.load(base_logits_ptr + r * stride_base_request + step.to(tl.int64) * stride_base_row + v, mask=there, other=0.0).to(tl.float32)
    if HAS_HEAD:
        for begin in range(0, rank, BLOCK_R):
            unit = begin + tl.arange(0, BLOCK_R)
            z = tl.load(z_ptr + r * rank + unit, mask=unit < rank, other=0.0)
            w = tl.load(markov_w2_ptr + v.to(tl.int64)[:, None] * rank + unit[None, :], mask=there[:, None] & (unit < rank)[None, :], other=0.0)
            logit += tl.sum(w.to(tl.float32) * z[None, :], axis=1)
    if KEEP_LOGITS:
        tl.store(logits_ptr + (r * steps + step) * vocab + v, logit, mask=v < vocab)
    score = logit
    temperature = 0.0
    if HAS_TEMPERATURE:
        temperature = coldest(tl.load(temperature_ptr + r))
        if temperature > 0:
            score = logit / temperature + gumbels(tl.load(seeds_ptr + r), tl.load(offsets_ptr + r), step, STREAM_DRAFT, v)
    score = tl.where(there, score, float("-inf"))
    at = r * tl.num_programs(0) + split
    tl.store(best_ptr + at, tl.max(score))
    tl.store(best_id_ptr + at, tl.argmax(score, axis=0) + split * BLOCK_V)
    if KEEP_LOGITS:
        most = tl.max(tl.where(there, logit, float("-inf")))
        shift = tl.where(most == float("-inf"), 0.0, most)
        divisor = tl.where(temperature > 0, temperature, 1.0)
        tl.store(most_ptr + at, most)
        tl.store(sum_ptr + at, tl.sum(tl.where(there, tl.exp((logit - shift) / divisor), 0.0)))


@triton.jit(do_not_specialize=["step"])  # one compilation for all steps of a block
def probs_kernel(
    probs_ptr,

    logits_ptr, best_ptr, best_id_ptr, most_ptr, sum_ptr, anchor_tokens_ptr, temperature_ptr,

    step, steps, vocab,

    HAS_TEMPERATURE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    # Grid (ceil(V / BLOCK_V), R). softmax(logits / T) of one step from the splits' maxima and sums; one-hot where greedy.
    split, splits, r = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    s = tl.arange(0, BLOCK_SPLITS)
    temperature = 0.0
    if HAS_TEMPERATURE:
        temperature = coldest(tl.load(temperature_ptr + r))
    v = split * BLOCK_V + tl.arange(0, BLOCK_V)
    logit = tl.load(logits_ptr + (r * steps + step) * vocab + v, mask=v < vocab, other=float("-inf"))
    if temperature > 0:
        most = tl.load(most_ptr + r * splits + s, mask=s < splits, other=float("-inf"))
        top = tl.max(most)
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.load(sum_ptr + r * splits + s, mask=s < splits, other=0.0)
        total = tl.sum(tl.where(most == float("-inf"), 0.0, total * tl.exp((most - shift) / temperature)))
        probability = tl.exp((logit - shift) / temperature) / total
    else:
        value = tl.load(best_ptr + r * splits + s, mask=s < splits, other=float("-inf"))
        first = tl.min(tl.where((value == tl.max(value)) & (s < splits), s, BLOCK_SPLITS))
        chosen = tl.load(best_id_ptr + r * splits + first, mask=first < splits, other=0)
        probability = tl.where(v == chosen, 1.0, 0.0)
    live = tl.load(anchor_tokens_ptr + r) >= 0
    tl.store(probs_ptr + (r * steps + step) * vocab + v, tl.where(live, probability, 0.0), mask=v < vocab)


def markov_sample_triton(
    tokens, logits, probs, confidence,
    base_logits, anchor_tokens, markov_w1, markov_w2, head, hidden, head_weight, head_bias, confidence_weight, confidence_bias,
    draft_to_target, temperature, seeds, offsets, return_logits, return_probs,
):  # fmt: skip
    requests, steps, vocab = base_logits.shape
    if requests == 0 or steps == 0:
        return
    rank = markov_w1.shape[1] if markov_w1 is not None else 0
    hidden_size = hidden.shape[2] if hidden is not None else 0
    tile = config("markov_sample", rank=rank)
    splits = triton.cdiv(vocab, tile.BLOCK_V)
    block_splits = triton.next_power_of_2(splits)
    keep = return_logits or return_probs

    def floats(*shape):
        return base_logits.new_empty(shape, dtype=torch.float32)

    z, state = floats(requests, rank), base_logits.new_zeros((requests, 2, rank), dtype=torch.float32)
    best, most, total = floats(requests, splits), floats(requests, splits), floats(requests, splits)
    best_id = base_logits.new_empty((requests, splits), dtype=torch.int32)
    kept = logits if return_logits else floats(requests, steps, vocab) if keep else None
    strides = hidden.stride()[:2] if hidden is not None else (0, 0)

    def run_head(step):
        head_kernel[(requests, max(1, triton.cdiv(rank, tile.BLOCK_R)))](
            tokens, confidence, z, state, best, best_id, anchor_tokens, draft_to_target, markov_w1, hidden, head_weight, head_bias,
            confidence_weight, confidence_bias, *strides, step, steps, markov_w1.shape[0] if rank else 0, rank, hidden_size,
            confidence_weight.shape[1] if confidence_weight is not None else 0, head, rank > 0, draft_to_target is not None,
            confidence_weight is not None, confidence_bias is not None, head_bias is not None, splits, block_splits, tile.BLOCK_R, 128,
            num_warps=4,
        )  # fmt: skip

    grid = (splits, requests)
    for step in range(steps):
        run_head(step)
        vocab_kernel[grid](
            kept, best, best_id, most, total, base_logits, markov_w2, z, anchor_tokens, temperature, seeds, offsets,
            *base_logits.stride()[:2], step, steps, vocab, rank, head != "none", temperature is not None, keep, tile.BLOCK_V, tile.BLOCK_R,
            num_warps=tile.num_warps,
        )  # fmt: skip
        if return_probs:
            probs_kernel[grid](
                probs, kept, best, best_id, most, total, anchor_tokens, temperature, step, steps, vocab, temperature is not None,
                tile.BLOCK_V, block_splits, num_warps=4,
            )  # fmt: skip
    run_head(steps)
