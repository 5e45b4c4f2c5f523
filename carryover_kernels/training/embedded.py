"""Trains the embedded models from nothing: python -m carryover_kernels.training.embedded --out DIR --work DIR

Stages: tokenizer, target, records, drafter, evaluation, cards. Each is skipped when its result is already there and
goes on where it was stopped. Steps are fixed numbers (recorded in the cards), so a seed gives the same models again.
"""

import argparse
import os
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from carryover_kernels.training import corpus, data, evaluation, losses, rollout
from carryover_kernels.training.loop import Loop, TrainingStopped, make_optimizers, progress_bar, step_seed, write_json
from carryover_kernels.training.model import DraftConfig, DraftModel

END, MASK = "<|endoftext|>", "<|mask|>"


@dataclass(frozen=True)
class Settings:
    """All that decides the result, beside the interpreter's standard library and the versions of the packages."""

    seed: int = 1
    vocab: int = 2048
    row: int = 256
    # target
    hidden: int = 256
    layers: int = 8
    intermediate: int = 512
    rows_per_step: int = 12
    target_steps: int = 1400
    target_horizon: int = 2600  # the cosine's own length; the last target_decay steps fall to zero
    target_decay: int = 450
    target_lr: float = 3e-3
    target_muon_lr: float = 5e-3
    text_rows: float = 0.25
    # records: prompts answered by the target, half of the batches greedily, half at temperature 0.7
    records: int = 3840
    new_tokens: int = 128
    # drafter
    taps: tuple = (1, 3, 6)
    block: int = 8
    draft_layers: int = 3
    draft_intermediate: int = 256
    draft_steps: int = 1300
    draft_horizon: int = 2600  # as for the target: the cosine's own length, and a line to zero at the end
    draft_decay: int = 400
    draft_batch: int = 16
    anchors: int = 24
    draft_lr: float = 2e-3
    draft_muon_lr: float = 4e-3
    held_out: int = 64


QUICK = dict(vocab=512, hidden=64, layers=4, intermediate=128, target_steps=30, target_horizon=30, target_decay=5, rows_per_step=4,
             records=64, new_tokens=32, taps=(0, 1, 2), draft_layers=2, draft_intermediate=64, draft_steps=20, draft_horizon=20,
             draft_decay=5, draft_batch=4,
             anchors=4, held_out=4)


