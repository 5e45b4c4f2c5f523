"""The kernels of csrc/cuda without a GPU: a slice of the op tests on the shim, and what ptxas makes of them for each architecture.

All of the op tests on the shim: ``pytest --backend simt tests/test_plan_round.py`` and so on; this file with ``--backend simt`` compiles
every kernel for every architecture, else those with products for one. Not yet run on hardware.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from torch.utils import cpp_extension

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SLICE = {
    "plan_round": ("ragged", "more_rejected_than_capacity", "padding_spaced", "rows_of_no_request"),
    "carry_to_pages": ("carried_rows_dropped_first", "negative_pages", "padding"),
    "clear_carry": ("",),
    "qk_norm_rope": ("qwen3-f32", "gemma4-bf16", "partial_interleaved-f16", "positions_outside_the_table-bf16"),
    "verify_draft": ("padding-f32", "greedy_ties_lowest_id-bf16", "removed_tokens-f16", "bad_drafts_block-f32", "vocabulary_4099-bf16"),
    "markov_sample": ("gated-f32", "rnn-bf16", "padding_sampled-f16", "anchor_outside_the_table-bf16", "vocabulary_1003-f32"),
    "project_states": ("every_kind_of_row-f32", "whole_tiles-bf16", "share_kv_mark_after_norm-f16", "cache_fp8_e4m3-bf16", "odd_sizes-bf16"),
    "block_attention": ("padding_row-f32", "causal_tree_positions-bf16", "three_splits-f16", "cache_fp8_e4m3-bf16", "head_dim_128_block_16-bf16"),
}  # fmt: skip
KERNELS = {"plan_round": 1, "carry_to_pages": 1, "clear_carry": 1, "qk_norm_rope": 3, "verify_draft": 14, "markov_sample": 3, "project_states": 15, "block_attention": 7}
ARCHITECTURES = ("80", "90a", "100a")


def test_slice_covers_every_kernel():
    there = {path.stem for path in (ROOT / "csrc/cuda").glob("*.cu")}
    assert there == set(SLICE) == set(KERNELS) and all((ROOT / f"csrc/cuda/{op}.cuh").exists() for op in there)


def test_slice_on_the_shim(tmp_path):
    """In a process of its own: the shim's library takes the ops over for good."""
    chosen = [f"tests/test_{op}.py" + (f"::test_named_case[{name}]" if name else "") for op, names in SLICE.items() for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--backend", "simt", f"--junitxml={tmp_path}/report.xml", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    cases = list(xml.etree.ElementTree.parse(tmp_path / "report.xml").iter("testcase"))
    assert len(cases) >= len(chosen) and not any(child.tag == "skipped" for case in cases for child in case)


def ptxas_report(text: str):
    """(kernel, registers, bytes of stack, bytes spilled, bytes of shared memory) of every kernel in ptxas -v's output."""
    found = []
    for part in text.split("Compiling entry function '")[1:]:
        stack, stores, loads = map(int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        shared = re.search(r"(\d+) bytes smem", part)
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        found.append((part.split("'")[0], registers, stack, stores + loads, int(shared[1]) if shared else 0))
    return found


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_ptxas(tmp_path, pytestconfig):
    """Compiles without a spill, without a stack frame, within 48 KiB of static shared memory and the registers that the launch bounds promise:
    128 are four blocks of 128 threads an SM; block_attention, which holds outputs and scores in registers, has 168: three blocks.

    All doors in one file: most of the time goes into PyTorch's headers.
    """
    whole = pytestconfig.getoption("--backend") == "simt"
    ops, architectures = (sorted(KERNELS), ARCHITECTURES) if whole else (["block_attention", "project_states"], ARCHITECTURES[:1])
    together = tmp_path / "all.cu"
    together.write_text("".join(f'#include "{ROOT}/csrc/cuda/{op}.cu"\n' for op in ops))
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    headers = ["-isystem", cpp_extension.include_paths()[0], "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command = ["nvcc", "-std=c++17", "-O3", *targets, "-Xptxas", "-v", *headers, "-Xcompiler", "-fPIC", "-c", str(together)]
    done = subprocess.run([*command, "-o", str(tmp_path / "out.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = ptxas_report(done.stderr)
    assert len(report) == sum(KERNELS[op] for op in ops) * len(architectures), report
    most = {line[0]: 168 if "block_attention_kernel" in line[0] else 128 for line in report}
    wrong = [line for line in report if line[1] > most[line[0]] or line[2] or line[3] or line[4] > 48 * 1024]
    assert not wrong, wrong


def test_a_spill_is_seen():
    text = (
        "ptxas info    : Compiling entry function 'k' for 'sm_80'\n    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 472 bytes cmem[0]\n"
    )
    assert ptxas_report(text) == [("k", 255, 8, 16, 1024)]
