"""Reports of engines' users (reports.tsv) that a drafter's config or state decides: each has a test named after its row."""

import torch
from compare import assert_equal
from dense_drafter import block_hidden
from drafter_tools import (  # ops, where: fixtures
    DSPARK,
    FOLDERS,
    ODD,
    TOLERANCE,
    absorb,
    as_speculators,
    changed,
    load,
    propose,
    refused,
    source_of,
    two_requests,
    where,  # noqa: F401
)

from carryover_kernels.drafter import CarryoverDrafter
from carryover_kernels.drafter.config import Rope
from carryover_kernels.drafter.formats import read_config
from carryover_kernels.drafter.weights import rope_table


def test_r01_rope_layout_comes_from_the_draft_config():
    """NeoX unless the drafter's own config says otherwise, whatever else is in it."""
    source = source_of("zlab_dflash_qwen3")[0]
    assert read_config(source).neox
    assert not read_config(source | dict(is_neox_style=False)).neox
    assert not read_config(source | dict(rope_is_neox_style=False)).neox
    assert "rope_is_neox_style" in refused(source | dict(is_neox_style=True, rope_is_neox_style=False))


def test_r02_rope_is_never_inferred():
    """A target's leftover rope keys change nothing; a missing theta is refused, not taken from elsewhere."""
    source = source_of("zlab_dflash_qwen3")[0]
    assert read_config(source | dict(qk_rope_head_dim=0, target_rope_theta=5.0)) == read_config(source)
    assert "rope_theta" in refused(source | dict(rope_parameters=None))


def test_r03_taps_name_layer_outputs_in_every_format():
    assert read_config(source_of("zlab_dflash_qwen3")[0]).taps == (1, 5, 9)
    assert read_config(as_speculators("zlab_dflash_qwen3")[0]).taps == (1, 5, 9)  # written as 2, 6, 10
    assert read_config(source_of(DSPARK[0])[0] | dict(target_layer_ids=[-1, 3, 4])).taps == (-1, 3, 4)
    source = source_of("zlab_dflash_qwen3")[0]
    assert "eagle_aux" in refused(source | dict(eagle_aux_hidden_state_layer_ids=[1, 5, 9]))
    read_config(source | dict(eagle_aux_hidden_state_layer_ids=[2, 6, 10]))


def test_r04_taps_are_never_guessed():
    for source in (changed(source_of("zlab_dflash_qwen3")[0], dict(dflash_config={"target_layer_ids": None})),
                   source_of(DSPARK[0])[0] | dict(target_layer_ids=None)):  # fmt: skip
        sentence = refused(source)
        assert "target_layer_ids" in sentence and "never guessed" in sentence


def test_r05_last_target_layer_is_refused():
    for folder in ("zlab_dflash_qwen3", DSPARK[0]):
        change = dict(dflash_config={"target_layer_ids": [1, 11]}) if "zlab" in folder else dict(target_layer_ids=[1, 11])
        assert "target_layer_ids is [1, 11], must be below the target's last layer, 11" in refused(changed(source_of(folder)[0], change))


def test_r06_anchor_stands_at_the_committed_length(backend, where, rng):
    """After n committed rows the block starts at n, not at the last row's own position n - 1."""
    drafter = load(FOLDERS[-1], device=where)
    features = torch.randn(10, 192, generator=rng)
    state = drafter.new_state(1, num_pages=4)
    slot = state.allocate(20)
    absorb(drafter, state, slot, features, 0)
    hidden = propose(drafter, state, [slot], [4], return_hidden=True).hidden[0].cpu()
    plain, embed = {name: t.cpu() for name, t in drafter.tensors.items()}, drafter.embed_tokens.cpu()
    right = block_hidden(drafter.config, plain, features, features[:0], 4, embed)
    early = block_hidden(drafter.config, plain, features[:9], features[:0], 4, embed)
    assert float((hidden - right).abs().max()) <= TOLERANCE < 0.01 < float((hidden - early).abs().max())


def test_r07_slot_0_is_the_anchor(backend, where, rng):
    """The anchor's embedding fills slot 0: another anchor, another block."""
    drafter = load(FOLDERS[-1], device=where)
    state, slots, _ = two_requests(drafter, rng)
    a, b, mask = (propose(drafter, state, slots[:1], [token], return_hidden=True).hidden for token in (4, 5, 100))
    assert float((a - b).abs().max()) > 0.01 and float((a - mask).abs().max()) > 0.01


