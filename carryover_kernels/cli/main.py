"""The command table of ``carryover``. Exit codes: 0 done, 1 outputs differ, 2 refused with one sentence, 130 Ctrl-C."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import listen

app = typer.Typer(
    name="carryover",
    help="Speculative decoding with carried-over drafts: the target's own text, in fewer of its passes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=1)]
PASS_ON = dict(allow_extra_args=True, ignore_unknown_options=True, help_option_names=[])


@app.command()
def demo(
    prompts: Annotated[int, typer.Option(help="Held-out prompts to complete, taken in turn from each kind.", min=1)] = 8,
    max_new_tokens: MaxNewTokens = 128,
    drafter: Annotated[str | None, typer.Option(help="Only this embedded drafter, by folder name.")] = None,
    models: Annotated[Path | None, typer.Option(help="Folder with target, drafters and held_out.json; default: the embedded ones.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also write acceptance by position as a PNG (needs matplotlib).")] = None,
):
    """Complete held-out prompts with the embedded target alone and with its drafters, and compare text and speed."""
    from .demo import run_demo

    listen()
    raise typer.Exit(run_demo(prompts, max_new_tokens, drafter, models, plot))


@app.command()
def generate(
    target: Annotated[Path, typer.Option(help="Folder of the target: a Transformers causal LM with its tokenizer.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to complete; may be given again; '-' reads standard input.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Folder of the drafter: z-lab DFlash, DeepSpec DSpark or speculators.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that reach this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, or cuda (not yet run on hardware).")] = "cpu",
    carryover: Annotated[
        bool | None, typer.Option("--carryover/--no-carryover", help="Keep rejected drafts for a round. Default: if it has a mark.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Drafts a round; default: all that it was trained for.", min=1)] = None,
    method: Annotated[str, typer.Option(help="How samples are verified: rejection or block.")] = "rejection",
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="With a drafter and greedy: also run the target alone.")] = True,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt through the tokenizer's chat template.")] = False,
):
    """Complete prompts with any local target and drafter."""
    from .generate import run_generate

    listen()
    raise typer.Exit(
        run_generate(
            target, prompt, drafter, max_new_tokens, temperature, top_p, seed, dtype, device, carryover, num_draft_tokens, method,
            compare, chat,
        )  # fmt: skip
    )


@app.command()
def info():
    """Tell versions, what is built, and which backend each op would use."""
    from .info import run_info

    listen()
    raise typer.Exit(run_info())


@app.command(context_settings=PASS_ON)
def train(context: typer.Context):
    """Train a drafter with parallel draft-verify-draft (carryover train --help)."""
    raise typer.Exit(_training("train", context.args))


@app.command(context_settings=PASS_ON)
def record(context: typer.Context):
    """Let a target write the responses that a drafter is trained on (carryover record --help)."""
    raise typer.Exit(_training("record", context.args))


def _training(command: str, arguments: list[str]) -> int:
    name = f"carryover_kernels.training.{command}"
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"{command}: this version has no module {name}, so the command cannot run")
    module = importlib.import_module(name)
    listen()
    return module.main(arguments, prog=f"carryover {command}") or 0


def main(arguments: list[str] | None = None):
    """Run the command line; always ends in SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without UTF-8 gets question marks, not an error
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="carryover")
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        # Library code raises these with one sentence about what was given; a longer text keeps its first line.
        sentence = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, RuntimeError) and ", must " not in sentence and " cannot run" not in sentence:
            raise  # not about what was given: the trace is wanted
        print(f"carryover: {sentence}", file=sys.stderr)
        sys.exit(2)
