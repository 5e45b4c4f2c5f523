"""Public reports of engines (collected before the project began), each row a test somewhere; here those that only whole decoding shows."""

import pathlib
import random
import re

import pytest
import torch
from test_decoding import VOCAB, foresee, own_greedy
from tiny import tiny_drafter, tiny_target

from carryover_kernels.decoding import DecodingSession, generate
from carryover_kernels.decoding import session as session_module

# id: repository#number, what it showed. A test carries the id in its name (test_rNN_...).
REPORTS = {
    "R01": "vllm-project/vllm#53063: rope layout inherited from the target",
    "R02": "vllm-project/vllm#54373: rope flag of a target without rope",
    "R03": "vllm-project/vllm#40727: taps read one layer early",
    "R04": "sgl-project/sglang#37475: missing tap ids guessed",
    "R05": "sgl-project/sglang#32204: last decoder layer as a tap",
    "R06": "ikawrakow/ik_llama.cpp#2296: block seeded one position early",
    "R07": "warpfront/hipfire#483: slot 0 not the anchor's embedding",
    "R08": "vllm-project/vllm#51581: packed quantised weight sliced",
    "R09": "vllm-project/vllm#42971: first draft wrote into pages of others",
    "R10": "vllm-project/vllm#47930: prefix served without draft K/V",
    "R11": "weicj/vLLM-2080Ti-Definitive#194: unbuilt draft context read",
    "R13": "vllm-project/vllm#54094: drafter's state vetoes reuse of the target's",
    "R14": "NVIDIA/TensorRT-LLM#16548: dummy requests own slot 0",
    "R16": "vllm-project/vllm#47066: stale ids of padded requests",
    "R18": "sgl-project/sglang#22958: stale tail of request ids",
    "R19": "sgl-project/sglang#26292: padded rows read old slots",
    "R20": "sgl-project/sglang#10892: stale positions of padding",
    "R22": "weicj/vLLM-2080Ti-Definitive#208: flat and spaced query_start_loc tails",
    "R24": "flashinfer-ai/flashinfer#941: NaN in the unused tail of a page",
    "R26": "vllm-project/vllm#936: V past the length times weight 0",
    "R27": "NVIDIA/TensorRT-LLM#18754: empty split merged",
    "R28": "lightseekorg/tokenspeed#748: slot times stride in 32 bits",
    "R30": "vllm-project/vllm#47671: page times stride in 32 bits",
    "R32": "sgl-project/sglang#20389: row offset of q in 32 bits",
    "R33": "sgl-project/sglang#33579: columns beyond the table",
    "R35": "wtdcode/vllm-backport#59: longer than the draft's positions",
    "R36": "local-inference-lab/vllm#24: writes to the null block",
    "R38": "vllm-project/vllm#54374: schedule of another window",
    "R39": "vllm-project/vllm#56692: one causal flag for all layers",
    "R40": "ikawrakow/ik_llama.cpp#2021: window of the draft ignored",
    "R41": "vllm-project/vllm#48381: slots recomputed from positions",
    "R43": "vllm-project/vllm#41559: fp8 cache in a non-causal op",
    "R44": "lightseekorg/tokenspeed#1012: draft cache dtype follows the target's",
    "R46": "InternLM/lmdeploy#4991: fp16 overflow in fc",
    "R47": "sgl-project/sglang#33614: accept length differs by rank",
    "R48": "sgl-project/sglang#40246: rank numerics differ",
    "R50": "vllm-project/vllm#54691: draft dominates at long context",
    "R51": "vllm-project/vllm#55279: failure after thousands of sampled steps",
    "R53": "ggml-org/llama.cpp#27407: text differs by batched numerics",
    "R55": "huggingface/candle#3520: rope table in bf16",
}


