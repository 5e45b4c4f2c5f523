"""The decoder: output equal to the target's own, whatever the drafter does, whoever joins and leaves."""

import math
import random

import pytest
import torch
from tiny import tiny_drafter, tiny_model, tiny_target, write_tiny_drafter

from carryover_kernels.decoding import ORIGINS, DecodingError, DecodingSession, Interrupted, Target, generate
from carryover_kernels.decoding import session as session_module
from carryover_kernels.decoding.sampling import request_seed, target_logits
from carryover_kernels.drafter import CarryoverDrafter

pytestmark = pytest.mark.usefixtures("backend")

VOCAB = 29
PROMPTS = [[5, 6, 7], [1], list(range(3, 20)), [9] * 8, [2, 3]]
LIMITS = [30, 20, 10, 25, 1]


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma3"])
def pair(request, tmp_path_factory):
    target = tiny_target(request.param, VOCAB)
    return target, tiny_drafter(tmp_path_factory.mktemp("drafter"), target)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    target = tiny_target("qwen3", VOCAB)
    return target, tiny_drafter(tmp_path_factory.mktemp("drafter"), target)


def own_greedy(target, prompt, count):
    """The first ``count`` tokens of the 40 that Transformers itself generates."""
    known = target.__dict__.setdefault("own_greedy", {})
    if tuple(prompt) not in known:
        ids = torch.tensor([prompt])
        options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0)
        known[tuple(prompt)] = target.model.generate(ids, **options)[0, len(prompt) :].tolist()
    assert count <= 40
    return known[tuple(prompt)][:count]


def foresee(monkeypatch, target, share, seed=0):
    """Drafts become the target's own continuation, each right with probability ``share``: acceptance of every length, unequal in a batch.

    The drafter still runs and still reads its cache; only the tokens it proposed are replaced.
    """
    propose, rng = DecodingSession._draft, random.Random(seed)

    def draft(self, requests):
        limits, tokens, probs = propose(self, requests)
        if tokens is None:
            return limits, tokens, probs
        tokens = tokens.clone()
        for row, request in enumerate(requests):
            for j, right in enumerate(own_greedy(target, request.prompt, 40)[len(request.tokens) :][: limits[row]]):
                tokens[row, j] = right if rng.random() < share else (right + 1) % target.vocab_size
        return limits, tokens, probs

    monkeypatch.setattr(DecodingSession, "_draft", draft)


# greedy


@pytest.mark.parametrize("carryover", [True, False])
def test_greedy_output_is_the_targets_own(pair, carryover, monkeypatch, seed):
    target, drafter = pair
    foresee(monkeypatch, target, share=0.7, seed=seed)
    requests = generate(target, drafter, PROMPTS, LIMITS, carryover=carryover, max_requests=3)
    for prompt, limit, request in zip(PROMPTS, LIMITS, requests):
        assert request.tokens == own_greedy(target, prompt, limit)
        assert request.finish_reason == "length"
    lengths = [request.stats.acceptance_length for request in requests if request.stats.rounds]
    assert max(lengths) > 1.5 and len(set(lengths)) > 1, "acceptance should be unequal"
    assert any(request.stats.carried for request in requests) == carryover


@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "deepseek_v3", "gpt_neox", "olmo2"])
def test_other_families_of_targets(family, tmp_path, monkeypatch, seed):
    """Windows everywhere, sinks and experts, latent attention, other norms: the cache and masks of a batch serve them all."""
    target = tiny_target(family, VOCAB)
    drafter = tiny_drafter(tmp_path / "drafter", target)
    foresee(monkeypatch, target, share=0.7, seed=seed)
    requests = generate(target, drafter, PROMPTS[:4], 20, max_requests=3, stop_tokens=())
    for prompt, request in zip(PROMPTS, requests):
        assert request.tokens == own_greedy(target, prompt, 20)
        assert sum(request.stats.accepted) > 0


def test_alone_equals_batch(qwen, monkeypatch, seed):
    target, drafter = qwen
    foresee(monkeypatch, target, share=0.6, seed=seed)
    together = generate(target, drafter, PROMPTS, LIMITS, max_requests=8)
    for prompt, limit, request in zip(PROMPTS, LIMITS, together):
        assert generate(target, drafter, [prompt], limit)[0].tokens == request.tokens
        assert generate(target, None, [prompt], limit)[0].tokens == request.tokens


