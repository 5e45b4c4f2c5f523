"""What demo and generate share: loading, printing text as it comes, and the proof that two outputs are equal."""

from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from ..decoding import Request, Target
from ..drafter import CarryoverDrafter

STYLES = {"first": "yellow", "bonus": "yellow", "draft": "green", "carried": "cyan"}
LEGEND = (
    ("the target's own token", "yellow"),
    ("accepted draft", "green"),
    ("accepted draft at a carried position", "cyan"),
)
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Terminal controls that a model might write, the newline and the tab excepted.
CONTROLS = {code: "\ufffd" for code in (*range(9), *range(11, 32), 127)}


def new_console(**options) -> Console:
    """Rich leaves out colours for NO_COLOR and for what is not a terminal; a file or pipe is not cut at 80 columns."""
    console = Console(highlight=False, **options)
    if not console.is_terminal:
        console.width = 120
    return console


def say(console: Console, text: str, end: str = "\n", style: str | None = None):
    """Print a sentence as it is: the terminal wraps it, a file gets one line. Square brackets are no markup."""
    console.print(Text(text, style=style or ""), end=end, soft_wrap=True)


def legend(console: Console) -> Text:
    if console.no_color or not console.is_terminal:
        return Text("(no colours here: on a terminal they tell accepted drafts from the target's own tokens)")
    text = Text()
    for words, style in LEGEND:
        text.append(f"{words}  ", style=style)
    return text


class Printer:
    """Prints tokens as they come, coloured by origin; bytes of an unfinished character wait for the rest. The stop token is not shown."""

    def __init__(self, console: Console, tokenizer, prompt: list[int]):
        self.console, self.tokenizer = console, tokenizer
        self.before = prompt[-6:]  # printed tokens that spacing may depend on
        self.waiting: list[int] = []

    def __call__(self, request: Request, tokens: list[int], origins: list[str]):
        for token, origin in zip(tokens, origins):
            if token not in request.stop_tokens:
                self.waiting.append(token)
            start = self.tokenizer.decode(self.before, skip_special_tokens=False)
            text = self.tokenizer.decode(self.before + self.waiting, skip_special_tokens=False)[len(start) :]
            # An unfinished UTF-8 character decodes to U+FFFD; four bytes are the longest.
            if text.endswith("\ufffd") and len(self.waiting) < 4 and not request.finished:
                continue
            self.before = (self.before + self.waiting)[-6:]
            self.waiting = []
            text = text.translate(CONTROLS)
            if self.console.is_terminal:
                self.console.out(text, style=STYLES[origin], end="", highlight=False)
            else:  # rich would turn tabs into spaces, which a file should not suffer
                self.console.file.write(text)
                self.console.file.flush()


def quiet_transformers():
    """No progress bars or advice from Transformers between our lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_target(path: Path, dtype: str | torch.dtype | None, device: str = "cpu"):
    """(Target, tokenizer) of a folder. Raises ValueError or OSError with one sentence."""
    dtype = _dtype(dtype)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"generate: device is '{device}', must be 'cpu': PyTorch finds no GPU here")
    if not path.is_dir():
        raise FileNotFoundError(f"target: no folder {path}, must be the folder of a Transformers checkpoint")
    quiet_transformers()
    from transformers import AutoTokenizer

    target = _loaded("target", path, lambda: Target.from_pretrained(path, dtype, device))
    return target, _loaded("tokenizer", path, lambda: AutoTokenizer.from_pretrained(path, local_files_only=True))


def load_drafter(path: Path, target: Target) -> CarryoverDrafter:
    if not path.is_dir():
        raise FileNotFoundError(f"drafter: no folder {path}, must be the folder of a drafter's checkpoint")
    return _loaded(
        "drafter",
        path,
        lambda: CarryoverDrafter.from_pretrained(
            path, dtype=target.dtype, device=target.device, embed_tokens=target.embed_tokens, lm_head=target.lm_head
        ),
    )


def _dtype(dtype):
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"generate: dtype is '{dtype}', must be one of {', '.join(DTYPES)}")
        return DTYPES[dtype]
    return dtype


def _loaded(what: str, path: Path, load):
    """``load()``; whatever is wrong with the files becomes one sentence that names them."""
    try:
        return load()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{what} in {path} cannot be loaded: {reason}") from error


@torch.no_grad()
def explain_difference(target: Target, one: Request, other: Request) -> tuple[str, bool]:
    """Where two greedy answers to one prompt part, in words; and whether rounding explains it.

    It does where the target's logits of the two tokens are no further apart than its own logits move when the same prefix is read in one
    pass, in pieces of 8 and token by token: twice that (either token may move), or twice one spacing of the largest logit if that is more.
    """
    pairs = zip(one.tokens, other.tokens)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))
    words = f"token {place + 1} differs"
    if place == min(len(one.tokens), len(other.tokens)):
        return f"{words}: one answer ends before it, which rounding does not explain", False
    prefix = one.prompt + one.tokens[:place]
    ways = torch.stack([_next_logits(target, prefix, width) for width in (1, 8, len(prefix))])
    gap = float((ways[0, one.tokens[place]] - ways[0, other.tokens[place]]).abs())
    rounding = 2 * max(float((ways.amax(0) - ways.amin(0)).max()), torch.finfo(target.dtype).eps * float(ways.abs().max()))
    words = f"{words}; there the target's logits of the two are {gap:.2g} apart"
    if gap <= rounding:
        name = str(target.dtype).removeprefix("torch.")
        return f"{words}, within the rounding of {name} (a pass over many rows adds in another order)", True
    return f"{words}, more than rounding explains", False


def _next_logits(target: Target, prefix: list[int], width: int) -> torch.Tensor:
    """[V] logits behind ``prefix``, read ``width`` tokens a pass."""
    cache = target.new_cache()
    cache.add_row()
    for piece in torch.tensor(prefix, device=target.device).split(width):
        logits, _ = target.run(cache, 0, piece.unsqueeze(0), keep=[len(piece) - 1])
        cache.commit(0, len(piece))
    return logits[0, 0].float()
