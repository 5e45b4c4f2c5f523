"""Shapes by model name: what benchmarks run at. Sizes are those of public checkpoints' configs (ENGINE_FACTS section 1), where known."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Drafter:
    name: str
    hidden: int
    intermediate: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    taps: int
    vocab: int
    block: int  # rows of a block
    share_kv: bool = False
    v_norm: bool = False

    @property
    def features(self) -> int:  # of the taps, side by side
        return self.taps * self.hidden

    @property
    def kv_rows(self) -> int:  # of the packed K/V weight
        return self.layers * (1 if self.share_kv else 2) * self.kv_heads * self.head_dim

    @property
    def qkv_columns(self) -> int:
        return (self.q_heads + (1 if self.share_kv else 2) * self.kv_heads) * self.head_dim


QWEN3_4B = Drafter("qwen3-4b", 2560, 9728, 5, 32, 8, 128, 5, 151936, 16)
# Widths of the 12B drafter are assumed (its file was not opened); head dim 512, shared K/V and normed v are Gemma 4's.
GEMMA4_12B = Drafter("gemma4-12b", 3840, 15360, 5, 16, 2, 512, 5, 262144, 8, share_kv=True, v_norm=True)
EMBEDDED = Drafter("embedded", 256, 256, 3, 4, 2, 64, 3, 2048, 8)
MODELS = {model.name: model for model in (QWEN3_4B, GEMMA4_12B, EMBEDDED)}