def test_every_report_has_a_test():
    names = set()
    for path in pathlib.Path(__file__).parent.rglob("test_*.py"):
        names |= set(re.findall(r"^\s*def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    tested = {part.upper() for name in names for part in name.split("_") if re.fullmatch(r"r\d\d", part)}
    assert set(REPORTS) - tested == set(), "reports without a test"
    assert tested - set(REPORTS) == set(), "tests of reports that are not listed"


@pytest.fixture(scope="module")
def qwen(backend, tmp_path_factory):
    target = tiny_target("qwen3", VOCAB)
    return target, tiny_drafter(tmp_path_factory.mktemp("drafter"), target)


def test_r03_a_tap_is_the_output_of_its_layer(qwen):
    target, _ = qwen
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    cache = target.new_cache()
    cache.add_row()
    _, states = target.run(cache, 0, ids, (2, -1, 0))
    with torch.no_grad():
        hidden = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    # The same modules in the same order on the same tokens: only the attention's mask is given another way.
    torch.testing.assert_close(states, torch.cat([hidden[3], hidden[0], hidden[1]], dim=-1))
    assert not torch.allclose(states[..., :32], hidden[2])


def test_r05_the_last_layers_tap_is_the_stream_before_the_norm(qwen):
    target, _ = qwen
    ids = torch.tensor([[3, 1, 4]])
    cache = target.new_cache()
    cache.add_row()
    _, states = target.run(cache, 0, ids, (3,))
    with torch.no_grad():
        normed = target.model(input_ids=ids, output_hidden_states=True).hidden_states[4]
        torch.testing.assert_close(target.model.model.norm(states), normed)
    assert not torch.allclose(states, normed)  # a norm of all ones leaves what is normed as it is: the line above holds for both
    with pytest.raises(ValueError, match="Target: tap 4 must be a layer of the target, -1 .* to 3"):
        target.run(cache, 0, ids, (4,))


def test_r06_r07_block_starts_with_the_anchor_at_the_committed_length(qwen, monkeypatch, seed):
    target, drafter = qwen
    foresee(monkeypatch, target, share=0.6, seed=seed)
    propose, seen = drafter.propose, []

    def watched(state, slots, anchor_tokens, **options):
        seen.append([(int(state.seq_lens[slot]), int(anchor)) for slot, anchor in zip(slots, anchor_tokens) if slot >= 0])
        return propose(state, slots, anchor_tokens, **options)

    monkeypatch.setattr(drafter, "propose", watched)
    prompts = [[5, 6, 7], [1], list(range(3, 20))]
    with DecodingSession(target, drafter, max_tokens=64) as session:
        requests = [session.join(prompt, 20) for prompt in prompts]
        while session.active:
            wanted = [(len(r.prompt) + len(r.tokens) - 1, r.tokens[-1]) for r in session.active if len(r.tokens) < 19]
            before = len(seen)
            session.step()
            if len(seen) > before:
                assert seen[-1] == wanted
    assert len(seen) > 4 and all(len(request.tokens) == 20 for request in requests)


def test_r09_a_joining_request_writes_no_page_of_another(qwen):
    target, drafter = qwen
    with DecodingSession(target, drafter, max_requests=3, max_tokens=48, page_size=4) as session:
        first = session.join(list(range(3, 15)), 20)
        session.step()
        pages = [page for page in session.state.block_table[first.slot].tolist() if page >= 0]
        kept = [cache[pages].clone() for cache in (*session.state.k_cache, *session.state.v_cache)]
        carried = [buffer[:, first.slot].clone() for buffer in (*session.state.carry_k, *session.state.carry_v)]
        second = session.join([7, 8, 9], 20)
        mine = {page for page in session.state.block_table[second.slot].tolist() if page >= 0}
        assert mine and not mine & set(pages)
        for before, cache in zip(kept, (*session.state.k_cache, *session.state.v_cache)):
            assert torch.equal(before, cache[pages])
        for before, buffer in zip(carried, (*session.state.carry_k, *session.state.carry_v)):
            assert torch.equal(before, buffer[:, first.slot])


def test_r10_a_request_that_did_not_draft_carries_nothing(qwen, monkeypatch):
    """The last token before the limit is verified without drafts: what was carried must not survive that step."""
    target, drafter = qwen
    with DecodingSession(target, drafter, max_tokens=64, carryover=True) as session:
        request = session.join([5, 6, 7], 40)
        session.step()
        assert int(session.state.carry_lens[request.slot]) > 0
        monkeypatch.setattr(session, "_can_draft", lambda request: False)
        session.step()
        assert int(session.state.carry_lens[request.slot]) == 0 and request.carried == 0


def test_r11_a_prefix_that_was_never_built_is_not_read(backend):
    """Keys of positions 0..5 are missing (a restored prefix), pages hold 6..9: ``block_start`` 10 says so; windows count by position."""
    from carryover_kernels.ops import block_attention

    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 1, 8, generator=generator) for _ in range(3))
    k_cache, v_cache = (torch.randn(2, 4, 1, 8, generator=generator) for _ in range(2))
    table, length = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    k_cache[0], v_cache[0] = float("nan"), float("nan")  # never built, never read
    out, _ = block_attention(q, k, v, k_cache, v_cache, table, length, block_start=torch.tensor([10]), window_left=2)
    keys, values = torch.cat([k_cache[1], k[0]])[:, 0], torch.cat([v_cache[1], v[0]])[:, 0]
    for row in range(2):
        seen = torch.tensor([10 + row - position <= 2 for position in (6, 7, 8, 9, 10, 11)])
        weights = torch.softmax((keys @ q[0, row, 0] * 8**-0.5).masked_fill(~seen, float("-inf")), dim=0)
        # Two float32 softmaxes of six numbers.
        torch.testing.assert_close(out[0, row, 0], weights @ values)


