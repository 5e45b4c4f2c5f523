"""Engine metadata to our arguments: stand-ins of vLLM's and SGLang's batches give the caches that the drafter itself writes.

The stand-ins follow the engines' conventions: null blocks, padded tails with stale values, rejected rows at position 0 and slot -1,
reserved request slots. No engine is installed or imported.
"""

import ast
import importlib
import inspect
import json
import pathlib
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from compare import assert_equal
from safetensors.torch import load_file

import carryover_kernels.ops as ops
from carryover_kernels.drafter import CarryoverDrafter
from carryover_kernels.drafter.formats import read_config
from carryover_kernels.integrations import buffers, sglang, vllm

FOLDER = pathlib.Path(__file__).parent / "golden" / "deepspec_dspark_qwen3_vanilla"
B, N, PAGE, PAGES = 7, 7, 4, 32  # DSpark: 7 block rows, 7 proposals, 8 verify rows


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def drafter():
    mark = load_file(FOLDER / "rounds.safetensors")["carryover_marker"]
    return CarryoverDrafter(
        read_config(json.loads((FOLDER / "config.json").read_text())), load_file(FOLDER / "model.safetensors"), mark=mark
    )


def project(drafter, states, arguments, caches, carry, run_fc=True):
    """plan_round and project_states as an engine calls them; gives block_start."""
    group = drafter.groups[0]
    *plan, block_start = ops.plan_round(*arguments, carry.carry_lens, carry.carry_k.shape[2])
    fc = drafter.tensors["fc.weight"]
    k, v = zip(*caches)
    ops.project_states(
        states if run_fc else states @ fc.T, fc if run_fc else None, group.kv_weight, group.kv_bias, group.k_norm_weight, drafter.mark,
        None, group.rope_table, *plan, list(k), list(v), carry.carry_k, carry.carry_v,
    )  # fmt: skip
    return block_start


