"""The ways into an op: the public function with everything guarded, opcheck, torch.compile, and a refusal through both doors."""

import importlib

import pytest
import torch
from poison import Frozen, Guards

from carryover_kernels import ops

COMPARISONS = ("test_schema", "test_faketensor")


def place(args, put):
    return {name: put(value, name) if isinstance(value, (torch.Tensor, list)) else value for name, value in args.items()}


def run(name, args, device="cpu", writes=()):
    """Call public op ``name`` with every tensor between guard bands. Gives (outputs, arguments as the op left them), on the CPU.

    Bands must be intact and tensors outside ``writes`` unchanged to the last byte.
    """
    guards = Guards(device)
    placed = place(args, guards.put)
    frozen = Frozen(**{key: value for key, value in placed.items() if key not in writes})
    out = getattr(ops, name)(**placed)
    guards.check()
    frozen.check()
    out = () if out is None else (out,) if isinstance(out, torch.Tensor) else out
    for i, tensor in enumerate(out):
        assert tensor.is_contiguous(), f"{name}: output {i} is not contiguous"
    return tuple(o.cpu() for o in out), place(placed, lambda value, _: [v.cpu() for v in value] if isinstance(value, list) else value.cpu())


def in_order(name, args):
    """``args`` as the positional tuple of the op's schema, and the op."""
    op = getattr(torch.ops.carryover_kernels, name).default
    values = []
    for argument in op._schema.arguments:
        values.append(args[argument.name] if argument.name in args else argument.default_value)
    return op, tuple(values)


def opcheck(name, args, device="cpu", utils=COMPARISONS):
    """torch.library.opcheck: the schema's write marks, and the fake's shapes, dtypes and strides."""
    op, values = in_order(name, place(args, lambda value, _: Guards(device).put(value)))
    flat = [t for value in values for t in (value if isinstance(value, list) else [value]) if isinstance(t, torch.Tensor)]
    if any(t.is_floating_point() and t.itemsize == 1 for t in flat):
        utils = tuple(u for u in utils if u != "test_schema")  # its comparison multiplies, and PyTorch has no fp8 product
    torch.library.opcheck(op, values, test_utils=utils)


def opcheck_dynamic(name, args, device="cpu"):
    """The whole of opcheck: also autograd registration, and AOTAutograd with dynamic shapes."""
    opcheck(name, args, device, ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"))


def compiled(name, args, device="cpu", backend="aot_eager"):
    """The public op under torch.compile(fullgraph=True): outputs and arguments as it left them."""
    function = torch.compile(getattr(ops, name), fullgraph=True, backend=backend)
    placed = place(args, lambda value, _: Guards(device).put(value))
    out = function(**placed)
    return () if out is None else (out,) if isinstance(out, torch.Tensor) else out, placed


def refused(name, args, sentence, device="cpu"):
    """Both doors refuse ``args`` with the same sentence: the backend's own checks, and the fake's under tracing."""
    kind = TypeError if " has dtype " in sentence else ValueError
    before = Frozen(**args)
    with pytest.raises(kind) as native:
        getattr(ops, name)(**place(args, lambda value, _: [v.to(device) for v in value] if isinstance(value, list) else value.to(device)))
    assert str(native.value) == f"{name}: {sentence}", "the backend's door"
    before.check()
    with pytest.raises(kind) as python:
        importlib.import_module(f"carryover_kernels.ops.{name}")._fake(**args)
    assert str(python.value) == f"{name}: {sentence}", "the fake's door"
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = place(args, lambda v, _: [mode.from_tensor(t) for t in v] if isinstance(v, list) else mode.from_tensor(v))
        with pytest.raises(kind) as traced:
            getattr(ops, name)(**faked)
    assert str(traced.value) == f"{name}: {sentence}", "the fake's door, through the dispatcher"
