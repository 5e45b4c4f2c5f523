"""``CarryoverDrafter``: a published block drafter on the ops of this package, with rejected states carried to the next round."""

from typing import NamedTuple

import torch

from .cache import DrafterState
from .config import DrafterConfig


class Proposal(NamedTuple):
    """What ``propose`` gives. R requests, N proposals, V the TARGET's vocabulary.

    tokens: [R, N] i64, target ids; -1 for padding (slot -1) and for a request whose block would end past the drafter's positions.
    probs: [R, N, V] f32, the distribution each token was drawn from, zeros for padding; None unless asked for. ``verify_draft`` takes it.
    confidence: [R, N] f32 logits of acceptance; None without a confidence head.
    logits: [R, N, Vd] f32 over DRAFT ids after softcap and Markov bias; None unless asked for.
    hidden: [R, B, H], the drafter's output after its final norm (all block rows, anchor first); None unless asked for.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    confidence: torch.Tensor | None
    logits: torch.Tensor | None
    hidden: torch.Tensor | None


class CarryoverDrafter:
    """A DFlash, DSpark or speculators drafter.

    One round, with T packed verify rows of R requests (after prefill: the prompt's rows, none rejected)::

        drafter = CarryoverDrafter.from_pretrained(path, embed_tokens=target_embedding, lm_head=target_head)
        state = drafter.new_state(max_requests=8, page_size=16, num_pages=512)
        slot = state.allocate(num_tokens=2048)
        drafter.absorb(state, [slot], taps, query_start_loc, num_rejected, positions)   # committed to pages, rejected to the carry slot
        tokens = drafter.propose(state, [slot], anchor_tokens).tokens
    """

    config: DrafterConfig
    dtype: torch.dtype
    device: torch.device
    mark: torch.Tensor | None  # [H] f32

    def __init__(self, config: DrafterConfig, tensors: dict[str, torch.Tensor], dtype=None, device=None, embed_tokens=None, lm_head=None,
                 mark=None, rope_parity: bool = False):  # fmt: skip
        """Build from a config and its tensors by their canonical (z-lab/DeepSpec) names; see ``from_pretrained``."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(
        cls,
        path,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        embed_tokens: torch.Tensor | None = None,
        lm_head: torch.Tensor | None = None,
        mark: torch.Tensor | None = None,
        mark_site: str | None = None,
        rope_parity: bool = False,
    ) -> "CarryoverDrafter":
        """Read a checkpoint folder (config.json + safetensors): z-lab DFlash, DeepSpec DSpark/DFlash (qwen3, gemma4) or speculators.

        Args:
            path: a local folder.
            dtype: of weights and states, float32, bfloat16 or float16; None: as stored.
            embed_tokens, lm_head: [V, H], the target's, used where the checkpoint has none of its own (z-lab's never has).
            mark: [H], overrides the checkpoint's ``carryover_mark``; without either the drafter has no mark.
            mark_site: 'pre_norm' or 'post_norm', overrides the checkpoint's; default 'pre_norm'.
            rope_parity: rotate in the activation dtype as Transformers does.

        Raises:
            CheckpointError (a ValueError): something is missing, unknown or of the wrong shape; the sentence names the key or tensor.
            FileNotFoundError: no such folder, or no config or weights in it.
        """
        raise NotImplementedError

    def save_pretrained(self, path) -> None:
        """Write the checkpoint back in its source format (tensors bit for bit, config key for key), plus ``carryover_mark`` if there is a mark.

        Borrowed tensors are not written. A folder that exists is replaced only once the new one is complete.
        """
        raise NotImplementedError

    def new_state(
        self,
        max_requests: int,
        page_size: int = 16,
        num_pages: int = 256,
        carry: bool | None = None,
        cache_dtype: torch.dtype | None = None,
        carry_dtype: torch.dtype | None = None,
    ) -> DrafterState:
        """Empty pages and carry buffers. carry: keep rejected rows; None: if the drafter has a mark. Dtypes: None = the drafter's."""
        raise NotImplementedError

    def absorb(
        self,
        state: DrafterState,
        slots,
        states: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_rejected: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Take in the target's states of verified rows: committed rows to the pages, rejected ones to the carry slot (replacing the last).

        The committed length of a request becomes the position after its last committed row: the next block's anchor.

        Args:
            slots: [R] list or i32 tensor; -1 = padding.
            states: [T, taps * target hidden] in the drafter's dtype: tap states concatenated in ``config.taps`` order.
            query_start_loc: [R + 1] i32. num_rejected: [R] i32, 0 for prompt rows. positions: [T] i64.

        Raises:
            ValueError: a committed row has no reserved page (on a CPU, or under CARRYOVER_CHECK=1); nothing was written.
        """
        raise NotImplementedError

    def propose(
        self,
        state: DrafterState,
        slots,
        anchor_tokens: torch.Tensor,
        num_draft_tokens: int | None = None,
        temperature: float | torch.Tensor = 0.0,
        seeds: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        return_probs: bool = False,
        return_logits: bool = False,
        return_hidden: bool = False,
    ) -> Proposal:
        """One block: N proposals for each request, behind its anchor token.

        Args:
            slots: [R] list or i32 tensor; -1 = padding.
            anchor_tokens: [R] i64, the last emitted token of each request, at position ``seq_lens``.
            num_draft_tokens: N, at most ``config.num_draft_tokens`` (default).
            temperature: 0 = greedy; a float for all or [R] f32.
            seeds, offsets: [R] i64, needed unless temperature is the float 0 (see ``markov_sample``: offsets never repeat for a seed).

        Raises:
            ValueError: num_draft_tokens is more than the block was trained for, or seeds and offsets lack.
        """
        raise NotImplementedError
