"""What is particular to the Triton backend. Its op tests are everybody's: ``pytest --backend triton`` (interpreted where there is no GPU).

Without that option a thin slice of them runs in a process of its own, this file's second half included: Triton interprets or compiles,
never both in one process.
"""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import cases
import pytest
import torch
from cases import i32
from compare import assert_equal
from poison import nan_like

from carryover_kernels import ops

ROOT = pathlib.Path(__file__).resolve().parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs an NVIDIA GPU or --backend triton, which interprets"
)
# Every kernel once, each where its tiles, masks or types are most at risk.
SLICE = {
    "plan_round": ("ragged", "more_rejected_than_capacity", "padding_spaced", "rows_of_no_request"),
    "carry_to_pages": ("carried_rows_dropped_first", "negative_pages", "padding"),
    "clear_carry": ("",),
    "qk_norm_rope": ("qwen3-f32", "gemma4-bf16", "partial_interleaved-f16", "positions_outside_the_table-bf16"),
    "project_states": ("every_kind_of_row-f32", "many_rows-bf16", "gemma4-f16", "cache_fp8_e4m3-bf16", "odd_sizes-f32"),
    "block_attention": ("ragged_batch-bf16", "padding_row-f16", "page_3-f32", "window_by_position-bf16", "splits_emptied_by_window-f32",
                        "cache_fp8_e5m2-bf16", "no_keys_but_sinks-f32"),
    "markov_sample": ("draft_vocabulary_rnn-f32", "gated-bf16", "padding_sampled-f32", "vocabulary_1003-f32"),
    "verify_draft": ("greedy_ties_lowest_id-bf16", "removed_tokens-f32", "bad_drafts_block-f32", "padding-f16"),
}  # fmt: skip


def chosen():
    for op, names in SLICE.items():
        for name in names:
            yield f"tests/test_{op}.py::test_named_case[{name}]" if name else f"tests/test_{op}.py"
    yield "tests/test_random.py::test_ops_draw_these_numbers"
    yield "tests/test_drafter.py::test_golden[selected-deepspec_dspark_qwen3_gated-carryover]"
    yield "tests/test_triton.py"


@pytest.fixture(scope="session")
def slice_results(tmp_path_factory):
    """Outcome of each chosen test by file, run once, interpreted."""
    report = tmp_path_factory.mktemp("triton") / "report.xml"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--backend", "triton", f"--junitxml={report}", *chosen()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert report.exists() and done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-1000:]
    outcomes = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        name = case.get("classname").rsplit(".", 1)[-1].removeprefix("test_")
        skipped = any(child.tag == "skipped" for child in case)
        outcomes.setdefault(name, []).append((case.get("name"), skipped, "".join(child.text or "" for child in wrong)))
    return outcomes


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the slice runs in; it needs no GPU")
@pytest.mark.parametrize("part", [*SLICE, "random", "drafter", "triton"])
def test_slice_under_interpretation(part, slice_results):
    results = slice_results[part]
    ran = [name for name, skipped, _ in results if not skipped]
    assert len(ran) >= len(SLICE.get(part, ("",))), f"{part}: {len(ran)} tests ran"
    wrong = {name: text for name, _, text in results if text}
    assert not wrong, "\n".join(f"{name}\n{text[-1500:]}" for name, text in wrong.items())


# --- the backend itself, in a process where it runs


@on_triton
def test_uniforms_bit_for_bit(device):
    """Philox and the map to floats are the reference's to the last bit, for words that fill 32 and 64 bits, on every stream."""
    import triton
    import triton.language as tl

    from carryover_kernels.triton import _common
    from python_ref.random import uniforms

    @triton.jit
    def draw(out_ptr, seed_ptr, offset_ptr, step, STREAM: tl.constexpr, BLOCK: tl.constexpr):
        v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + v, _uniforms(tl.load(seed_ptr), tl.load(offset_ptr), step, STREAM, v))

    draw.fn.__globals__["_uniforms"], draw.fn.__globals__["tl"] = _common.uniforms, tl
    for seed, offset, step in ((0, 0, 0), (-1, 2**40 + 3, 14), (2**62 + 5, 2**32 - 1, 65535), (-(2**63), 7, 1)):
        for stream in (0, 1, 2):
            out = torch.full((512,), float("nan"), device=device)
            draw[(2,)](out, torch.tensor([seed], device=device), torch.tensor([offset], device=device), step, stream, 256)
            assert_equal(out, uniforms(seed, offset, step, stream, 512).float(), f"seed {seed} offset {offset} stream {stream}")


