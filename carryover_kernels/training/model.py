"""The drafter as a differentiable torch module. Same formulas and tensor names as the published checkpoints.

Serving runs on the ops (carryover_kernels.drafter); this class is for training and for tests that compare the two.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from carryover_kernels.drafter.files import write_checkpoint

MARK = "carryover_mark"  # [H] f32: the one tensor that carryover adds to a checkpoint
CARRIED = ("states", "draft_tokens", "target_tokens")


@dataclass(frozen=True)
class DraftConfig:
    """Shape of a drafter. `shift` says what block row j predicts: 0: the token at its own position, row 0 nothing
    (z-lab); 1: the next token, every row (DSpark)."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    taps: tuple
    block: int
    mask_token: int
    target_hidden: int
    target_layers: int
    eps: float = 1e-6
    theta: float = 1e6
    max_position: int = 2048
    shift: int = 0
    mark: str = ""  # "", "pre_norm" or "post_norm"
    carried: str = "states"  # study only: carried rows are tap states, or embeddings of the drafts or of the target's tokens there
    own_projector: bool = False  # study only: carried tap states go through a projector of their own in place of fc
    carry_pos_offset: int = 0  # study only: added to carried rows' positions
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: bool = False
    confidence_markov: bool = True
    borrowed: bool = True  # embeddings and lm_head are the target's and not in the checkpoint

    @property
    def proposals(self):
        return self.block if self.shift else self.block - 1

    def to_json(self):
        """config.json of the z-lab layout (shift 0) or of DeepSpec's (shift 1)."""
        common = dict(
            attention_bias=False, attention_dropout=0.0, block_size=self.block, head_dim=self.head_dim,
            hidden_act="silu", hidden_size=self.hidden, intermediate_size=self.intermediate,
            layer_types=["full_attention"] * self.layers, max_position_embeddings=self.max_position,
            model_type="qwen3", num_attention_heads=self.heads, num_hidden_layers=self.layers,
            num_key_value_heads=self.kv_heads, num_target_layers=self.target_layers, rms_norm_eps=self.eps,
            rope_parameters={"rope_theta": self.theta, "rope_type": "default"}, rope_theta=self.theta,
            sliding_window=None, tie_word_embeddings=False, use_cache=True, use_sliding_window=False,
            vocab_size=self.vocab, dtype="bfloat16",
        )
        study = {k: getattr(self, k) for k in STUDY if getattr(self, k) != getattr(type(self), k)}
        if self.mark or study:
            common["carryover_config"] = {**({"mark_site": self.mark} if self.mark else {}), **study}
        if self.shift == 0:
            inner = dict(mask_token_id=self.mask_token, target_layer_ids=list(self.taps))
            if self.markov_rank:
                inner.update(markov_rank=self.markov_rank, markov_head_type=self.markov_type)
            return {"architectures": ["DFlashDraftModel"], **common, "dflash_config": inner}
        return {
            "architectures": ["Qwen3DSparkModel"], **common, "mask_token_id": self.mask_token,
            "target_layer_ids": list(self.taps), "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_type, "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence_markov,
        }

    @classmethod
    def from_json(cls, raw, mark=""):
        """From either layout's config.json; taps and the mask token are never guessed."""
        inner = raw.get("dflash_config", raw)
        zlab = "dflash_config" in raw
        for key in ("target_layer_ids", "mask_token_id"):
            if key not in inner:
                raise ValueError(f"draft model: config.json lacks {key}, must have it")
        rope = raw.get("rope_parameters") or {}
        return cls(
            vocab=raw["vocab_size"], hidden=raw["hidden_size"], layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"], kv_heads=raw["num_key_value_heads"], head_dim=raw["head_dim"],
            intermediate=raw["intermediate_size"], taps=tuple(inner["target_layer_ids"]),
            block=inner.get("block_size", raw.get("block_size")), mask_token=inner["mask_token_id"],
            target_hidden=raw.get("target_hidden_size", raw["hidden_size"]), target_layers=raw["num_target_layers"],
            eps=raw["rms_norm_eps"], theta=float(rope.get("rope_theta", raw.get("rope_theta", 1e6))),
            max_position=raw["max_position_embeddings"], shift=0 if zlab else 1,
            mark=raw.get("carryover_config", {}).get("mark_site", "") or mark,
            **{k: v for k, v in raw.get("carryover_config", {}).items() if k in STUDY},
            markov_rank=inner.get("markov_rank", 0), markov_type=inner.get("markov_head_type", "vanilla"),
            confidence=raw.get("enable_confidence_head", False),
            confidence_markov=raw.get("confidence_head_with_markov", True),
        )