def test_the_real_drafts_are_used(qwen):
    """Without help from the test: rounds must be fewer than tokens where the tiny drafter guesses right at all."""
    target, drafter = qwen
    requests = generate(target, drafter, [[token] for token in range(12)], 24, max_requests=12)
    accepted = sum(sum(request.stats.accepted) for request in requests)
    assert accepted > 0
    assert all(request.tokens == own_greedy(target, request.prompt, 24) for request in requests)
    assert sum(request.stats.rounds for request in requests) + accepted == sum(len(request.tokens) - 1 for request in requests)


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 11])
def test_length_is_exact_and_rounds_are_fewest(qwen, limit, monkeypatch):
    target, drafter = qwen
    foresee(monkeypatch, target, share=1.0)
    (request,) = generate(target, drafter, [[5, 6, 7]], limit)
    assert request.tokens == own_greedy(target, [5, 6, 7], limit)
    assert request.finish_reason == "length"
    assert request.stats.rounds == math.ceil((limit - 1) / 5)  # 4 drafts and the bonus a round; the last verifies fewer


def test_fewer_drafts_than_trained(qwen, monkeypatch, seed):
    target, drafter = qwen
    foresee(monkeypatch, target, share=0.8, seed=seed)
    (request,) = generate(target, drafter, [[5, 6, 7]], 25, num_draft_tokens=2)
    assert request.tokens == own_greedy(target, [5, 6, 7], 25)
    assert len(request.stats.verified) == 2


def test_long_prompt_is_read_in_pieces(qwen, monkeypatch, seed):
    target, drafter = qwen
    prompts = [[(7 * i + i * i) % VOCAB for i in range(50)], [3, 4]]
    whole = generate(target, drafter, prompts, 12)
    monkeypatch.setattr(session_module, "PREFILL_ROWS", 16)
    pieces = generate(target, drafter, prompts, 12, max_requests=1)
    for prompt, one, other in zip(prompts, whole, pieces):
        assert one.tokens == other.tokens == own_greedy(target, prompt, 12)
        assert one.stats.accepted == other.stats.accepted, "the drafter's context should be the same"


# stop tokens, streaming, statistics


@pytest.mark.parametrize("place", [0, 1, 3, 6])
def test_stop_token_ends_inside_accepted_drafts(qwen, place, monkeypatch):
    target, drafter = qwen
    foresee(monkeypatch, target, share=1.0)
    prompt = [5, 6, 7]
    answer = own_greedy(target, prompt, 30)
    stop = answer[place]
    end = answer.index(stop) + 1
    (request,) = generate(target, drafter, [prompt], 30, stop_tokens=[stop])
    assert request.tokens == answer[:end]
    assert request.finish_reason == "stop"
    assert len(request.origins) == end


def test_default_stop_tokens_are_the_targets(qwen):
    target, drafter = qwen
    answer = own_greedy(target, [5, 6, 7], 30)
    target.model.generation_config.eos_token_id = [answer[4]]
    try:
        (request,) = generate(target, drafter, [[5, 6, 7]], 30)
        (all_of_it,) = generate(target, drafter, [[5, 6, 7]], 30, stop_tokens=())
    finally:
        target.model.generation_config.eos_token_id = None
    assert request.tokens == answer[: answer.index(answer[4]) + 1]
    assert all_of_it.tokens == answer


def test_stream_gets_every_token_once_with_its_origin(qwen, monkeypatch, seed):
    target, drafter = qwen
    foresee(monkeypatch, target, share=0.7, seed=seed)
    told = {}

    def stream(request, tokens, origins):
        assert len(tokens) == len(origins) > 0
        told.setdefault(request.index, []).append((tokens, origins))

    requests = generate(target, drafter, PROMPTS, LIMITS, stream=stream, max_requests=2)
    for request in requests:
        pieces = told[request.index]
        assert sum((tokens for tokens, _ in pieces), []) == request.tokens
        assert sum((origins for _, origins in pieces), []) == request.origins
        assert pieces[0][1] == ["first"]
        for _, origins in pieces[1:]:
            assert origins[-1] == "bonus" and set(origins[:-1]) <= {"draft", "carried"} <= set(ORIGINS)
        assert len(pieces) == request.stats.rounds + 1


