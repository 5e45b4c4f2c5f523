"""Checkpoint tensors as the ops take them: packed projections, folded norm, float32 epilogue vectors, RoPE tables."""

import math
from dataclasses import dataclass

import torch

from .config import DrafterConfig, Geometry, Rope


@dataclass(frozen=True)
class GroupWeights:
    """One ``project_states`` call: layers of one geometry (Lg of them, indices ``layers``)."""

    layers: tuple[int, ...]
    geometry: Geometry
    kv_weight: torch.Tensor  # [Lg * (2 or 1) * Hkv * D, H], times hidden_norm's weight
    kv_bias: torch.Tensor | None  # [rows] f32
    k_norm_weight: torch.Tensor  # [Lg, D] f32
    mark_kv: torch.Tensor | None  # [rows] f32, the post_norm mark through the unfolded weight
    rope_table: torch.Tensor  # [max_positions, rotary_dim] f32


@dataclass(frozen=True)
class LayerWeights:
    """The block's own path through one layer. Projections in the drafter's dtype, norms in float32."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    norms: dict[str, torch.Tensor]
    sinks: torch.Tensor | None
    scalar: torch.Tensor | None


def pack(tensors: dict[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    """Concatenate rows of ``names`` into one tensor, and make those entries of ``tensors`` views of it, so that nothing is kept twice."""
    packed = torch.cat([tensors[name] for name in names])
    rows = [tensors[name].shape[0] for name in names]
    tensors.update(zip(names, packed.split(rows)))
    return packed


def layer_weights(config: DrafterConfig, tensors: dict[str, torch.Tensor], index: int) -> LayerWeights:
    """Packs layer ``index``'s projections (see ``pack``)."""
    layer, at = config.layers[index], f"layers.{index}."
    projections = ["q_proj", "k_proj"] if layer.geometry.share_kv else ["q_proj", "k_proj", "v_proj"]
    bias = config.attention_bias
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.family == "gemma4":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return LayerWeights(
        qkv=pack(tensors, [f"{at}self_attn.{name}.weight" for name in projections]),
        qkv_bias=pack(tensors, [f"{at}self_attn.{name}.bias" for name in projections]) if bias else None,
        out=tensors[f"{at}self_attn.o_proj.weight"],
        out_bias=tensors[f"{at}self_attn.o_proj.bias"] if bias else None,
        gate_up=pack(tensors, [f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"]),
        down=tensors[f"{at}mlp.down_proj.weight"],
        q_norm=tensors[f"{at}self_attn.q_norm.weight"].float(),
        k_norm=tensors[f"{at}self_attn.k_norm.weight"].float(),
        norms={name: tensors[f"{at}{name}.weight"].float() for name in norms},
        sinks=tensors[f"{at}self_attn.attention_sink_bias"].float() if layer.sinks else None,
        scalar=tensors[f"{at}layer_scalar"] if config.family == "gemma4" else None,
    )


def group_weights(
    config: DrafterConfig, tensors: dict[str, torch.Tensor], layers: tuple[int, ...], mark: torch.Tensor | None
) -> GroupWeights:
    """Stack the K/V projections of ``layers``; ``mark`` [H] f32 is given where it enters after the norm."""
    geometry = config.layers[layers[0]].geometry
    projections = ["k_proj"] if geometry.share_kv else ["k_proj", "v_proj"]
    names = [f"layers.{layer}.self_attn.{name}" for layer in layers for name in projections]
    dtype = tensors["fc.weight"].dtype
    norm = tensors["hidden_norm.weight"].float()
    # Folded in float32 and rounded once a projection, not stacked in float32 first: that would double the peak.
    folded = torch.cat([(tensors[f"{name}.weight"].float() * norm).to(dtype) for name in names])
    return GroupWeights(
        layers=layers,
        geometry=geometry,
        kv_weight=folded,
        kv_bias=torch.cat([tensors[f"{name}.bias"].float() for name in names]) if config.attention_bias else None,
        k_norm_weight=torch.stack([tensors[f"layers.{layer}.self_attn.k_norm.weight"].float() for layer in layers]),
        # The mark goes behind hidden_norm's weight, so through the weights as they were.
        mark_kv=None if mark is None else torch.cat([tensors[f"{name}.weight"].float() @ mark for name in names]),
        rope_table=rope_table(geometry.rope, geometry.head_dim, config.max_positions).to(folded.device),
    )


def rope_table(rope: Rope, head_dim: int, max_positions: int) -> torch.Tensor:
    """[max_positions, rotary_dim] f32, [cos | sin], computed in float32 throughout (report R55) as the drafters' own code does."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32, device="cpu")[:, None] * frequencies
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=1)


def rotary_columns(rope: Rope, head_dim: int) -> int:
    """Columns of the RoPE table: the elements of a head that it rotates."""
    return head_dim // 2 * 2 if rope.kind == "proportional" else -(-int(head_dim * rope.partial) // 2) * 2


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians a position of each rotating pair, [rotary_dim / 2] f32, and what cos and sin are multiplied by."""
    given = dict(rope.parameters)
    if rope.kind == "proportional":
        # All pairs are in the table; exponents are those of the whole head and pairs past the share don't turn (Gemma 4).
        pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        turning = int(rope.partial * head_dim / 2)
        frequencies = 1.0 / rope.theta ** (2 * pairs / head_dim) / given.get("factor", 1.0)
        return torch.where(pairs < turning, frequencies, 0.0), 1.0
    rotary_dim = int(head_dim * rope.partial)
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim)
    if rope.kind == "linear":
        return frequencies / given["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, **given), 1.0
    if rope.kind == "yarn":
        return _yarn(frequencies, rope.theta, rotary_dim, **given)
    return frequencies, 1.0


def _llama3(frequencies, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings):
    """Llama 3.1: pairs with few turns over the original context slow down by ``factor``, those with many don't, linear in turns between."""
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def _yarn(
    frequencies, theta, rotary_dim, factor, original_max_position_embeddings, beta_fast=32.0, beta_slow=1.0, attention_factor=None,
    mscale=None, mscale_all_dim=None, truncate=True,
):  # fmt: skip
    """YaRN (arXiv 2309.00071): as llama3, but linear in the pair's index between the pairs with ``beta_fast`` and ``beta_slow`` turns."""

    def pair_with(turns):
        return rotary_dim * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)

    def grown(scale):
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if attention_factor is None:
        attention_factor = grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)
    return frequencies * (1 - slowed + slowed / factor), attention_factor
