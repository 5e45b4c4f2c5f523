"""What a request cost and gained: acceptance by position, passes, and where the time went."""

import time
from dataclasses import dataclass, field

import torch


@dataclass
class RequestStats:
    """Counts and seconds of one request. In a batch each request bears an equal share of a round's time, so shares add up to the wall.

    Attributes:
        prompt_tokens, new_tokens: tokens read and emitted.
        rounds: target passes after the prompt's; without a drafter each gives one token.
        verified, accepted: [N] by draft position (0 = the one after the anchor): rounds in which it was verified, and was accepted.
        carried: rejected states handed to later rounds, summed.
        prefill, target, drafter, rest: seconds in the prompt's passes (target's and drafter's), in verify passes, in drafting (proposals
            and taking states in), and in all else (sampling, bookkeeping). ``rest`` excludes the stream callback.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    carried: int = 0
    prefill: float = 0.0
    target: float = 0.0
    drafter: float = 0.0
    rest: float = 0.0

    def count_round(self, verified: int, accepted: int, carried: int):
        self.rounds += 1
        self.carried += carried
        for counts, length in ((self.verified, verified), (self.accepted, accepted)):
            counts.extend([0] * (verified - len(counts)))
            for position in range(length):
                counts[position] += 1

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a round's verification gave, the bonus counted: 1 without any accepted draft; 0 before the first round."""
        return (self.rounds + sum(self.accepted)) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of rounds that kept draft i, of those that verified it (so it falls with i: a kept draft needs all before it)."""
        return [kept / tried for kept, tried in zip(self.accepted, self.verified)]

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens a target pass, the prompt's own pass counted."""
        return self.new_tokens / (self.rounds + 1)

    @property
    def seconds(self) -> float:
        return self.prefill + self.target + self.drafter + self.rest

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


class Clock:
    """Laps of a round by kind. On a GPU a lap waits for the device, else launches would be timed, not work; ``waits=False`` skips that."""

    def __init__(self, device: torch.device, waits: bool = True):
        self._wait = torch.cuda.synchronize if device.type == "cuda" and waits else None
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def start(self):
        self.laps = {}
        self._last = time.perf_counter()

    def lap(self, kind: str):
        if self._wait is not None:
            self._wait()
        now = time.perf_counter()
        self.laps[kind] = self.laps.get(kind, 0.0) + now - self._last
        self._last = now