def test_origin_carried_is_where_a_rejected_state_stood(qwen, monkeypatch):
    """Round 1 keeps 0 of 4 drafts: states of positions s'..s'+3 are carried, so the first 3 drafts of round 2 stand beside one."""
    target, drafter = qwen
    answer = own_greedy(target, [5, 6, 7], 20)
    propose, calls = DecodingSession._draft, []

    def draft(self, requests):
        limits, tokens, probs = propose(self, requests)
        right = torch.tensor([answer[len(requests[0].tokens) :][:4]])
        calls.append(1)
        return limits, right if len(calls) > 1 else (right + 1) % VOCAB, probs

    monkeypatch.setattr(DecodingSession, "_draft", draft)
    (request,) = generate(target, drafter, [[5, 6, 7]], 12, carryover=True)
    assert request.tokens == answer[:12]
    assert request.origins[:7] == ["first", "bonus", "carried", "carried", "carried", "draft", "bonus"]
    assert request.origins[7:] == ["draft"] * 4 + ["bonus"]


def test_statistics(qwen, monkeypatch):
    """Drafts right, right, wrong, right in every round: 2 of 4 kept, the third judged, the fourth useless."""
    target, drafter = qwen
    answer = own_greedy(target, [5, 6, 7], 32)
    propose = DecodingSession._draft

    def draft(self, requests):
        limits, tokens, probs = propose(self, requests)
        right = torch.tensor([(answer[len(requests[0].tokens) :] + [0] * 4)[:4]])
        right[0, 2] = (right[0, 2] + 1) % VOCAB
        return limits, right, probs

    monkeypatch.setattr(DecodingSession, "_draft", draft)
    (request,) = generate(target, drafter, [[5, 6, 7]], 1 + 3 * 8, carryover=True)
    stats = request.stats
    assert request.tokens == answer[:25]
    assert (stats.rounds, stats.new_tokens, stats.prompt_tokens) == (8, 25, 3)
    assert stats.acceptance_length == 3.0
    assert stats.tokens_per_pass == 25 / 9
    assert stats.verified == [8, 8, 7, 7]  # the last round wants 3 tokens, so it verifies 2 drafts
    assert stats.accepted == [8, 8, 0, 0]
    assert stats.acceptance_by_position == [1.0, 1.0, 0.0, 0.0]
    assert stats.carried == 7 * 2
    assert min(stats.prefill, stats.target, stats.drafter, stats.rest) > 0
    assert stats.tokens_per_second == pytest.approx(25 / (stats.prefill + stats.target + stats.drafter + stats.rest))


# joining and leaving


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_joining_and_finishing_between_rounds_changes_nobody(qwen, temperature):
    target, drafter = qwen
    wanted = {}
    for index, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS)):
        with DecodingSession(target, drafter, max_tokens=64) as session:
            request = session.join(prompt, limit, temperature=temperature, seed=index)
            while session.active:
                session.step()
        wanted[index] = request.tokens
    with DecodingSession(target, drafter, max_requests=4, max_tokens=64) as session:
        first = session.join(PROMPTS[0], LIMITS[0], temperature=temperature, seed=0)
        session.step()
        third = session.join(PROMPTS[2], LIMITS[2], temperature=temperature, seed=2)
        leaver = session.join([4, 4, 4], 40, temperature=temperature, seed=9)
        session.step()
        fourth = session.join(PROMPTS[3], LIMITS[3], temperature=temperature, seed=3)
        with pytest.raises(RuntimeError, match="join: 4 requests are active, must be fewer than max_requests 4"):
            session.join([1], 3)
        session.step()
        session.finish(leaver)
        assert leaver.finish_reason == "cancelled" and len(leaver.tokens) >= 3
        second = session.join(PROMPTS[1], LIMITS[1], temperature=temperature, seed=1)
        while session.active:
            session.step()
        for index, request in enumerate((first, second, third, fourth)):
            assert request.tokens == wanted[index], f"request {index}"
        with pytest.raises(ValueError, match="finish: request .* is not active"):
            session.finish(leaver)


