"""Training by two processes: the loss curve of one process at the same global batch, with DDP and with FSDP2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from carryover_kernels.training import data, parallel, train
from carryover_kernels.training.model import DraftConfig, DraftModel

HERE = Path(__file__).parent
STEPS = 4
# AdamW and Muon, so that both are seen; FSDP2's shares of matrices are AdamW's alone
RUNS = {"ddp": dict(kind="ddp", muon_lr=1e-3), "fsdp": dict(kind="fsdp", muon_lr=0.0)}


def run(root, name, work):
    train.train(
        root / "target", root / "records", work / "out", work / "work", drafter=root / "drafter", steps=STEPS, batch=4, anchors=4,
        lr=1e-2, mark_lr=1e-2, seed=3, quiet=True, autocast=False, tensorboard=False, **RUNS[name],
    )
    return [json.loads(line)["loss"] for line in (work / "work" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Tiny target, drafter and records in folders."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    root = tmp_path_factory.mktemp("parallel")
    torch.manual_seed(5)
    target = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=23, hidden_size=16, num_hidden_layers=4, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
    ))  # fmt: skip
    target.save_pretrained(root / "target")
    words = {f"w{i}": i for i in range(23)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1")
    tokenizer.save_pretrained(root / "target")
    config = DraftConfig(
        vocab=23, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate=24, taps=(0, 2), block=4,
        mask_token=22, target_hidden=16, target_layers=4, theta=1e4,
    )  # fmt: skip
    embed = target.model.embed_tokens.weight.detach()
    DraftModel(config, embed, target.lm_head.weight.detach()).initialise(0, std=0.3).save(root / "drafter", torch.float32)
    generator = torch.Generator().manual_seed(9)
    rows = []
    for i in range(12):
        ids = torch.randint(0, 22, (14 + i % 3,), generator=generator).tolist()
        rows.append({"kind": "k", "prompt_ids": ids[:4], "response_ids": ids[4:]})
    (root / "records").mkdir()
    data.write_jsonl(root / "records" / "0.jsonl", rows)
    return root


def test_two_processes_compute_the_loss_curve_of_one(root, tmp_path):
    """torchrun, gloo, both layouts in one start (a start costs more than the steps)."""
    alone = {name: run(root, name, tmp_path / f"alone_{name}") for name in RUNS}
    path = os.pathsep.join(map(str, (HERE, HERE.parent)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, root, tmp_path]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in RUNS:
        work = tmp_path / f"two_{name}"
        together = [json.loads(line)["loss"] for line in (work / "work" / "metrics.jsonl").read_text().splitlines()]
        assert len(together) == len(alone[name]) == 2  # the first and the last step are written
        # float32: sums of half a batch each, then added; AdamW divides by small roots and makes more of a rounding
        assert torch.allclose(torch.tensor(together), torch.tensor(alone[name]), rtol=1e-4), name
        assert alone[name][0] != alone[name][-1]
        a, b = (load_file(tmp_path / f"{who}_{name}" / "out" / "model.safetensors") for who in ("alone", "two"))
        assert a.keys() == b.keys()
        for key in a:  # bf16 weights: a rounding away from each other at most in the last of 8 bits
            assert (a[key].float() - b[key].float()).abs().max() <= 2**-7 * max(1.0, a[key].float().abs().max()), key
    state = torch.load(tmp_path / "two_fsdp" / "work" / "checkpoint.pt", weights_only=True)
    assert state["step"] == STEPS and state["model"]["fc.weight"].shape == (16, 32)  # whole, although the training's lay in shares


def test_share_needs_a_batch_that_divides(monkeypatch):
    monkeypatch.setattr(parallel, "size", lambda: 3)
    with pytest.raises(ValueError, match="batch was 4, must be a multiple of the number of processes, 3"):
        parallel.share(4)


def test_wrap_names_its_kinds():
    with pytest.raises(ValueError, match="parallel was 'tp', must be 'ddp' or 'fsdp'"):
        parallel.wrap(torch.nn.Linear(1, 1), "tp")


if __name__ == "__main__":
    torch.set_num_threads(1)
    parallel.start()
    for name in RUNS:
        run(Path(sys.argv[1]), name, Path(sys.argv[2]) / f"two_{name}")
    parallel.stop()
