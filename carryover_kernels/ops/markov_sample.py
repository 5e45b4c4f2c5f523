"""``markov_sample``: left-to-right sampling of a block with the Markov heads."""

import torch

from ._check import ACTIVATIONS, FLOAT32, INT64, Checker, Values
from ._define import call, define

HEADS = ("none", "vanilla", "gated", "rnn")

SCHEMA = (
    "(Tensor base_logits, Tensor anchor_tokens, Tensor? markov_w1=None, Tensor? markov_w2=None, str head='none', Tensor? hidden=None, "
    "Tensor? head_weight=None, Tensor? head_bias=None, Tensor? confidence_weight=None, Tensor? confidence_bias=None, "
    "Tensor? draft_to_target=None, Tensor? temperature=None, Tensor? seeds=None, Tensor? offsets=None, bool return_logits=False, "
    "bool return_probs=False) -> (Tensor tokens, Tensor logits, Tensor probs, Tensor confidence)"
)


def _check(
    base_logits, anchor_tokens, markov_w1, markov_w2, head, hidden, head_weight, head_bias, confidence_weight, confidence_bias,
    draft_to_target, temperature, seeds, offsets,
):  # fmt: skip
    check = Checker("markov_sample")
    check.tensor("base_logits", base_logits, "R N V", ACTIVATIONS, last_contiguous=True)
    check.at_least("base_logits' vocabulary", base_logits.shape[2], 1)
    check.tensor("anchor_tokens", anchor_tokens, "R", INT64, contiguous=True)
    check.one_of("head", head, HEADS)
    weights = (markov_w1.dtype,) if markov_w1 is not None else ACTIVATIONS
    if head == "none":
        check.require(markov_w1 is None, "markov_w1 is given with head 'none', must be None")
        check.require(markov_w2 is None, "markov_w2 is given with head 'none', must be None")
    else:
        check.require(markov_w1 is not None, f"markov_w1 is None, must be given with head '{head}'")
        check.require(markov_w2 is not None, f"markov_w2 is None, must be given with head '{head}'")
        check.tensor("markov_w1", markov_w1, "Vt r", ACTIVATIONS, contiguous=True)
        check.tensor("markov_w2", markov_w2, "V r", weights, contiguous=True)
    needs_hidden = head in ("gated", "rnn") or confidence_weight is not None
    check.require(hidden is not None or not needs_hidden, "hidden is None, must be given with a gated or rnn head or a confidence head")
    check.optional("hidden", hidden, "R N H", ACTIVATIONS, last_contiguous=True)
    r, h = check.sizes.get("r", 0), check.sizes.get("H", 0)
    if head in ("gated", "rnn"):
        check.require(head_weight is not None, f"head_weight is None, must be given with head '{head}'")
        check.sizes["head_rows"], check.sizes["head_columns"] = (r, h + r) if head == "gated" else (3 * r, 2 * r + h)
        check.tensor("head_weight", head_weight, "head_rows head_columns", weights, contiguous=True)
        check.optional("head_bias", head_bias, "head_rows", FLOAT32, contiguous=True)
    else:
        check.require(head_weight is None, f"head_weight is given with head '{head}', must be None")
    if confidence_weight is not None:
        check.tensor("confidence_weight", confidence_weight, "1 width", FLOAT32, contiguous=True)
        check.require(
            check.sizes["width"] in (h, h + r),
            f"confidence_weight has {check.sizes['width']} columns, must have {h} (hidden) or {h + r} (hidden and markov_w1 row)",
        )
    check.optional("confidence_bias", confidence_bias, "1", FLOAT32, contiguous=True)
    check.optional("draft_to_target", draft_to_target, "V", INT64, contiguous=True)
    check.optional("temperature", temperature, "R", FLOAT32, contiguous=True)
    if temperature is not None:
        check.together(temperature=temperature, seeds=seeds, offsets=offsets)
        check.tensor("seeds", seeds, "R", INT64, contiguous=True)
        check.tensor("offsets", offsets, "R", INT64, contiguous=True)


def _fake(
    base_logits, anchor_tokens, markov_w1=None, markov_w2=None, head="none", hidden=None, head_weight=None, head_bias=None,
    confidence_weight=None, confidence_bias=None, draft_to_target=None, temperature=None, seeds=None, offsets=None,
    return_logits=False, return_probs=False,
):  # fmt: skip
    _check(
        base_logits, anchor_tokens, markov_w1, markov_w2, head, hidden, head_weight, head_bias, confidence_weight, confidence_bias,
        draft_to_target, temperature, seeds, offsets,
    )  # fmt: skip
    requests, steps, vocab = base_logits.shape

    def floats(wanted, *shape):
        return base_logits.new_empty(shape if wanted else (0,), dtype=torch.float32)

    return (
        anchor_tokens.new_empty(requests, steps),
        floats(return_logits, requests, steps, vocab),
        floats(return_probs, requests, steps, vocab),
        floats(confidence_weight is not None, requests, steps),
    )


