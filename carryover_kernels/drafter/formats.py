"""Published checkpoint formats: their keys and tensor names in, the same out. Facts are those of z-lab/dflash, DeepSpec and speculators.

What a key means differs by format and a misread key costs acceptance without an error, so nothing is guessed: a key that changes
the maths and isn't honoured here, a tensor that isn't expected, or a missing one raises ``CheckpointError`` naming it.
"""

import math

import torch

from .config import CheckpointError, DrafterConfig, Geometry, Layer, Rope
from .weights import rotary_columns

MARK = "carryover_mark"  # the one tensor that is ours
MARK_CONFIG = "carryover_config"  # and the one config key: {"mark_site": "pre_norm" | "post_norm"}
MARK_SITES = ("pre_norm", "post_norm")

# dflash_config keys that are read below, or that say nothing about one drafter pass. Any other one is refused.
DFLASH_KEYS = {
    "target_layer_ids", "mask_token_id", "block_size", "causal", "use_swa", "swa_window_size", "use_aux_hidden_state",
    "attention_sink_bias", "attention_value_scale", "sample_from_anchor", "mask_token", "projector_type", "num_target_layers", "layer_ids",
    # Ours: z-lab's layout with DeepSpec's heads, as this package's trainer writes it (the paper's Markov drafter).
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
}  # fmt: skip
ROPE_REQUIRED = {
    "default": set(),
    "linear": {"factor"},
    "proportional": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
ROPE_OPTIONAL = {
    "proportional": {"factor"},
    "yarn": {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
}
# Said by the config class beside the rope itself. M-RoPE sections don't matter: drafters use one position a token.
ROPE_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


class Keys:
    """A config dict that names itself in errors."""

    def __init__(self, values: dict, where: str = "config.json"):
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} is {type(values).__name__}, must be an object")
        self.values, self.where = values, where

    def get(self, key, default=None):
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key, why: str = ""):
        value = self.values.get(key)
        if value is None:
            raise CheckpointError(f"{self.where}: {key} is missing, must be given{why}")
        return value

    def integer(self, key, least: int = 1, default: int | None = None) -> int:
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CheckpointError(f"{self.where}: {key} is {value!r}, must be an integer of at least {least}")
        return value

    def number(self, key, default: float | None = None, least: float | None = None, above: float | None = None) -> float:
        value = self.need(key) if default is None else self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (least is not None and value < least) or (above is not None and value <= above):
            bound = f" of at least {least}" if least is not None else f" above {above}" if above is not None else ""
            raise CheckpointError(f"{self.where}: {key} is {value!r}, must be a number{bound}")
        return float(value)

    def flag(self, key, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} is {value!r}, must be true or false")
        return value

    def optional_flag(self, key) -> bool | None:
        return None if self.get(key) is None else self.flag(key)

    def refuse(self, key, *allowed):
        """Raise unless ``key`` is absent or one of ``allowed``."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            wanted = " or ".join(["absent", *(repr(a) for a in allowed)])
            raise CheckpointError(f"{self.where}: {key} is {value!r}, must be {wanted}: it is not supported")


# Reading a config


def read_config(source: dict) -> DrafterConfig:
    """The ``DrafterConfig`` of a config.json, whichever of the three formats it is in.

    Raises:
        CheckpointError: a key is missing, unknown or can't be honoured; the sentence names it.
    """
    keys = Keys(source)
    keys.refuse("quantization_config")  # report R08: packed weights can't be sliced or folded
    keys.refuse("compression_config")
    architectures = keys.get("architectures", [])
    if keys.get("speculators_model_type") is not None:
        return _speculators(keys)
    if architectures == ["DFlashDraftModel"] or keys.get("dflash_config") is not None:
        return _zlab(keys)
    if architectures in (["Qwen3DSparkModel"], ["Gemma4DSparkModel"]):
        return _deepspec(keys, "qwen3" if architectures == ["Qwen3DSparkModel"] else "gemma4")
    raise CheckpointError(
        f"config.json: architectures is {architectures}, must be one of DFlashDraftModel, Qwen3DSparkModel, Gemma4DSparkModel, "
        "or speculators_model_type must be dflash or dspark"
    )


def _zlab(keys: Keys) -> DrafterConfig:
    dflash = Keys(keys.need("dflash_config"), "config.json: dflash_config")
    for key in dflash.values:
        if key not in DFLASH_KEYS:
            raise CheckpointError(f"{dflash.where}: {key} is {dflash.values[key]!r}, must be absent: it is not supported")
    dflash.refuse("projector_type")
    dflash.refuse("use_aux_hidden_state", True)
    dflash.refuse("attention_value_scale", 1, 1.0)
    keys.refuse("logit_scale", 1, 1.0)
    keys.refuse("draft_vocab_size", keys.get("vocab_size"))
    taps = _taps(dflash, "target_layer_ids", _num_target_layers(keys, dflash))
    if keys.get("eagle_aux_hidden_state_layer_ids") is not None:
        keys.refuse("eagle_aux_hidden_state_layer_ids", [tap + 1 for tap in taps])
    if dflash.get("layer_ids") is not None:
        dflash.refuse("layer_ids", list(taps))
    if dflash.flag("use_swa"):
        window, all_slide = dflash.integer("swa_window_size"), "sliding_attention" not in keys.get("layer_types", [])
        keys.refuse("sliding_window", window)
    else:
        window, all_slide = keys.get("sliding_window"), False
    causal = keys.optional_flag("is_causal")
    causal = dflash.optional_flag("causal") if causal is None else causal
    return DrafterConfig(
        format="zlab",
        taps=taps,
        block_size=_either(keys, dflash, "block_size").integer("block_size", 2),
        mask_token_id=_either(keys, dflash, "mask_token_id").integer("mask_token_id", 0),
        layout="next" if dflash.flag("sample_from_anchor") else "own",
        neox=_neox(keys),
        logit_softcap=keys.number("final_logit_softcapping", 0.0, least=0),
        **_qwen3(keys, window, causal, all_slide, dflash.flag("attention_sink_bias"), keys.flag("add_swa_attention_sink_bias")),
        **_heads(dflash, default_rank=0),
        **_mark_site(keys),
        source=keys.values,
    )


def _deepspec(keys: Keys, family: str) -> DrafterConfig:
    common = dict(
        format="deepspec",
        taps=_taps(keys, "target_layer_ids", _num_target_layers(keys)),
        block_size=keys.integer("block_size"),
        mask_token_id=keys.integer("mask_token_id", 0),
        layout="next",
        **_heads(keys),
        **_mark_site(keys),
        source=keys.values,
    )
    if family == "qwen3":
        return DrafterConfig(**common, **_qwen3(keys, keys.get("sliding_window"), None))
    return DrafterConfig(**common, **_gemma4(keys))


def _speculators(keys: Keys) -> DrafterConfig:
    kind = keys.need("speculators_model_type")
    if kind not in ("dflash", "dspark"):
        raise CheckpointError(f"config.json: speculators_model_type is {kind!r}, must be 'dflash' or 'dspark'")
    nested = Keys(keys.need("transformer_layer_config"), "config.json: transformer_layer_config")
    nested.refuse("quantization_config")
    # Here id i is the stream ENTERING layer i, z-lab's output of layer i - 1.
    taps = tuple(tap - 1 for tap in _ids(keys, "aux_hidden_state_layer_ids", least=0))
    causal_windows = not keys.flag("sliding_window_non_causal")
    fields = _qwen3(nested, nested.get("sliding_window"), None, sliding_causal=causal_windows)
    fields["draft_vocab_size"] = keys.integer("draft_vocab_size")
    if fields["draft_vocab_size"] > fields["vocab_size"]:
        size = fields["draft_vocab_size"]
        raise CheckpointError(f"config.json: draft_vocab_size is {size}, must be at most vocab_size, {fields['vocab_size']}")
    return DrafterConfig(
        format="speculators",
        taps=taps,
        block_size=keys.integer("block_size", 2),
        mask_token_id=keys.integer("mask_token_id", 0),
        layout="next" if keys.flag("sample_from_anchor", kind == "dspark") else "own",
        **fields,
        **(_heads(keys) if kind == "dspark" else {}),
        **_mark_site(keys),
        source=keys.values,
    )


def _qwen3(
    keys: Keys, window, causal, all_slide: bool = False, sinks: bool = False, sliding_sinks: bool = False, sliding_causal: bool = True
) -> dict:
    """Fields of Qwen3 decoder layers. causal: of every layer; None: sliding layers by ``sliding_causal``, full ones never (report R39)."""
    keys.refuse("hidden_act", "silu")
    keys.refuse("attn_logit_softcapping")
    num_layers, num_heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    geometry = _geometry(
        keys,
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=keys.integer("head_dim", default=keys.integer("hidden_size") // num_heads),
        rope=read_rope(keys, "full_attention"),
    )
    layers = []
    for kind in _layer_types(keys, num_layers):
        slides = all_slide or kind == "sliding_attention"
        is_causal = (slides and sliding_causal) if causal is None else causal
        layers.append(Layer(geometry, is_causal, *_window(keys, window, slides), sinks or (slides and sliding_sinks)))
    return dict(
        family="qwen3",
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        layers=tuple(layers),
        vocab_size=keys.integer("vocab_size"),
        draft_vocab_size=keys.integer("vocab_size"),
        rms_norm_eps=keys.number("rms_norm_eps", least=0),
        max_positions=keys.integer("max_position_embeddings"),
        attention_bias=keys.flag("attention_bias"),
    )


def _geometry(keys: Keys, **fields) -> Geometry:
    """The ``Geometry`` of ``fields``, whose heads divide and whose rope fits a head."""
    geometry, heads = Geometry(**fields), keys.integer("num_attention_heads")
    if heads % geometry.num_kv_heads:
        raise CheckpointError(f"{keys.where}: num_key_value_heads is {geometry.num_kv_heads}, must divide num_attention_heads, {heads}")
    columns = rotary_columns(geometry.rope, geometry.head_dim)
    if not 2 <= columns <= geometry.head_dim:
        raise CheckpointError(
            f"{keys.where}: head_dim is {geometry.head_dim} with partial_rotary_factor {geometry.rope.partial}, "
            f"which rotates {columns} of its elements, must rotate 2 to {geometry.head_dim}"
        )
    return geometry


def _gemma4(keys: Keys) -> dict:
    keys.refuse("hidden_activation", "gelu_pytorch_tanh")
    keys.refuse("enable_moe_block", False)
    keys.refuse("hidden_size_per_layer_input", 0)
    keys.refuse("num_kv_shared_layers", 0)
    keys.refuse("use_double_wide_mlp", False)
    num_layers = keys.integer("num_hidden_layers")
    per_layer = Keys(keys.get("per_layer_config", {}), "config.json: per_layer_config")  # where Transformers after 5.10 keeps two of them
    shares = keys.flag("attention_k_eq_v")
    layers = []
    for index, kind in enumerate(_layer_types(keys, num_layers)):
        slides = kind == "sliding_attention"
        own = Keys(per_layer.get(str(index), per_layer.get(index, {})), f"{per_layer.where}: {index}")
        if slides:
            kv_heads, head_dim = keys.integer("num_key_value_heads"), keys.integer("head_dim")
        else:
            kv_heads = keys.get("num_global_key_value_heads") if shares else None
            kv_heads, head_dim = kv_heads or keys.integer("num_key_value_heads"), keys.get("global_head_dim") or keys.integer("head_dim")
        geometry = _geometry(
            keys,
            num_kv_heads=own.integer("num_key_value_heads", default=kv_heads),
            head_dim=own.integer("head_dim", default=head_dim),
            rope=read_rope(keys, kind),
            share_kv=shares and not slides,
            v_norm=True,
        )
        layers.append(Layer(geometry, slides, *_window(keys, keys.get("sliding_window"), slides)))
    return dict(
        family="gemma4",
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=keys.integer("num_attention_heads"),
        layers=tuple(layers),
        vocab_size=keys.integer("vocab_size"),
        draft_vocab_size=keys.integer("vocab_size"),
        rms_norm_eps=keys.number("rms_norm_eps", least=0),
        max_positions=keys.integer("max_position_embeddings"),
        attention_bias=keys.flag("attention_bias"),
        scale=1.0,
        softcap=keys.number("attn_logit_softcapping", 0.0, least=0),
        embed_scale=float(keys.integer("hidden_size")) ** 0.5,
        logit_softcap=keys.number("final_logit_softcapping", 0.0, least=0),
    )


def _heads(keys: Keys, default_rank: int | None = None) -> dict:
    rank = keys.integer("markov_rank", 0, default_rank)
    head = keys.need("markov_head_type") if rank else "none"
    if head not in ("none", "vanilla", "gated", "rnn") or (rank and head == "none"):
        raise CheckpointError(f"{keys.where}: markov_head_type is {head!r}, must be 'vanilla', 'gated' or 'rnn'")
    confidence = keys.flag("enable_confidence_head")
    with_markov = confidence and keys.flag("confidence_head_with_markov")
    if with_markov and not rank:
        raise CheckpointError(f"{keys.where}: confidence_head_with_markov is true, must be false with markov_rank 0")
    return dict(head=head, markov_rank=rank, confidence=confidence, confidence_with_markov=with_markov)


def _ids(keys: Keys, key: str, least: int) -> list[int]:
    ids = keys.need(key, ": which target layers are read is never guessed")
    valid = isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) and i >= least for i in ids)
    if not valid or len(set(ids)) != len(ids):
        raise CheckpointError(f"{keys.where}: {key} is {ids!r}, must be a list of distinct integers of at least {least}")
    return ids


def _taps(keys: Keys, key: str, num_target_layers) -> tuple[int, ...]:
    ids = _ids(keys, key, least=-1)
    if num_target_layers is not None and max(ids) >= num_target_layers - 1:
        # Hugging Face stores the state AFTER the final norm there, caches and hooks the one before (R05): training used either.
        raise CheckpointError(f"{keys.where}: {key} is {ids}, must be below the target's last layer, {num_target_layers - 1}")
    return tuple(ids)


def _num_target_layers(*places: Keys) -> int | None:
    return next((keys.integer("num_target_layers") for keys in places if keys.get("num_target_layers") is not None), None)


def _either(keys: Keys, dflash: Keys, key: str) -> Keys:
    """Where ``key`` is: older z-lab files have it at the top, newer ones inside dflash_config."""
    if keys.get(key) is not None and dflash.get(key) is not None:
        keys.refuse(key, dflash.get(key))
    return dflash if dflash.get(key) is not None else keys


def _neox(keys: Keys) -> bool:
    if keys.get("is_neox_style") is not None:
        keys.refuse("rope_is_neox_style", keys.flag("is_neox_style"))
    return keys.flag("is_neox_style", keys.flag("rope_is_neox_style", True))


def _mark_site(keys: Keys) -> dict:
    ours = Keys(keys.get(MARK_CONFIG, {}), f"config.json: {MARK_CONFIG}")
    for key in ours.values:
        if key != "mark_site":
            ours.refuse(key)  # drafters of the study that carry something else, or elsewhere
    site = ours.get("mark_site", "pre_norm")
    if site not in MARK_SITES:
        raise CheckpointError(f"config.json: {MARK_CONFIG}: mark_site is {site!r}, must be 'pre_norm' or 'post_norm'")
    return dict(mark_site=site)


def _layer_types(keys: Keys, num_layers: int) -> list[str]:
    kinds = keys.get("layer_types", ["full_attention"] * num_layers)
    valid = isinstance(kinds, list) and len(kinds) == num_layers
    if not valid or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise CheckpointError(f"{keys.where}: layer_types is {kinds}, must be {num_layers} of 'full_attention' or 'sliding_attention'")
    return kinds


def _window(keys: Keys, window, slides: bool) -> tuple[int, int]:
    """(left, right) of a layer: a config's W counts the token itself."""
    if not slides:
        return -1, -1
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(f"{keys.where}: sliding_window is {window!r}, must be a positive integer with sliding_attention layers")
    return window - 1, window - 1


