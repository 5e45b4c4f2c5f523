"""A whole drafter from the reference ops: reads a published checkpoint folder, absorbs verified rows, proposes a block.

One request, one paged cache, every number in one dtype. Families: z-lab DFlash, DeepSpec DSpark / DFlash for Qwen3 and Gemma 4.
"""

import json
import math
import pathlib

import torch

from .block_attention import block_attention
from .clear_carry import clear_carry
from .markov_sample import markov_sample
from .plan_round import plan_round
from .project_states import project_states
from .qk_norm_rope import qk_norm_rope, rms_norm

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
}


def load_safetensors(path) -> dict[str, torch.Tensor]:
    """Tensors of a .safetensors file: 8 bytes of header length, a JSON header, the bytes."""
    raw = pathlib.Path(path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = torch.frombuffer(bytearray(data[begin:end]), dtype=DTYPES[entry["dtype"]])
            tensors[name] = flat.view(entry["shape"])
    return tensors


def rope_table(config, head_dim) -> torch.Tensor:
    """[max_position, D] f32, [cos | sin]: default or proportional frequencies, angles in float64."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    frequencies = torch.tensor([theta ** (-2 * j / head_dim) for j in range(head_dim // 2)], dtype=torch.float64)
    if rope.get("rope_type") == "proportional":  # the last pairs don't turn; the exponents are those of the whole head
        frequencies[int(rope["partial_rotary_factor"] * head_dim / 2) :] = 0.0
    angles = torch.arange(config["max_position_embeddings"], dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


class Drafter:
    """``mark`` [H] or None; ``post_norm``: the mark goes behind hidden_norm instead of before it."""

    def __init__(self, folder, dtype=torch.float64, mark=None, post_norm=False, page_size=4, pages=64):
        folder = pathlib.Path(folder)
        self.config = config = json.loads((folder / "config.json").read_text())
        tensors = load_safetensors(folder / "model.safetensors")
        if (folder / "target.safetensors").exists():
            tensors |= load_safetensors(folder / "target.safetensors")
        self.w = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.dtype = dtype

        options = config | config.get("dflash_config", {})
        self.block_size, self.mask_token_id = options["block_size"], options["mask_token_id"]
        self.gemma = config["model_type"].startswith("gemma4")
        self.anchor_predicts = "DSpark" in config["architectures"][0]  # DSpark: every row proposes; DFlash: the masks do
        self.num_drafts = self.block_size - (0 if self.anchor_predicts else 1)
        self.layers = config["num_hidden_layers"]
        self.eps = config["rms_norm_eps"]
        self.q_heads, self.kv_heads, self.head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.share_kv = bool(config.get("attention_k_eq_v"))
        if self.gemma:
            self.kv_heads = config.get("num_global_key_value_heads") or self.kv_heads
            self.head_dim = config.get("global_head_dim") or self.head_dim
        self.table = rope_table(config, self.head_dim)

        # Context K/V weights of all layers, stacked, with hidden_norm's weight folded in.
        projections = ["k_proj"] if self.share_kv else ["k_proj", "v_proj"]
        stacked = torch.cat([self.layer(i, f"self_attn.{p}.weight") for i in range(self.layers) for p in projections])
        self.kv_weight = stacked * self.w["hidden_norm.weight"]
        self.k_norm_weight = torch.stack([self.layer(i, "self_attn.k_norm.weight") for i in range(self.layers)])
        mark = None if mark is None else mark.to(dtype)
        self.mark = None if post_norm else mark
        self.mark_kv = stacked @ mark if post_norm and mark is not None else None

        # A shuffled page table: slot and position must not be mistaken for each other.
        self.page_size = page_size
        self.block_table = torch.tensor([[(7 * p + 3) % pages for p in range(pages)]], dtype=torch.int32)
        self.k_cache = [torch.full((pages, page_size, self.kv_heads, self.head_dim), float("nan"), dtype=dtype) for _ in range(self.layers)]
        self.v_cache = [k.clone() for k in self.k_cache]
        carry = (self.layers, 3, self.num_drafts, self.kv_heads, self.head_dim)
        self.carry_k, self.carry_v = (torch.full(carry, float("nan"), dtype=dtype) for _ in range(2))
        self.carry_lens = torch.zeros(3, dtype=torch.int32)
        self.carry_slot_ids = torch.tensor([1], dtype=torch.int32)

    def layer(self, i, name):
        return self.w[f"layers.{i}.{name}"]

    def absorb(self, features, first_position, num_rejected):
        """Verified rows [n, F] from ``first_position`` on; the last ``num_rejected`` are carried. Gives the next block's start."""
        positions = torch.arange(first_position, first_position + features.shape[0])
        pages = self.block_table[0, positions // self.page_size].long()
        rows = torch.tensor([0, features.shape[0]], dtype=torch.int32)
        rejected = torch.tensor([num_rejected], dtype=torch.int32)
        slots = pages * self.page_size + positions % self.page_size
        *plan, block_start = plan_round(
            rows, rejected, positions, slots, self.carry_slot_ids, self.carry_lens, self.carry_k.shape[2]
        )  # fmt: skip
        project_states(
            features, self.w["fc.weight"], self.kv_weight, None, self.k_norm_weight, self.mark, self.mark_kv, self.table, *plan,
            self.k_cache, self.v_cache, self.carry_k, self.carry_v, self.eps, self.eps,
            share_kv=self.share_kv, v_norm=self.gemma, dtype=self.dtype,
        )  # fmt: skip
        return int(block_start[0])

    def forget(self):
        clear_carry(self.carry_slot_ids, self.carry_lens)

    def propose(self, anchor_token, start):
        """Greedy block at ``start``: block_hidden [B, H], draft_logits [N, V], draft_tokens [N], confidence_logits [N] or empty."""
        tokens = torch.tensor([anchor_token] + [self.mask_token_id] * (self.block_size - 1))
        positions = torch.arange(start, start + self.block_size)
        h = self.w["embed_tokens.weight"][tokens]
        if self.gemma:
            h = h * math.sqrt(h.shape[1])
        for i in range(self.layers):
            h = self.gemma_layer(i, h, positions) if self.gemma else self.qwen3_layer(i, h, positions)
        h = rms_norm(h, self.eps, self.w["norm.weight"])

        rows = h if self.anchor_predicts else h[1:]
        logits = rows @ self.w["lm_head.weight"].T
        cap = self.config.get("final_logit_softcapping") if self.gemma else None
        if cap:
            logits = cap * torch.tanh(logits / cap)
        rank = self.config.get("markov_rank", 0)
        kind = self.config.get("markov_head_type", "vanilla") if rank else "none"
        head = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}.get(kind, "")
        draft_tokens, draft_logits, _, confidence = markov_sample(
            logits[None], torch.tensor([anchor_token]), self.w.get("markov_head.markov_w1.weight"),
            self.w.get("markov_head.markov_w2.weight"), kind, rows[None], self.w.get(f"{head}.weight"), self.w.get(f"{head}.bias"),
            self.w.get("confidence_head.proj.weight"), self.w.get("confidence_head.proj.bias"), return_logits=True, dtype=self.dtype,
        )  # fmt: skip
        return h, draft_logits[0], draft_tokens[0], confidence[0] if confidence.numel() else confidence

    def attention(self, i, x, positions):
        names = ["q_proj", "k_proj"] + ([] if self.share_kv else ["v_proj"])
        qkv = x @ torch.cat([self.layer(i, f"self_attn.{name}.weight") for name in names]).T
        q, k, v = qk_norm_rope(
            qkv, positions, self.table, self.layer(i, "self_attn.q_norm.weight"), self.layer(i, "self_attn.k_norm.weight"),
            self.q_heads, self.kv_heads, self.eps, share_kv=self.share_kv, v_norm=self.gemma, dtype=self.dtype,
        )  # fmt: skip
        out, _ = block_attention(
            q[None], k[None], v[None], self.k_cache[i], self.v_cache[i], self.block_table, positions[:1].int(),
            self.carry_k[i], self.carry_v[i], self.carry_lens, self.carry_slot_ids,
            scale=1.0 if self.gemma else None, dtype=self.dtype,
        )  # fmt: skip
        return out.reshape(x.shape[0], -1) @ self.layer(i, "self_attn.o_proj.weight").T

    def mlp(self, i, x):
        gate, up = x @ self.layer(i, "mlp.gate_proj.weight").T, x @ self.layer(i, "mlp.up_proj.weight").T
        act = torch.nn.functional.gelu(gate, approximate="tanh") if self.gemma else torch.nn.functional.silu(gate)
        return (act * up) @ self.layer(i, "mlp.down_proj.weight").T

    def norm(self, i, name, x):
        return rms_norm(x, self.eps, self.layer(i, f"{name}.weight"))

    def qwen3_layer(self, i, h, positions):
        h = h + self.attention(i, self.norm(i, "input_layernorm", h), positions)
        return h + self.mlp(i, self.norm(i, "post_attention_layernorm", h))

    def gemma_layer(self, i, h, positions):
        h = h + self.norm(i, "post_attention_layernorm", self.attention(i, self.norm(i, "input_layernorm", h), positions))
        h = h + self.norm(i, "post_feedforward_layernorm", self.mlp(i, self.norm(i, "pre_feedforward_layernorm", h)))
        return h * self.layer(i, "layer_scalar")
