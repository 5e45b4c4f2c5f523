"""Prompts and recorded responses: JSONL files, and how a target writes its own responses."""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from carryover_kernels.training.loop import step_seed, write_atomically


@dataclass(frozen=True)
class Record:
    """A prompt and the target's own continuation, as token ids; `ids` is both, the response starts at `start`."""

    kind: str
    ids: list
    start: int
    temperature: float


def read_jsonl(path):
    """Objects of a JSONL file; a broken line is named."""
    rows = []
    with open(path, encoding="utf-8") as handle:
        try:
            for number, line in enumerate(handle, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}: line {number} is not JSON ({error.msg}), must be one object a line") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}: line {number} is a JSON {type(row).__name__}, must be one object a line")
                rows.append(row)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 ({error.reason} at byte {error.start}), must be JSONL in UTF-8") from None
    return rows


def check_ids(what, ids, vocab=None):
    """Refuses what is no list of token ids, 0 or more and below `vocab` where it is known; `what` names file, line and key."""
    if not isinstance(ids, list):
        raise ValueError(f"{what} is {ids!r}, must be a list of token ids")
    for token in ids:
        if type(token) is not int or token < 0 or (vocab is not None and token >= vocab):
            raise ValueError(f"{what} holds {token!r}, must hold token ids of 0 or more" + (f" below {vocab}" if vocab is not None else ""))


def check_number(caller, name, value, least, most=None, above=False):
    """Refuses a number that is not finite or outside [least, most]; above: `least` itself is refused too."""
    inside = math.isfinite(value) and (value > least if above else value >= least) and (most is None or value <= most)
    if not inside:
        bound = f"above {least}" if above else f"{least} or more" if most is None else f"from {least} to {most}"
        raise ValueError(f"{caller}: {name} was {value}, must be {bound}")


def read_rows(path):
    """Rows (dicts) of a JSONL file, or of a Hugging Face dataset: a folder of save_to_disk, or *.parquet or *.arrow files."""
    path = Path(path)
    saved = path.is_dir() and any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))
    if not saved and path.suffix not in (".parquet", ".arrow"):
        return read_jsonl(path)
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{path}: is a Hugging Face dataset and the package datasets is not installed, must be a JSONL file without it "
            "(pip install datasets)"
        ) from None
    if saved:
        found = datasets.load_from_disk(str(path))
        if hasattr(found, "keys"):
            raise ValueError(f"{path}: holds the splits {', '.join(found)}, must be one of them: name its folder")
        return [dict(row) for row in found]
    return [dict(row) for row in datasets.load_dataset(path.suffix[1:], data_files=str(path), split="train")]


def write_jsonl(path, rows):
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    write_atomically(path, lambda tmp: Path(tmp).write_text(text, encoding="utf-8"))


def read_records(path):
    """Records of a file, of all *.jsonl in a folder in name order, or of a Hugging Face dataset (see read_rows)."""
    path = Path(path)
    files = (sorted(path.glob("*.jsonl")) or [path]) if path.is_dir() else [path]
    if files == [path] and path.is_dir() and not list(path.glob("dataset_*.json")):
        raise ValueError(f"{path}: no *.jsonl file in it, must hold records (carryover record writes them)")
    records = []
    for file in files:
        for number, row in enumerate(read_rows(file), 1):
            for key in ("prompt_ids", "response_ids"):
                if not isinstance(row.get(key), list):
                    raise ValueError(f"{file}: record {number} has no list {key}, must have prompt_ids and response_ids")
                check_ids(f"{file}: record {number}: {key}", row[key])
            ids = row["prompt_ids"] + row["response_ids"]
            records.append(Record(row.get("kind", ""), ids, len(row["prompt_ids"]), row.get("temperature", 0.0)))
    return records


@torch.no_grad()
def respond(target, prompts, max_new_tokens, end_token, temperature=0.0, seed=0):
    """The target's continuations of token lists, batched: list of lists that end with end_token where it stopped.
    Prompts are padded on the left. temperature 0: greedy. The rest of sampling is plain (no top-k, no top-p)."""
    torch.manual_seed(seed)
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), end_token)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention[row, width - len(prompt) :] = 1
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    out = target.generate(
        ids, attention_mask=attention, max_new_tokens=max_new_tokens, pad_token_id=end_token,
        eos_token_id=end_token, **sampling,
    )
    responses = []
    for row in out[:, width:].tolist():
        responses.append(row[: row.index(end_token) + 1] if end_token in row else row)
    return responses