def attention_case(committed, carried, rows=4, page=16, seed=5):
    """Float32 arguments of block_attention for one request whose table is in order, and all its keys laid flat for a dense check."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, 2, 16, generator=generator)

    pages = -(-committed // page)
    args = dict(
        q=random(1, rows), k_block=random(1, rows), v_block=random(1, rows), k_cache=random(pages, page), v_cache=random(pages, page),
        block_table=torch.arange(pages, dtype=torch.int32).unsqueeze(0), seq_lens=torch.tensor([committed], dtype=torch.int32),
        carry_k=random(1, 8), carry_v=random(1, 8), carry_lens=torch.tensor([carried], dtype=torch.int32),
        carry_slot_ids=torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    positions = torch.cat([torch.arange(committed), committed + torch.arange(carried), committed + torch.arange(rows)])
    flat = [
        torch.cat([args[f"{name}_cache"].flatten(0, 1)[:committed], args[f"carry_{name}"][0, :carried], args[f"{name}_block"][0]])
        for name in ("k", "v")
    ]
    return args, flat, positions


def dense(args, flat, positions, window=None):
    """Masked softmax in float64, [rows, heads, D]."""
    q, (keys, values) = args["q"][0].double(), (tensor.double() for tensor in flat)
    scores = torch.einsum("rhd,khd->hrk", q, keys) * q.shape[-1] ** -0.5
    if window is not None:
        distance = positions[-q.shape[0] :, None] - positions[None, :]
        scores = scores.masked_fill(distance > window, float("-inf"))
    return torch.einsum("hrk,khd->rhd", scores.softmax(dim=-1), values)


def assert_dense(out, wanted):
    # Float32 sums of up to some thousand terms, each below 5: assert_close's own float32 tolerance is for that.
    torch.testing.assert_close(out[0].double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_r24_r26_what_lies_past_the_length_never_enters(backend, poison):
    """17 keys in pages of 16: the second page's tail, and the carry slot's, hold NaN or Inf in K and in V."""
    from carryover_kernels.ops import block_attention

    args, flat, positions = attention_case(17, 3)
    wanted = dense(args, flat, positions)
    for name in ("k", "v"):
        args[f"{name}_cache"][1, 1:] = poison
        args[f"carry_{name}"][0, 3:] = poison
    assert_dense(block_attention(**args)[0], wanted)


@pytest.mark.parametrize("splits", [2, 7, 16])
def test_r27_splits_that_see_no_key_weigh_nothing(backend, splits):
    """A window of 9 leaves most splits of 300 keys empty."""
    from carryover_kernels.ops import block_attention

    args, flat, positions = attention_case(300, 2)
    out, lse = block_attention(**args, window_left=9, num_splits=splits, return_lse=True)
    assert_dense(out, dense(args, flat, positions, window=9))
    assert torch.isfinite(lse).all()


def test_r32_rows_of_q_past_32_bits(backend):
    """Two requests whose q lies 2**31 + 64 elements apart."""
    from test_block_attention import sparse_storage

    from carryover_kernels.ops import block_attention

    args, _, _ = attention_case(17, 3)
    twice = {name: value.repeat(2, *[1] * (value.dim() - 1)) if name in ("k_block", "v_block") else value for name, value in args.items()}
    twice |= {name: args[name].repeat(2, *[1] * (args[name].dim() - 1)) for name in ("block_table", "seq_lens", "carry_slot_ids")}
    rows, heads, dim = args["q"].shape[1:]
    twice["q"] = sparse_storage((2, rows, heads, dim), (2**31 + 64, heads * dim, dim, 1), torch.float32)
    twice["q"][0], twice["q"][1] = args["q"][0], args["q"][0] * 2
    out, _ = block_attention(**twice)
    assert torch.equal(out[:1], block_attention(**args)[0])
    assert torch.equal(out[1:], block_attention(**(args | dict(q=args["q"] * 2)))[0])


def test_r38_a_plan_is_never_reused_for_another_window(backend):
    """The same shapes with windows in turn, each against its own definition."""
    from carryover_kernels.ops import block_attention

    args, flat, positions = attention_case(300, 2)
    for window in (9, None, 120, 9, 1000, None):
        out, _ = block_attention(**args, window_left=-1 if window is None else window)
        assert_dense(out, dense(args, flat, positions, window))


def test_r50_long_context_is_split_and_carry_joins_the_same_pass(backend):
    """Thousands of keys cut into parts give what one part gives, with carried rows and without."""
    from carryover_kernels.ops import block_attention

    for carried in (0, 5):
        args, flat, positions = attention_case(5000, carried)
        wanted = dense(args, flat, positions)
        for splits in (0, 1, 8):
            assert_dense(block_attention(**args, num_splits=splits)[0], wanted)


def test_r13_the_targets_cache_never_holds_rejected_tokens(qwen, monkeypatch, seed):
    """What the target keeps with a drafter and carryover is what it keeps alone: it may be reused for anything."""
    target, drafter = qwen
    foresee(monkeypatch, target, share=0.5, seed=seed)
    kept = {}
    for name in (None, drafter):
        with DecodingSession(target, name, max_tokens=64) as session:
            request = session.join([5, 6, 7], 30)
            while not request.finished and len(request.tokens) < 20:
                session.step()
            length = session.cache.lengths[0]
            assert length == request.anchor_position
            kept[name] = [layer.keys[0, :, : min(length, 20)].clone() for layer in session.cache.layers], length
    for alone, drafted in zip(kept[None][0], kept[drafter][0]):
        # float32 of the same numbers added over rows in another order.
        torch.testing.assert_close(alone, drafted)


def test_r14_r16_requests_without_a_slot_touch_no_live_one(qwen):
    """Padding (-1) of a request that decodes without drafts, beside a live request in slot 0."""
    target, drafter = qwen
    alone = generate(target, drafter, [[5, 6, 7]], 25)[0]
    with DecodingSession(target, drafter, max_tokens=64) as session:
        live = session.join([5, 6, 7], 25)
        other = session.join([4, 4], 25)
        assert live.slot == 0
        session._stop_drafting(other)
        while session.active:
            session.step()
    assert live.tokens == alone.tokens and live.stats.accepted == alone.stats.accepted and live.stats.carried == alone.stats.carried
    assert other.tokens == own_greedy(target, [4, 4], 25) and other.stats.accepted == []


def test_r19_padded_rows_read_nothing_and_change_nothing(qwen):
    """A captured batch is wider than the requests in it: its padding proposes nothing, and the others propose what they do alone."""
    target, drafter = qwen
    with DecodingSession(target, drafter, max_tokens=64, carryover=True) as session:
        request = session.join([5, 6, 7], 25)
        session.step()
        anchor = torch.tensor([request.tokens[-1]])
        alone = drafter.propose(session.state, [request.slot], anchor, return_logits=True)
        before = [tensor.clone() for tensor in (*session.state.k_cache, session.state.carry_lens, session.state.seq_lens[:-1])]
        padded = drafter.propose(session.state, [-1, request.slot, -1], torch.tensor([3, int(anchor), 3]), return_logits=True)
        assert padded.tokens[0].tolist() == padded.tokens[2].tolist() == [-1] * 4
        assert padded.tokens[1].tolist() == alone.tokens[0].tolist()
        # One batch of three blocks against one block: float32 sums in another order.
        torch.testing.assert_close(padded.logits[1], alone.logits[0])
        after = (*session.state.k_cache, session.state.carry_lens, session.state.seq_lens[:-1])
        assert all(torch.equal(one, other) for one, other in zip(before, after))


@pytest.mark.parametrize("positions", [8, 12, 20, 33])
def test_r35_past_the_drafters_positions_it_decodes_on_without_drafts(qwen, positions, tmp_path, monkeypatch):
    target, _ = qwen
    short = tiny_drafter(tmp_path / "short", target, max_positions=positions)
    foresee(monkeypatch, target, share=0.9)
    prompts = [[5, 6, 7], list(range(3, 20))]
    with DecodingSession(target, short, max_tokens=64) as session:
        requests = [session.join(prompt, 30) for prompt in prompts]
        while session.active:
            session.step()
        assert session.state.num_free_slots == session.max_requests
    for prompt, request in zip(prompts, requests):
        assert request.tokens == own_greedy(target, prompt, 30)
    assert (sum(requests[0].stats.accepted) > 0) == (positions >= 8)
    assert (sum(requests[1].stats.accepted) > 0) == (positions > 22)


def test_r47_carried_rows_are_those_that_verification_rejected(qwen, monkeypatch):
    """Another rank's verdict counts: a verification that keeps fewer drafts than these logits would is followed, in lengths and carry."""
    target, drafter = qwen
    foresee(monkeypatch, target, share=1.0)
    verify = session_module.verify_draft

    def synced(drafts, query_start_loc, **options):
        count, token, rejected = verify(drafts, query_start_loc, **options)
        rows = count + rejected
        agreed = count.clamp(max=1)
        return agreed, drafts.gather(1, agreed.long().unsqueeze(1)).squeeze(1), rows - agreed

    monkeypatch.setattr(session_module, "verify_draft", synced)
    with DecodingSession(target, drafter, max_tokens=64, carryover=True) as session:
        request = session.join([5, 6, 7], 30)
        for _ in range(3):
            session.step()
            assert int(session.state.carry_lens[request.slot]) == 3
            assert int(session.state.seq_lens[request.slot]) == request.anchor_position == session.cache.lengths[0]
        assert request.tokens == own_greedy(target, [5, 6, 7], 30)[:7]


