"""A request and how it can end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .stats import RequestStats

# Where a token came from: the prompt's own pass; an accepted draft; an accepted draft at whose position a carried state stood;
# the target's own token at the end of a round.
ORIGINS = ("first", "draft", "carried", "bonus")


@dataclass
class Request:
    """One prompt and what became of it. ``tokens`` and ``origins`` grow together, whole rounds at a time.

    finish_reason: '' while running, then 'stop' (a stop token came; it is the last of ``tokens``), 'length' (max_new_tokens),
    'cancelled' (``DecodingSession.finish``) or 'interrupted' (Ctrl-C, an error: what is there is right, but more was wanted).
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stream: Callable | None = None
    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    finish_reason: str = ""
    stats: RequestStats = field(default_factory=RequestStats)
    slot: int = -1  # of the drafter; -1: decodes without drafts
    carried: int = 0  # rows that the next block will see

    @property
    def finished(self) -> bool:
        return self.finish_reason != ""

    @property
    def anchor_position(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1


class DecodingError(RuntimeError):
    """Decoding stopped on an error; ``requests`` hold what was done."""

    requests: list[Request] = []


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during ``generate``; ``requests`` hold what was done, whole rounds, those not begun included."""

    def __init__(self, requests: list[Request]):
        super().__init__("interrupted")
        self.requests = requests