STUDY = ("carried", "own_projector", "carry_pos_offset")  # what serving refuses: it carries tap states through fc, where they were


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rope(x, positions, theta):
    """Neox rotation over the whole head. x [N, T, heads, D], positions [N, T] -> same shape; angles in f32."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[..., None].to(torch.float32) * frequencies
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.watch = None  # a list gets each pass's attention on carried rows [N, A, B], mean over heads
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.eps)
        self.k_norm = RMSNorm(c.head_dim, c.eps)

    def keys(self, x, positions):
        """K (normed, rotated) and V of rows x [N, T, H]: two of [N, T, kv_heads, D]."""
        shape = (*x.shape[:2], self.c.kv_heads, self.c.head_dim)
        k = rope(self.k_norm(self.k_proj(x).view(shape)), positions, self.c.theta)
        return k, self.v_proj(x).view(shape)

    def forward(self, x, positions, outside, mask, carried=None):
        """outside: K and V of context (and carried) rows in front of the block's own; mask [N, 1, Q, K] bool, a BlockMask of
        flex_attention, or the pair of Sight.apart, with which carried rows' K and V [N, A, G, kv_heads, D] come apart."""
        q = self.q_norm(self.q_proj(x).view(*x.shape[:2], self.c.heads, self.c.head_dim))
        q = rope(q, positions, self.c.theta)
        own = self.keys(x, positions)
        if isinstance(mask, tuple):
            return self.o_proj(attention_apart(q, outside, own, carried, *mask, self.watch).flatten(2))
        k, v = (torch.cat([there, here], 1).transpose(1, 2) for there, here in zip(outside, own, strict=True))
        if torch.is_tensor(mask):
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True)
        else:
            out = flex_attention(q.transpose(1, 2), k, v, block_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def attention_apart(q, context, own, carried, sees_context, sees_own, watch=None):
    """Attention of A blocks of a sequence, each over the shared context and its own rows only. q [N, A * B, heads, D];
    context k, v [N, S, kv_heads, D]; own [N, A * B, kv_heads, D]; carried [N, A, G, kv_heads, D] or None."""
    n, rows, heads, d = q.shape
    kv, count = own[0].shape[2], sees_own.shape[1]
    group = heads // kv
    if carried is not None:
        own = [torch.cat([c, o.unflatten(1, (count, -1))], 2) for c, o in zip(carried, own, strict=True)]
    else:
        own = [o.unflatten(1, (count, -1)) for o in own]
    q = q * d**-0.5
    grouped = q.view(n, rows, kv, group, d).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [N, kv, group * rows, D]
    k, v = (t.transpose(1, 2) for t in context)
    far = (grouped @ k.transpose(-1, -2)).unflatten(2, (group, rows))
    each = q.view(n, count, -1, kv, group, d).permute(0, 1, 3, 4, 2, 5).flatten(3, 4)  # [N, A, kv, group * B, D]
    own_k, own_v = (t.transpose(2, 3) for t in own)
    near = (each @ own_k.transpose(-1, -2)).unflatten(3, (group, -1))
    far = far.float().masked_fill(~sees_context[:, :, None], -torch.inf)
    near = near.float().masked_fill(~sees_own[:, :, :, None], -torch.inf).permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    weights = torch.softmax(torch.cat([far, near], -1), -1).to(v.dtype)
    far, near = weights.split([k.shape[2], weights.shape[-1] - k.shape[2]], -1)
    if watch is not None and carried is not None:
        watch.append(near[..., : carried[0].shape[2]].float().sum(-1).mean((1, 2)).unflatten(1, (count, -1)))
    out = (far.flatten(2, 3) @ v).view(n, kv, group, rows, d)
    near = near.unflatten(3, (count, -1)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
    near = (near @ own_v).unflatten(3, (group, -1)).permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    return (out + near).permute(0, 3, 1, 2, 4).reshape(n, rows, heads, d)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)

    def forward(self, x, positions, outside, mask, carried=None):
        x = x + self.self_attn(self.input_layernorm(x), positions, outside, mask, carried)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Low-rank bias from the previous token, W2 f(W1[prev]); f by type: vanilla, gated, rnn (ENGINE_FACTS 2e)."""

    def __init__(self, c):
        super().__init__()
        r = c.markov_rank
        if c.markov_type not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"draft model: markov_head_type was {c.markov_type!r}, must be vanilla, gated or rnn")
        self.type = c.markov_type
        self.markov_w1 = nn.Embedding(c.vocab, r)
        self.markov_w2 = nn.Linear(r, c.vocab, bias=False)
        if c.markov_type == "gated":
            self.gate_proj = nn.Linear(c.hidden + r, r)
        elif c.markov_type == "rnn":
            self.joint_proj = nn.Linear(2 * r + c.hidden, 3 * r)

    def step(self, previous, hidden, state):
        """previous [...] i64, hidden [..., H], state [..., r] -> (bias factor [..., r] before W2, new state)."""
        w = self.markov_w1(previous)
        if self.type == "vanilla":
            return w, state
        if self.type == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, w], -1))) * w, state
        gate, content, out = self.joint_proj(torch.cat([state, w, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(content)
        return torch.tanh(out), state

    def initial_state(self, hidden):
        return hidden.new_zeros(*hidden.shape[:-2], self.markov_w1.embedding_dim)

    def factors(self, previous, hidden):
        """Teacher-forced factors [..., P, r] of all slots: previous [..., P] (slot 0: the anchor), hidden [..., P, H]."""
        if self.type != "rnn":
            return self.step(previous, hidden, None)[0]
        state, out = self.initial_state(hidden), []
        for i in range(previous.shape[-1]):
            factor, state = self.step(previous[..., i], hidden[..., i, :], state)
            out.append(factor)
        return torch.stack(out, -2)


class ConfidenceHead(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Linear(c.hidden + (c.markov_rank if c.confidence_markov else 0), 1)


class DraftModel(nn.Module):
    """Drafter with borrowed (frozen) embeddings [V, H] and head [V, H].

    Context and carried rows enter as raw tap states; `features` turns them into what k_proj and v_proj read.
    """

    def __init__(self, c, embed, head):
        super().__init__()
        self.c = c
        self.fc = nn.Linear(len(c.taps) * c.target_hidden, c.hidden, bias=False)
        self.hidden_norm = RMSNorm(c.hidden, c.eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.eps)
        if c.markov_rank:
            self.markov_head = MarkovHead(c)
        if c.confidence:
            self.confidence_head = ConfidenceHead(c)
        if c.mark:
            self.carryover_mark = nn.Parameter(torch.zeros(c.hidden))
        if c.carried not in CARRIED:
            raise ValueError(f"draft model: carried was {c.carried!r}, must be one of {', '.join(CARRIED)}")
        if c.carried != "states":
            self.carry_proj = nn.Linear(embed.shape[1], c.hidden, bias=False)
        elif c.own_projector:
            self.carry_proj = nn.Linear(self.fc.in_features, c.hidden, bias=False)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("head", head, persistent=False)

    def initialise(self, seed, std=0.02):
        """N(0, std) for matrices as the published trainers do; W2 of a Markov head is zero so that rank 0 is its
        exact start; norms one; the mark is set by whoever adds it."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim >= 2:
                    p.normal_(0, std, generator=generator)
                elif name.endswith("bias") or name == MARK:
                    p.zero_()
                if name.endswith("markov_w2.weight"):
                    p.zero_()
        return self

    def features(self, taps, carried=False):
        """taps [N, T, taps*H_target] -> [N, T, H]. Carried rows get the mark, before hidden_norm or after it; they may be
        rows [N, T, H_target] of the embeddings where the config says so."""
        if not torch.is_autocast_enabled(taps.device.type):
            taps = taps.to(self.fc.weight.dtype)  # cached states are bf16
        x = (self.carry_proj if carried and hasattr(self, "carry_proj") else self.fc)(taps)
        if carried and self.c.mark == "pre_norm":
            x = x + self.carryover_mark.to(x.dtype)
        x = self.hidden_norm(x)
        if carried and self.c.mark == "post_norm":
            x = x + self.carryover_mark.to(x.dtype)
        return x

    def outside_keys(self, features, positions):
        """Every layer's K and V of context or carried rows: list of (k, v), each [N, T, kv_heads, D]."""
        return [layer.self_attn.keys(features, positions) for layer in self.layers]

    def block_tokens(self, anchor_tokens):
        """anchor_tokens [...] -> [..., block]: the anchor and mask tokens."""
        tokens = anchor_tokens[..., None].repeat(*[1] * anchor_tokens.ndim, self.c.block)
        tokens[..., 1:] = self.c.mask_token
        return tokens

    def forward(self, tokens, positions, outside, mask, carried=None):
        """tokens, positions [N, Q]; outside as outside_keys (rows in the mask's key order, blocks come last);
        mask and carried (one entry a layer) as in Attention. Returns hidden states after the final norm, [N, Q, H]."""
        x = F.embedding(tokens, self.embed)
        for i, (layer, pair) in enumerate(zip(self.layers, outside, strict=True)):
            x = layer(x, positions, pair, mask, carried[i] if carried else None)
        return self.norm(x)

    def proposal_rows(self, hidden):
        """[..., block, H] -> the rows that propose, [..., proposals, H]."""
        return hidden if self.c.shift else hidden[..., 1:, :]

    def logits(self, rows, previous=None):
        """Logits [..., P, V] of proposing rows [..., P, H]; with a Markov head `previous` [..., P] are the tokens
        before each slot (teacher forcing)."""
        logits = F.linear(rows, self.head.to(rows.dtype))
        if self.c.markov_rank:
            logits = logits + self.markov_head.markov_w2(self.markov_head.factors(previous, rows))
        return logits

    def confidence_logits(self, rows, previous):
        """[..., P]: how likely the target is to accept each slot, as a logit."""
        if self.c.confidence_markov and self.c.markov_rank:
            rows = torch.cat([rows, self.markov_head.markov_w1(previous)], -1)
        return self.confidence_head.proj(rows)[..., 0]

    @torch.no_grad()
    def propose(self, rows, anchor_tokens, temperature=0.0, generator=None, allow_mask=False):
        """The drafter's real sampler, left to right. rows [..., P, H], anchor_tokens [...] -> tokens and logits
        [..., P], [..., P, V]. In training the mask token is never proposed: the target never saw it."""
        base = F.linear(rows, self.head.to(rows.dtype)).float()
        tokens, corrected, previous = [], [], anchor_tokens
        state = self.markov_head.initial_state(rows) if self.c.markov_rank else None
        for i in range(self.c.proposals):
            logits = base[..., i, :]
            if self.c.markov_rank:
                factor, state = self.markov_head.step(previous, rows[..., i, :], state)
                logits = logits + self.markov_head.markov_w2(factor).float()
            corrected.append(logits)
            allowed = logits.clone()
            if not allow_mask:
                allowed[..., self.c.mask_token] = -torch.inf
            if temperature:
                noise = torch.rand(allowed.shape, generator=generator, device=allowed.device).clamp_min(1e-20)
                allowed = allowed / temperature - torch.log(-torch.log(noise))
            previous = allowed.argmax(-1)
            tokens.append(previous)
        return torch.stack(tokens, -1), torch.stack(corrected, -2)

    def save(self, directory, dtype=torch.bfloat16, state=None):
        """config.json and model.safetensors in the published layout; see drafter.files.write_checkpoint. Norms and
        matrices in `dtype`, the mark in f32. state: whole weights, where the module's own lie in shares."""
        tensors = {
            name: value.detach().to(torch.float32 if name == MARK else dtype)
            for name, value in (state or self.state_dict()).items()
        }
        if not self.c.borrowed:
            tensors["embed_tokens.weight"] = self.embed.to(dtype)
            tensors["lm_head.weight"] = self.head.to(dtype)
        write_checkpoint(directory, self.c.to_json(), tensors)

    @classmethod
    def load(cls, directory, embed=None, head=None, mark=None, **study):
        """Reads a z-lab or DeepSpec folder in f32. embed and head are the target's where the folder has none.
        mark: "pre_norm" or "post_norm" adds a zero mark to a checkpoint without one. study: fields of STUDY; a projector that
        the checkpoint lacks starts as fc, or as the identity on embeddings."""
        from safetensors.torch import load_file

        directory = Path(directory)
        tensors = {k: v.float() for k, v in load_file(directory / "model.safetensors").items()}
        config = DraftConfig.from_json(json.loads((directory / "config.json").read_text()))
        config = replace(config, borrowed="embed_tokens.weight" not in tensors)
        embed = tensors.pop("embed_tokens.weight", embed)
        head = tensors.pop("lm_head.weight", head)
        if embed is None or head is None:
            raise ValueError(f"draft model: {directory} has no embed_tokens or lm_head, must be given the target's")
        if mark is not None:
            config = replace(config, mark=mark)
        model = cls(replace(config, **study), embed, head)
        if hasattr(model, "carry_proj") and "carry_proj.weight" not in tensors:
            states = model.c.carried == "states"
            tensors["carry_proj.weight"] = tensors["fc.weight"] if states else torch.eye(*model.carry_proj.weight.shape)
        if config.mark and MARK not in tensors:
            tensors[MARK] = torch.zeros(config.hidden)
        model.load_state_dict(tensors)
        return model
