"""A Hugging Face causal LM as the target of speculative decoding: its own layers and maths, a cache of ragged rows, tap hooks."""

import contextlib
import inspect
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

# A pass over a longer prompt is cut into pieces of this many rows: the mask of one piece is rows x keys floats.
PREFILL_ROWS = 2048


class RaggedLayer(DynamicLayer):
    """K/V of one layer for every row (request) of the batch; a row keeps its own length, nothing is padded on the left.

    Storage grows by half; a pass writes behind each row's length and reads a view, so taking rejected rows back costs nothing.
    """

    def __init__(self, rows: "RaggedCache"):
        super().__init__()
        self.rows = rows

    def lazy_initialization(self, key_states, value_states):
        self.device = key_states.device
        self.keys = key_states.new_zeros(0, key_states.shape[1], 0, key_states.shape[3])
        self.values = value_states.new_zeros(0, value_states.shape[1], 0, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self.rows
        self.keys = grown(self.keys, rows.first + rows.count, rows.longest)
        self.values = grown(self.values, rows.first + rows.count, rows.longest)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, store, states):
        rows = self.rows
        active = store[rows.first : rows.first + rows.count]
        if rows.count == 1:
            start = rows.starts[0]
            active[0, :, start : start + states.shape[2]] = states[0]
        else:
            row = torch.arange(rows.count, device=states.device).unsqueeze(1)
            active.transpose(1, 2)[row, rows.positions] = states.transpose(1, 2)
        return active[:, :, : rows.longest]

    def get_seq_length(self):
        return max(self.rows.starts, default=0)

    def get_mask_sizes(self, query_length):
        return self.rows.longest, 0