PAGE, COLUMNS, SLOTS, LAYERS, HEADS, DIM, BLOCK, VOCAB = 4, 6, 4, 2, 2, 16, 4, 29
REQUESTS, CAPACITY, PAGES = 3, 3, 24


def weights(rng, device):
    hidden, features, rows = 24, 40, LAYERS * 2 * HEADS * DIM
    return {
        name: value.to(device)
        for name, value in {
            "fc": cases.randn(rng, hidden, features, scale=0.2), "kv": cases.randn(rng, rows, hidden, scale=0.2),
            "k_norm": cases.randn(rng, LAYERS, DIM), "mark": cases.randn(rng, hidden), "rope": cases.rope_table(rng, 64, DIM),
            "w1": cases.randn(rng, VOCAB, 8), "w2": cases.randn(rng, VOCAB, 8), "norm": cases.randn(rng, DIM),
        }.items()
    }  # fmt: skip


def round_inputs(rng, lengths, rejected, carry_ids, table):
    """What an engine writes into its static buffers before a round: lengths -1 = padding row. Poison stands in all that is not used."""
    count = BLOCK  # verify rows of a live request
    starts, slots, positions = [0], [], []
    for r, length in enumerate(lengths):
        live = length >= 0
        starts.append(starts[-1] + (count if live else 0))
        for i in range(count if live else 0):
            at = length + i
            positions.append(at)
            slots.append(int(table[r, at // PAGE]) * PAGE + at % PAGE)
    rows = REQUESTS * BLOCK
    states = nan_like(torch.empty(rows, 40))
    states[: starts[-1]] = cases.randn(rng, starts[-1], 40)
    pad = rows - len(slots)
    committed = [max(length, 0) + count - gone if length >= 0 else -1 for length, gone in zip(lengths, rejected)]
    return {
        "states": states, "query_start_loc": i32(starts), "num_rejected": i32(rejected),
        "positions": torch.tensor(positions + [-(2**40)] * pad), "slot_mapping": torch.tensor(slots + [-1] * pad),
        "carry_slot_ids": i32(carry_ids), "block_table": table, "seq_lens": i32(committed),
        "qkv": cases.randn(rng, rows, 4 * HEADS * DIM), "base_logits": cases.randn(rng, REQUESTS, BLOCK - 1, VOCAB),
        "anchors": torch.tensor([5 if length >= 0 else -1 for length in lengths]),
        "target": cases.randn(rng, rows, VOCAB), "seeds": cases.integers(rng, 0, 2**60, (REQUESTS,)), "offsets": torch.arange(REQUESTS),
        "temperature": torch.tensor([0.8, 0.0, 1.2]),
    }  # fmt: skip


def drafter_round(x, w, state):
    """One round by the ops alone, as a captured graph holds it: no host value of it depends on a tensor's contents."""
    plan = ops.plan_round(
        x["query_start_loc"], x["num_rejected"], x["positions"], x["slot_mapping"], x["carry_slot_ids"], state["carry_lens"], CAPACITY
    )
    cache_slot, carry_slot, position, start = plan
    ops.project_states(
        x["states"], w["fc"], w["kv"], None, w["k_norm"], w["mark"], None, w["rope"], cache_slot, carry_slot, position, state["k_cache"],
        state["v_cache"], state["carry_k"], state["carry_v"],
    )  # fmt: skip
    block_positions = (start[:, None] + torch.arange(BLOCK, device=start.device)).flatten()
    q, k, v = ops.qk_norm_rope(x["qkv"], block_positions, w["rope"], w["norm"], w["norm"], 2 * HEADS, HEADS)
    shape = (REQUESTS, BLOCK, -1, DIM)
    results = list(plan)
    for layer in range(LAYERS):
        out, lse = ops.block_attention(
            q.view(shape), k.view(shape), v.view(shape), state["k_cache"][layer], state["v_cache"][layer], x["block_table"], x["seq_lens"],
            state["carry_k"][layer], state["carry_v"][layer], state["carry_lens"], x["carry_slot_ids"], block_start=start, return_lse=True,
        )  # fmt: skip
        results += [out, lse]
    tokens, _, probs, _ = ops.markov_sample(
        x["base_logits"], x["anchors"], w["w1"], w["w2"], "vanilla", temperature=x["temperature"], seeds=x["seeds"], offsets=x["offsets"],
        return_probs=True,
    )  # fmt: skip
    verdict = ops.verify_draft(tokens, x["query_start_loc"], x["target"], None, probs, x["seeds"], x["offsets"], "rejection")
    return results + [tokens, probs, *verdict]


def new_state(device):
    cache = nan_like(torch.empty(PAGES, PAGE, HEADS, DIM)).to(device)
    carry = nan_like(torch.empty(LAYERS, SLOTS, CAPACITY, HEADS, DIM)).to(device)
    return {
        "k_cache": [cache.clone() for _ in range(LAYERS)], "v_cache": [cache.clone() for _ in range(LAYERS)],
        "carry_k": carry, "carry_v": carry.clone(), "carry_lens": torch.zeros(SLOTS, dtype=torch.int32, device=device),
    }  # fmt: skip


def rounds(rng):
    """Three rounds of static shapes whose lengths, ids and acceptance change: a request leaves (padding), another takes its row and slot."""
    tables = [i32(torch.randperm(PAGES, generator=rng)[: REQUESTS * COLUMNS].view(REQUESTS, COLUMNS)) for _ in range(2)]
    yield round_inputs(rng, [0, 0, 0], [2, 0, 3], [2, 0, 3], tables[0])
    yield round_inputs(rng, [2, -1, 1], [0, 0, 1], [2, -1, 3], tables[0])
    yield round_inputs(rng, [0, 0, -1], [1, 3, 0], [1, 0, -1], tables[1])


def same(results, expected, lengths, what):
    """Bitwise; a padding row's own results (attention of no request) must still be finite where they are defined: zeros."""
    for i, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        assert_equal(got.cpu(), wanted.cpu(), f"{what}, result {i}")


@on_triton
@pytest.mark.usefixtures("poisoned_outputs")
def test_round_over_stale_buffers(rng, backend, device):
    """Rounds that reuse one set of buffers, with the last round's rows behind the new ones, give what fresh buffers give."""
    w = weights(rng, device)
    kept, fresh = new_state(device), new_state(device)
    buffers = None
    for number, inputs in enumerate(rounds(rng)):
        x = {name: value.to(device) for name, value in inputs.items()}
        if buffers is None:
            buffers = {name: value.clone() for name, value in x.items()}
        else:  # only what a round of this size needs is rewritten: rows behind query_start_loc's end stay the last round's
            end = int(inputs["query_start_loc"][-1])
            for name, value in x.items():
                live = end if name in ("states", "positions", "target") else len(value)
                buffers[name][:live] = value[:live]
        got = drafter_round(buffers, w, kept)
        expected = drafter_round(x, w, fresh)
        same(got, expected, inputs["seq_lens"], f"round {number}")
        for name in ("k_cache", "v_cache", "carry_k", "carry_v"):
            for a, b in zip(kept[name], fresh[name]):
                assert_equal(a.cpu(), b.cpu(), f"round {number}, {name}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: a CUDA graph is captured")
def test_round_as_a_cuda_graph(rng, backend, device):
    """One captured round, replayed with changed lengths, ids and acceptance, padding included. Not yet run on hardware."""
    w, state, expected_state = weights(rng, device), new_state(device), new_state(device)
    inputs = [{name: value.to(device) for name, value in x.items()} for x in rounds(rng)]
    buffers = {name: value.clone() for name, value in inputs[0].items()}
    warm = new_state(device)
    drafter_round(buffers, w, warm)  # compiles; a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = drafter_round(buffers, w, state)
    for number, x in enumerate(inputs):
        for name, value in x.items():
            buffers[name].copy_(value)
        graph.replay()
        same(captured, drafter_round(x, w, expected_state), x["seq_lens"], f"replay {number}")