def record(target, prompts, path, *, max_new_tokens, end_token, temperatures=(0.0,), batch=192, seed=0, share=(0, 1),
           on_batch=None):
    """Writes the target's responses to prompts [(kind, ids)] into folder `path`, one file a batch; batches already
    there are kept, so a stopped run goes on. Batch i is answered at temperatures[i mod len]. share (k, n): write every
    n-th batch from the k-th on only (n processes share the work; the files don't depend on n)."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    for i in range(0, len(prompts), batch):
        number = i // batch
        file = path / f"{number:05d}.jsonl"
        if number % share[1] != share[0]:
            continue
        if not file.exists():
            part = sorted(prompts[i : i + batch], key=lambda p: len(p[1]))
            temperature = temperatures[number % len(temperatures)]
            responses = respond(
                target, [ids for _, ids in part], max_new_tokens, end_token, temperature, step_seed(seed, number, 7)
            )
            write_jsonl(file, [
                {"kind": kind, "prompt_ids": ids, "response_ids": response, "temperature": temperature}
                for (kind, ids), response in zip(part, responses, strict=True)
            ])
        if on_batch is not None:
            on_batch(min(i + batch, len(prompts)))
    return read_records(path) if share[1] == 1 else None


@functools.cache
def multiplies_bf16(device="cpu"):
    """Whether a device has instructions for bf16 products. A CPU without them takes five times as long as in float32."""
    return device != "cpu" or any(there for name, there in getattr(torch.cpu, "get_capabilities", dict)().items() if "bf16" in name)


def autocast(device="cpu", wanted=True):
    """bf16 matrix products, as a context manager; float32 where not wanted or where bf16 would be slower."""
    return torch.autocast(device, torch.bfloat16, enabled=wanted and multiplies_bf16(device))


@torch.no_grad()
def tap_states(target, ids, taps, attention_mask=None):
    """Concatenated outputs of the tapped decoder layers, [N, T, taps * H]. Layer i's output is hidden_states[i + 1];
    the last layer can't be tapped, its stored state is the normed one."""
    out = target.model(input_ids=ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[tap + 1] for tap in taps], -1)


@torch.no_grad()
def cache_states(target, records, taps, batch=32, on_batch=None):
    """Tap states of every record in bf16, in memory: list of [T, taps * H]. Its size is records x tokens x taps x H x
    2 bytes; `states_bytes` tells it before."""
    order = sorted(range(len(records)), key=lambda i: len(records[i].ids))
    states = [None] * len(records)
    for i in range(0, len(order), batch):
        part = order[i : i + batch]
        width = max(len(records[j].ids) for j in part)
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        for row, j in enumerate(part):
            ids[row, : len(records[j].ids)] = torch.tensor(records[j].ids)
        with autocast():
            block = tap_states(target, ids, taps).to(torch.bfloat16)  # padding is on the right: causal, never seen
        for row, j in enumerate(part):
            states[j] = block[row, : len(records[j].ids)].clone()
        if on_batch is not None:
            on_batch(min(i + batch, len(order)))
    return states


def states_bytes(records, taps, hidden):
    return sum(len(r.ids) for r in records) * len(taps) * hidden * 2


def sample_anchors(records, count, generator):
    """Anchors of a batch of records: positions in the response whose next token is in it too, without replacement.
    Returns anchors [N, A] i64 and keep [N, A] bool; where a record has fewer, the rest is not kept."""
    anchors = torch.zeros(len(records), count, dtype=torch.int64)
    keep = torch.zeros(len(records), count, dtype=torch.bool)
    for row, record in enumerate(records):
        candidates = len(record.ids) - 1 - record.start
        if candidates < 1:
            continue
        chosen = (torch.randperm(candidates, generator=generator)[:count] + record.start).sort().values
        anchors[row, : len(chosen)] = chosen
        anchors[row, len(chosen) :] = record.start
        keep[row, : len(chosen)] = True
    return anchors, keep


def pad_records(records, states=None):
    """ids [N, S] i64 (0 padded), lengths [N] i64 and, with states, their features [N, S, F] f32."""
    width = max(len(r.ids) for r in records)
    ids = torch.zeros(len(records), width, dtype=torch.int64)
    for row, r in enumerate(records):
        ids[row, : len(r.ids)] = torch.tensor(r.ids)
    lengths = torch.tensor([len(r.ids) for r in records])
    if states is None:
        return ids, lengths
    features = torch.zeros(len(records), width, states[0].shape[-1])
    for row, s in enumerate(states):
        features[row, : len(s)] = s.float()
    return ids, lengths, features


def block_labels(ids, lengths, anchors, keep, proposals):
    """labels and kept [N, A, P]: the recorded tokens after each anchor; kept up to the end of the record."""
    at = anchors[..., None] + 1 + torch.arange(proposals, device=anchors.device)
    kept = keep[..., None] & (at < lengths[:, None, None])
    labels = torch.gather(ids[:, None].expand(-1, anchors.shape[1], -1), 2, at.clamp_max(ids.shape[1] - 1))
    return labels, kept


def similar_lengths(records, count, generator, window=128):
    """Indices of `count` records of similar length (less padding): drawn from a random window of the length order."""
    return window_of(sorted(range(len(records)), key=lambda i: (len(records[i].ids), i)), count, generator, window)


def window_of(order, count, generator, window=128):
    """`count` entries of a random window of a list."""
    window = min(max(window, count), len(order))
    begin = int(torch.randint(len(order) - window + 1, (), generator=generator))
    return [order[begin + j] for j in torch.randperm(window, generator=generator)[:count].tolist()]


def load_target(path, dtype=torch.float32):
    """A frozen Hugging Face causal LM and its tokenizer from a local folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (Path(path) / "config.json").exists():
        raise ValueError(f"train: target was {path}, must be a folder with config.json")
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    return model.eval().requires_grad_(False), tokenizer


def encode(tokenizer, texts):
    """Token ids without special tokens, one list a text."""
    return [e.ids for e in tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)]
