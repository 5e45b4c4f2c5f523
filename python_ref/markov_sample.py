"""``markov_sample``: the block's proposals, left to right, each corrected by the token before it."""

import torch

from .random import STREAM_DRAFT, gumbels


def markov_sample(
    base_logits, anchor_tokens, markov_w1=None, markov_w2=None, head="none", hidden=None, head_weight=None, head_bias=None,
    confidence_weight=None, confidence_bias=None, draft_to_target=None, temperature=None, seeds=None, offsets=None,
    return_logits=False, return_probs=False, *, dtype=torch.float64, forced_tokens=None,
):  # fmt: skip
    """``forced_tokens`` [R, N]: each step's previous token is taken from there, so that one near-tie does not change all that follows."""
    requests, steps, vocab = base_logits.shape
    tokens = torch.full((requests, steps), -1, dtype=torch.int64)
    logits = torch.zeros(base_logits.shape, dtype=dtype)
    probs = torch.zeros(base_logits.shape, dtype=dtype)
    confidence = torch.zeros(requests, steps, dtype=dtype)

    for r in range(requests):
        previous = int(anchor_tokens[r])
        if previous < 0:
            continue
        state = None if markov_w1 is None else torch.zeros(markov_w1.shape[1], dtype=dtype)
        for i in range(steps):
            logits[r, i] = base_logits[r, i].to(dtype)
            h = None if hidden is None else hidden[r, i].to(dtype)
            w = None
            if markov_w1 is not None:  # a token outside the table has no row: zeros
                w = markov_w1[previous].to(dtype) if 0 <= previous < markov_w1.shape[0] else torch.zeros_like(state)
            bias = 0.0 if head_bias is None else head_bias.to(dtype)
            if head == "vanilla":
                z = w
            elif head == "gated":
                z = torch.sigmoid(head_weight.to(dtype) @ torch.cat([h, w]) + bias) * w
            elif head == "rnn":
                gate, candidate, output = (head_weight.to(dtype) @ torch.cat([state, w, h]) + bias).chunk(3)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                z = torch.tanh(output)
            if head != "none":
                logits[r, i] += markov_w2.to(dtype) @ z

            if confidence_weight is not None:
                row = confidence_weight[0].to(dtype)
                features = h if row.shape[0] == h.shape[0] else torch.cat([h, w])
                confidence[r, i] = row @ features + (0.0 if confidence_bias is None else confidence_bias[0].to(dtype))

            t = 0.0 if temperature is None else float(temperature[r])
            if t > 0:
                noise = gumbels(int(seeds[r]), int(offsets[r]), i, STREAM_DRAFT, vocab).to(dtype)
                choice = first_argmax(logits[r, i] / t + noise)
                probs[r, i] = torch.softmax(logits[r, i] / t, dim=0)
            else:
                choice = first_argmax(logits[r, i])
                probs[r, i, choice] = 1.0
            tokens[r, i] = choice + (0 if draft_to_target is None else int(draft_to_target[choice]))
            previous = int(tokens[r, i] if forced_tokens is None else forced_tokens[r, i])

    empty = logits.new_empty(0)
    return (
        tokens,
        logits if return_logits else empty,
        probs if return_probs else empty,
        confidence if confidence_weight is not None else empty,
    )


def first_argmax(values) -> int:
    """The lowest index of the largest value."""
    return int((values == values.max()).nonzero()[0, 0])
