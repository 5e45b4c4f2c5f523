"""The round loop: draft, verify, keep, carry. The only place that owns the order of the ops.

A round of a request whose anchor (last emitted token) has position s: the drafter proposes d_1..d_N; one target pass over
[anchor, d_1..d_n] at s..s+n; ``verify_draft`` accepts a of them and gives the next anchor; rows 0..a stay in the target's cache and
become drafter context, rows a+1..n become carried rows (DESIGN section 1).
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence

import torch

from ..drafter import CarryoverDrafter
from ..ops import verify_draft
from .request import DecodingError, Request
from .sampling import check_sampling, check_whole, target_logits
from .stats import Clock
from .target import PREFILL_ROWS, Target

METHODS = ("rejection", "block")


def _without_autograd(method):
    """No gradients, and no inference mode either: caches made inside it could not be written outside, by the next call."""

    @functools.wraps(method)
    def run(*args, **kwargs):
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


class DecodingSession:
    """Requests that decode together, one round at a time; they join and leave between rounds.

    Args:
        target: the model whose output this is.
        drafter: proposes; None: the target alone, one token a pass.
        max_requests: most requests at once.
        max_tokens: prompt and answer of one request, for sizing the drafter's pages.
        page_size: tokens a page of the drafter's cache.
        carryover: keep rejected rows for the next round; None: if the drafter has a mark (was trained to read them).
        num_draft_tokens: N; None: all that the drafter's block was trained for.
        method: how sampled requests verify, 'rejection' or 'block'. Greedy requests accept what the target's argmax says.
        timing: on a GPU, wait for the device between the parts of a round so that their times are true.

    A round that raised leaves the session closed to further rounds: what requests have so far stays readable and right.
    """

    @_without_autograd
    def __init__(
        self,
        target: Target,
        drafter: CarryoverDrafter | None = None,
        max_requests: int = 8,
        max_tokens: int = 2048,
        page_size: int = 16,
        carryover: bool | None = None,
        num_draft_tokens: int | None = None,
        method: str = "rejection",
        timing: bool = True,
    ):
        if method not in METHODS:
            raise ValueError(f"generate: method is '{method}', must be one of {', '.join(METHODS)}")
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens), ("page_size", page_size)):
            check_whole(name, value, 1)
        if num_draft_tokens is not None:
            check_whole("num_draft_tokens", num_draft_tokens, 1)
        if carryover not in (None, True, False):
            raise TypeError(f"generate: carryover is {carryover!r}, must be True, False or None")
        self.target, self.drafter, self.max_requests, self.method = target, drafter, max_requests, method
        self.taps: tuple[int, ...] = ()
        self.num_draft_tokens, self.state = 0, None
        if drafter is not None:
            _check_pair(target, drafter)
            self.taps = tuple(drafter.config.taps)
            self._block_rows = drafter.config.num_rows(num_draft_tokens)
            self.num_draft_tokens = num_draft_tokens or drafter.config.num_draft_tokens
            pages = max_requests * -(-min(max_tokens, drafter.config.max_positions) // page_size)
            self.state = drafter.new_state(max_requests, page_size, pages, carry=carryover)
        elif num_draft_tokens:
            raise ValueError(f"generate: num_draft_tokens is {num_draft_tokens}, must be None without a drafter")
        self.cache = target.new_cache()
        self.active: list[Request] = []  # in the order of the cache's rows
        self._joined = 0
        self._whole = True
        self._clock = Clock(target.device, timing)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """End all requests and give their memory back."""
        for request in list(self.active):
            self._leave(request, "interrupted")
        self.cache = self.target.new_cache()

    @_without_autograd
    def join(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_tokens: Iterable[int] | None = None,
        stream: Callable | None = None,
    ) -> Request:
        """Read a prompt and emit its first token; the request takes part in every ``step`` until it is finished.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: exact limit of emitted tokens.
            temperature, top_p: 0 = greedy; top_p cuts the target's distribution.
            seed: of this request's random numbers; the same seed, prompt and models give the same tokens, whoever else decodes.
            stop_tokens: None = the target's end-of-sequence ids; () = none.
            stream: called as ``stream(request, tokens, origins)`` with the new tokens after each round, and after this call. What it
                raises comes out of ``step`` (or this call) once the other requests' callbacks have run; the session can go on.

        Raises:
            ValueError, TypeError: a prompt, limit or sampling argument out of range or of the wrong kind; the session is unchanged.
            RuntimeError: no room: ``max_requests`` are active, or the drafter's pages are taken; the session is unchanged.
        """
        self._check_whole()
        request = self._new_request(prompt, max_new_tokens, temperature, top_p, seed, stop_tokens, stream)
        self._joined += 1
        if len(self.active) >= self.max_requests:
            raise RuntimeError(f"join: {len(self.active)} requests are active, must be fewer than max_requests {self.max_requests}")
        self._admit([request])
        return request

    @_without_autograd
    def _admit(self, requests: list[Request]):
        """Read the prompts of ``requests`` together, unequal lengths padded at the end, and emit their first tokens."""
        joined = []
        try:
            for request in requests:
                self._allocate(request)
                joined.append(request)
                self.active.append(request)
                self.cache.add_row()
            self._clock.start()
            tokens = self._prefill(requests)
            self._clock.lap("prefill")
        except BaseException:
            for request in reversed(joined):  # the other requests' rows and slots were not touched
                self._leave(request, "interrupted")
            raise
        news = []
        for request, token in zip(requests, tokens):
            request.stats.prefill = self._clock.laps["prefill"] / len(requests)
            news.append((request, self._emit(request, [token], ["first"])))
        self._release_finished(requests)
        self._tell(news)

    @_without_autograd
    def step(self) -> list[Request]:
        """One round of all active requests; gives those that took part."""
        self._check_whole()
        if not self.active:
            return []
        self._whole = False
        requests = list(self.active)
        self._clock.start()
        limits, drafts, draft_probs = self._draft(requests)
        tokens = self._verify_rows(requests, limits, drafts)
        self._clock.lap("rest")
        drafting = any(request.slot >= 0 for request in requests)
        logits, states = self.target.run(self.cache, 0, tokens, self.taps if drafting else ())
        self._clock.lap("target")
        lengths = [limit + 1 for limit in limits]
        rows, query_start_loc = _packed_rows(lengths, tokens.shape[1], tokens.device), _starts(lengths, tokens.device)
        num_accepted, next_token, num_rejected = self._judge(requests, logits.flatten(0, 1)[rows], query_start_loc, drafts, draft_probs)
        accepted, following, drafted = num_accepted.tolist(), next_token.tolist(), tokens[:, 1:].tolist()

        news = []
        for row, request in enumerate(requests):
            count = accepted[row]
            request.stats.count_round(limits[row], count, request.carried)
            origins = ["carried" if j + 1 < request.carried else "draft" for j in range(count)] + ["bonus"]
            news.append((request, self._emit(request, drafted[row][:count] + [following[row]], origins)))
            self.cache.commit(row, count + 1)
            request.carried = min(limits[row] - count, self.state.capacity) if self.state is not None and self.state.carry else 0
        self._clock.lap("rest")
        if drafting:
            self._absorb(requests, states.flatten(0, 1)[rows], query_start_loc, num_rejected, self.cache.positions.flatten()[rows])
            self._clock.lap("drafter")
        self._release_finished(requests)
        self._clock.lap("rest")
        for request in requests:
            for kind in ("target", "drafter", "rest"):
                share = self._clock.laps.get(kind, 0.0) / len(requests)
                setattr(request.stats, kind, getattr(request.stats, kind) + share)
        self._whole = True
        self._tell(news)
        return requests

    def finish(self, request: Request):
        """Let ``request`` go between rounds, before its own end; its slot, pages and carried rows are free at once."""
        if request not in self.active:
            raise ValueError(f"finish: request {request.index} is not active, must be one that joined and has not finished")
        self._leave(request, "cancelled")

    # joining and leaving

    def _check_whole(self):
        if not self._whole:
            raise RuntimeError("step: an earlier round was cut short, must start a new session (the requests of this one stay readable)")

    def _new_request(self, prompt, max_new_tokens, temperature, top_p, seed, stop_tokens, stream) -> Request:
        prompt = token_ids(prompt)
        if not prompt:
            raise ValueError("generate: prompt has 0 tokens, must have at least 1")
        outside = [token for token in prompt if not 0 <= token < self.target.vocab_size]
        if outside:
            raise ValueError(f"generate: prompt has token {outside[0]}, must be 0 to {self.target.vocab_size - 1}")
        check_whole("max_new_tokens", max_new_tokens, 1)
        check_sampling(temperature, top_p, seed)
        total = len(prompt) + max_new_tokens
        if total > self.target.max_length:
            raise ValueError(
                f"generate: prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} need {total} positions, "
                f"must be at most the target's {self.target.max_length}"
            )
        stops = self.target.stop_tokens if stop_tokens is None else stop_ids(stop_tokens)
        request = Request(self._joined, prompt, max_new_tokens, float(temperature), float(top_p), int(seed), stops, stream)
        request.stats.prompt_tokens = len(prompt)
        return request

    def _allocate(self, request: Request):
        """A drafter slot for ``request`` if its first block fits the drafter's positions; else it decodes without drafts (report R35)."""
        if self.drafter is None or len(request.prompt) + self._block_rows > self.drafter.config.max_positions:
            return
        total = len(request.prompt) + request.max_new_tokens
        request.slot = self.state.allocate(min(total, self.drafter.config.max_positions))

    def _leave(self, request: Request, reason: str):
        row = next(i for i, other in enumerate(self.active) if other is request)
        request.finish_reason = request.finish_reason or reason
        self.cache.remove_row(row)
        self.active[row] = self.active[-1]
        self.active.pop()
        self._stop_drafting(request)

    def _release_finished(self, requests: list[Request]):
        for request in requests:
            if request.finished:
                self._leave(request, request.finish_reason)

    def _stop_drafting(self, request: Request):
        if request.slot >= 0:
            self.state.free(request.slot)
        request.slot, request.carried = -1, 0

    # parts of a round

    def _prefill(self, requests: list[Request]) -> list[int]:
        """First tokens of requests whose rows are the last of the cache and still empty. A prompt over PREFILL_ROWS comes alone."""
        device, first = self.target.device, len(self.active) - len(requests)
        longest = max(len(request.prompt) for request in requests)
        taps = self.taps if any(request.slot >= 0 for request in requests) else ()
        for begin in range(0, longest, PREFILL_ROWS):
            pieces = [request.prompt[begin : begin + PREFILL_ROWS] for request in requests]
            lengths = [len(piece) for piece in pieces]
            width = max(lengths)
            tokens = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], dtype=torch.int64, device=device)
            ends = sorted({length - 1 for length in lengths})
            logits, states = self.target.run(self.cache, first, tokens, taps, ends)
            for row, length in enumerate(lengths):
                self.cache.commit(first + row, length)
            if taps:
                rows = _packed_rows(lengths, width, device)
                none_rejected = torch.zeros(len(requests), dtype=torch.int32, device=device)
                positions = self.cache.positions.flatten()[rows]
                self._absorb(requests, states.flatten(0, 1)[rows], _starts(lengths, device), none_rejected, positions)
        last = torch.stack([logits[row, ends.index(length - 1)] for row, length in enumerate(lengths)])
        return self._judge(requests, last, _starts([1] * len(requests), device), None, None)[1].tolist()

    def _draft(self, requests: list[Request]) -> tuple[list[int], torch.Tensor | None, torch.Tensor | None]:
        """Drafts to verify of each request (0: none), tokens [R, N] and their distributions [R, N, V] where someone samples."""
        for request in requests:
            if request.slot >= 0 and request.anchor_position + self._block_rows > self.drafter.config.max_positions:
                self._stop_drafting(request)
        # A draft past max_new_tokens could not be kept, so it is not verified; the last token is always the target's own.
        limits = [
            min(self.num_draft_tokens, request.max_new_tokens - len(request.tokens) - 1) if self._can_draft(request) else 0
            for request in requests
        ]
        if not any(limits):
            return limits, None, None
        device = self.target.device
        sampled = any(request.temperature > 0 for request in requests)
        anchors = [request.tokens[-1] if limit else 0 for request, limit in zip(requests, limits)]
        proposal = self.drafter.propose(
            self.state,
            [request.slot if limit else -1 for request, limit in zip(requests, limits)],
            torch.tensor(anchors, dtype=torch.int64, device=device),
            num_draft_tokens=self.num_draft_tokens,
            temperature=_floats(requests, "temperature", device) if sampled else 0.0,
            seeds=_seeds(requests, device) if sampled else None,
            offsets=_offsets(requests, device) if sampled else None,
            return_probs=sampled,
        )
        self._clock.lap("drafter")
        return limits, proposal.tokens, proposal.probs

    def _can_draft(self, request: Request) -> bool:
        # A head padded beyond the drafter's vocabulary may emit a token that the drafter cannot embed.
        return request.slot >= 0 and request.tokens[-1] < self.drafter.config.vocab_size

    def _verify_rows(self, requests, limits, drafts) -> torch.Tensor:
        """[R, 1 + most drafts] i64: anchor, then drafts; shorter rows end in padding that nobody reads."""
        anchors = torch.tensor([[request.tokens[-1]] for request in requests], dtype=torch.int64, device=self.target.device)
        if drafts is None:
            return anchors
        return torch.cat([anchors, drafts[:, : max(limits)].clamp(min=0)], dim=1)

    def _judge(self, requests, logits, query_start_loc, drafts, draft_probs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(num_accepted, next_token, num_rejected) [R] from packed ``logits`` [T, V]."""
        highest, argmax = logits.max(dim=1)
        if not bool(torch.isfinite(highest).all()):
            row = int((~torch.isfinite(highest)).nonzero()[0])
            request = requests[int((query_start_loc <= row).sum()) - 1]
            raise DecodingError(f"generate: the target's logits of request {request.index} are not finite, must be finite numbers")
        if all(request.temperature == 0 for request in requests):
            if drafts is None:
                nothing = torch.zeros(len(requests), dtype=torch.int32, device=logits.device)
                return nothing, argmax, nothing
            return verify_draft(drafts, query_start_loc, target_argmax=argmax)
        rows = (query_start_loc[1:] - query_start_loc[:-1]).long()
        temperature = torch.repeat_interleave(_floats(requests, "temperature", logits.device), rows)
        top_p = None
        if any(request.top_p < 1 for request in requests):
            top_p = torch.repeat_interleave(_floats(requests, "top_p", logits.device), rows)
        if drafts is None:
            drafts = torch.full((len(requests), 1), -1, dtype=torch.int64, device=logits.device)
        # A target's head may be padded beyond the drafter's vocabulary: what it cannot draft has probability 0 there.
        if draft_probs is not None and draft_probs.shape[-1] < logits.shape[-1]:
            draft_probs = torch.nn.functional.pad(draft_probs, (0, logits.shape[-1] - draft_probs.shape[-1]))
        return verify_draft(
            drafts, query_start_loc, target_logits=target_logits(logits, temperature, top_p), draft_probs=draft_probs,
            seeds=_seeds(requests, logits.device), offsets=_offsets(requests, logits.device), method=self.method,
        )  # fmt: skip

    def _absorb(self, requests, states, query_start_loc, num_rejected, positions):
        slots = [-1 if request.finished else request.slot for request in requests]
        if any(slot >= 0 for slot in slots):
            self.drafter.absorb(self.state, slots, states.to(self.drafter.dtype), query_start_loc, num_rejected, positions)

    def _emit(self, request: Request, tokens: list[int], origins: list[str]) -> tuple[list[int], list[str]]:
        """Append what a round gave, up to the first stop token, and note whether that ends the request."""
        stop = next((i for i, token in enumerate(tokens) if token in request.stop_tokens), None)
        if stop is not None:
            tokens, origins = tokens[: stop + 1], origins[: stop + 1]
            request.finish_reason = "stop"
        request.tokens += tokens
        request.origins += origins
        request.stats.new_tokens = len(request.tokens)
        if len(request.tokens) >= request.max_new_tokens and stop is None:
            request.finish_reason = "length"
        return tokens, origins

    def _tell(self, news):
        """Run the stream callbacks last: one that raises finds the session between rounds, and the others get their tokens first."""
        failed = None
        for request, (tokens, origins) in news:
            if request.stream is not None:
                try:
                    request.stream(request, tokens, origins)
                except Exception as error:
                    failed = failed or error
        if failed is not None:
            raise failed


def token_ids(prompt: Sequence[int]) -> list[int]:
    """``prompt`` as a list of ints: text or fractions are refused, not rounded."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise TypeError(f"generate: prompt is {str(prompt)[:60]!r}, must be a list of token ids") from None


def stop_ids(stop_tokens: Iterable[int]) -> frozenset[int]:
    try:
        return frozenset(operator.index(token) for token in stop_tokens)
    except TypeError:
        raise TypeError(f"generate: stop_tokens is {stop_tokens!r}, must be token ids in a list, or () for none") from None


def _check_pair(target: Target, drafter: CarryoverDrafter):
    target.check_taps(tuple(drafter.config.taps))
    if drafter.config.vocab_size > target.vocab_size:
        raise ValueError(
            f"generate: the drafter's vocabulary is {drafter.config.vocab_size}, must be at most the target's {target.vocab_size}"
        )
    columns, wanted = drafter.tensors["fc.weight"].shape[1], len(drafter.config.taps) * target.hidden_size
    if columns != wanted:
        raise ValueError(
            f"generate: the drafter's fc.weight has {columns} columns, must have {wanted}: "
            f"{len(drafter.config.taps)} taps of the target's {target.hidden_size}"
        )
    if drafter.device != target.device:
        raise ValueError(f"generate: the drafter is on {drafter.device}, must be on {target.device} as the target is")


def _packed_rows(lengths: list[int], width: int, device) -> torch.Tensor:
    """Indices of the real rows in a padded batch [R, width] laid flat."""
    return torch.tensor([row * width + i for row, length in enumerate(lengths) for i in range(length)], dtype=torch.int64, device=device)


def _starts(lengths: list[int], device) -> torch.Tensor:
    """[R + 1] i32 of packed rows."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def _floats(requests, name: str, device) -> torch.Tensor:
    return torch.tensor([getattr(request, name) for request in requests], dtype=torch.float32, device=device)


def _seeds(requests, device) -> torch.Tensor:
    return torch.tensor([request.seed for request in requests], dtype=torch.int64, device=device)


def _offsets(requests, device) -> torch.Tensor:
    """Number of each request's draw: 0 for the prompt's token, then one a round; never twice for a seed, whoever else decodes."""
    return torch.tensor([request.stats.rounds + 1 if request.tokens else 0 for request in requests], dtype=torch.int64, device=device)
