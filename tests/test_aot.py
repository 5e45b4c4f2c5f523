"""Every Triton kernel and every row of its tile table compiles for sm_80, sm_90 and sm_100 on a machine without a GPU (DESIGN 6.3).

A spill, shared memory over the architecture's limit, or a GEMM that lost its tensor-core instruction fails. What is compiled is what the
launchers launch: they run over meta tensors while their launches are recorded.
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from carryover_kernels.triton import _configs, warmup

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
SHAPES = tuple(warmup.SHAPES)
GEMMS = warmup.GEMM_SHAPED


def run(arch: int) -> list[dict]:
    """The rows that ``python -m carryover_kernels.triton.warmup`` prints. A process of its own: Triton interprets or compiles, never both."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "carryover_kernels.triton.warmup", "--arch", str(arch)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@functools.cache
def pool():
    """All compilations, begun with the first test that asks, a process an architecture; the slowest first."""
    workers = concurrent.futures.ThreadPoolExecutor(max_workers=min(3, os.cpu_count() or 1))
    return {arch: workers.submit(run, arch) for arch in reversed(LIMITS)}


@pytest.mark.parametrize("arch", LIMITS)
def test_compiles(arch):
    rows = pool()[arch].result()
    assert {row["shape"] for row in rows} == set(SHAPES)
    for row in rows:
        shape, what = row["shape"], f"sm_{arch} {row['shape']} {row['kernel']} {row['tile']}"
        if "fp8 e4m3" in shape and arch == 80 and "error" in row:
            assert "fp8e4nv" in row["error"], what  # sm_80 has no e4m3 conversion: the sentence names the type
            continue
        assert "error" not in row, f"{what}: {row.get('error')}"
        assert row["stack"] == row["local"] == 0, f"{what}: {row['registers']} registers and {row['stack']} bytes spilled"
        assert row["shared"] <= LIMITS[arch], f"{what}: {row['shared']} bytes of shared memory, {LIMITS[arch]} there"
        if row["kernel"] in GEMMS and "float32" not in shape:
            wide = row["tile"]["BLOCK_M"] >= 64
            wanted = {80: "mma.sync", 90: "wgmma.mma_async" if wide else "mma.sync", 100: "tcgen05.mma" if wide else "mma.sync"}[arch]
            assert row[wanted] > 0, f"{what}: no {wanted} in its PTX"


def test_every_row_of_the_table_is_compiled():
    """The shapes above reach each tile of the table on some architecture; a row that none reaches would never be seen to compile."""
    reached = {(row["kernel"].removesuffix("_kernel"), json.dumps(row["tile"])) for job in pool().values() for row in job.result()}
    for kernel, by_arch in _configs.table().items():
        for arch, rows in by_arch.items():
            if arch == "interpreter" or not kernel.startswith(("project", "block_attention")):
                continue
            for row in rows:
                tiles = [json.loads(tile) for name, tile in reached if name == kernel]
                assert any(row["tile"].items() <= tile.items() for tile in tiles), f"{kernel} {arch} {row}"
