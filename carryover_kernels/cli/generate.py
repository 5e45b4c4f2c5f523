"""``carryover generate``: any local target and drafter, text as it comes, then what it cost."""

import os
import sys
from pathlib import Path

from rich.table import Table

from ..decoding import Interrupted, generate
from .show import Printer, explain_difference, legend, load_drafter, load_target, new_console, say


def run_generate(
    target_path: Path, prompts: list[str] | None, drafter_path: Path | None, max_new_tokens: int, temperature: float, top_p: float,
    seed: int, dtype: str, device: str, carryover: bool | None, num_draft_tokens: int | None, method: str, compare: bool, chat: bool,
) -> int:  # fmt: skip
    console = new_console()
    texts = [_as_utf8(sys.stdin.read() if text == "-" else text) for text in prompts or ()]
    if not texts:
        raise ValueError("generate: no --prompt was given, must have at least one")
    target, tokenizer = load_target(target_path, dtype, device)
    drafter = load_drafter(drafter_path, target) if drafter_path is not None else None
    if drafter is not None:
        carryover = drafter.mark is not None if carryover is None else carryover
        switch = "on" if carryover else "off"
        say(console, f"{drafter.config.format} drafter of {drafter.config.num_draft_tokens} drafts, carryover {switch}")
        if carryover and drafter.mark is None:
            say(console, "this drafter was not trained with carryover (no mark): carried states may well cost acceptance")
        console.print(legend(console))
    encoded = [_encode(tokenizer, text, chat) for text in texts]
    options = dict(temperature=temperature, top_p=top_p)
    drafting = dict(carryover=carryover, num_draft_tokens=num_draft_tokens, method=method) if drafter is not None else {}
    proves = compare and drafter is not None and temperature == 0

    code, rows = 0, []
    for index, (text, ids) in enumerate(zip(texts, encoded)):
        say(console, text, end="", style="dim")
        stream = Printer(console, tokenizer, ids)
        try:
            request = generate(target, drafter, [ids], max_new_tokens, seed=seed + index, stream=stream, **options, **drafting)[0]
        except KeyboardInterrupt as stopped:  # before the first round it is not yet an Interrupted
            request, code = stopped.requests[0] if isinstance(stopped, Interrupted) else None, 130
        console.print()
        if request is not None:
            rows.append((f"{index + 1}" if drafter is None else f"{index + 1} drafted", request))
        if code == 130:
            say(console, f"interrupted: {len(request.tokens) if request is not None else 0} tokens were done")
            break
        if proves:
            try:
                alone = generate(target, None, [ids], max_new_tokens, **options)[0]
            except KeyboardInterrupt:
                say(console, "interrupted during the run of the target alone: equality not proven")
                code = 130
                break
            rows.append((f"{index + 1} alone", alone))
            if alone.tokens == request.tokens:
                say(console, f"equal to the target alone, all {len(alone.tokens)} tokens")
            else:
                words, rounding = explain_difference(target, alone, request)
                say(console, f"not equal to the target alone: {words}")
                code = code if rounding else 1
    console.print(_table(rows))
    return code


def _as_utf8(text: str) -> str:
    """What was typed or piped, read as UTF-8 whatever the locale says: in one without UTF-8, Python hands over bytes as lone surrogates."""
    try:
        return os.fsencode(text).decode("utf-8") if any("\ud800" <= letter <= "\udfff" for letter in text) else text
    except UnicodeError:
        raise ValueError("generate: prompt holds bytes that are no text, must be UTF-8") from None


def _encode(tokenizer, text: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer(text)["input_ids"]
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("generate: --chat was given, but the target's tokenizer has no chat template")
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def _table(rows) -> Table:
    table = Table("run", title=None)
    for name in ("tokens", "passes", "acceptance length", "tokens a pass", "tokens/s", "target s", "drafter s", "rest s"):
        table.add_column(name, justify="right")
    for name, request in rows:
        stats = request.stats
        table.add_row(
            name, str(stats.new_tokens), str(stats.rounds + 1), f"{stats.acceptance_length:.2f}" if stats.rounds else "-",
            f"{stats.tokens_per_pass:.2f}", f"{stats.tokens_per_second:.1f}", f"{stats.target + stats.prefill:.2f}", f"{stats.drafter:.2f}",
            f"{stats.rest:.2f}",
        )  # fmt: skip
    return table
