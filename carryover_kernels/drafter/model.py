"""``CarryoverDrafter``: a published block drafter on the ops of this package, with rejected states carried to the next round."""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import _env
from ..ops import block_attention, markov_sample, plan_round, project_states, qk_norm_rope
from .cache import DrafterState
from .config import CheckpointError, DrafterConfig
from .files import read_checkpoint, write_checkpoint
from .formats import MARK, MARK_CONFIG, MARK_SITES, check_tensors, read_config
from .weights import group_weights, layer_weights


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


class Block(NamedTuple):
    """What every layer of one block's pass needs beside its input. R requests of ``rows`` rows."""

    state: DrafterState
    slots: torch.Tensor  # [R] i32, -1 = padding
    block_table: torch.Tensor  # [R, P] i32
    seq_lens: torch.Tensor  # [R] i32, -1 = nothing to draft
    positions: torch.Tensor  # [R * rows] i64
    rows: int


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

    def __init__(
        self,
        config: DrafterConfig,
        tensors: dict[str, torch.Tensor],
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        embed_tokens: torch.Tensor | None = None,
        lm_head: torch.Tensor | None = None,
        mark: torch.Tensor | None = None,
        mark_site: str | None = None,
        mask_embedding: torch.Tensor | None = None,
        rope_parity: bool = False,
    ):
        """Build from a config and its tensors by their published names; see ``from_pretrained``."""
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"drafter: dtype is {dtype}, must be float32, bfloat16 or float16")
        if mark_site is not None:
            if mark_site not in MARK_SITES:
                raise ValueError(f"drafter: mark_site is {mark_site!r}, must be 'pre_norm' or 'post_norm'")
            config = replace(config, mark_site=mark_site)
        check_tensors(config, tensors)
        self.config, self.rope_parity = config, rope_parity
        self.dtype, self.device = dtype or tensors["fc.weight"].dtype, torch.device(device)

        stored_mark = tensors.get(MARK)
        self.tensors = {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
            if name != MARK
        }
        # Where a checkpoint mixes dtypes, what saving must give back.
        kept = dtype is None
        self._stored = {n: t for n, t in tensors.items() if kept and n != MARK and t.is_floating_point() and t.dtype != self.dtype}
        mark = stored_mark if mark is None else mark
        self._mark_dtype = None if mark is None else mark.dtype  # as it came, for saving
        self.mark = None if mark is None else self._vector("mark", mark).to(self.device, torch.float32, copy=True)
        if mask_embedding is not None:
            mask_embedding = self._vector("mask_embedding", mask_embedding.reshape(-1)).to(self.device, self.dtype)
        self.mask_embedding = mask_embedding
        self.embed_tokens = self._own_or_borrowed("embed_tokens", embed_tokens, config.vocab_size)
        self.lm_head = self._own_or_borrowed("lm_head", lm_head, config.draft_vocab_size)
        if config.mask_token_id >= self.embed_tokens.shape[0] and mask_embedding is None:
            raise CheckpointError(
                f"config.json: mask_token_id is {config.mask_token_id}, must be below the {self.embed_tokens.shape[0]} rows of embed_tokens"
            )

        w = self.tensors
        self.layers = [layer_weights(config, w, index) for index in range(config.num_layers)]
        mark_behind_norm = self.mark if config.mark_site == "post_norm" else None
        self.groups = [group_weights(config, w, layers, mark_behind_norm) for layers in config.groups]
        self.rope_tables = {index: group.rope_table for group in self.groups for index in group.layers}
        self.norm = w["norm.weight"].float()
        # Gemma multiplies by the scale as rounded to its embedding's dtype.
        self.embed_scale = float(torch.tensor(config.embed_scale, dtype=self.dtype, device="cpu"))
        head = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}.get(config.head)
        self.head_weight = w[f"{head}.weight"] if head else None
        self.head_bias = w[f"{head}.bias"].float() if head else None
        self.confidence_weight = w["confidence_head.proj.weight"].float() if config.confidence else None
        self.confidence_bias = w["confidence_head.proj.bias"].float() if config.confidence else None
        self.draft_to_target = w["d2t"].to(torch.int64) if config.draft_vocab_size != config.vocab_size else None

    def _vector(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) != (self.config.hidden_size,):
            raise CheckpointError(f"drafter: {name} has shape {list(tensor.shape)}, must be [{self.config.hidden_size}]")
        return tensor.detach()

    def _own_or_borrowed(self, name: str, borrowed: torch.Tensor | None, rows: int) -> torch.Tensor:
        own = self.tensors.get(f"{name}.weight")
        if own is not None:
            return own
        if borrowed is None:
            raise CheckpointError(f"checkpoint: tensor {name}.weight is missing, must be there or given as {name}: the target's")
        # A target's table may be padded beyond the vocabulary its config names.
        if borrowed.dim() != 2 or borrowed.shape[0] < rows or borrowed.shape[1] != self.config.hidden_size:
            raise CheckpointError(f"drafter: {name} has shape {list(borrowed.shape)}, must be [{rows}, {self.config.hidden_size}]")
        return borrowed.detach()[:rows].to(self.device, self.dtype)

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
        source, tensors, mask_embedding = read_checkpoint(path)
        config = read_config(source)
        return cls(config, tensors, dtype, device, embed_tokens, lm_head, mark, mark_site, mask_embedding, rope_parity)

    def save_pretrained(self, path) -> None:
        """Write the checkpoint back in its source format (tensors bit for bit, config key for key) and the mark, if any.

        Borrowed tensors are not written. A folder that exists is replaced only once the new one is complete.
        """
        tensors, source = self.tensors | self._stored, dict(self.config.source)
        for key in ("dtype", "torch_dtype"):
            if source.get(key) is not None and not self._stored:
                source[key] = str(self.dtype).removeprefix("torch.")
        if self.mark is not None:
            tensors[MARK] = self.mark.to(self._mark_dtype)
            if self.config.mark_site != "pre_norm" or MARK_CONFIG in source:
                source[MARK_CONFIG] = dict(source.get(MARK_CONFIG) or {}, mark_site=self.config.mark_site)
        write_checkpoint(path, source, tensors, self.mask_embedding)

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
        return DrafterState(
            self.config,
            max_requests,
            page_size,
            num_pages,
            carry=self.mark is not None if carry is None else carry,
            cache_dtype=cache_dtype or self.dtype,
            carry_dtype=carry_dtype or self.dtype,
            device=self.device,
        )

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
            ValueError: states or indices of a wrong shape; a committed row beyond the slot's reserved pages (seen on a CPU, elsewhere under
                CARRYOVER_CHECK=1); nothing was written.
        """
        fc, config = self.tensors["fc.weight"], self.config
        if states.dim() != 2 or states.shape[1] != fc.shape[1]:
            raise ValueError(
                f"absorb: states has shape {list(states.shape)}, must be [T, {fc.shape[1]}]: {len(config.taps)} taps beside one another"
            )
        if states.dtype != self.dtype:
            raise TypeError(f"absorb: states has dtype {states.dtype}, must be {self.dtype} as the drafter is")
        slots = state.slot_ids(slots)
        slot_mapping = state.slot_mapping(slots, query_start_loc, num_rejected, positions)
        carry_slots = slots if state.carry else torch.full_like(slots, -1)
        row_cache_slot, row_carry_slot, row_position, block_start = plan_round(
            query_start_loc, num_rejected, positions, slot_mapping, carry_slots, state.carry_lens, state.capacity
        )
        # Layers of several geometries run fc once each: its result stays in float32 inside the op (R46), and no known checkpoint has two.
        for index, group in enumerate(self.groups):
            project_states(
                states,
                fc,
                group.kv_weight,
                group.kv_bias,
                group.k_norm_weight,
                self.mark if config.mark_site == "pre_norm" else None,
                group.mark_kv,
                group.rope_table,
                row_cache_slot,
                row_carry_slot,
                row_position,
                [state.k_cache[layer] for layer in group.layers],
                [state.v_cache[layer] for layer in group.layers],
                state.carry_k[index] if state.carry else None,
                state.carry_v[index] if state.carry else None,
                norm_eps=config.rms_norm_eps,
                k_norm_eps=config.rms_norm_eps,
                neox=config.neox,
                share_kv=group.geometry.share_kv,
                v_norm=group.geometry.v_norm,
                rope_parity=self.rope_parity,
            )
        state.advance(slots, query_start_loc, block_start)

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
        config = self.config
        rows = config.num_rows(num_draft_tokens)
        slots = state.slot_ids(slots)
        if tuple(anchor_tokens.shape) != tuple(slots.shape) or anchor_tokens.dtype != torch.int64:
            raise ValueError(
                f"propose: anchor_tokens is {anchor_tokens.dtype} {list(anchor_tokens.shape)}, must be torch.int64 {list(slots.shape)}"
            )
        if (self.device.type == "cpu" or _env.check_values()) and (anchor_tokens >= self.embed_tokens.shape[0]).any():
            raise ValueError(f"propose: anchor_tokens has {int(anchor_tokens.max())}, must be below {self.embed_tokens.shape[0]}")
        state_rows = state.rows_of(slots)
        start = state.seq_lens[state_rows].long()
        # A block that would leave the RoPE table proposes nothing (report R35), like padding.
        live = (slots >= 0) & (start + rows <= config.max_positions)
        anchor_tokens = torch.where(live, anchor_tokens, -1)
        positions = (start[:, None] + torch.arange(rows, device=self.device)).reshape(-1)
        block = Block(state, slots, state.block_table[state_rows], torch.where(live, start, -1).int(), positions, rows)

        hidden = self._hidden(block, anchor_tokens)
        drafting = hidden[:, 1:] if config.layout == "own" else hidden
        # One 2-d product: a strided 3-d view makes PyTorch multiply request by request (on a CPU 1.5 to 2 times as slow at batch 8).
        logits = F.linear(drafting.reshape(-1, drafting.shape[-1]), self.lm_head).view(*drafting.shape[:2], -1)
        if config.logit_softcap:
            logits = config.logit_softcap * torch.tanh(logits.float() / config.logit_softcap)
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.to(self.device, torch.float32)
        else:
            temperature = torch.full(slots.shape, temperature, device=self.device) if temperature else None
        tokens, corrected, probs, confidence = markov_sample(
            logits,
            anchor_tokens,
            self.tensors.get("markov_head.markov_w1.weight"),
            self.tensors.get("markov_head.markov_w2.weight"),
            config.head,
            drafting,
            self.head_weight,
            self.head_bias,
            self.confidence_weight,
            self.confidence_bias,
            self.draft_to_target,
            temperature,
            seeds,
            offsets,
            return_logits=return_logits,
            return_probs=return_probs,
        )
        return Proposal(
            tokens,
            self._over_target(probs) if return_probs else None,
            confidence if config.confidence else None,
            corrected if return_logits else None,
            hidden if return_hidden else None,
        )

    def _over_target(self, probs: torch.Tensor) -> torch.Tensor:
        """Probabilities over draft ids, spread over the target's vocabulary."""
        if self.draft_to_target is None:
            return probs
        ids = torch.arange(probs.shape[-1], device=probs.device) + self.draft_to_target
        return probs.new_zeros(*probs.shape[:-1], self.config.vocab_size).index_copy_(-1, ids, probs)

    def _hidden(self, block: Block, anchor_tokens: torch.Tensor) -> torch.Tensor:
        """[R, rows, H] after the final norm: slot 0 is the anchor, the others are masks behind it."""
        config, requests, rows = self.config, block.slots.shape[0], block.rows
        ids = torch.full((requests, rows), config.mask_token_id, dtype=torch.int64, device=self.device)
        ids[:, 0] = anchor_tokens.clamp(min=0)
        if self.mask_embedding is None:
            x = F.embedding(ids, self.embed_tokens)
        else:
            x = self.mask_embedding.expand(requests, rows, -1).clone()
            x[:, 0] = F.embedding(ids[:, 0], self.embed_tokens)
        if config.embed_scale != 1.0:
            x = x * self.embed_scale
        x = x.reshape(requests * rows, -1)
        for index in range(config.num_layers):
            x = self._layer(index, block, x)
        return self._norm(x, self.norm).view(requests, rows, -1)

    def _layer(self, index: int, block: Block, x: torch.Tensor) -> torch.Tensor:
        weights = self.layers[index]
        norms = weights.norms
        attended = self._attention(index, block, self._norm(x, norms["input_layernorm"]))
        if self.config.family == "qwen3":
            x = x + attended
            return x + self._mlp(weights, self._norm(x, norms["post_attention_layernorm"]), F.silu)
        x = x + self._norm(attended, norms["post_attention_layernorm"])
        fed = self._mlp(weights, self._norm(x, norms["pre_feedforward_layernorm"]), lambda gate: F.gelu(gate, approximate="tanh"))
        return (x + self._norm(fed, norms["post_feedforward_layernorm"])) * weights.scalar

    def _attention(self, index: int, block: Block, x: torch.Tensor) -> torch.Tensor:
        config, weights, layer = self.config, self.layers[index], self.config.layers[index]
        geometry, state, rows = layer.geometry, block.state, block.rows
        q, k, v = qk_norm_rope(
            F.linear(x, weights.qkv, weights.qkv_bias),
            block.positions,
            self.rope_tables[index],
            weights.q_norm,
            weights.k_norm,
            config.num_heads,
            geometry.num_kv_heads,
            config.rms_norm_eps,
            config.neox,
            geometry.share_kv,
            geometry.v_norm,
            self.rope_parity,
        )
        carry_k, carry_v = state.carry_of(index)
        out, _ = block_attention(
            q.view(-1, rows, config.num_heads, geometry.head_dim),
            k.view(-1, rows, geometry.num_kv_heads, geometry.head_dim),
            v.view(-1, rows, geometry.num_kv_heads, geometry.head_dim),
            state.k_cache[index],
            state.v_cache[index],
            block.block_table,
            block.seq_lens,
            carry_k,
            carry_v,
            state.carry_lens if state.carry else None,
            block.slots if state.carry else None,
            scale=config.scale,
            causal=layer.causal,
            window_left=layer.window_left,
            window_right=layer.window_right,
            sinks=weights.sinks,
            softcap=config.softcap,
        )
        return F.linear(out.view(x.shape[0], -1), weights.out, weights.out_bias)

    def _mlp(self, weights, x: torch.Tensor, activation) -> torch.Tensor:
        gate, up = F.linear(x, weights.gate_up).chunk(2, dim=-1)
        return F.linear(activation(gate) * up, weights.down)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps).to(x.dtype)
