"""The ops: schema, fake implementation, checks and public function of each."""

from .. import backend
from . import _define
from .block_attention import block_attention
from .carry_to_pages import carry_to_pages
from .clear_carry import clear_carry
from .markov_sample import markov_sample
from .plan_round import plan_round
from .project_states import project_states
from .qk_norm_rope import qk_norm_rope
from .verify_draft import verify_draft

__all__ = [
    "block_attention",
    "carry_to_pages",
    "clear_carry",
    "markov_sample",
    "plan_round",
    "project_states",
    "qk_norm_rope",
    "verify_draft",
]

backend.attach(_define.FAKES, _define.LIBRARY)