def test_everything_is_given_back(qwen):
    target, drafter = qwen
    session = DecodingSession(target, drafter, max_requests=3, max_tokens=64)
    pages, slots = session.state.num_free_pages, session.state.num_free_slots
    a = session.join(PROMPTS[2], 30)
    b = session.join(PROMPTS[0], 4)
    session.step()
    assert session.state.num_free_pages < pages and session.state.num_free_slots == slots - 2
    session.finish(a)
    while session.active:
        session.step()
    assert b.finish_reason == "length"
    assert (session.state.num_free_pages, session.state.num_free_slots) == (pages, slots)
    assert session.state.carry_lens.tolist() == [0, 0, 0]
    assert session.cache.lengths == []
    assert all(layer.keys is None and layer.values is None for layer in session.cache.layers), "K/V of no request should take no memory"


def test_a_prompt_that_cannot_be_read_leaves_the_others_alone(qwen, monkeypatch):
    target, drafter = qwen
    with DecodingSession(target, drafter, max_requests=2, max_tokens=64) as session:
        request = session.join(PROMPTS[0], 20)
        session.step()
        run = target.run
        monkeypatch.setattr(target, "run", lambda *args: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            session.join(PROMPTS[2], 20)
        monkeypatch.setattr(target, "run", run)
        assert len(session.active) == 1 and session.state.num_free_slots == 1
        while session.active:
            session.step()
    assert request.tokens == own_greedy(target, PROMPTS[0], 20)


# sampling


def test_seeds_decide_and_draws_never_repeat(qwen, monkeypatch):
    target, drafter = qwen
    used = []
    verify = session_module.verify_draft

    def recorded(*args, **kwargs):
        used.extend(zip(kwargs["seeds"].tolist(), kwargs["offsets"].tolist()))
        return verify(*args, **kwargs)

    monkeypatch.setattr(session_module, "verify_draft", recorded)
    first = generate(target, drafter, PROMPTS, 20, temperature=1.0, seed=3)
    assert len(used) == len(set(used)), "a (seed, offset) pair was used twice"
    again = generate(target, drafter, PROMPTS, 20, temperature=1.0, seed=3, max_requests=1)
    other = generate(target, drafter, PROMPTS, 20, temperature=1.0, seed=4)
    assert [r.tokens for r in first] == [r.tokens for r in again]
    assert [r.tokens for r in first] != [r.tokens for r in other]
    assert len({request_seed(seed, index) for seed in range(50) for index in range(50)}) == 2500


def test_greedy_and_sampled_requests_share_a_batch(qwen):
    target, drafter = qwen
    alone = generate(target, drafter, [PROMPTS[0]], 20, temperature=0.8, seed=[5])[0]
    with DecodingSession(target, drafter, max_tokens=64) as session:
        greedy = session.join(PROMPTS[2], 20)
        sampled = session.join(PROMPTS[0], 20, temperature=0.8, seed=5)
        while session.active:
            session.step()
    assert greedy.tokens == own_greedy(target, PROMPTS[2], 20)
    assert sampled.tokens == alone.tokens


def test_target_logits_against_the_definition(rng):
    logits = torch.randn(6, 11, generator=rng) * 3
    logits[1, 3] = logits[1, 7] = logits[1].max() + 1  # equals
    temperature = torch.tensor([0.0, 0.0, 1.0, 0.5, 2.0, 1e-30])
    top_p = torch.tensor([1.0, 0.3, 1.0, 0.6, 1e-6, 0.9])
    got = torch.softmax(target_logits(logits, temperature, top_p).double(), dim=1)
    for row in range(6):
        t, best = float(temperature[row]), int(logits[row].argmax())
        if t < 1e-20:
            wanted = torch.zeros(11, dtype=torch.float64)
            wanted[best] = 1
        else:
            p = torch.softmax(logits[row].double() / t, dim=0)
            kept, mass = [], 0.0
            for token in sorted(range(11), key=lambda v: (-float(p[v]), v)):
                if mass < float(top_p[row]) or float(top_p[row]) == 1.0:
                    kept.append(token)
                mass += float(p[token])
            wanted = torch.zeros(11, dtype=torch.float64)
            wanted[kept] = p[kept] / p[kept].sum()
        # float32 logits: e**x of numbers up to 30 carries about 30 roundings of 6e-8.
        assert (got[row] - wanted).abs().max() < 1e-5, row
    assert got[1, 3] == 1 and got[1, 7] == 0, "of equals the lowest id is the greedy one"


# exact distribution of sampled output


def chi_squared_p(counts, probabilities, draws):
    """p-value of Pearson's statistic; cells expected fewer than 5 times are merged into one."""
    small = probabilities * draws < 5
    counts = torch.cat([counts[~small], counts[small].sum().reshape(1)]).double()
    expected = torch.cat([probabilities[~small], probabilities[small].sum().reshape(1)]) * draws
    cells = expected > 0
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = int(cells.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))