def read_rope(keys: Keys, layer_type: str) -> Rope:
    """The rope of one layer type from ``rope_parameters`` (flat, or by layer type) or the older ``rope_theta`` with ``rope_scaling``."""
    name = "rope_parameters" if keys.get("rope_parameters") is not None else "rope_scaling"
    values = Keys(keys.get(name, {}), f"{keys.where}: {name}")
    if values.get(layer_type) is not None:
        values = Keys(values.get(layer_type), f"{values.where}: {layer_type}")
    theta = values if values.get("rope_theta") is not None else keys
    kind = values.get("rope_type", values.get("type", "default"))
    kind = "default" if kind == "mrope" else kind
    if not isinstance(kind, str) or kind not in ROPE_REQUIRED:
        raise CheckpointError(f"{values.where}: rope_type is {kind!r}, must be one of {', '.join(ROPE_REQUIRED)}")
    for key in sorted(ROPE_REQUIRED[kind]):
        values.number(key, above=0)
    read = ROPE_REQUIRED[kind] | ROPE_OPTIONAL.get(kind, set())
    parameters = []
    for key in sorted(key for key in values.values if values.get(key) is not None):
        if key in read:
            if key == "truncate":
                values.flag(key)
            else:
                values.number(key, **(dict(above=0) if key.startswith("beta") else dict(least=0)))
            parameters.append((key, values.get(key)))
        elif key not in ROPE_COMMON:
            raise CheckpointError(f"{values.where}: {key} is {values.get(key)!r}, must be absent with rope_type {kind!r}")
    partial = values.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if not 0 < partial <= 1:
        raise CheckpointError(f"{values.where}: partial_rotary_factor is {partial}, must be above 0 and at most 1")
    # At 1 no pair would turn slower than another, and YaRN divides by the logarithm.
    return Rope(kind, theta.number("rope_theta", above=1), partial, tuple(parameters))