def test_r08_quantised_weights_are_refused():
    source, tensors = source_of(DSPARK[0])
    assert "quantization_config" in refused(source | dict(quantization_config={"quant_method": "fp8"}))
    name = "layers.0.self_attn.k_proj.weight"
    assert "quantised" in refused(source, tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    assert "weight_scale" in refused(source, tensors | {"layers.0.self_attn.k_proj.weight_scale": torch.ones(1)})
    nested = as_speculators(DSPARK[0])[0]
    nested["transformer_layer_config"]["quantization_config"] = {"bits": 4}
    assert "quantization_config" in refused(nested)


def test_r35_blocks_past_the_rope_table_propose_nothing(backend, where, rng):
    """The request at the end of the drafter's positions gets -1, its neighbour its usual drafts."""
    source, tensors = source_of(DSPARK[0])
    drafter = CarryoverDrafter(read_config(source | dict(max_position_embeddings=20)), tensors, device=where)
    state = drafter.new_state(2, num_pages=4)
    slots = [state.allocate(20), state.allocate(20)]
    features = torch.randn(14, 192, generator=rng)
    absorb(drafter, state, slots[0], features[:13], 0)  # 13 + 7 = 20: fits
    absorb(drafter, state, slots[1], features, 0)  # 14 + 7 = 21: doesn't
    both = propose(drafter, state, slots, [4, 4])
    assert (both.tokens[1] == -1).all()
    assert_equal(both.tokens[0].cpu(), propose(drafter, state, slots[:1], [4]).tokens[0].cpu(), "neighbour")
    assert (both.tokens[0] >= 0).all()


def test_r39_causality_is_by_layer():
    """speculators: full layers see both ways, sliding ones by sliding_window_non_causal."""
    source, _ = as_speculators("zlab_dflash_qwen3")
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    source["transformer_layer_config"] |= dict(layer_types=kinds, sliding_window=8)
    assert [layer.causal for layer in read_config(source).layers] == [True, False, True]
    assert [layer.causal for layer in read_config(source | dict(sliding_window_non_causal=True)).layers] == [False] * 3


def test_r40_windows_are_honoured_by_layer():
    """W counts the token itself: W - 1 to either side; full layers have none."""
    source = changed(source_of("zlab_dflash_qwen3")[0], ODD["swa_causal"])
    assert [(layer.window_left, layer.window_right) for layer in read_config(source).layers] == [(8, 8), (-1, -1), (8, 8)]


def test_r46_float16_does_not_overflow(backend, where, rng):
    """Outliers whose fused state is beyond float16's range come out finite and close to float32's."""
    source, tensors = source_of(DSPARK[0])
    tensors["fc.weight"] = tensors["fc.weight"] * 3e4
    features = torch.randn(12, 192, generator=rng) * 50
    assert (features @ tensors["fc.weight"].T).abs().max() > torch.finfo(torch.float16).max
    hidden = []
    for dtype in (torch.float16, torch.float32):
        drafter = CarryoverDrafter(read_config(source), tensors, dtype=dtype, device=where)
        state = drafter.new_state(1, num_pages=2)
        slot = state.allocate(20)
        absorb(drafter, state, slot, features.half(), 0)
        hidden.append(propose(drafter, state, [slot], [4], return_hidden=True).hidden.float())
    assert hidden[0].isfinite().all()
    # Two layers of float16 rounding (2**-11 each step) on values of size 4: far below what a lost row would do.
    assert float((hidden[0] - hidden[1]).abs().max()) < 0.1


def test_r55_rope_table_is_float32_at_long_positions():
    """Against float64 the angle's error stays that of float32 (position * 2**-24 * 4): bfloat16 tables are off by whole turns."""
    rope = Rope("default", 1e6)
    table = rope_table(rope, 128, 40000)
    assert table.dtype == torch.float32
    position = 39999
    exact = torch.tensor([position * 1e6 ** (-2 * j / 128) for j in range(64)], dtype=torch.float64)
    error = (table[position].double() - torch.cat([exact.cos(), exact.sin()])).abs().max()
    assert error < position * 2**-24 * 4
    coarse = (torch.tensor(float(position)).bfloat16() * exact.bfloat16().div(position)).double()
    assert (coarse.cos() - exact.cos()).abs().max() > 100 * error