def test_r48_replicas_with_other_rounding_keep_the_same_lengths(qwen, seed):
    """Two replicas of the drafter (other weights, so other numbers) given one verdict agree on every length."""
    target, drafter = qwen
    rng = random.Random(seed)
    torch.manual_seed(seed)
    states = []
    for scale in (1.0, 1.37):
        state = drafter.new_state(4, page_size=4, num_pages=64, carry=True)
        states.append((state, [state.allocate(60) for _ in range(3)], scale))
    lengths = [0, 0, 0]
    for _ in range(4):
        rows = [rng.randint(1, 5) for _ in range(3)]
        rejected = [rng.randint(0, count - 1) for count in rows]
        starts = torch.tensor([0, rows[0], rows[0] + rows[1], sum(rows)], dtype=torch.int32)
        positions = torch.cat([torch.arange(length, length + count) for length, count in zip(lengths, rows)])
        features = torch.randn(sum(rows), 64)
        for state, slots, scale in states:
            drafter.absorb(state, slots, features * scale, starts, torch.tensor(rejected, dtype=torch.int32), positions)
        lengths = [length + count - gone for length, count, gone in zip(lengths, rows, rejected)]
        for state, slots, _ in states:
            assert state.seq_lens[slots].tolist() == lengths
            assert state.carry_lens[slots].tolist() == rejected


