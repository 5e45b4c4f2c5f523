"""`carryover record`: the target answers prompts; its answers are what a drafter is trained on."""

import argparse
import sys

from carryover_kernels.training import data
from carryover_kernels.training.loop import progress_bar


def record(target, prompts, out, *, max_new_tokens=256, temperatures=(0.0, 0.7), batch=64, seed=0):
    """Lets the target at folder `target` answer the prompts of a JSONL file or Hugging Face dataset ({"prompt": text} or
    {"prompt_ids": [...]}, optional "kind") and writes folder `out`. Goes on where it was stopped. Returns the number of records."""
    data.check_number("record", "max_new_tokens", max_new_tokens, 1)
    data.check_number("record", "batch", batch, 1)
    for temperature in temperatures:
        data.check_number("record", "temperature", temperature, 0)
    rows = data.read_rows(prompts)
    if not rows:
        raise ValueError(f"{prompts}: holds no prompt, must hold at least one")
    model, tokenizer = data.load_target(target)
    pairs = []
    for number, row in enumerate(rows, 1):
        ids = row.get("prompt_ids")
        if ids is None and isinstance(row.get("prompt"), str):
            ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError(f"{prompts}: line {number} has no prompt, must have prompt (text) or prompt_ids (a list)")
        data.check_ids(f"{prompts}: line {number}: prompt_ids", ids, model.config.vocab_size)
        pairs.append((row.get("kind", ""), ids))
    with progress_bar("record", len(pairs)) as tick:
        records = data.record(
            model, pairs, out, max_new_tokens=max_new_tokens, end_token=tokenizer.eos_token_id,
            temperatures=temperatures, batch=batch, seed=seed, on_batch=tick,
        )
    return len(records)


def main(argv=None, prog=None):
    """Returns 0, or after a sentence on stderr 1, or 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--target", required=True, help="folder of a Hugging Face causal LM")
    parser.add_argument("--prompts", required=True, help='JSONL, a line {"prompt": text} or {"prompt_ids": [...]}')
    parser.add_argument("--out", required=True, help="folder for the records; recording goes on there")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="taken in turn by batches")
    parser.add_argument("--batch", type=int, default=64, help="prompts answered together")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args(argv))
    out = arguments["out"]
    try:
        count = record(arguments.pop("target"), arguments.pop("prompts"), arguments.pop("out"), **arguments)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"record: stopped; {out} holds whole batches, the same command goes on from there", file=sys.stderr)
        return 130
    print(f"record: {count} records in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
