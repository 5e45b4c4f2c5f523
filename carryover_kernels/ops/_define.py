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
        fake(*args)  # shapes and dtypes first: the checks of values rely on them
        check_values(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        refused = refusal(op._schema.name.split("::")[1], str(error))
        if refused is None:
            raise
        raise refused from None


def refusal(name: str, text: str) -> Exception | None:
    """The exception for an argument refused by op ``name``, read out of ``text``, or None where it is another failure."""
    for line in text.splitlines():
        start = line.find(f"{name}: ")
        if start >= 0 and " must " in line[start:]:
            sentence = line[start:]
            return (TypeError if " has dtype " in sentence else ValueError)(sentence)
    return None