def log(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# tokenizer

def train_tokenizer(settings, files, directory):
    """Byte-level BPE over the library's training files and the tasks; digits stand alone, so that counting is local."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(f"tokenizer/{settings.seed}")
    texts = [text for relative, text in files if not corpus.file_is_held_out(relative)]
    texts = rng.sample(texts, min(150, len(texts)))
    for kind in corpus.TASKS:
        for i in range(1500):
            sample = corpus.task(kind, f"tokenizer/{settings.seed}/{i}")
            texts.append(sample.prompt + sample.response)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab, special_tokens=[END, MASK], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, mask_token=MASK,
        clean_up_tokenization_spaces=False, model_max_length=2048,
    )
    wrapped.save_pretrained(directory)


def load_tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


# target

class Rows:
    """Rows of tokens for the target: tasks packed whole, the rest filled from the library. A row is a function of
    (seed, step). Weights are 1 where the loss counts: a task's response and all library text."""

    def __init__(self, settings, tokenizer, files):
        self.settings, self.tokenizer = settings, tokenizer
        self.end = tokenizer.eos_token_id
        kept = [text for relative, text in files if not corpus.file_is_held_out(relative)]
        stream = []
        for ids in data.encode(tokenizer, kept):
            stream += ids + [self.end]
        self.stream = torch.tensor(stream, dtype=torch.int16)

    def batch(self, step, rows):
        """ids [rows, row + 1] i64, weights [rows, row] f32 (of the tokens predicted)."""
        rng = random.Random(f"rows/{self.settings.seed}/{step}")
        length = self.settings.row + 1
        ids = torch.empty(rows, length, dtype=torch.int64)
        weights = torch.zeros(rows, length)
        samples = []
        for row in range(rows):
            if rng.random() < self.settings.text_rows:
                continue
            for i in range(6):
                kind = rng.choices(("substitution", "code", "records"), (0.5, 0.25, 0.25))[0]
                samples.append((row, corpus.task(kind, f"{self.settings.seed}/{step}/{row}/{i}")))
        prompts = data.encode(self.tokenizer, [s.prompt for _, s in samples])
        responses = data.encode(self.tokenizer, [s.response for _, s in samples])
        filled = [0] * rows
        for (row, _), prompt, response in zip(samples, prompts, responses, strict=True):
            at, n = filled[row], len(prompt) + len(response) + 1
            if at + n > length:
                continue
            ids[row, at : at + n] = torch.tensor(prompt + response + [self.end])
            weights[row, at + len(prompt) : at + n] = 1
            filled[row] = at + n
        for row in range(rows):
            n = length - filled[row]
            if n:
                begin = rng.randrange(len(self.stream) - n)
                ids[row, filled[row] :] = self.stream[begin : begin + n]
                weights[row, filled[row] :] = 1 if filled[row] == 0 or n > 48 else 0
        return ids, weights[:, 1:]


def new_target(settings, tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(step_seed(settings.seed, 0, 1))
    config = Qwen3Config(
        vocab_size=settings.vocab, hidden_size=settings.hidden, num_hidden_layers=settings.layers,
        intermediate_size=settings.intermediate, num_attention_heads=settings.hidden // 64,
        num_key_value_heads=max(1, settings.hidden // 128), head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10000.0, initializer_range=0.02,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id, bos_token_id=None,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def target_loss(model, ids, weights):
    """Mean cross-entropy of the weighted tokens; logits are computed where the weight is not zero only."""
    with data.autocast():
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        keep = weights.reshape(-1) > 0
        logits = model.lm_head(hidden.reshape(-1, hidden.shape[-1])[keep])
    return F.cross_entropy(logits.float(), ids[:, 1:].reshape(-1)[keep])


def train_target(settings, work, files, tokenizer, quiet=False):
    model = new_target(settings, tokenizer)
    rows = Rows(settings, tokenizer, files)
    log(f"target: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(rows.stream)} text tokens")
    optimizers = make_optimizers(model, settings.target_lr, settings.target_muon_lr, weight_decay=0.02)
    loop = Loop(model, optimizers, work / "target_training", settings.target_steps,
                warmup=min(100, settings.target_steps // 10), horizon=settings.target_horizon,
                decay=settings.target_decay, name="target", quiet=quiet)
    if loop.resume():
        log(f"target: goes on at step {loop.step}")
    model.train()

    def step(i):
        ids, weights = rows.batch(i, settings.rows_per_step)
        loss = target_loss(model, ids, weights)
        return loss, {"tokens": ids.numel()}

    loop.run(step)
    return model


def save_target(model, tokenizer, directory):
    """Writes the target in bf16 with its tokenizer; the folder appears whole or not at all."""
    tmp = Path(str(directory) + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = tokenizer.eos_token_id
    copy.save_pretrained(tmp)
    tokenizer.save_pretrained(tmp)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(tmp, directory)


# records

MIX = {"substitution": 0.3, "code": 0.25, "records": 0.2, "text": 0.25}


def record_prompts(settings, tokenizer, files, count, seed):
    """(kind, ids) of prompts for the drafter's training: tasks and library places that the target may have seen in
    part, never held-out words or files."""
    rng = random.Random(f"record/{seed}")
    kinds = rng.choices(list(MIX), list(MIX.values()), k=count)
    texts = iter(corpus.text_prompts(files, kinds.count("text"), f"record/{seed}", held_out=False))
    samples = [
        next(texts, None) if kind == "text" else corpus.task(kind, f"record/{seed}/{i}")
        for i, kind in enumerate(kinds)
    ]
    samples = [s for s in samples if s is not None]
    return list(zip([s.kind for s in samples], data.encode(tokenizer, [s.prompt for s in samples]), strict=True))


def write_records(settings, work, files, tokenizer, target, share=(0, 1)):
    prompts = record_prompts(settings, tokenizer, files, settings.records, settings.seed)
    log(f"records: {len(prompts)} prompts")
    with progress_bar("records", len(prompts)) as tick:
        records = data.record(
            target, prompts, work / "records", max_new_tokens=settings.new_tokens,
            end_token=tokenizer.eos_token_id, temperatures=(0.0, 0.7), seed=settings.seed, share=share, on_batch=tick,
        )
    return records


# drafter

def draft_config(settings, target, tokenizer):
    c = target.config
    return DraftConfig(
        vocab=c.vocab_size, hidden=c.hidden_size, layers=settings.draft_layers, heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads, head_dim=64, intermediate=settings.draft_intermediate, taps=settings.taps,
        block=settings.block, mask_token=tokenizer.mask_token_id, target_hidden=c.hidden_size,
        target_layers=c.num_hidden_layers, theta=10000.0,
    )


def plain_loss(model, ids, lengths, features, anchors, keep):
    """Cross-entropy with decay at given anchors; also the mean number of accepted drafts (teacher-forced chain)."""
    labels, kept = data.block_labels(ids, lengths, anchors, keep, model.c.proposals)
    weights = losses.position_weights(kept)
    with data.autocast():
        rows = rollout.draft_rows(model, features, lengths, ids, anchors)
        logits = model.logits(rows, rollout.previous_tokens(ids, anchors, labels))
    loss = losses.cross_entropy(logits, labels, weights)
    right = torch.cumprod(((logits.argmax(-1) == labels) & kept).long(), -1).sum(-1)
    return loss, right[keep].float().mean().item()


def train_drafter(settings, work, tokenizer, target, records, quiet=False):
    records = [r for r in records if len(r.ids) - r.start > 2]
    size = data.states_bytes(records, settings.taps, target.config.hidden_size)
    log(f"drafter: {len(records)} records, {size / 1e9:.2f} GB of tap states in memory")
    with progress_bar("tap states", len(records)) as tick:
        states = data.cache_states(target, records, settings.taps, on_batch=tick)
    embed = target.model.embed_tokens.weight.detach()
    model = DraftModel(draft_config(settings, target, tokenizer), embed, embed)
    model.initialise(step_seed(settings.seed, 0, 2))
    log(f"drafter: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    optimizers = make_optimizers(model, settings.draft_lr, settings.draft_muon_lr)
    loop = Loop(model, optimizers, work / "drafter_training", settings.draft_steps,
                warmup=min(100, settings.draft_steps // 10), horizon=settings.draft_horizon,
                decay=settings.draft_decay, name="drafter", quiet=quiet)
    if loop.resume():
        log(f"drafter: goes on at step {loop.step}")

    def step(i):
        generator = torch.Generator().manual_seed(step_seed(settings.seed, i, 3))
        chosen = data.similar_lengths(records, settings.draft_batch, generator)
        part = [records[j] for j in chosen]
        ids, lengths, features = data.pad_records(part, [states[j] for j in chosen])
        anchors, keep = data.sample_anchors(part, settings.anchors, generator)
        loss, accepted = plain_loss(model, ids, lengths, features, anchors, keep)
        return loss, {"accepted": accepted}

    loop.run(step)
    return model


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where the finished models go")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints, records, metrics")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny models, a minute: shows that the script works")
    parser.add_argument("--until", choices=["tokenizer", "target", "records", "drafter"], help="stop after this stage")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: its own choice)")
    parser.add_argument("--note", default="", help="a sentence for the cards about how this run was made")
    parser.add_argument("--share", default="0/1", help="K/N: write only the K-th of N shares of the records, then stop")
    arguments = parser.parse_args(argv)
    settings = Settings(seed=arguments.seed, **(QUICK if arguments.quick else {}))
    work, out = arguments.work, arguments.out
    work.mkdir(parents=True, exist_ok=True)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    files, facts = corpus.standard_library()
    write_json(work / "settings.json", {"settings": asdict(settings), "library": facts})
    try:
        if not (work / "tokenizer").exists():
            log("tokenizer")
            train_tokenizer(settings, files, work / "tokenizer.tmp")
            os.replace(work / "tokenizer.tmp", work / "tokenizer")
        tokenizer = load_tokenizer(work / "tokenizer")
        if arguments.until == "tokenizer":
            return
        if not (work / "target").exists():
            save_target(train_target(settings, work, files, tokenizer), tokenizer, work / "target")
        if arguments.until == "target":
            return
        share = tuple(int(x) for x in arguments.share.split("/"))
        records = write_records(settings, work, files, tokenizer, data.load_target(work / "target", torch.bfloat16)[0], share)
        if arguments.until == "records" or share[1] > 1:
            return
        target = data.load_target(work / "target")[0]
        if not (work / "dflash").exists():
            train_drafter(settings, work, tokenizer, target, records).save(work / "dflash")
        if arguments.until == "drafter":
            return
        evaluation.finish(settings, facts, work, out, files, tokenizer, target, arguments.note)
    except TrainingStopped as stopped:
        sys.exit(str(stopped))


if __name__ == "__main__":
    main()
