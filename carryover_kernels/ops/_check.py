"""Argument checks in Python: the same sentences as csrc/common/check.h, for fakes and Python launchers.

A sentence is ``op: argument was this, must be that``. Checks run in the order of the signature and never touch values;
those that must read values (and so sync) are each op's ``_check_values``, run under ``CARRYOVER_CHECK=1``.
"""

import torch

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
CACHES = ACTIVATIONS + (torch.float8_e4m3fn, torch.float8_e5m2)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
FLOAT32 = (torch.float32,)


def names(dtypes) -> str:
    words = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


class Checker:
    """Checks the arguments of one call of ``op``; sizes are bound to letters (R, T, ...) by the first tensor that has them."""

    def __init__(self, op: str, **sizes: int):
        self.op = op
        self.sizes = dict(sizes)
        self.device = None
        self.device_of = ""

    def fail(self, sentence: str, kind=ValueError):
        raise kind(f"{self.op}: {sentence}")

    def require(self, holds: bool, sentence: str):
        if not holds:
            self.fail(sentence)

    def tensor(self, name: str, tensor, shape: str, dtypes, last_contiguous: bool = False, contiguous: bool = False):
        """Check rank, shape (letters bind on first use, digits are literal), dtype, device and strides of ``tensor``."""
        letters = shape.split()
        drawn = "[" + ", ".join(letters) + "]"
        if tensor.dim() != len(letters):
            self.fail(f"{name} has {tensor.dim()} dimensions, must have {len(letters)}: {drawn}")
        wanted = []
        for letter, size in zip(letters, tensor.shape):
            if letter.isdigit():
                wanted.append(int(letter))
            else:
                wanted.append(self.sizes.setdefault(letter, size))
        if any(a != b for a, b in zip(wanted, tensor.shape)):
            self.fail(f"{name} has shape {list(tensor.shape)}, must be {wanted}: {drawn}")
        if tensor.dtype not in dtypes:
            self.fail(f"{name} has dtype {names([tensor.dtype])}, must be {names(dtypes)}", TypeError)
        if self.device is None:
            self.device, self.device_of = tensor.device, name
        elif tensor.device != self.device:
            self.fail(f"{name} is on {tensor.device}, must be on {self.device} as {self.device_of} is")
        if last_contiguous and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            self.fail(f"{name} has stride {tensor.stride(-1)} in its last dimension, must be 1")
        if contiguous and not tensor.is_contiguous():
            self.fail(f"{name} has strides {list(tensor.stride())}, must be contiguous")

    def optional(self, name: str, tensor, *args, **kwargs):
        if tensor is not None:
            self.tensor(name, tensor, *args, **kwargs)

    def at_least(self, name: str, value: int, least: int):
        if value < least:
            self.fail(f"{name} is {value}, must be at least {least}")

    def finite(self, name: str, value: float):
        if not float("-inf") < value < float("inf"):
            self.fail(f"{name} is {value}, must be finite")

    def finite_and_not_negative(self, name: str, value: float, note: str = ""):
        if not 0 <= value < float("inf"):
            self.fail(f"{name} is {value}, must be finite and at least 0{note}")

    def one_of(self, name: str, value: str, choices):
        if value not in choices:
            self.fail(f"{name} is '{value}', must be one of {', '.join(choices)}")

    def together(self, **arguments):
        """All of ``arguments`` are given, or none is."""
        present = [name for name, value in arguments.items() if value is not None]
        if present and len(present) != len(arguments):
            absent = next(name for name, value in arguments.items() if value is None)
            self.fail(f"{absent} is None, must be given when {present[0]} is")


class Values:
    """Checks that read values, and so sync: ids in range, lengths within tables, finite inputs. Run under ``CARRYOVER_CHECK=1``."""

    def __init__(self, op: str):
        self.op = op

    def fail(self, sentence: str):
        raise ValueError(f"{self.op}: {sentence}")

    def _first(self, name: str, tensor, wrong, rule: str):
        if wrong.numel() and bool(wrong.any()):
            index = wrong.nonzero()[0].tolist()
            value = tensor[tuple(index)].item()
            self.fail(f"{name}{index} is {value}, must be {rule}")

    def at_least(self, name: str, tensor, least, where=None):
        wrong = tensor < least
        self._first(name, tensor, wrong if where is None else wrong & where, f"at least {least}")

    def below(self, name: str, tensor, bound: int, what: str, where=None):
        """Entries are below ``bound``, which is ``what``; negative ones mean skip or padding and pass."""
        wrong = tensor >= bound
        self._first(name, tensor, wrong if where is None else wrong & where, f"below {bound}: {what}")

    def at_most(self, name: str, tensor, bounds, what: str):
        wrong = tensor > bounds
        if bool(wrong.any()):
            index = wrong.nonzero()[0].tolist()
            most = bounds if isinstance(bounds, int) else bounds[tuple(index)].item()
            self.fail(f"{name}{index} is {tensor[tuple(index)].item()}, must be at most {most}: {what}")

    def finite(self, name: str, tensor, where=None, allow_minus_inf: bool = False):
        values = tensor.float()
        wrong = ~values.isfinite()
        if allow_minus_inf:
            wrong &= values != float("-inf")
        if where is not None:
            wrong &= where.view(-1, *[1] * (tensor.dim() - 1))
        self._first(name, tensor, wrong, "finite" + (" or -inf" if allow_minus_inf else ""))

    def row_bounds(self, query_start_loc, rows: int | None):
        """``query_start_loc`` starts at 0 or above, never falls, and stays within the ``rows`` packed rows."""
        self.at_least("query_start_loc", query_start_loc, 0)
        falls = query_start_loc[1:] < query_start_loc[:-1]
        if bool(falls.any()):
            r = int(falls.nonzero()[0]) + 1
            self.fail(
                f"query_start_loc[{r}] is {query_start_loc[r].item()}, must be at least {query_start_loc[r - 1].item()}: it never decreases"
            )
        if rows is not None:
            self.at_most("query_start_loc", query_start_loc, rows, "the packed rows")

    def distinct(self, name: str, tensor, bound: int):
        """No entry of 0..bound-1 occurs twice: two owners would overwrite each other."""
        named = tensor[(tensor >= 0) & (tensor < bound)]
        values, counts = named.unique(return_counts=True)
        if bool((counts > 1).any()):
            self.fail(f"{name} names {values[counts > 1][0].item()} twice, must name each slot at most once")