# Tensors


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of ``config`` must hold, borrowed ones aside; -1 = any size."""
    hidden, bias = config.hidden_size, config.attention_bias
    shapes = {"fc.weight": (hidden, -1), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for index, layer in enumerate(config.layers):
        geometry, at = layer.geometry, f"layers.{index}."
        q_rows, kv_rows = config.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config.family == "gemma4":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            shapes[at + "layer_scalar"] = (1,)
        shapes.update({f"{at}{norm}.weight": (hidden,) for norm in norms})
        rows = {"q_proj": q_rows, "k_proj": kv_rows} | ({} if geometry.share_kv else {"v_proj": kv_rows})
        for name, count in rows.items():
            shapes[f"{at}self_attn.{name}.weight"] = (count, hidden)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, q_rows)
        if bias:
            shapes.update({f"{at}self_attn.{name}.bias": (count,) for name, count in (rows | {"o_proj": hidden}).items()})
        shapes.update({f"{at}self_attn.{norm}.weight": (geometry.head_dim,) for norm in ("q_norm", "k_norm")})
        if layer.sinks:
            shapes[f"{at}self_attn.attention_sink_bias"] = (config.num_heads,)
        shapes.update({f"{at}mlp.{name}.weight": (config.intermediate_size, hidden) for name in ("gate_proj", "up_proj")})
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, config.intermediate_size)
    rank = config.markov_rank
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    for head, module, head_shape in (("gated", "gate_proj", (rank, hidden + rank)), ("rnn", "joint_proj", (3 * rank, 2 * rank + hidden))):
        if config.head == head:
            shapes[f"markov_head.{module}.weight"], shapes[f"markov_head.{module}.bias"] = head_shape, head_shape[:1]
    if config.confidence:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if config.confidence_with_markov else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if config.draft_vocab_size != config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def optional_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a checkpoint may hold: its own embedding and head, the mark, and speculators' leftovers, kept to be written back."""
    shapes = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        MARK: (config.hidden_size,),
    }
    if config.format == "speculators":
        shapes |= {"t2d": (config.vocab_size,), "d2t": (config.draft_vocab_size,)}
        shapes |= {"verifier_norm.weight": (config.hidden_size,), "verifier_lm_head.weight": (config.draft_vocab_size, config.hidden_size)}
    return shapes


