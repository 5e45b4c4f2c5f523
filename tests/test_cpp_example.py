"""find_package(carryover_kernels): the C++ example is built as a stranger's project would be, and gives Python's numbers."""

import math
import os
import pathlib
import re
import subprocess

import pytest
import torch

from carryover_kernels import _native, ops

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    build = tmp_path_factory.mktemp("cpp")
    prefix = f"{_native.cmake_prefix()};{torch.utils.cmake_prefix_path}"
    configure = ["cmake", "-S", str(ROOT / "examples/cpp"), "-B", str(build), f"-DCMAKE_PREFIX_PATH={prefix}"]
    for command in (configure, ["cmake", "--build", str(build)], [str(build / "engine_round")]):
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def floats(*shape, seed):
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    return (((index * 7919 + seed * 104729) % 1009).float() / 1009 - 0.5).view(shape)


def python_round():
    """The example's round through the Python ops: (accepted, next, carried, block_start), sums of k, carry_k, out."""

    def i32(*values):
        return torch.tensor(values, dtype=torch.int32)

    query_start_loc, carry_lens, slots = i32(0, 4), i32(0, 0), i32(1)
    accepted, anchor, rejected = ops.verify_draft(torch.tensor([[5, 6, 7]]), query_start_loc, target_argmax=torch.tensor([5, 9, 7, 1]))
    *plan, block_start = ops.plan_round(query_start_loc, rejected, torch.arange(2, 6), torch.tensor([10, 11, 4, 5]), slots, carry_lens, 3)
    angles = torch.arange(64.0, dtype=torch.float64)[:, None] * 1e4 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    rope = torch.cat([angles.cos(), angles.sin()], 1).float()
    k_cache, v_cache = torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8)
    carry_k, carry_v = torch.zeros(1, 2, 3, 1, 8), torch.zeros(1, 2, 3, 1, 8)
    ops.project_states(
        floats(4, 24, seed=1), floats(16, 24, seed=2), floats(16, 16, seed=3), None, None, floats(16, seed=4), None, rope,
        *plan, [k_cache], [v_cache], carry_k, carry_v,
    )  # fmt: skip
    q, k, v = (x.view(1, 4, -1, 8) for x in ops.qk_norm_rope(floats(4, 32, seed=5), torch.arange(4, 8), rope, None, None, 2, 1))
    carry = (carry_k[0], carry_v[0], carry_lens, slots)
    out, _ = ops.block_attention(q, k, v, k_cache, v_cache, i32(2, 1).view(1, 2), i32(4), *carry)
    whole = (accepted.item(), anchor.item(), carry_lens[1].item(), block_start.item())
    return whole, [x.double().sum().item() for x in (k_cache, carry_k, out)]


def test_same_round_as_python(output):
    found = re.search(r"accepted (\d+) next (\d+) carried (\d+) block_start (\d+) k (\S+) carry_k (\S+) out (\S+)", output)
    assert found, output
    whole, sums = python_round()
    assert tuple(map(int, found.groups()[:4])) == whole == (1, 9, 2, 4)
    # The same library on the same float32 inputs; the table of angles is rounded once more here, and six decimals are printed.
    for printed, wanted in zip(found.groups()[4:], sums):
        assert abs(float(printed) - wanted) < 1e-4 and abs(wanted) > 1e-2


def test_refusal_is_an_exception_with_one_sentence(output):
    assert "clear_carry: carry_slot_ids has dtype int64, must be int32" in re.search(r"refused: (.*)", output)[1]
    assert "carried after clear_carry: 0" in output
