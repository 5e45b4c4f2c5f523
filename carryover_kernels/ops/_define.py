"""The torch library of this package: one schema an op, defined here whether or not any backend is built."""

import torch

from .. import _env

NAMESPACE = "carryover_kernels"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
FAKES = {}  # name -> fake, in the order of definition
_DEBUG = {}  # op -> (fake, check_values)


def define(name: str, schema: str, fake, check_values) -> "torch._ops.OpOverload":
    """Define ``carryover_kernels::name`` with its fake implementation and return its default overload.

    ``fake`` and ``check_values`` take the op's arguments in schema order; the latter reads values and runs under ``CARRYOVER_CHECK=1`` alone.

    ``Library.define`` rather than the ``custom_op`` decorator: about 3 µs a call against 16 (DESIGN section 3).
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    FAKES[name] = fake
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    _DEBUG[op] = (fake, check_values)
    return op


def call(op, *args):
    """Call ``op``; a refused argument raises ``ValueError`` or ``TypeError`` with its one sentence.

    C++ checks arrive as ``RuntimeError`` with the function, file and line in front and a trace behind: only the sentence is kept.
    """
    if not torch.compiler.is_compiling() and _env.check_values():
        fake, check_values = _DEBUG[op]
        _refuse_kinds(op, args)
        fake(*args)  # shapes and dtypes first: the checks of values rely on them
        check_values(*args)
    try:
        return op(*args)
    except (RuntimeError, AttributeError) as error:  # AttributeError: a check written in Python met None
        _refuse_kinds(op, args)
        refused = refusal(op._schema.name.split("::")[1], str(error))
        if refused is None:
            raise
        raise refused from None


def _refuse_kinds(op, args):
    """Raise ``TypeError`` with one sentence for the first argument that is not of the schema's kind.

    Called once PyTorch or a backend has failed: PyTorch's own text is many lines, and lets None through where a tensor must be.
    """
    name = op._schema.name.split("::")[1]
    for argument, value in zip(op._schema.arguments, args):
        kind = str(argument.type)
        optional, is_list = kind.startswith("Optional["), kind.startswith("List[")
        if value is None and optional:
            continue
        inner = kind.removeprefix("Optional[").removeprefix("List[").rstrip("]")
        if not is_list:
            _refuse_kind(name, argument.name, value, inner)
        elif not isinstance(value, list | tuple):
            raise TypeError(f"{name}: {argument.name} is of type {type(value).__name__}, must be a list of tensors")
        else:
            for index, one in enumerate(value):
                _refuse_kind(name, f"{argument.name}[{index}]", one, inner)


KINDS = {"Tensor": ("a tensor", ()), "int": ("an integer", (int,)), "float": ("a number", (int, float)), "bool": ("a bool", (int,))}
KINDS["str"] = ("a string", (str,))


def _refuse_kind(op: str, name: str, value, kind: str):
    wanted, types = KINDS[kind]
    if not isinstance(value, (torch.Tensor, *types)):  # PyTorch turns a tensor of one element into a number itself
        raise TypeError(f"{op}: {name} is of type {type(value).__name__}, must be {wanted}")
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        raise TypeError(f"{op}: {name} has layout {value.layout}, must be torch.strided")


def refusal(name: str, text: str) -> Exception | None:
    """The exception for an argument refused by op ``name``, read out of ``text``, or None where it is another failure."""
    for line in text.splitlines():
        start = line.find(f"{name}: ")
        if start >= 0 and " must " in line[start:]:
            sentence = line[start:]
            return (TypeError if " has dtype " in sentence else ValueError)(sentence)
    return None