def check_tensors(config: DrafterConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ``CheckpointError`` for the first tensor that is missing, unexpected, of a wrong shape or not a plain float."""
    expected = expected_tensors(config)
    for name in expected:
        if name not in tensors:
            raise CheckpointError(f"checkpoint: tensor {name} is missing, must be there")
    known = optional_tensors(config) | expected
    for name, tensor in tensors.items():
        if name not in known:
            raise CheckpointError(f"checkpoint: tensor {name} is unknown, must be one that this kind of drafter has")
        if len(known[name]) != tensor.dim() or any(w not in (-1, s) for w, s in zip(known[name], tensor.shape)):
            raise CheckpointError(f"checkpoint: tensor {name} has shape {list(tensor.shape)}, must be {list(known[name])}")
        if name in ("d2t", "t2d"):
            if tensor.is_floating_point() or tensor.is_complex() or (name == "d2t" and tensor.dtype == torch.bool):
                wanted = "int64" if name == "d2t" else "bool or int64"
                raise CheckpointError(f"checkpoint: tensor {name} has dtype {tensor.dtype}, must be {wanted}")
        elif tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(
                f"checkpoint: tensor {name} has dtype {tensor.dtype}, must be float32, bfloat16 or float16, not quantised"
            )
    if "d2t" in expected:
        ids = tensors["d2t"].to(torch.int64) + torch.arange(config.draft_vocab_size, device=tensors["d2t"].device)
        outside = ((ids < 0) | (ids >= config.vocab_size)).nonzero()
        if outside.numel():
            row = int(outside[0])
            raise CheckpointError(
                f"checkpoint: tensor d2t takes draft id {row} to target id {int(ids[row])}, must be 0 to {config.vocab_size - 1}"
            )
        if len(ids.unique()) < len(ids):  # probabilities over target ids would lose all but one of them
            raise CheckpointError("checkpoint: tensor d2t takes two draft ids to one target id, must take each to its own")
    columns = tensors["fc.weight"].shape[1]
    if columns == 0 or columns % len(config.taps):
        raise CheckpointError(
            f"checkpoint: tensor fc.weight has {columns} columns, must be a multiple of the {len(config.taps)} layers of target_layer_ids"
        )
    wanted = config.source.get("target_hidden_size")
    if wanted is None and config.format != "zlab":
        wanted = config.hidden_size  # these two formats have the target's width
    if wanted is not None and columns != wanted * len(config.taps):
        raise CheckpointError(
            f"checkpoint: tensor fc.weight has {columns} columns, must have {wanted * len(config.taps)}: "
            f"target_layer_ids names {len(config.taps)} layers of {wanted}"
        )
