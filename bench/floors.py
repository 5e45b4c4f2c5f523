"""What the machine can do, measured in the same run: the floor under an op's time is the larger of bytes / bandwidth and flops / rate."""

import functools
import time

import torch
import torch.nn.functional as F

from .timing import interleaved

MEGABYTES = 256
GEMM = (1024, 2048, 2048)  # rows, columns, inner: large enough that PyTorch's rate is flat


def count_bytes(*tensors) -> int:
    """Bytes of tensors that are read or written once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@functools.lru_cache(maxsize=None)
def _product(dtype):
    """The machine's quickest product for operands of ``dtype``: without bf16 units PyTorch's own is a tenth of its float32 one, no floor."""
    rows, columns, inner = GEMM
    calls = {}
    for kind in {dtype, torch.float32}:
        x, weight = torch.randn(rows, inner).to(kind), torch.randn(columns, inner).to(kind)
        call = functools.partial(F.linear, x, weight)
        call()
        start = time.perf_counter()
        call()
        calls[time.perf_counter() - start] = call
    return calls[min(calls)]


@functools.lru_cache(maxsize=None)
def _stream():
    return torch.ones(MEGABYTES * 2**18), torch.empty(MEGABYTES * 2**18)


def rates(dtype, budget: float = 0.25) -> dict:
    """{read_gbs, copy_gbs, gemm_gflops} of this moment, best of a few: a floor must not be raised by somebody else's work."""
    source, target = _stream()
    times = interleaved({"read": source.sum, "copy": lambda: target.copy_(source), "gemm": _product(dtype)}, budget, least=3)
    rows, columns, inner = GEMM
    size = source.numel() * 4
    return {
        "read_gbs": size / times["read"]["best"] / 1e3,
        "copy_gbs": 2 * size / times["copy"]["best"] / 1e3,
        "gemm_gflops": 2 * rows * columns * inner / times["gemm"]["best"] / 1e3,
        "gemm_gflops_median": 2 * rows * columns * inner / times["gemm"]["median"] / 1e3,
    }


def floor_us(num_bytes: int, flops: int, rate: dict) -> tuple[float, str]:
    """(microseconds, which of the two it is)."""
    by_bytes = num_bytes / (max(rate["read_gbs"], rate["copy_gbs"]) * 1e3)
    by_flops = flops / (rate["gemm_gflops"] * 1e3)
    return (by_bytes, "bytes") if by_bytes >= by_flops else (by_flops, "flops")
