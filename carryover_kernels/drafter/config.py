"""One frozen description of a drafter, whatever format its checkpoint came in."""

from dataclasses import dataclass, field


class CheckpointError(ValueError):
    """A checkpoint that can't be honoured; the sentence names the key or tensor."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer, from the drafter's own config (never from the target: reports R01, R02).

    kind: 'default', 'linear', 'proportional', 'llama3' or 'yarn'. partial: share of the head that rotates. parameters: the other
    numbers of the scaling as sorted (key, value) pairs, so that two layers with equal ropes compare equal.
    """

    kind: str
    theta: float
    partial: float = 1.0
    parameters: tuple[tuple[str, float | bool | int], ...] = ()


@dataclass(frozen=True)
class Geometry:
    """What layers must share to be projected in one ``project_states`` call."""

    num_kv_heads: int
    head_dim: int
    rope: Rope
    share_kv: bool = False  # v comes from the raw k (Gemma 4's attention_k_eq_v): there is no v_proj
    v_norm: bool = False  # v is divided by its RMS


@dataclass(frozen=True)
class Layer:
    """One drafter layer: its geometry and its mask. Windows are in tokens of distance, -1 = unlimited (config's W is window_left + 1)."""

    geometry: Geometry
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    sinks: bool = False


@dataclass(frozen=True)
class DrafterConfig:
    """What the drafter is. Built by ``formats.read_config``; ``source`` is the checkpoint's config.json, kept to be written back.

    taps: ids of target layers whose OUTPUT is read, in the order of fc's columns: id i is Hugging Face's ``hidden_states[i + 1]``, -1 the
        embedding output (report R03). Whatever the source format counts, here it is this.
    layout: 'own' = a mask predicts the token at its own position, the anchor's row predicts nothing (z-lab: N = B - 1 proposals);
        'next' = every row predicts the token after it, the anchor's row too (DSpark: N = B).
    block_size: B, rows of a trained block; proposals beyond ``num_draft_tokens`` are refused (rows attend to one another: a wider
        block changes all of them).
    """

    format: str  # 'zlab', 'deepspec' or 'speculators'
    family: str  # 'qwen3' or 'gemma4': which decoder layer
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    layout: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[Layer, ...]
    vocab_size: int  # of the target: rows of embed_tokens
    draft_vocab_size: int  # rows of lm_head; smaller than vocab_size where d2t maps draft ids
    rms_norm_eps: float
    max_positions: int  # rows of the RoPE table; no block may reach beyond it
    attention_bias: bool = False
    neox: bool = True
    scale: float | None = None  # of q.k; None = head_dim ** -0.5
    softcap: float = 0.0  # of attention scores
    embed_scale: float = 1.0
    logit_softcap: float = 0.0  # of the base logits, before the Markov bias
    head: str = "none"  # 'none', 'vanilla', 'gated' or 'rnn'
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    mark_site: str = "pre_norm"  # where the mark enters: 'pre_norm' (between fc and hidden_norm, the default) or 'post_norm'
    source: dict = field(default_factory=dict, repr=False, compare=False, hash=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_draft_tokens(self) -> int:
        """N, most proposals of a block: B - 1 with layout 'own', B with 'next'."""
        return self.block_size - 1 if self.layout == "own" else self.block_size

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layer indices by geometry, in order of first appearance: one ``project_states`` call a group."""
        found: dict[Geometry, list[int]] = {}
        for index, layer in enumerate(self.layers):
            found.setdefault(layer.geometry, []).append(index)
        return tuple(tuple(indices) for indices in found.values())

    def num_rows(self, num_draft_tokens: int | None = None) -> int:
        """Block rows that ``num_draft_tokens`` proposals need (default: all)."""
        wanted = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        if not 1 <= wanted <= self.num_draft_tokens:
            raise ValueError(
                f"propose: num_draft_tokens is {wanted}, must be 1 to {self.num_draft_tokens}: "
                f"the block was trained at {self.block_size} rows"
            )
        return wanted + 1 if self.layout == "own" else wanted
