"""Small functions that all kernels share; they mirror csrc/common name by name."""

import triton
import triton.language as tl

from .. import _env

# Triton decides at import of a kernel whether it is interpreted; so does this.
INTERPRETED = tl.constexpr(_env.triton_interprets())
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
STREAM_DRAFT, STREAM_ACCEPT, STREAM_NEXT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32. float32 operands are multiplied in full precision; the interpreter cannot multiply bf16, so there they are upcast."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def nearest(x, KEPT: tl.constexpr, SMALLEST_NORMAL: tl.constexpr):
    """float32 x to the nearest value, ties to even, with KEPT bits after the point; below SMALLEST_NORMAL the step stays what it is there."""
    CUT: tl.constexpr = 23 - KEPT
    bits = x.to(tl.uint32, bitcast=True)
    up = (bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) & (0xFFFFFFFF - ((1 << CUT) - 1))
    normal = up.to(tl.uint32).to(tl.float32, bitcast=True)
    magic = 1.5 * SMALLEST_NORMAL * (1 << CUT)  # its own last bit is that step, so the addition rounds
    x = tl.where(x == x, tl.where(tl.abs(x) < SMALLEST_NORMAL, (x + magic) - magic, normal), x)
    return x


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """float32 to DTYPE, to nearest even as the GPU rounds; the interpreter cuts bf16 and fp8 off, so there x is rounded by hand first."""
    if INTERPRETED:
        if DTYPE == tl.bfloat16:
            x = nearest(x.to(tl.float32), 7, 1.1754943508222875e-38)
        if DTYPE == tl.float8e4nv:
            x = nearest(x.to(tl.float32), 3, 0.015625)
        if DTYPE == tl.float8e5:
            x = nearest(x.to(tl.float32), 2, 6.103515625e-05)
    return x.to(DTYPE)


@triton.jit
def page_offset(slot, page_size, stride_page, stride_slot):
    """Element offset of a flat slot in a paged cache. 64 bits: pages times a page's stride passes 2**31 soon."""
    slot = slot.to(tl.int64)
    return (slot // page_size) * stride_page + (slot % page_size) * stride_slot


@triton.jit
def rms_scale(sum_of_squares, count, eps):
    """1 / rms, eps inside the root."""
    return 1.0 / tl.sqrt(sum_of_squares / count + eps)


@triton.jit
def key_visible(key_position, query_position, CAUSAL: tl.constexpr, WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr):
    """Masks are by position, never by key index: a carried row and a block row may share one."""
    visible = (key_position == key_position) & (query_position == query_position)
    if CAUSAL:
        visible = visible & (key_position <= query_position)
    if WINDOW_LEFT >= 0:
        visible = visible & (query_position - key_position <= WINDOW_LEFT)
    if WINDOW_RIGHT >= 0:
        visible = visible & (key_position - query_position <= WINDOW_RIGHT)
    return visible


@triton.jit
def key_reachable(key_position, first_query, last_query, CAUSAL: tl.constexpr, WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr):
    """Whether any row at first_query .. last_query sees the key. One that none sees is not read: its V may not meet even a zero weight."""
    reachable = key_position == key_position
    if CAUSAL:
        reachable = reachable & (key_position <= last_query)
    if WINDOW_LEFT >= 0:
        reachable = reachable & (first_query - key_position <= WINDOW_LEFT)
    if WINDOW_RIGHT >= 0:
        reachable = reachable & (key_position - last_query <= WINDOW_RIGHT)
    return reachable


@triton.jit
def softmax_shift(maximum):
    """What is subtracted in the exponent: a row that saw no key yet has -inf, and -inf minus -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def uniforms(seed, offset, step, STREAM: tl.constexpr, v):
    """A uniform strictly inside (0, 1) for every vocabulary id in ``v``: word v % 4 of Philox4x32-10 at counter v // 4 (docs/numerics.md)."""
    zero = v * 0
    quad = (v // 4).to(tl.uint32)
    second = (zero + step + STREAM * 65536).to(tl.uint32)
    offset = offset.to(tl.int64)
    low, high = (zero + offset).to(tl.uint32), (zero + (offset >> 32)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, quad, second, low, high)
    lane = v % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def gumbels(seed, offset, step, STREAM: tl.constexpr, v):
    """Standard Gumbel noise: argmax(logits + gumbels) is a sample of softmax(logits)."""
    return -tl.log(-tl.log(uniforms(seed, offset, step, STREAM, v)))


@triton.jit
def tanh(x):
    """By the exponential, and by its series near 0, where the exponential's difference would lose the digits."""
    square = x * x
    near = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488))))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def pair_index(j, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr):
    """A head as two vectors a and b, so that a rotated pair is (a[j], b[j]) whatever the layout: where each lies in the head, and whether it is there.

    Lanes up to ROTARY / 2 are the pairs; the elements that do not turn follow, half of them in each vector.
    """
    half: tl.constexpr = ROTARY // 2
    rest: tl.constexpr = (HEAD_DIM - ROTARY + 1) // 2
    if NEOX:
        first, second = j, j + half
    else:
        first, second = 2 * j, 2 * j + 1
    a = tl.where(j < half, first, ROTARY + j - half)
    b = tl.where(j < half, second, ROTARY + rest + j - half)
    there = j < half + rest
    return a, b, there & (a < HEAD_DIM), there & (b < HEAD_DIM)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, PARITY: tl.constexpr):
    """x as DTYPE holds it under rope_parity, else as it is."""
    if PARITY:
        return cast(x, DTYPE).to(tl.float32)
    else:
        return x


@triton.jit
def rope_rotate(a, b, cosine, sine, DTYPE: tl.constexpr, PARITY: tl.constexpr):
    """The pair (a, b) turned by the angle; every product and sum is rounded under rope_parity."""
    first = rounded(rounded(a * cosine, DTYPE, PARITY) - rounded(b * sine, DTYPE, PARITY), DTYPE, PARITY)
    second = rounded(rounded(b * cosine, DTYPE, PARITY) + rounded(a * sine, DTYPE, PARITY), DTYPE, PARITY)
    return first, second


@triton.jit
def store_scaled(pointer, value, scale, mask):
    """Store value / scale in the pointer's dtype; fp8 saturates at its largest finite value."""
    value = value / scale
    if pointer.dtype.element_ty == tl.float8e4nv:
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    if pointer.dtype.element_ty == tl.float8e5:
        value = tl.minimum(tl.maximum(value, -57344.0), 57344.0)
    tl.store(pointer, cast(value, pointer.dtype.element_ty), mask=mask)