def grown(store: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """``store`` [rows, heads, length, D] with room for ``rows`` and ``length`` at least; new room is zero: masked keys must stay finite."""
    if rows <= store.shape[0] and length <= store.shape[2]:
        return store
    wanted = [rows if rows > store.shape[0] else store.shape[0], store.shape[1], store.shape[2], store.shape[3]]
    if length > store.shape[2]:
        wanted[2] = max(length, store.shape[2] * 3 // 2, 64)
    larger = store.new_zeros(wanted)
    larger[: store.shape[0], :, : store.shape[2]] = store
    return larger


class RaggedCache(Cache):
    """The K/V cache of a batch of requests of unequal lengths, in the form that a Transformers model updates itself.

    Rows are dense: 0 .. len(lengths)-1. Sliding layers keep all keys and are masked by position, so that rejected rows can be taken back
    however far the window has moved; memory grows with the sequence there.
    """

    def __init__(self, layer_types: list[str]):
        super().__init__(layers=[DummyLayer() if kind == "dummy" else RaggedLayer(self) for kind in layer_types])
        self.lengths: list[int] = []
        self.first = self.count = self.longest = 0
        self.starts: list[int] = []
        self.positions = torch.empty(0, 0, dtype=torch.int64, device="cpu")

    def add_row(self) -> int:
        self.lengths.append(0)
        return len(self.lengths) - 1

    def begin(self, first: int, count: int, query_length: int, device) -> torch.Tensor:
        """Aim the next pass at rows ``first .. first+count-1``; gives the positions [count, query_length] of its queries."""
        self.first, self.count = first, count
        self.starts = self.lengths[first : first + count]
        self.longest = max(self.starts) + query_length
        start = torch.tensor(self.starts, dtype=torch.int64, device=device)
        self.positions = start.unsqueeze(1) + torch.arange(query_length, device=device)
        return self.positions

    def commit(self, row: int, tokens: int):
        """Keep the first ``tokens`` of what the last pass wrote for ``row``; the rest is overwritten by the next pass."""
        self.lengths[row] += tokens

    def remove_row(self, row: int):
        """Forget ``row``; the last row moves into its place. Freed memory is zeroed, and given back when no row is left."""
        last = len(self.lengths) - 1
        for layer in self.layers:
            if not getattr(layer, "is_initialized", False):
                continue
            for store in (layer.keys, layer.values):
                if last < store.shape[0]:
                    if row != last:
                        store[row] = store[last]
                    store[last].zero_()
            if last == 0:
                layer.keys = layer.values = None
                layer.is_initialized = False
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()


class Target:
    """A causal LM of Transformers and what a drafter needs of it: logits of several rows, taps, embeddings.

    The model's own modules compute everything; this class gives them positions, a 4-D mask and a ``RaggedCache``. One pass at a time: taps
    are hooks on the model, so threads that share a model would catch each other's states.

    Args:
        model: a causal LM in eval mode, with ``eager`` or ``sdpa`` attention and full or sliding attention layers.
        check: compare a small ragged pass with a plain one first, and refuse the model where they differ (four short passes).

    Raises:
        ValueError: a model that cannot be served exactly, and why.
    """

    def __init__(self, model, check: bool = True):
        self.model = model
        if model.training:
            raise ValueError("Target: model is in training mode, must be in eval mode (call model.eval())")
        self.config = model.config.get_text_config(decoder=True)
        name = type(model).__name__
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"Target: {name} is an encoder-decoder, must be a causal LM")
        attention = getattr(self.config, "_attn_implementation", None)
        if attention not in ("eager", "sdpa"):
            raise ValueError(f"Target: attention implementation is '{attention}', must be 'sdpa' or 'eager': they take a batch's mask")
        self.layer_types, self.windows = _layer_types(self.config, name)
        self.layers = _decoder_layers(model, self.config.num_hidden_layers)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocab_size, self.hidden_size = self.embed_tokens.shape[0], self.config.hidden_size
        self.max_length = _max_length(self.config)
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._keeps_logits = "logits_to_keep" in accepted
        if check:
            try:
                self._check_ragged(name)
            except (TypeError, RuntimeError, ValueError, IndexError) as error:
                if str(error).startswith("Target: "):
                    raise
                reason = str(error).strip().splitlines()[0]
                raise ValueError(f"Target: {name} fails in a ragged batch ({reason}), must take 4-D masks and positions") from error

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype | None = None, device: str = "cpu") -> "Target":
        """Load a checkpoint; ``dtype`` None keeps the checkpoint's own. Paths are local folders: nothing is downloaded.

        Raises:
            FileNotFoundError: ``path`` has no config.json.
            ValueError: the checkpoint is not a causal LM that can be served.
        """
        path = Path(path)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"Target: no config.json in {path}, must be the folder of a Transformers checkpoint")
        with torch.device("cpu"):  # whatever the caller's default device is: Transformers would load there, and refuses 'meta'
            model, loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True, output_loading_info=True)
        missing = sorted(loaded["missing_keys"])
        if missing:  # Transformers fills them with random numbers
            raise ValueError(f"Target: {path} lacks the weights of {missing[0]} and {len(missing) - 1} more, must hold all of the model")
        return cls(model.to(device).eval())

    @property
    def embed_tokens(self) -> torch.Tensor:
        """[V, H] input embeddings, that drafters without their own borrow."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> torch.Tensor:
        """[V, H] output projection, that drafters without their own borrow."""
        head = self.model.get_output_embeddings()
        return self.embed_tokens if head is None else head.weight

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End-of-sequence ids of the generation config, else of the config; empty where there are none."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        if ids is None:
            ids = getattr(self.config, "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or ())

    def new_cache(self) -> RaggedCache:
        return RaggedCache(self.layer_types)

    def check_taps(self, taps: tuple[int, ...]):
        """Id i is the output of decoder layer i (``hidden_states[i + 1]`` of Transformers), -1 the embedding's output."""
        for tap in taps:
            if not -1 <= tap < len(self.layers):
                raise ValueError(f"Target: tap {tap} must be a layer of the target, -1 (embeddings) to {len(self.layers) - 1}")

    @contextlib.contextmanager
    def captured(self, taps: tuple[int, ...]):
        """Collect the outputs of the tapped layers during the passes inside; the hooks are gone afterwards, whatever happened.

        The last layer's tap is the stream before the final norm (Transformers' ``hidden_states`` has it after the norm).
        """
        self.check_taps(taps)
        caught: dict[int, torch.Tensor] = {}
        hooks = []
        try:
            for tap in set(taps):
                module = self.model.get_input_embeddings() if tap < 0 else self.layers[tap]

                def keep(module, args, output, tap=tap):
                    caught[tap] = output[0] if isinstance(output, tuple) else output

                hooks.append(module.register_forward_hook(keep))
            yield caught
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def run(
        self, cache: RaggedCache, first: int, tokens: torch.Tensor, taps: tuple[int, ...] = (), keep: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One pass over rows ``first .. first+R-1`` of ``cache``, each continued by its ``tokens``; nothing is committed.

        Args:
            tokens: [R, Q] i64; a row with fewer tokens than Q is padded at the end with any id (its extra outputs are meaningless,
                and its extra K/V are never read).
            taps: layers whose output is wanted, in the drafter's order.
            keep: which of the Q positions logits are wanted of, None = all.

        Returns:
            logits [R, Q or len(keep), V] in the model's dtype.
            states [R, Q, taps * H], the taps side by side in the order given; None without taps.
        """
        count, query_length = tokens.shape
        positions = cache.begin(first, count, query_length, tokens.device)
        kwargs = {self._cache_name: cache, "use_cache": True, "return_dict": True}
        if keep is not None and self._keeps_logits:
            kwargs["logits_to_keep"] = torch.tensor(keep, dtype=torch.int64, device=tokens.device)
        mask = self._mask(positions, cache.longest)
        if cache.longest > self.max_length:  # padding behind a request's last rows: a learned table of positions has no row for it
            positions = positions.clamp(max=self.max_length - 1)
        with self.captured(taps) as caught:
            output = self.model(input_ids=tokens, attention_mask=mask, position_ids=positions, **kwargs)
        logits = output.logits if keep is None or self._keeps_logits else output.logits[:, keep]
        if not taps:
            return logits, None
        for tap in taps:
            if tap not in caught or caught[tap].shape[:2] != tokens.shape:
                raise RuntimeError(f"Target: tap {tap} gave no state for some of {query_length} tokens, must be a layer that runs on all")
        return logits, torch.cat([caught[tap] for tap in taps], dim=-1)

    def _mask(self, positions: torch.Tensor, keys: int):
        """[R, 1, Q, keys] additive masks by position: 0 where seen, the lowest finite number elsewhere."""
        key = torch.arange(keys, device=positions.device)
        query = positions[:, None, :, None]
        lowest = torch.finfo(self.dtype).min
        masks = {}
        for kind, window in self.windows.items():
            hidden = key > query
            if window is not None:
                hidden = hidden | (key <= query - window)
            masks[kind] = torch.zeros(hidden.shape, dtype=self.dtype, device=positions.device).masked_fill_(hidden, lowest)
        # Models with one kind of layer take the tensor; those that mix kinds take one mask a kind, by the config's names.
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _check_ragged(self, name: str):
        """Two rows of unequal length, a joint pass, against the model's plain pass over the same tokens."""
        ids = torch.arange(1, 8, device=self.device) % self.vocab_size
        cache = self.new_cache()
        for row, length in enumerate((4, 2)):
            cache.add_row()
            self.run(cache, row, ids[:length].unsqueeze(0))
            cache.commit(row, length)
        joint, _ = self.run(cache, 0, torch.stack([ids[4:7], ids[2:5]]))
        with torch.no_grad():
            plain = [self.model(input_ids=ids[:end].unsqueeze(0), use_cache=False).logits[0, -3:] for end in (7, 5)]
        error = (joint.double() - torch.stack(plain).double()).abs().max().item()
        scale = max(row.double().abs().max().item() for row in plain)
        # Rounding alone stays far below these; a mask or position the model ignored does not (float32: 1e-4 of the largest logit).
        allowed = torch.finfo(self.dtype).eps * (1024 if self.dtype in (torch.float32, torch.float64) else 32) * scale
        if not error <= allowed:
            raise ValueError(
                f"Target: logits of {name} in a ragged batch differ from its plain ones by {error:.3g}, must be at most {allowed:.3g}: "
                "the model does not honour explicit masks and positions"
            )


def _decoder_layers(model, layers: int) -> torch.nn.ModuleList:
    decoder = model.get_decoder()
    found = [child for child in decoder.children() if isinstance(child, torch.nn.ModuleList) and len(child) == layers]
    if len(found) != 1:
        raise ValueError(f"Target: {type(model).__name__} has {len(found)} lists of {layers} decoder layers, must have 1")
    return found[0]


def _layer_types(config, name: str) -> tuple[list[str], dict[str, int | None]]:
    """The kind of each layer, and the window of each kind (None: all keys), as the model's own cache would have them."""
    # Transformers makes one cache layer a decoder layer from the config: its classes say what a layer remembers.
    own = DynamicCache(config=config)
    kinds, windows = [], {}
    names = getattr(config, "layer_types", None) or [None] * len(own.layers)
    for index, (layer, kind) in enumerate(zip(own.layers, names)):
        if type(layer) is DynamicLayer:
            kind, window = kind or "full_attention", None
        elif type(layer) is DynamicSlidingWindowLayer and kind != "chunked_attention":
            kind, window = kind or "sliding_attention", layer.sliding_window
        elif type(layer) is DummyLayer:
            kinds.append("dummy")
            continue
        else:
            raise ValueError(
                f"Target: layer {index} of {name} has the cache {type(layer).__name__} ({kind}), "
                "must be full or sliding attention: rejected tokens cannot be taken back from other caches"
            )
        if windows.setdefault(kind, window) != window:
            raise ValueError(f"Target: layers of kind {kind} of {name} have windows {windows[kind]} and {window}, must have one")
        kinds.append(kind)
    return kinds, windows


def _max_length(config) -> int:
    """Positions a request may fill. Scalings that change with the length would make a draft row change rows already cached."""
    limit = getattr(config, "max_position_embeddings", None) or 2**31
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if entry.get("rope_type", entry.get("type")) in ("dynamic", "longrope"):
            limit = min(limit, entry.get("original_max_position_embeddings") or limit)
    return limit
