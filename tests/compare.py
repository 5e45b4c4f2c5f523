"""How results are compared. Integers and untouched bytes: bitwise. Floats: never worse than twice plain PyTorch in the same dtype.

Why 2 x: PyTorch's own error in that dtype says how much rounding the computation brings at these inputs; another order of the same
operations may be unlucky where PyTorch is lucky,
so a factor is needed, and 2 is the smallest that FlashAttention's years of use found enough.
The floor (twice the rounding of one harmless addition in the output's dtype) covers inputs where PyTorch happens to be exact.
"""

from itertools import chain

import torch

ORDERS = 16  # in which PyTorch may be asked to sum: with 3, a correct result of 100 elements fails about once in ten thousand times


def where(index, shape) -> list[int]:
    return [int(i) for i in torch.unravel_index(torch.tensor(int(index)), shape)]


def floor(ref64, dtype) -> float:
    """Twice the rounding error of adding 0.3 and taking it away again in ``dtype``, at the values of ``ref64``.

    ``dtype`` float8: PyTorch has no arithmetic there, so twice the rounding of the value itself.
    """
    ref64 = ref64[ref64.isfinite()]
    if ref64.numel() == 0:
        return 0.0
    low = ref64.to(dtype)
    if dtype.itemsize > 1:
        low = (low + 0.3) - 0.3
    return 2 * float((low.double() - ref64).abs().max())


def assert_as_good_as_torch(out, torch_out, ref64, what="out", siblings=()):
    """``out`` is at most 2 x as far from the float64 reference as ``torch_out``, plain PyTorch in the same dtype, is.

    PyTorch's error depends on the order in which it sums, which nobody promises; of a few elements it is exact by luck too often. So
    ``torch_out`` may be several tensors, the same result with the sums in other orders, and ``siblings`` pairs (torch_out, ref64) of other
    inputs of the same kind: the worst error of all is PyTorch's. Generators are asked only while the bound is not met.
    """
    yardsticks = iter([torch_out] if isinstance(torch_out, torch.Tensor) else torch_out)
    first = next(yardsticks)
    assert out.shape == ref64.shape == first.shape, f"{what}: shape {list(out.shape)}, reference {list(ref64.shape)}"
    assert out.dtype == first.dtype, f"{what}: dtype {out.dtype}, must be {first.dtype}"
    got = out.detach().cpu().double()
    assert_same_specials(got, ref64, what)
    if got.numel() == 0:
        return
    error = torch.where(ref64.isfinite(), (got - ref64).abs(), 0.0)
    worst = error.flatten().argmax()
    allowed = least = floor(ref64, out.dtype)
    for y, ref in chain(((y, ref64) for y in chain([first], yardsticks)), siblings):
        torch_error = float(torch.where(ref.isfinite(), (y.cpu().double() - ref).abs(), 0.0).max())
        allowed = max(allowed, 2 * torch_error + least)
        if error.flatten()[worst] <= allowed:
            return
    at = where(worst, got.shape)
    rows = (error > allowed).flatten(0, -2).any(-1).sum() if got.dim() > 1 else 0
    raise AssertionError(
        f"{what}{at} is {float(got.flatten()[worst]):.8g}, reference {float(ref64.flatten()[worst]):.8g}: error "
        f"{float(error.flatten()[worst]):.3g}, allowed {allowed:.3g} (2 x PyTorch's + floor); {int(rows)} rows are off"
    )


def assert_same_specials(got, ref64, what):
    """NaN and Inf stand where the reference has them, and nowhere else."""
    for name, test in (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf)):
        wrong = test(got) != test(ref64)
        if wrong.any():
            at = where(wrong.flatten().nonzero()[0], got.shape)
            raise AssertionError(f"{what}{at} is {float(got[tuple(at)])}, reference {float(ref64[tuple(at)])}: {name} differs")


def assert_equal(out, expected, what="out"):
    """Bitwise equality, the first difference named."""
    assert out.shape == expected.shape, f"{what}: shape {list(out.shape)}, must be {list(expected.shape)}"
    assert out.dtype == expected.dtype, f"{what}: dtype {out.dtype}, must be {expected.dtype}"
    out = out.detach().cpu()
    wrong = bits(out) != bits(expected)
    if wrong.any():
        at = where(wrong.flatten().nonzero()[0], out.shape)
        raise AssertionError(f"{what}{at} is {out[tuple(at)].item()}, must be {expected[tuple(at)].item()}; {int(wrong.sum())} differ")


def bits(tensor):
    """The tensor's bit patterns as integers."""
    if not (tensor.is_floating_point()):
        return tensor
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def chi_squared(counts, probabilities) -> float:
    """Pearson's statistic of ``counts`` under ``probabilities``; a count where the probability is 0 gives infinity."""
    expected = probabilities.double() * counts.sum()
    impossible = (expected == 0) & (counts > 0)
    if impossible.any():
        return float("inf")
    cells = expected > 0
    return float(((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum())


def chi_squared_limit(degrees: int) -> float:
    """The value that chi-squared passes once in a million times (Wilson and Hilferty's cube; z = 4.753)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.753 * (2 / (9 * degrees)) ** 0.5) ** 3
