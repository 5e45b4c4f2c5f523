"""``generate``: prompts in, the target's own continuations out."""

import numbers
from collections.abc import Callable, Iterable, Sequence

import torch

from ..drafter import CarryoverDrafter
from .request import DecodingError, Interrupted, Request
from .sampling import check_sampling, check_whole, request_seed
from .session import DecodingSession, stop_ids, token_ids
from .target import PREFILL_ROWS, Target


def generate(
    target: Target,
    drafter: CarryoverDrafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop_tokens: Iterable[int] | None = None,
    stream: Callable | None = None,
    carryover: bool | None = None,
    num_draft_tokens: int | None = None,
    max_requests: int = 8,
    method: str = "rejection",
    page_size: int = 16,
    timing: bool = True,
) -> list[Request]:
    """Complete ``prompts``; greedy output is the target's own greedy output, sampled output has the target's distribution.

    In float32 greedy equality holds token for token unless two of the target's logits lie within rounding of each other: a pass over many
    rows adds in another order than a pass over one (report R53). Sampling never depends on the drafter beyond speed.

    Args:
        prompts: token ids of each prompt.
        max_new_tokens: for all, or one for each prompt.
        seed: for all (each prompt draws its own stream from it), or one for each prompt, taken as they are.
        max_requests: how many decode together; others join as these finish.
        temperature, top_p, stop_tokens, stream: as for ``DecodingSession.join``; the rest as for ``DecodingSession``.

    Returns: one ``Request`` a prompt, in order, with tokens, origins, finish_reason and stats.

    Raises:
        ValueError, TypeError: an argument out of range or of the wrong kind, named in one sentence; nothing was generated.
        Interrupted (a KeyboardInterrupt): Ctrl-C; its ``requests`` hold what was done.
        DecodingError: the target gave logits that are not finite; its ``requests`` hold what was done.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | torch.Tensor):
        raise TypeError(f"generate: prompts is a {type(prompts).__name__}, must be a list of lists of token ids")
    check_whole("max_requests", max_requests, 1)
    limits = _one_each("max_new_tokens", max_new_tokens, len(prompts))
    one_seed = isinstance(seed, numbers.Integral)
    seeds = [request_seed(int(seed), i) for i in range(len(prompts))] if one_seed else _one_each("seed", seed, len(prompts))
    check_sampling(temperature, top_p, seed if one_seed else 0)
    stops = None if stop_tokens is None else stop_ids(stop_tokens)
    prompts = [token_ids(prompt) for prompt in prompts]
    for limit in limits:
        check_whole("max_new_tokens", limit, 1)
    longest = max((len(prompt) + limit for prompt, limit in zip(prompts, limits)), default=1)
    session = DecodingSession(
        target, drafter, max(1, min(max_requests, len(prompts))), longest, page_size, carryover,
        num_draft_tokens, method, timing,
    )  # fmt: skip
    # Every prompt is checked before the first pass.
    wanted = []
    for index, (prompt, limit, own_seed) in enumerate(zip(prompts, limits, seeds)):
        wanted.append(session._new_request(prompt, limit, temperature, top_p, own_seed, stops, stream))
        wanted[-1].index = index
    try:
        waiting = list(wanted)
        while waiting or session.active:
            joining = _fitting(waiting, session.max_requests - len(session.active))
            if joining:
                session._admit(joining)
                del waiting[: len(joining)]
            else:
                session.step()
    except KeyboardInterrupt:
        raise Interrupted(wanted) from None
    except DecodingError as error:
        error.requests = wanted
        raise
    finally:
        session.close()
        for request in wanted:
            request.finish_reason = request.finish_reason or "interrupted"
    return wanted


def _one_each(name: str, value, count: int) -> list[int]:
    if not isinstance(value, Sequence | numbers.Integral) or isinstance(value, str):
        raise TypeError(f"generate: {name} is {value!r}, must be a whole number, or a list of one a prompt")
    values = [value] * count if isinstance(value, numbers.Integral) else list(value)
    if len(values) != count:
        raise ValueError(f"generate: {name} has {len(values)} values, must have {count}: one a prompt")
    return values


def _fitting(waiting: list[Request], room: int) -> list[Request]:
    """The first in line that can be read in one pass of at most PREFILL_ROWS rows, padding counted; at least one where there is room."""
    count = longest = 0
    while count < min(room, len(waiting)):
        longest = max(longest, len(waiting[count].prompt))
        if count and longest * (count + 1) > PREFILL_ROWS:
            break
        count += 1
    return waiting[:count]