class Engine:
    """Two requests at unequal lengths with pages of their own, and the drafter's own state as the truth."""

    def __init__(self, drafter, rng, first_page):
        self.drafter, self.rng = drafter, rng
        self.lengths = [10, 6]
        # Pages by request, shuffled; tails beyond a request's pages are 0, vLLM's null block.
        order = (first_page + torch.randperm(PAGES - first_page, generator=rng)).tolist()
        self.table = torch.zeros(2, 8, dtype=torch.int32)
        for r in range(2):
            self.table[r, :6] = torch.tensor([order.pop() for _ in range(6)], dtype=torch.int32)
        self.state = drafter.new_state(4, page_size=PAGE, num_pages=PAGES, carry=True)
        self.slots = [self.state.allocate(24), self.state.allocate(24)]
        self.prompts = [torch.randn(length, 192, generator=rng) for length in self.lengths]
        for slot, prompt, length in zip(self.slots, self.prompts, self.lengths):
            drafter.absorb(self.state, [slot], prompt, ints(0, length), ints(0), torch.arange(length))
        self.verified = torch.randn(2, N + 1, 192, generator=rng)
        self.rejected = [5, 0]

    def absorb(self):
        for r, slot in enumerate(self.slots):
            positions = torch.arange(N + 1) + self.lengths[r]
            self.drafter.absorb(self.state, [slot], self.verified[r], ints(0, N + 1), ints(self.rejected[r]), positions)

    def slots_of(self, r, positions):
        return self.table[r, positions // PAGE].long() * PAGE + positions % PAGE

    def check(self, caches, carry, engine_slots, tolerance):
        """The engine's pages and carry buffer hold what the drafter's own hold."""
        for r, slot in enumerate(self.slots):
            length = int(self.state.seq_lens[slot])
            positions = torch.arange(length)
            mine = self.state.block_table[slot, positions // PAGE].long()
            for layer, (k, v) in enumerate(caches):
                flat = self.slots_of(r, positions)
                for engine, own in ((k, self.state.k_cache[layer]), (v, self.state.v_cache[layer])):
                    got = engine[flat // engine.shape[1], flat % engine.shape[1]]
                    assert float((got - own[mine, positions % PAGE]).abs().max()) <= tolerance
            count = int(self.state.carry_lens[slot])
            assert int(carry.carry_lens[engine_slots[r]]) == count == self.rejected[r]
            for engine, own in ((carry.carry_k, self.state.carry_k[0]), (carry.carry_v, self.state.carry_v[0])):
                error = (engine[:, engine_slots[r], :count] - own[:, slot, :count]).abs()
                assert error.numel() == 0 or float(error.max()) <= tolerance


# The engine runs all rows in one GEMM, the truth one request at a time: the same float32 sums in another order.
TOLERANCE = 2e-5


def caches_of(layout):
    """Two layers of caches in one of vLLM's layouts, NaN where nothing was written."""
    nan = float("nan")
    if layout == "kv_first":
        tensors = [torch.full((2, PAGES, PAGE, 2, 32), nan) for _ in range(2)]
    elif layout == "block_first":  # heads first in memory: logical NHD over HND strides
        tensors = [torch.full((PAGES, 2, 2, PAGE, 32), nan).transpose(2, 3) for _ in range(2)]
    else:  # views of one buffer shared by both layers, so a page's stride isn't its size
        tensors = list(torch.full((PAGES, 2, 2, PAGE, 64), nan).unbind(1))
    return tensors, [vllm.kv_views(t, layout, 32) for t in tensors]


@pytest.mark.parametrize("run_fc", [True, False], ids=["we_run_fc", "engine_ran_fc"])
@pytest.mark.parametrize("layout", vllm.LAYOUTS)
def test_vllm_round(layout, run_fc, backend, drafter, rng):
    engine = Engine(drafter, rng, first_page=1)
    tensors, caches = caches_of(layout)
    carry = buffers.new_buffers(2, 9, N, 2, 32, dtype=torch.float32)
    idx = [6, 3]  # the engine's request slots
    # Prefill of both, a chunk of a third request that samples nothing, and the padded tail of a graph with stale values.
    third = torch.randn(5, 192, generator=rng)
    counts = [10, 6, 5]
    positions = [torch.arange(count) for count in counts]
    mapping = [engine.slots_of(0, positions[0]), engine.slots_of(1, positions[1]), torch.full((5,), -1)]
    batch = SimpleNamespace(
        num_reqs=3,
        num_tokens=21,
        query_start_loc=ints(0, 10, 16, 21, 21, 21),
        idx_mapping=ints(*idx, 8, 6, 3),
        positions=torch.cat([*positions, torch.full((3,), 99)]),
    )
    slot_mapping = torch.cat([*mapping, torch.full((3,), 5)])
    carry.carry_lens.fill_(2)  # left over from the slots' last owners
    arguments = vllm.plan_arguments(batch, ints(1, 1, 0, 4, 4), ints(0, 0, 3, 7, 7), slot_mapping)
    states = torch.cat([*engine.prompts, third])
    project(drafter, states, arguments, caches, carry, run_fc)
    assert carry.carry_lens.tolist() == [2, 2, 2, 0, 2, 2, 0, 2, 0]  # the three live slots were reset, no other

    # Verify step: rejected rows are still in the batch; vLLM's own context mapping gives them -1.
    engine.absorb()
    rows = [torch.arange(8) + length for length in engine.lengths]
    slot_mapping = torch.cat([engine.slots_of(r, rows[r]) for r in range(2)])
    for r in range(2):
        slot_mapping[8 * r + 8 - engine.rejected[r] : 8 * r + 8] = -1
    batch = SimpleNamespace(
        num_reqs=2, num_tokens=16, query_start_loc=ints(0, 8, 16, 16), idx_mapping=ints(*idx, 8), positions=torch.cat(rows)
    )
    arguments = vllm.plan_arguments(batch, ints(3, 8, 1), ints(*engine.rejected, 7), slot_mapping)
    block_start = project(drafter, engine.verified.flatten(0, 1), arguments, caches, carry, run_fc)
    assert block_start.tolist() == engine.state.seq_lens[engine.slots].tolist() == [13, 14]
    engine.check(caches, carry, idx, TOLERANCE)
    for k, v in caches:  # vLLM's null block was never written
        assert k[0].isnan().all() and v[0].isnan().all()

    # The draft graph runs at 4 requests: stale tails are rewritten, the padding rows give 0.
    slots = vllm.padded_slot_ids(arguments.carry_slot_ids, 2, ints(7, 7, 7, 6))
    lens = vllm.block_seq_lens(block_start, 2, B, 4096, ints(7, 7, 7, 7))
    assert slots.tolist() == [*idx, -1, -1] and lens.tolist() == [13, 14, -1, -1]
    assert vllm.block_seq_lens(block_start, 2, B, 20, ints(7, 7)).tolist() == [13, -1]  # 14 + 7 > 20: nothing to draft
    q, k, v = (torch.randn(4, B, heads, 32, generator=rng) for heads in (4, 2, 2))
    table = torch.cat([engine.table, torch.full((2, 8), 31, dtype=torch.int32)])
    out, _ = ops.block_attention(q, k, v, *caches[0], table, lens, carry.carry_k[0], carry.carry_v[0], carry.carry_lens, slots)
    own = engine.state
    expected, _ = ops.block_attention(
        q[:2], k[:2], v[:2], own.k_cache[0], own.v_cache[0], own.block_table[engine.slots], own.seq_lens[engine.slots],
        *own.carry_of(0), own.carry_lens, ints(*engine.slots),
    )  # fmt: skip
    assert float((out[:2] - expected).abs().max()) <= TOLERANCE
    assert (out[2:] == 0).all()


def test_vllm_slot_mapping_of_sliding_groups():
    """Evicted pages (null block 0) and positions past the table are never written."""
    table = torch.tensor([[0, 0, 5, 7], [3, 4, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([1, 6, 9, 15, 16, 0, 7, 8, -1])
    owner = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
    slots = vllm.draft_slot_mapping(table, positions, owner, 4)
    assert slots.tolist() == [-1, -1, 21, 31, -1, 12, 19, -1, -1]
    assert slots.dtype == torch.int64


def test_vllm_layouts_are_named_not_guessed():
    ambiguous = torch.zeros(2, 2, 4, 2, 32)
    a, b = vllm.kv_views(ambiguous, "kv_first", 32)[0], vllm.kv_views(ambiguous, "block_first", 32)[0]
    assert a.stride() != b.stride()
    assert a.untyped_storage().data_ptr() == ambiguous.untyped_storage().data_ptr()
    for tensor, layout, words in (
        (ambiguous, "nhd", "layout is 'nhd'"),
        (ambiguous, "packed", "must have 4 dimensions ending in 64"),
        (torch.zeros(3, 5, 4, 2, 32), "kv_first", "3 entries in dimension 0"),
        (torch.zeros(2, 5, 4, 2, 31), "kv_first", "ending in 32"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm.kv_views(tensor, layout, 32)


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_sglang_round(page_size, backend, drafter, rng):
    engine = Engine(drafter, rng, first_page=1)
    carry = buffers.new_buffers(2, 8, N, 2, 32, dtype=torch.float32)
    pool = [[torch.full((PAGES * PAGE + 2, 2, 32), float("nan")) for _ in range(2)] for _ in "kv"]  # not whole pages
    caches = [tuple(sglang.page_views(pool[part][layer], page_size) for part in (0, 1)) for layer in range(2)]
    req_to_token = torch.zeros(8, 32, dtype=torch.int32)
    indices = torch.tensor([5, 2])
    for r in range(2):
        positions = torch.arange(24)
        req_to_token[indices[r], :24] = engine.slots_of(r, positions).int()

    prefix, extend = ints(0, 0), ints(10, 6)
    cache_loc = torch.cat([engine.slots_of(r, torch.arange(engine.lengths[r])) for r in range(2)])
    carry.carry_lens.fill_(3)
    arguments = sglang.extend_arguments(prefix, extend, cache_loc, indices)
    assert_equal(arguments.positions, torch.cat([torch.arange(10), torch.arange(6)]))
    project(drafter, torch.cat(engine.prompts), arguments, caches, carry)
    assert carry.carry_lens.tolist() == [3, 3, 0, 3, 3, 0, 3, 3]

    # A captured verify batch of 3: the last row is padding and points at reserved slot 0 and token 0.
    engine.absorb()
    prefix = torch.tensor([10, 6, 0])
    commit = ints(N + 1 - engine.rejected[0], N + 1 - engine.rejected[1], 1)
    rows = [engine.slots_of(r, torch.arange(8) + engine.lengths[r]) for r in range(2)] + [torch.zeros(8, dtype=torch.int64)]
    arguments = sglang.verify_arguments(prefix, commit, torch.cat(rows), torch.tensor([5, 2, 0]), 8)
    states = torch.cat([engine.verified.flatten(0, 1), torch.full((8, 192), float("nan"))])
    block_start = project(drafter, states, arguments, caches, carry)
    assert block_start[:2].tolist() == [13, 14]
    engine.check(caches, carry, indices.tolist(), TOLERANCE)
    assert all(pool[part][layer][0].isnan().all() for part in (0, 1) for layer in range(2))  # token 0 was never written
    assert carry.carry_lens[0] == 3

    # Next step, batch order changed: the carried rows follow the request.
    indices = indices.flip(0)
    q, k, v = (torch.randn(2, B, heads, 32, generator=rng) for heads in (4, 2, 2))
    table = sglang.block_table(req_to_token, indices, page_size)
    out, _ = ops.block_attention(
        q, k, v, *caches[1], table, block_start[:2].flip(0).int(), carry.carry_k[1], carry.carry_v[1], carry.carry_lens,
        sglang.carry_slot_ids(indices),
    )  # fmt: skip
    own, slots = engine.state, engine.slots[::-1]
    expected, _ = ops.block_attention(
        q, k, v, own.k_cache[1], own.v_cache[1], own.block_table[slots], own.seq_lens[slots], *own.carry_of(1), own.carry_lens,
        ints(*slots),
    )  # fmt: skip
    assert float((out - expected).abs().max()) <= TOLERANCE


def test_sglang_arguments_are_checked():
    with pytest.raises(ValueError, match=r"out_cache_loc has 7 entries, must have 8"):
        sglang.verify_arguments(torch.tensor([3]), ints(1), torch.zeros(7, dtype=torch.int64), torch.tensor([1]), 8)
    assert sglang.carry_slot_ids(torch.tensor([4, 0]), padding_slot=None).tolist() == [4, 0]


@pytest.mark.parametrize("share_kv", [False, True])
def test_shards_of_ranks_are_the_whole(share_kv, rng):
    """Ranks' rows put back together by head are the packed weight; more ranks than heads replicate."""
    layers, heads, dim, hidden = 3, 4, 8, 16
    parts = 1 if share_kv else 2
    weight = torch.randn(layers * parts * heads * dim, hidden, generator=rng)
    by_head = weight.view(layers, parts, heads, dim, hidden)
    for size in (1, 2, 4, 8):
        for rank in range(size):
            held = buffers.kv_heads_of_rank(heads, rank, size)
            expected = by_head[:, :, held.start : held.stop].reshape(-1, hidden)
            assert_equal(buffers.shard_kv_rows(weight, layers, heads, rank, size, share_kv), expected)
    assert [buffers.kv_heads_of_rank(4, rank, 8).start for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    for size in (3, 6):
        with pytest.raises(ValueError, match=f"size is {size}, must divide the 4 KV heads"):
            buffers.kv_heads_of_rank(4, 0, size)
    with pytest.raises(ValueError, match="rank is 2, must be 0 to 1"):
        buffers.kv_heads_of_rank(4, 2, 2)
    with pytest.raises(ValueError, match="rows has 10 rows"):
        buffers.shard_kv_rows(weight[:10], layers, heads, 0, 2, share_kv)


def test_engines_are_imported_only_when_asked(monkeypatch):
    """Importing the adapters brings no engine in; asking for a version without the engine says what is missing."""
    for module in (vllm, sglang):
        name = module.__name__.rsplit(".", 1)[1]
        assert name not in sys.modules
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed, also where it is
        with pytest.raises(ImportError, match=f"{name} can't be imported .* must be installed"):
            module.engine_version()


def test_docs_name_what_exists():
    """Every name that docs/engines.md's code takes from us is there, with as many arguments as it accepts."""
    text = (pathlib.Path(__file__).parent.parent / "docs" / "engines.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 3
    calls = 0
    for block in blocks:
        ours = {"ck": importlib.import_module("carryover_kernels")}
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                ours.update({alias.asname or alias.name: getattr(module, alias.name) for alias in node.names})
        for node in ast.walk(ast.parse(block)):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in ours:
                target = getattr(ours[function.value.id], function.attr)
            elif isinstance(function, ast.Name) and function.id in ours:
                target = ours[function.id]
            else:
                continue
            if any(isinstance(a, ast.Starred) or (isinstance(a, ast.Constant) and a.value is ...) for a in node.args):
                continue
            inspect.signature(target).bind(*node.args, **{keyword.arg: 0 for keyword in node.keywords})
            calls += 1
    assert calls >= 10
