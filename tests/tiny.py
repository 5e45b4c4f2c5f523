"""Tiny random targets and drafters for tests: real Transformers models and real checkpoint folders, a few thousand weights."""

import json

import torch
from safetensors.torch import save_file

from carryover_kernels.decoding import Target
from carryover_kernels.drafter import CarryoverDrafter

HIDDEN, LAYERS = 32, 4


def tiny_model(family: str = "qwen3", vocab: int = 97, seed: int = 0, **options):
    """A causal LM in float32 whose greedy text wanders (large weights), without an end token. Sliding layers where the family has them."""
    import transformers

    shape = dict(
        vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    if family == "gemma3":
        # Every other layer sees 5 tokens: prompts and answers of the tests are longer.
        shape |= dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=8)
    if family in ("mistral", "gpt_oss"):
        shape |= dict(sliding_window=5)
    if family == "gpt_oss":
        shape |= dict(num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    if family == "deepseek_v3":
        shape |= dict(
            num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
            first_k_dense_replace=1,
        )  # fmt: skip
    names = {"qwen3": "Qwen3", "llama": "Llama", "gemma3": "Gemma3", "mistral": "Mistral", "gpt_oss": "GptOss", "deepseek_v3": "DeepseekV3"}
    names |= {"gpt_neox": "GPTNeoX", "olmo2": "Olmo2", "bloom": "Bloom"}
    config_class = getattr(transformers, names[family] + ("TextConfig" if family == "gemma3" else "Config"))
    torch.manual_seed(seed)
    model = getattr(transformers, names[family] + "ForCausalLM")(config_class(**(shape | options)))
    return model.float().eval()


def tiny_target(family: str = "qwen3", vocab: int = 97, seed: int = 0, **options) -> Target:
    return Target(tiny_model(family, vocab, seed, **options))


def write_tiny_drafter(folder, vocab: int = 97, block: int = 5, taps=(0, 2), mark: bool = True, seed: int = 1, max_positions: int = 256):
    """A z-lab DFlash checkpoint of two layers for ``tiny_target``, with a mark if asked."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns):
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def scale(size):
        return 1 + 0.1 * torch.randn(size, generator=generator)

    tensors = {"fc.weight": matrix(HIDDEN, len(taps) * HIDDEN), "hidden_norm.weight": scale(HIDDEN), "norm.weight": scale(HIDDEN)}
    for layer in range(2):
        name = f"layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": scale(HIDDEN),
            name + "post_attention_layernorm.weight": scale(HIDDEN),
            name + "self_attn.q_proj.weight": matrix(32, HIDDEN),
            name + "self_attn.k_proj.weight": matrix(16, HIDDEN),
            name + "self_attn.v_proj.weight": matrix(16, HIDDEN),
            name + "self_attn.o_proj.weight": matrix(HIDDEN, 32),
            name + "self_attn.q_norm.weight": scale(8),
            name + "self_attn.k_norm.weight": scale(8),
            name + "mlp.gate_proj.weight": matrix(48, HIDDEN),
            name + "mlp.up_proj.weight": matrix(48, HIDDEN),
            name + "mlp.down_proj.weight": matrix(HIDDEN, 48),
        }
    if mark:
        tensors["carryover_mark"] = torch.randn(HIDDEN, generator=generator)
    config = dict(
        architectures=["DFlashDraftModel"], model_type="qwen3", hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=48, rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False,
        vocab_size=vocab, num_target_layers=LAYERS, block_size=block, max_position_embeddings=max_positions,
        dflash_config=dict(target_layer_ids=list(taps), mask_token_id=vocab - 1),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def tiny_drafter(folder, target: Target, **options) -> CarryoverDrafter:
    path = write_tiny_drafter(folder, vocab=target.vocab_size, **options)
    return CarryoverDrafter.from_pretrained(path, dtype=target.dtype, embed_tokens=target.embed_tokens, lm_head=target.lm_head)


def write_tiny_tokenizer(folder):
    """A byte-level BPE tokenizer of 300 ids, the last two an end and a mask token; gives its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3, "carry carried carrying " * 5], trainer)
    tokenizer.add_special_tokens(["<end>", "<mask>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", mask_token="<mask>").save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_tiny_models(folder, mark: bool = True, **options):
    """``target`` with tokenizer, ``dflash`` and held_out.json, laid out as the embedded models are."""
    size = write_tiny_tokenizer(folder / "target")
    tiny_model(vocab=size, **options).save_pretrained(folder / "target")
    write_tiny_drafter(folder / "dflash", vocab=size, mark=mark)
    prompts = [{"kind": kind, "source": f"{kind}/{i}", "prompt": f"the {kind} fox {i}"} for kind in ("code", "text") for i in range(2)]
    (folder / "held_out.json").write_text(json.dumps(prompts))
    return folder