SMALL, DRAWN, DRAWS = 6, 3, 4000


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Vocabulary of 6, flat enough that drafts of another model are often kept; exact probabilities of all 216 answers."""
    target = tiny_target("qwen3", SMALL, initializer_range=0.12)
    drafter = tiny_drafter(tmp_path_factory.mktemp("small"), target, block=3)
    prompt = [1, 2, 3]
    answers = torch.cartesian_prod(*[torch.arange(SMALL)] * DRAWN)
    with torch.no_grad():
        logits = target.model(input_ids=torch.cat([torch.tensor([prompt]).expand(len(answers), -1), answers], dim=1)).logits
    return target, drafter, prompt, answers, logits[:, len(prompt) - 1 : -1].double()


def sampled_p_value(small, temperature, top_p, method, carryover):
    target, drafter, prompt, answers, logits = small
    options = [torch.full((len(answers) * DRAWN,), x) for x in (temperature, top_p)]
    steps = torch.softmax(target_logits(logits.flatten(0, 1), *options), dim=1).view(len(answers), DRAWN, SMALL).double()
    exact = steps.gather(2, answers.unsqueeze(2)).squeeze(2).prod(dim=1)
    assert float(exact.sum()) == pytest.approx(1)
    requests = generate(
        target, drafter, [prompt] * DRAWS, DRAWN, temperature=temperature, top_p=top_p, seed=11, stop_tokens=(), carryover=carryover,
        max_requests=500, method=method, page_size=4,
    )  # fmt: skip
    index = torch.tensor([request.tokens for request in requests]) @ torch.tensor([SMALL**2, SMALL, 1])
    assert sum(sum(request.stats.accepted) for request in requests) > DRAWS // 4, "too few drafts are kept to test anything"
    return chi_squared_p(torch.bincount(index, minlength=len(answers)), exact, DRAWS)


# A right sampler gives a p-value below this once in a million seeds; the seeds here are fixed, so it was decided once.
FALSE_ALARM = 1e-6


@pytest.mark.parametrize(
    "temperature, top_p, method, carryover",
    [(1.0, 1.0, "rejection", True), (0.7, 0.8, "rejection", False), (1.0, 1.0, "block", True)],
)
def test_sampled_answers_have_the_targets_distribution(small, temperature, top_p, method, carryover):
    assert sampled_p_value(small, temperature, top_p, method, carryover) > FALSE_ALARM


@pytest.mark.parametrize("fault", ["residual", "always_kept", "greedy_drafts"])
def test_the_distribution_test_sees_a_wrong_sampler(small, fault, monkeypatch):
    """The same test with p instead of max(p - q, 0) after a rejection, with too many drafts kept, with drafts that q does not describe."""
    verify = session_module.verify_draft

    def wrong(drafts, query_start_loc, target_logits=None, draft_probs=None, **kwargs):
        count, token, rejected = verify(drafts, query_start_loc, target_logits=target_logits, draft_probs=draft_probs, **kwargs)
        if draft_probs is None:
            return count, token, rejected
        rows = query_start_loc[:-1].long() + count
        if fault == "residual":
            fresh = torch.distributions.Categorical(logits=target_logits[rows]).sample()
            token = torch.where(rejected > 0, fresh, token)
        elif fault == "always_kept":
            # Drafted distribution claimed lower than it is: more is kept than should be.
            count, token, rejected = verify(
                drafts, query_start_loc, target_logits=target_logits, draft_probs=draft_probs * 0.6, **kwargs
            )
        else:
            count, token, rejected = verify(
                draft_probs.argmax(dim=2), query_start_loc, target_logits=target_logits, draft_probs=draft_probs, **kwargs
            )
        return count, token, rejected

    monkeypatch.setattr(session_module, "verify_draft", wrong)
    torch.manual_seed(0)
    if fault == "greedy_drafts":
        # The emitted drafts must be the ones verified: replace them where they are proposed.
        propose = DecodingSession._draft

        def draft(self, requests):
            limits, tokens, probs = propose(self, requests)
            return limits, tokens if probs is None else probs.argmax(dim=2), probs

        monkeypatch.setattr(DecodingSession, "_draft", draft)
    assert sampled_p_value(small, 1.0, 1.0, "rejection", True) < FALSE_ALARM


@pytest.mark.parametrize("device, dtype", [("meta", torch.float32), (None, torch.float64), (None, torch.bfloat16)])
def test_the_callers_default_device_and_dtype_change_nothing(qwen, tmp_path, device, dtype):
    """An engine may have set both: neither loading nor decoding makes a tensor where, or of what kind, the default says."""
    target, drafter = qwen
    options = dict(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=3, max_requests=2)
    expected = [request.tokens for request in generate(target, drafter, PROMPTS, **options)]
    target.model.save_pretrained(tmp_path / "target")
    folder = write_tiny_drafter(tmp_path / "drafter", vocab=VOCAB)
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        loaded = Target.from_pretrained(tmp_path / "target", torch.float32)
        reads = CarryoverDrafter.from_pretrained(folder, embed_tokens=loaded.embed_tokens, lm_head=loaded.lm_head)
        answers = [request.tokens for request in generate(loaded, reads, PROMPTS, **options)]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert answers == expected


# interruption and errors


def test_interrupt_keeps_what_was_done(qwen):
    target, drafter = qwen
    answer = own_greedy(target, PROMPTS[0], 30)

    def stream(request, tokens, origins):
        if len(request.tokens) >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        generate(target, drafter, [PROMPTS[0], PROMPTS[1]], 30, stream=stream, max_requests=1)
    assert isinstance(caught.value, Interrupted)
    begun, waiting = caught.value.requests
    assert begun.finish_reason == waiting.finish_reason == "interrupted"
    assert len(begun.tokens) >= 8 and begun.tokens == answer[: len(begun.tokens)]
    assert waiting.tokens == []


def test_interrupt_inside_a_pass_leaves_no_hook_and_whole_rounds(qwen):
    target, drafter = qwen
    passes = []

    def press(module, args):
        passes.append(1)
        if len(passes) == 5:
            raise KeyboardInterrupt

    handle = target.layers[2].register_forward_pre_hook(press)
    session = DecodingSession(target, drafter, max_tokens=64)
    request = session.join(PROMPTS[0], 30)
    try:
        with pytest.raises(KeyboardInterrupt):
            while session.active:
                session.step()
    finally:
        handle.remove()
    assert request.tokens == own_greedy(target, PROMPTS[0], 30)[: len(request.tokens)] and len(request.tokens) >= 4
    assert all(not module._forward_hooks for module in target.model.modules())
    with pytest.raises(RuntimeError, match="must start a new session"):
        session.step()
    with pytest.raises(RuntimeError, match="must start a new session"):
        session.join([1], 3)
    session.close()
    assert request.finish_reason == "interrupted" and session.state.num_free_slots == session.max_requests


def test_logits_that_are_not_finite_stop_with_a_sentence(qwen):
    target, drafter = qwen
    seen = []

    def spoil(module, args, output):
        seen.append(1)
        if len(seen) == 4:
            output = output.clone()
            output[..., 3] = float("nan")
        return output

    handle = target.model.lm_head.register_forward_hook(spoil)
    try:
        with pytest.raises(DecodingError, match="the target's logits of request 0 are not finite") as caught:
            generate(target, drafter, [PROMPTS[0]], 30)
    finally:
        handle.remove()
    (request,) = caught.value.requests
    assert request.tokens == own_greedy(target, PROMPTS[0], 30)[: len(request.tokens)] and len(request.tokens) >= 3
    assert request.finish_reason == "interrupted"


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(prompts=[[]]), "generate: prompt has 0 tokens, must have at least 1"),
        (dict(prompts=[[5, VOCAB]]), f"generate: prompt has token {VOCAB}, must be 0 to {VOCAB - 1}"),
        (dict(prompts=[[5], [-1]]), f"generate: prompt has token -1, must be 0 to {VOCAB - 1}"),
        (dict(max_new_tokens=0), "generate: max_new_tokens is 0, must be at least 1"),
        (dict(max_new_tokens=[3, 4]), "generate: max_new_tokens has 2 values, must have 1: one a prompt"),
        (dict(max_new_tokens=254), "need 257 positions, must be at most the target's 256"),
        (dict(temperature=-0.1), "generate: temperature is -0.1, must be 0 (greedy) or more, and finite"),
        (dict(temperature=float("nan")), "generate: temperature is nan, must be 0 (greedy) or more, and finite"),
        (dict(top_p=0.0), "generate: top_p is 0.0, must be above 0 and at most 1"),
        (dict(seed=-1), "generate: seed is -1, must be 0 to 2**63 - 1"),
        (dict(method="typical"), "generate: method is 'typical', must be one of rejection, block"),
        (dict(max_requests=0), "generate: max_requests is 0, must be at least 1"),
        (dict(num_draft_tokens=5), "num_draft_tokens is 5, must be 1 to 4"),
    ],
)
def test_refused_arguments(qwen, change, sentence, monkeypatch):
    target, drafter = qwen
    monkeypatch.setattr(target, "run", lambda *args: pytest.fail("a pass ran before the arguments were checked"))
    with pytest.raises(ValueError) as caught:
        generate(target, drafter, **(dict(prompts=[[5, 6, 7]], max_new_tokens=5) | change))
    assert sentence in str(caught.value)


def test_refused_pairs(qwen, tmp_path):
    target, drafter = qwen
    with pytest.raises(ValueError, match="num_draft_tokens is 3, must be None without a drafter"):
        generate(target, None, [[1]], num_draft_tokens=3)
    other = tiny_target("qwen3", VOCAB, num_hidden_layers=2)
    with pytest.raises(ValueError, match="Target: tap 2 must be a layer of the target, -1 .* to 1"):
        generate(other, drafter, [[1]])
    smaller = tiny_target("qwen3", VOCAB - 5)
    with pytest.raises(ValueError, match=f"the drafter's vocabulary is {VOCAB}, must be at most the target's {VOCAB - 5}"):
        generate(smaller, drafter, [[1]])
    wider = tiny_target("qwen3", VOCAB, hidden_size=48)
    with pytest.raises(ValueError, match="fc.weight has 64 columns, must have 96: 2 taps of the target's 48"):
        generate(wider, drafter, [[1]])


def test_refused_targets(tmp_path):
    import transformers

    with pytest.raises(ValueError, match="must be in eval mode"):
        Target(tiny_model().train())
    model = tiny_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attention implementation is 'flash_attention_2', must be 'sdpa' or 'eager'"):
        Target(model)
    with pytest.raises(FileNotFoundError, match="no config.json in .*, must be the folder of a Transformers checkpoint"):
        Target.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="Target: BloomForCausalLM fails in a ragged batch .*, must take 4-D masks and positions"):
        tiny_target("bloom")
    hybrid = transformers.Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="rejected tokens cannot be taken back from other caches"):
        Target(transformers.Qwen3NextForCausalLM(hybrid).eval())


def test_a_model_that_ignores_the_mask_is_refused():
    model = tiny_model()
    forward = model.model.forward

    def deaf(*args, attention_mask=None, **kwargs):
        return forward(*args, attention_mask=None, **kwargs)

    model.model.forward = deaf
    with pytest.raises(ValueError, match="the model does not honour explicit masks and positions"):
        Target(model)


def test_padded_heads_sample(tmp_path):
    """A target whose head is wider than the drafter's vocabulary: the extra ids can be sampled, never drafted."""
    target = tiny_target("qwen3", VOCAB, initializer_range=0.1)
    drafter = tiny_drafter(tmp_path / "d", target)
    narrow = CarryoverDrafter.from_pretrained(
        write_tiny_drafter(tmp_path / "narrow", vocab=VOCAB - 4), embed_tokens=target.embed_tokens, lm_head=target.lm_head
    )
    assert drafter.config.vocab_size == VOCAB and narrow.config.vocab_size == VOCAB - 4
    requests = generate(target, narrow, [[1, 2]] * 8, 20, temperature=1.0, seed=1)
    seen = {token for request in requests for token in request.tokens}
    assert any(token >= VOCAB - 4 for token in seen)
    assert sum(sum(request.stats.accepted) for request in requests) > 0
