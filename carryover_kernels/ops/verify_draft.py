"""``verify_draft``: how many drafts the target keeps, and the token that follows them."""

import torch

from ._check import ACTIVATIONS, FLOAT32, INT32, INT64, Checker, Values
from ._define import call, define

METHODS = ("greedy", "rejection", "block")

SCHEMA = (
    "(Tensor draft_tokens, Tensor query_start_loc, Tensor? target_logits=None, Tensor? target_argmax=None, Tensor? draft_probs=None, "
    "Tensor? seeds=None, Tensor? offsets=None, str method='greedy') -> (Tensor num_accepted, Tensor next_token, Tensor num_rejected)"
)


def _check(draft_tokens, query_start_loc, target_logits, target_argmax, draft_probs, seeds, offsets, method):
    check = Checker("verify_draft")
    check.tensor("draft_tokens", draft_tokens, "R N", INT64, contiguous=True)
    check.sizes["R+1"] = draft_tokens.shape[0] + 1
    check.tensor("query_start_loc", query_start_loc, "R+1", INT32, contiguous=True)
    check.one_of("method", method, METHODS)
    if method == "greedy":
        check.require(
            (target_logits is None) != (target_argmax is None),
            f"target_argmax is {'None' if target_argmax is None else 'given'}, must be given with method 'greedy' unless target_logits is",
        )
    else:
        check.require(target_logits is not None, f"target_logits is None, must be given with method '{method}'")
        check.require(target_argmax is None, f"target_argmax is given, must be None with method '{method}'")
    check.optional("target_logits", target_logits, "T V", ACTIVATIONS, last_contiguous=True)
    if target_logits is not None:
        check.at_least("target_logits' vocabulary", target_logits.shape[1], 1)
    check.optional("target_argmax", target_argmax, "T", INT64, contiguous=True)
    if method == "greedy":
        check.require(draft_probs is None, "draft_probs is given, must be None with method 'greedy'")
        return
    check.optional("draft_probs", draft_probs, "R N V", FLOAT32, last_contiguous=True)
    check.require(seeds is not None, f"seeds is None, must be given with method '{method}'")
    check.require(offsets is not None, f"offsets is None, must be given with method '{method}'")
    check.tensor("seeds", seeds, "R", INT64, contiguous=True)
    check.tensor("offsets", offsets, "R", INT64, contiguous=True)


def _fake(
    draft_tokens, query_start_loc, target_logits=None, target_argmax=None, draft_probs=None, seeds=None, offsets=None, method="greedy"
):
    _check(draft_tokens, query_start_loc, target_logits, target_argmax, draft_probs, seeds, offsets, method)
    requests = draft_tokens.shape[0]
    return query_start_loc.new_empty(requests), draft_tokens.new_empty(requests), query_start_loc.new_empty(requests)


def _check_values(draft_tokens, query_start_loc, target_logits, target_argmax, draft_probs, seeds, offsets, method):
    check = Values("verify_draft")
    rows = target_argmax.shape[0] if target_logits is None else target_logits.shape[0]
    check.row_bounds(query_start_loc, rows)
    drafts = draft_tokens.shape[1]
    for r, count in enumerate(query_start_loc.diff().tolist()):
        if count > drafts + 1:
            check.fail(f"query_start_loc gives request {r} {count} rows, must give at most {drafts + 1}: its anchor and {drafts} drafts")
    if target_logits is not None:
        check.below("draft_tokens", draft_tokens, target_logits.shape[1], "the target's vocabulary")
        check.finite("target_logits", target_logits, allow_minus_inf=True)
        empty = (target_logits == float("-inf")).all(-1)
        if bool(empty.any()):
            check.fail(f"target_logits[{int(empty.nonzero()[0])}] is all -inf, must leave at least one token")
    if draft_probs is not None:
        check.finite("draft_probs", draft_probs)
        check.at_least("draft_probs", draft_probs, 0)


_OP = define("verify_draft", SCHEMA, _fake, _check_values)


def verify_draft(
    draft_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    target_logits: torch.Tensor | None = None,
    target_argmax: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    method: str = "greedy",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept a prefix of the drafts and give the token after it, with the target's own distribution.

    Request r owns rows ``query_start_loc[r] .. query_start_loc[r+1]-1`` of the target's output: the anchor's row, then one a draft. With n
    such rows, n - 1 drafts (at most N) were verified; row i judges draft i, row ``num_accepted`` gives the next token.

    - greedy: accept while draft i is the argmax of row i; next token = argmax of row a (lowest id on ties).
    - rejection (Leviathan et al. 2023): accept draft d while u_i q(d) < p(d); on a rejection sample max(p - q, 0), renormalised;
      p itself where that has no mass; after the last draft sample p.
    - block (Sun et al. 2024): P_i = min(1, P_{i-1} p(d_i) / q(d_i)), h_i = M_i / (M_i + 1 - P_i) with M_i = sum max(P_i p_{i+1} - q_{i+1}, 0),
      h = P after the last draft; accept the LAST i with u_i < h_i (h_0 = 1: nothing accepted); sample max(P_i p - q, 0), renormalised.

    p = softmax(target_logits): temperature, top-k and top-p go in before, a removed token as -inf. u_i and the Gumbel noise of the sampled token
    come from Philox4x32-10 with key ``seeds[r]``, counter (v // 4, i + 2**16 * stream, low word, high word of offsets[r]): stream 1 for u_i (v = 0),
    stream 2 for the next token (i = number accepted); see ``markov_sample`` (stream 0) for lanes and the map to floats.

    Args:
        draft_tokens: [R, N] i64; a negative draft is never accepted.
        query_start_loc: [R+1] i32, non-decreasing; a request without rows is padding: 0, -1, 0.
        target_logits: [T, V] f32|bf16|f16, any row stride. target_argmax: [T] i64 instead, for greedy.
        draft_probs: [R, N, V] f32, the distribution each draft was sampled from; None: drafts were chosen, not sampled (q = one-hot).
        seeds, offsets: [R] i64, for rejection and block; the same rule as for ``markov_sample``: offsets never repeat for a seed.
        method: 'greedy', 'rejection' or 'block'.

    Returns:
        num_accepted [R] i32: a, 0..n-1 (acceptance length is a + 1, the bonus included).
        next_token [R] i64: the bonus or corrected token, -1 for padding.
        num_rejected [R] i32: n - 1 - a, as ``plan_round`` takes it.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or layout, named in one sentence.

    Example:
        >>> import torch, carryover_kernels as ck
        >>> a, token, rejected = ck.verify_draft(
        ...     torch.tensor([[5, 6, 7]]), torch.tensor([0, 4], dtype=torch.int32), target_argmax=torch.tensor([5, 6, 9, 1]))
        >>> a.tolist(), token.tolist(), rejected.tolist()
        ([2], [9], [1])
    """
    return call(_OP, draft_tokens, query_start_loc, target_logits, target_argmax, draft_probs, seeds, offsets, method)