def _check_values(
    base_logits, anchor_tokens, markov_w1, markov_w2, head, hidden, head_weight, head_bias, confidence_weight, confidence_bias,
    draft_to_target, temperature, seeds, offsets, return_logits, return_probs,
):  # fmt: skip
    check = Values("markov_sample")
    live = anchor_tokens >= 0
    check.finite("base_logits", base_logits, where=live, allow_minus_inf=True)
    if markov_w1 is not None:
        check.below("anchor_tokens", anchor_tokens, markov_w1.shape[0], "rows of markov_w1")
    if hidden is not None:
        check.finite("hidden", hidden, where=live)
    if draft_to_target is not None:
        check.at_least("draft_to_target", draft_to_target + torch.arange(len(draft_to_target), device=draft_to_target.device), 0)
    if temperature is not None:
        check.finite("temperature", temperature)
        check.at_least("temperature", temperature, 0)


_OP = define("markov_sample", SCHEMA, _fake, _check_values)


def markov_sample(
    base_logits: torch.Tensor,
    anchor_tokens: torch.Tensor,
    markov_w1: torch.Tensor | None = None,
    markov_w2: torch.Tensor | None = None,
    head: str = "none",
    hidden: torch.Tensor | None = None,
    head_weight: torch.Tensor | None = None,
    head_bias: torch.Tensor | None = None,
    confidence_weight: torch.Tensor | None = None,
    confidence_bias: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    return_logits: bool = False,
    return_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample the N proposals of a block left to right, each slot's logits corrected by the token before it (DSpark's heads).

    prev_0 = anchor; step i: logits_i = base_i + W2 z_i, token_i = argmax or sample, prev_{i+1} = token_i, with w = W1[prev_i] and

    - vanilla: z = w
    - gated: z = sigmoid(G [h_i; w] + g) * w, G = head_weight [r, H + r]
    - rnn: [a, c, o] = J [s; w; h_i] + j (thirds of r), s <- sigmoid(a) s + (1 - sigmoid(a)) tanh(c), z = tanh(o), s_0 = 0, J [3r, 2r + H]
    - none: no correction (plain DFlash)

    Confidence_i = confidence_weight . [h_i (; W1[prev_i])] + bias, a logit. Arithmetic is float32 whatever the weights are.

    Sampling is Gumbel-max: token_i = argmax_v logits_i[v] / T + gumbel(v), Philox4x32-10 with key ``seeds[r]`` and counter
    (v // 4, i, low word of offsets[r], high word of offsets[r]), lane v % 4, u = ((x >> 9) + 0.5) * 2**-23, gumbel = -log(-log u): the
    same numbers on every backend. Ties go to the lowest id.

    Args:
        base_logits: [R, N, V] f32|bf16|f16, any outer strides; a softcap belongs in before.
        anchor_tokens: [R] i64, last emitted token (target ids); negative = padding: tokens -1, floats 0.
        markov_w1: [Vt, r] by previous target token; markov_w2: [V, r]; same dtype. None with head 'none'.
        head: 'none', 'vanilla', 'gated' or 'rnn'.
        hidden: [R, N, H] after the final norm, for gated, rnn and confidence.
        head_weight: G or J in markov_w1's dtype; head_bias: [rows of head_weight] f32 or None.
        confidence_weight: [1, H] or [1, H + r] f32, with the W1 row in the latter; confidence_bias: [1] f32 or None.
        draft_to_target: [V] i64 or None: OFFSET added to a draft id to get the target's (speculators' d2t).
        temperature: [R] f32 or None = greedy; 0 = greedy for that request; between 0 and 1e-30 counts as 1e-30.
        seeds: [R] i64 and offsets: [R] i64, with temperature. ``offsets`` must differ at every call for the same seed (a round counter): with
            carryover the next draft depends on the last one's random numbers, so reusing them would bias the output.
        return_logits, return_probs: also give the corrected logits, and the distribution sampled from (one-hot where greedy).

    Returns:
        tokens [R, N] i64, target ids.
        logits [R, N, V] f32, over draft ids; [0] if not asked for.
        probs [R, N, V] f32, softmax(logits / T), over draft ids; [0] if not asked for.
        confidence [R, N] f32; [0] without a confidence head.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or layout, named in one sentence.

    Example:
        >>> import torch, carryover_kernels as ck
        >>> tokens, *_ = ck.markov_sample(torch.eye(3).view(1, 3, 3), torch.tensor([2]))
        >>> tokens.tolist()
        [[0, 1, 2]]
    """
    return call(
        _OP, base_logits, anchor_tokens, markov_w1, markov_w2, head, hidden, head_weight, head_bias, confidence_weight,
        confidence_bias, draft_to_target, temperature, seeds, offsets, return_logits, return_probs,
    )  # fmt: skip
