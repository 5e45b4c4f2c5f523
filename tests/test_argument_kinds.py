"""An argument that is no tensor, number or list at all: one sentence that names it, and nothing written."""

import cases
import numpy
import pytest
import torch
from poison import Frozen

from carryover_kernels import ops
from carryover_kernels.ops import _define

pytestmark = pytest.mark.usefixtures("backend")


def good_arguments(rng):
    return {
        "plan_round": cases.plan_case(rng),
        "project_states": cases.project_case(rng, scales=True, bias=True),
        "qk_norm_rope": cases.qk_case(rng),
        "block_attention": cases.attention_case(rng, sinks=True, kv_scales=True, tree=True),
        "carry_to_pages": cases.pages_case(rng),
        "markov_sample": cases.markov_case(rng, head="gated", temperature=cases.WARM),
        "verify_draft": cases.verify_case(rng),
        "clear_carry": {"carry_slot_ids": cases.i32([0]), "carry_lens": cases.i32([3])},
    }


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("name", list(_define.FAKES))
def test_each_argument_of_the_wrong_kind(name, check, rng, device, monkeypatch):
    """PyTorch's own text here is many lines with a declaration in them, and None came through as a tensor without elements."""
    monkeypatch.setenv("CARRYOVER_CHECK", check)
    schema = {argument.name: str(argument.type) for argument in getattr(torch.ops.carryover_kernels, name).default._schema.arguments}
    args = good_arguments(rng)[name]
    tried = 0
    for argument, value in args.items():
        kind = schema[argument]
        if kind in ("bool", "Optional[float]", "Optional[int]"):
            continue  # anything has a truth value; the other two are None in these cases
        wrong = [object()]
        if "Tensor" in kind:
            wrong += ["x", 3, numpy.zeros(3)] + ([] if kind.startswith("Optional[") else [None])
        if kind == "Tensor" or kind == "Optional[Tensor]":
            wrong += [torch.eye(3).to_sparse()]
        if kind in ("int", "float", "str"):
            wrong += [None]
        if kind == "List[Tensor]":
            wrong += [[value[0], None], [value[0], 3]]
        for one in wrong:
            before = Frozen(**{key: tensor for key, tensor in args.items() if key != argument})
            with pytest.raises(TypeError) as refused:
                getattr(ops, name)(**args | {argument: one})
            sentence = str(refused.value)
            assert sentence.startswith(f"{name}: {argument}") and " must be " in sentence and "\n" not in sentence, sentence
            before.check()
            tried += 1
    assert tried >= 5 * sum("Tensor" in schema[argument] for argument in args)
