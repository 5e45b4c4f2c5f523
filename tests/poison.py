"""Guard bands round every buffer, and poison wherever an op has no business.

Floats outside the valid region are NaN (all bits set, in every float format down to fp8). Integers outside it are huge or negative ids.
"""

import torch

BAND = 256  # bytes on either side: more than a vector register, and it keeps alignment of 64
FLOAT_BYTE, INT_BYTE = 0xFF, 0x6B  # NaN in every float format; ids and lengths far out of range


class Guards:
    """Copies tensors into storages of their own with a band on either side, and later says whether a band changed."""

    def __init__(self, device="cpu"):
        self.device = device
        self.kept = []

    def put(self, tensor, name="tensor"):
        """A copy of ``tensor`` with the same strides; the gaps of a strided tensor are copied from its own storage."""
        if tensor is None:
            return None
        if isinstance(tensor, (list, tuple)):
            return [self.put(t, f"{name}[{i}]") for i, t in enumerate(tensor)]
        if tensor.numel() == 0:  # nothing to guard, and opcheck's storage arithmetic wants plain strides
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        size = tensor.element_size()
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
        byte = FLOAT_BYTE if tensor.is_floating_point() else INT_BYTE
        raw = torch.full((extent * size + 2 * BAND,), byte, dtype=torch.uint8)
        span = tensor.as_strided((extent,), (1,), tensor.storage_offset())
        raw[BAND : BAND + extent * size] = span.contiguous().view(torch.uint8)
        raw = raw.to(self.device)
        copy = raw[BAND : BAND + extent * size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), BAND // size)
        self.kept.append((name, raw, byte))
        return copy

    def check(self):
        for name, raw, byte in self.kept:
            for side, band in (("before", raw[:BAND]), ("after", raw[-BAND:])):
                assert bool((band == byte).all()), f"memory {side} {name} was written"


class Frozen:
    """Remembers the bytes of inputs that an op must not touch."""

    def __init__(self, **tensors):
        flat = {}
        for name, value in tensors.items():
            for i, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(tensor, torch.Tensor):
                    flat[f"{name}[{i}]" if isinstance(value, (list, tuple)) else name] = (tensor, raw_bytes(tensor).clone())
        self.flat = flat

    def check(self):
        for name, (tensor, before) in self.flat.items():
            assert torch.equal(raw_bytes(tensor), before), f"input {name} was changed"


def raw_bytes(tensor):
    """All bytes between a tensor's first and last element, its gaps included."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return tensor.as_strided((extent,), (1,), tensor.storage_offset()).contiguous().view(torch.uint8)


def nan_like(tensor):
    return torch.full_like(tensor.contiguous(), float("nan")) if tensor.is_floating_point() else torch.full_like(tensor, -(2**30))
