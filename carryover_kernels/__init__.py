"""Kernels and a thin drafter for Carryover Drafting (arXiv 2609.14717). Nothing heavy is imported until a name is used."""

import importlib

__version__ = "0.1.0"

_HOME = {
    **{
        op: "ops"
        for op in (
            "block_attention",
            "carry_to_pages",
            "clear_carry",
            "markov_sample",
            "plan_round",
            "project_states",
            "qk_norm_rope",
            "verify_draft",
        )
    },
    "use_backend": "backend",
    "CarryoverDrafter": "drafter",
    "DecodingSession": "decoding",
    "Target": "decoding",
    "generate": "decoding",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'carryover_kernels' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"carryover_kernels.{_HOME[name]}"), name)
    globals()[name] = value  # the next use is a plain attribute, which torch.compile can trace too
    return value


def __dir__():
    return sorted(__all__)
