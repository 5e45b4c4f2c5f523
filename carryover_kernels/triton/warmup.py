"""Compile kernels before they are needed, on any machine: launchers run on meta tensors, and what they would launch is compiled.

``specializations`` records the launches of one drafter's shapes; ``compile_for`` turns one into a cubin for an architecture without a
GPU; ``warm`` fills Triton's disk cache with them. ``python -m carryover_kernels.triton.warmup --arch 90 --shape qwen3-4b`` prints a line of
JSON a kernel: registers, spills, shared memory, tensor-core instructions. Not yet run on hardware.
"""

import argparse
import contextlib
import importlib
import json
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import _configs

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a block may have
ARCHITECTURES = tuple(SHARED_MEMORY)
OPS = ("plan_round", "clear_carry", "carry_to_pages", "qk_norm_rope", "block_attention", "project_states", "markov_sample", "verify_draft")
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Shape:
    """What of a drafter and its serving the kernels specialise on. Letters as in the docs of the ops."""

    name: str
    H: int
    F: int
    L: int
    Hq: int
    Hkv: int
    D: int
    B: int = 16
    V: int = 151936
    r: int = 256
    rotary_dim: int | None = None
    share_kv: bool = False
    R: int = 8
    context: int = 4096
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    softcap: float = 0.0
    window_left: int = -1
    head: str = "vanilla"


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: grid, and the arguments by name with their types."""

    kernel: object
    grid: tuple
    values: dict
    options: dict


class _Recorder:
    """Stands in for a JIT kernel: ``kernel[grid](...)`` is written down instead of run."""

    def __init__(self, kernel, launches: list):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            values = dict(zip(self.kernel.arg_names, args))
            options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
            self.launches.append(Launch(self.kernel, tuple(grid), values | kwargs, options))

        return launch


@contextlib.contextmanager
def recording():
    """Every launch of this package's kernels inside the block is recorded in the list it gives, and none is run."""
    launches, replaced = [], []
    for op in OPS:
        module = importlib.import_module(f"carryover_kernels.triton.{op}")
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel") and isinstance(kernel, triton.runtime.jit.KernelInterface):
                replaced.append((module, name, kernel))
                setattr(module, name, _Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in replaced:
            setattr(module, name, kernel)


def specializations(shape: Shape, capability: int = 90) -> list[Launch]:
    """What one drafter round of ``shape`` launches on sm_<capability>, every op once, both marks' places and both ways to sample."""
    from .block_attention import block_attention_triton
    from .carry_to_pages import carry_to_pages_triton
    from .clear_carry import clear_carry_triton
    from .markov_sample import markov_sample_triton
    from .plan_round import plan_round_triton
    from .project_states import project_states_triton
    from .qk_norm_rope import qk_norm_rope_triton
    from .verify_draft import verify_draft_triton

    s, N = shape, shape.B - 1
    T, P, C = s.R * s.B, -(-s.context // s.page), s.B - 1
    rotary, cache_dtype = s.rotary_dim or s.D, s.cache_dtype or s.dtype

    def meta(*dims, dtype=s.dtype):
        return torch.empty(dims, dtype=dtype, device="meta")

    def f32(*dims):
        return meta(*dims, dtype=torch.float32)

    def i32(*dims):
        return meta(*dims, dtype=torch.int32)

    def i64(*dims):
        return meta(*dims, dtype=torch.int64)

    parts = 1 if s.share_kv else 2
    width = s.L * parts * s.Hkv * s.D
    caches = [meta(s.R * P, s.page, s.Hkv, s.D, dtype=cache_dtype) for _ in range(s.L)]
    carry_k = meta(s.L, s.R, C, s.Hkv, s.D)
    fp8 = cache_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    rope = f32(40960, rotary)
    with recording() as launches, _configs.assumed(capability):
        plan_round_triton(i64(T), i64(T), i64(T), i64(s.R), i32(s.R + 1), i32(s.R), i64(T), i64(T), i32(s.R), i32(s.R), C, None)
        clear_carry_triton(i32(s.R), i32(s.R))
        carry_to_pages_triton(i64(T), i64(s.R, s.B), i32(s.R), i64(T), i64(T), i32(s.R + 1), i32(s.R, P), i32(s.R), s.page, s.B, i32(s.R))
        for mark, mark_kv in ((f32(s.H), None), (None, f32(width))):
            project_states_triton(
                meta(T, s.F), meta(s.H, s.F), meta(width, s.H), None, f32(s.L, s.D), mark, mark_kv, rope, i64(T), i64(T), i64(T),
                caches, caches, carry_k, carry_k, 1e-6, 1e-6, True, s.share_kv, s.share_kv, False,
                f32(s.L) if fp8 else None, f32(s.L) if fp8 else None,
            )  # fmt: skip
        qkv = meta(T, (s.Hq + parts * s.Hkv) * s.D)
        q, k = meta(T, s.Hq, s.D), meta(T, s.Hkv, s.D)
        qk_norm_rope_triton(q, k, k, qkv, i64(T), rope, f32(s.D), f32(s.D), s.Hq, s.Hkv, 1e-6, True, s.share_kv, s.share_kv, False)
        q, k = meta(s.R, s.B, s.Hq, s.D), meta(s.R, s.B, s.Hkv, s.D)
        block_attention_triton(
            meta(s.R, s.B, s.Hq, s.D), f32(0), q, k, k, caches[0], caches[0], i32(s.R, P), i32(s.R), carry_k[0], carry_k[0], i32(s.R), i32(s.R),
            None, None, None, False, s.window_left, -1, None, s.softcap, f32(1) if fp8 else None, f32(1) if fp8 else None, 0, False,
        )  # fmt: skip
        head_weight = {"gated": (s.r, s.H + s.r), "rnn": (3 * s.r, 2 * s.r + s.H)}.get(s.head)
        for temperature in (None, f32(s.R)):
            sampled = temperature is not None
            markov_sample_triton(
                i64(s.R, N), f32(0), f32(s.R, N, s.V) if sampled else f32(0), f32(0), meta(s.R, N, s.V), i64(s.R), meta(s.V, s.r),
                meta(s.V, s.r), s.head, meta(s.R, N, s.H), meta(*head_weight) if head_weight else None, None, None, None, None, temperature,
                i64(s.R) if sampled else None, i64(s.R) if sampled else None, False, sampled,
            )  # fmt: skip
        rows = (i32(s.R), i64(s.R), i32(s.R), i64(s.R, N), i32(s.R + 1))
        verify_draft_triton(*rows, None, i64(T), None, None, None, "greedy")
        verify_draft_triton(*rows, f32(T, s.V), None, None, None, None, "greedy")
        for method in ("rejection", "block"):
            verify_draft_triton(*rows, f32(T, s.V), None, f32(s.R, N, s.V), i64(s.R), i64(s.R), method)
    return list({_key(launch): launch for launch in launches}.values())


def signature(launch: Launch) -> tuple[dict, dict, dict]:
    """(types, constants, attributes) by parameter, as Triton's own launcher would specialise them."""
    types, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.values[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            types[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[parameter.name] = "fp32"
        else:
            types[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def _key(launch: Launch):
    types, constants, attributes = signature(launch)
    return launch.kernel.__name__, tuple(types.items()), str(constants), str(attributes), tuple(launch.options.items())


# What tests compile and docs/kernels.md lists. Gemma-4-12B's own file was not at hand: its widths are assumed, head dim and shared K/V known.
QWEN3_4B = Shape("qwen3-4b", 2560, 5 * 2560, 5, 32, 8, 128, head="gated")
GEMMA4_12B = Shape("gemma4-12b", 3840, 5 * 3840, 5, 16, 2, 512, B=8, V=262144, share_kv=True, head="rnn")
SMALL = replace(QWEN3_4B, H=512, F=1024, L=2, Hq=8, Hkv=2, V=2048, r=64, head="vanilla")
SHAPES = {
    shape.name: shape
    for shape in (
        QWEN3_4B,
        GEMMA4_12B,
        *(replace(QWEN3_4B, name=f"qwen3-4b batch {R}", R=R, head="none") for R in (1, 32)),
        *(replace(SMALL, name=f"head dim {D}", D=D, rotary_dim=D // 2) for D in (64, 80, 96, 256)),
        replace(SMALL, name="window, softcap", window_left=2047, softcap=30.0, dtype=torch.float16, B=4),
        replace(SMALL, name="fp8 e4m3 cache", cache_dtype=torch.float8_e4m3fn),
        replace(SMALL, name="fp8 e5m2 cache", cache_dtype=torch.float8_e5m2, dtype=torch.float16, B=8),
        replace(SMALL, name="float32", dtype=torch.float32, D=128),
        replace(SMALL, name="float32 head dim 256", dtype=torch.float32, D=256),
        replace(SMALL, name="bf16, float32 cache", cache_dtype=torch.float32),
        # Every count 1: Triton's launcher turns a 1 into a constant, which is not the same code.
        replace(SMALL, name="ones", L=1, Hq=1, Hkv=1, B=2, R=1, context=1, page=1),
    )
}
WHOLE = ("qwen3-4b", "gemma4-12b", "ones")  # all kernels of a round; the other shapes add the GEMM-shaped ones
# Where the tile table and the tensor cores matter.
GEMM_SHAPED = ("project_fc_kernel", "project_kv_kernel", "block_attention_kernel")


def compile_for(launch: Launch, capability: int):
    """The compiled kernel (``.asm['ptx']``, ``.asm['cubin']``, ``.metadata``) for sm_<capability>, made without a GPU."""
    types, constants, attributes = signature(launch)
    source = ASTSource(launch.kernel, types, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def figures(compiled) -> dict[str, int]:
    """Registers a thread, bytes of stack and local memory a thread (0 unless registers spill), bytes of shared memory a block, and how many
    of each tensor-core instruction the PTX holds."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([cuobjdump, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    line = text[text.index(f"Function {compiled.metadata.name}:") :].splitlines()[1]
    fields = dict(part.rsplit(":", 1) for part in line.split() if ":" in part)
    return {
        "registers": int(fields["REG"]),
        "stack": int(fields["STACK"]),
        "local": int(fields["LOCAL"]),
        # 1 KiB that the driver keeps for itself on sm_90 and later is part of the count.
        "shared": int(fields.get("SHARED", 0)) + compiled.metadata.shared,
        **{name: compiled.asm["ptx"].count(name + ".") for name in ("wgmma.mma_async", "mma.sync", "tcgen05.mma")},
    }


def tile(launch: Launch) -> dict:
    return {name: value for name, value in launch.values.items() if name.startswith("BLOCK")} | launch.options


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m carryover_kernels.triton.warmup", description=__doc__)
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, required=True)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args(argv)
    compiled = set()  # what two shapes share is compiled and listed once
    for name in options.shape:
        for launch in specializations(SHAPES[name], options.arch):
            kernel = launch.kernel.__name__
            if _key(launch) in compiled or not (name in WHOLE or kernel in GEMM_SHAPED):
                continue
            compiled.add(_key(launch))
            row = {"shape": name, "kernel": kernel, "grid": launch.grid, "tile": tile(launch)}
            try:
                row |= figures(compile_for(launch, options.arch))
            except Exception as error:  # Triton's compiler raises many kinds; the row says which kernel it was
                row["error"] = f"{type(error).__name__}: {str(error)[-400:]}"
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