def test_r51_a_long_sampled_run_stays_in_bounds(backend, tmp_path, monkeypatch, seed):
    """Hundreds of sampled rounds, two requests joining anew, every id checked by CARRYOVER_CHECK on the way."""
    monkeypatch.setenv("CARRYOVER_CHECK", "1")
    target = tiny_target("qwen3", VOCAB, initializer_range=0.1, max_position_embeddings=1024)
    drafter = tiny_drafter(tmp_path / "drafter", target, max_positions=1024)
    requests = generate(target, drafter, [[1, 2], [3]] * 2, [450, 300, 200, 400], temperature=1.0, seed=seed, max_requests=2)
    assert [len(request.tokens) for request in requests] == [450, 300, 200, 400]
    assert sum(request.stats.rounds for request in requests) > 250
    assert all(0 <= token < VOCAB for request in requests for token in request.tokens)


@pytest.mark.parametrize("broken", [False, True], ids=["right", "broken_commit"])
def test_r53_in_bf16_texts_part_only_where_two_logits_are_as_good_as_equal(broken, backend, tmp_path, monkeypatch, seed):
    """Acceptance and length are what is promised in bf16; where the text differs from the target's own, rounding must explain it.

    It must not explain a cache that loses an accepted token's keys: the test can fail.
    """
    from carryover_kernels.cli.show import explain_difference
    from carryover_kernels.decoding import Target
    from carryover_kernels.decoding.target import RaggedCache
    from tiny import tiny_model

    target = Target(tiny_model("qwen3", VOCAB).to(torch.bfloat16))
    drafter = tiny_drafter(tmp_path / "drafter", target)
    foresee(monkeypatch, target, share=0.8, seed=seed)
    prompts = [[5, 6, 7], [1], list(range(3, 20)), [9] * 8]
    alone = [generate(target, None, [prompt], 40)[0] for prompt in prompts]
    commit = RaggedCache.commit

    def forgetful(cache, row, tokens):
        commit(cache, row, tokens)
        for layer in cache.layers:
            layer.keys[cache.first + row, :, cache.lengths[row] - 1] = 0

    with monkeypatch.context() as patch:
        if broken:
            patch.setattr(RaggedCache, "commit", forgetful)
        drafted = generate(target, drafter, prompts, 40)
    verdicts = []
    for one, request in zip(alone, drafted):
        assert len(request.tokens) == 40 and request.stats.acceptance_length > 1
        if one.tokens != request.tokens:
            verdicts.append(explain_difference(target, one, request))
    assert all(rounding for _, rounding in verdicts) != broken, verdicts
