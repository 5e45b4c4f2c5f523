"""One block of any drafter the long way: float64, dense masks, keys in a list, no pages, no ops. The options that no golden folder has."""

import torch


def rms(x, eps, weight=None):
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def rotate(x, positions, rope, neox):
    """x [n, heads, D] turned by default, partial or proportional RoPE."""
    head_dim = x.shape[-1]
    width = head_dim if rope.kind == "proportional" else int(head_dim * rope.partial)
    turning = int(rope.partial * head_dim / 2) if rope.kind == "proportional" else width // 2
    y = x.clone()
    for pair in range(turning):
        angle = positions.double() * rope.theta ** (-2 * pair / width)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        i, j = (pair, pair + width // 2) if neox else (2 * pair, 2 * pair + 1)
        y[..., i] = x[..., i] * cos - x[..., j] * sin
        y[..., j] = x[..., j] * cos + x[..., i] * sin
    return y


def heads_of(config, w, layer, name, x, norm):
    """Projected heads [n, heads, D] of rows x, normed by ``norm``: a weight, 'plain' or None."""
    y = x @ w[f"layers.{layer}.self_attn.{name}.weight"].T
    if config.attention_bias:
        y = y + w[f"layers.{layer}.self_attn.{name}.bias"]
    y = y.view(x.shape[0], -1, config.layers[layer].geometry.head_dim)
    if norm is None:
        return y
    return rms(y, config.rms_norm_eps, None if isinstance(norm, str) else norm)


def attend(config, w, layer, x, context, carried, start):
    option = config.layers[layer]
    geometry = option.geometry
    at = f"layers.{layer}.self_attn."
    sources = [context, carried, x]  # rows of the three segments
    positions = torch.cat([torch.arange(start), start + torch.arange(carried.shape[0]), start + torch.arange(x.shape[0])])
    rows = torch.cat(sources)
    k = rotate(heads_of(config, w, layer, "k_proj", rows, w[at + "k_norm.weight"]), positions, geometry.rope, config.neox)
    v = heads_of(config, w, layer, "k_proj" if geometry.share_kv else "v_proj", rows, "plain" if geometry.v_norm else None)
    own = positions[-x.shape[0] :]
    q = rotate(heads_of(config, w, layer, "q_proj", x, w[at + "q_norm.weight"]), own, geometry.rope, config.neox)

    distance = own[:, None] - positions[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if option.causal:
        seen &= distance >= 0
    if option.window_left >= 0:
        seen &= distance <= option.window_left
    if option.window_right >= 0:
        seen &= -distance <= option.window_right
    out = torch.zeros_like(q)
    for head in range(config.num_heads):
        kv = head // (config.num_heads // geometry.num_kv_heads)
        scores = q[:, head] @ k[:, kv].T * (geometry.head_dim**-0.5 if config.scale is None else config.scale)
        if config.softcap:
            scores = config.softcap * (scores / config.softcap).tanh()
        scores = scores.masked_fill(~seen, float("-inf"))
        if option.sinks:
            sink = w[at + "attention_sink_bias"][head].expand(x.shape[0], 1)
            probs = torch.cat([scores, sink], dim=1).softmax(1)[:, :-1]
        else:
            probs = scores.softmax(1)
        out[:, head] = probs @ v[:, kv]
    out = out.reshape(x.shape[0], -1) @ w[at + "o_proj.weight"].T
    return out + w[at + "o_proj.bias"] if config.attention_bias else out


def block_hidden(config, tensors, context, carried, anchor, embed_tokens, mark=None, rows=None):
    """[B, H] float64 after the final norm, behind ``context`` [n, F] committed and ``carried`` [m, F] rejected feature rows."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    eps, start = config.rms_norm_eps, context.shape[0]
    rows = config.block_size if rows is None else rows

    def fused(features, e=None):
        x = features.double() @ w["fc.weight"].T
        if e is not None and config.mark_site == "pre_norm":
            x = x + e.double()
        x = rms(x, eps, w["hidden_norm.weight"])
        return x + e.double() if e is not None and config.mark_site == "post_norm" else x

    context, carried = fused(context), fused(carried, mark)
    h = embed_tokens.double()[[anchor] + [config.mask_token_id] * (rows - 1)] * config.embed_scale
    for layer in range(config.num_layers):

        def norm(name, x, layer=layer):
            return rms(x, eps, w[f"layers.{layer}.{name}.weight"])

        def mlp(x, layer=layer):
            gate, up = x @ w[f"layers.{layer}.mlp.gate_proj.weight"].T, x @ w[f"layers.{layer}.mlp.up_proj.weight"].T
            act = torch.nn.functional.gelu(gate, approximate="tanh") if config.family == "gemma4" else torch.nn.functional.silu(gate)
            return (act * up) @ w[f"layers.{layer}.mlp.down_proj.weight"].T

        attended = attend(config, w, layer, norm("input_layernorm", h), context, carried, start)
        if config.family == "gemma4":
            h = h + norm("post_attention_layernorm", attended)
            h = h + norm("post_feedforward_layernorm", mlp(norm("pre_feedforward_layernorm", h)))
            h = h * w[f"layers.{layer}.layer_scalar"]
        else:
            h = h + attended
            h = h + mlp(norm("post_attention_layernorm", h))
    return rms(h, eps, w["norm.weight"])
