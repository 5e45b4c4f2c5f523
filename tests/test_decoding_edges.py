"""The decoder at its edges: arguments of the wrong kind, the end of learned positions, callbacks that raise, inference mode."""

import numpy
import pytest
import torch
from tiny import tiny_drafter, tiny_target

from carryover_kernels.decoding import DecodingSession, Target, generate

pytestmark = pytest.mark.usefixtures("backend")

VOCAB = 29
PROMPTS = [[5, 6, 7], [1], list(range(3, 20)), [2, 3]]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    target = tiny_target("qwen3", VOCAB)
    return target, tiny_drafter(tmp_path_factory.mktemp("drafter"), target)


def tokens(requests):
    return [request.tokens for request in requests]


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(prompts=None), "prompts is a NoneType, must be a list of lists of token ids"),
        (dict(prompts="text"), "prompts is a str, must be a list of lists of token ids"),
        (dict(prompts=["text"]), "prompt is 'text', must be a list of token ids"),
        (dict(prompts=[5, 6]), "prompt is '5', must be a list of token ids"),
        (dict(prompts=[[1.7, 2]]), "prompt is '[1.7, 2]', must be a list of token ids"),
        (dict(max_new_tokens=2.5), "max_new_tokens is 2.5, must be a whole number, or a list of one a prompt"),
        (dict(max_new_tokens=[None]), "max_new_tokens is None, must be a whole number"),
        (dict(seed=None), "seed is None, must be a whole number, or a list of one a prompt"),
        (dict(seed=["x"]), "seed is 'x', must be a whole number"),
        (dict(temperature=None), "temperature is None, must be a number"),
        (dict(top_p="x"), "top_p is 'x', must be a number"),
        (dict(stop_tokens=5), "stop_tokens is 5, must be token ids in a list, or () for none"),
        (dict(stop_tokens=[None]), "stop_tokens is [None], must be token ids in a list, or () for none"),
        (dict(max_requests=1.5), "max_requests is 1.5, must be a whole number"),
        (dict(page_size=0), "page_size is 0, must be at least 1"),
        (dict(page_size=2.5), "page_size is 2.5, must be a whole number"),
        (dict(num_draft_tokens=2.5), "num_draft_tokens is 2.5, must be a whole number"),
        (dict(num_draft_tokens=0), "num_draft_tokens is 0, must be at least 1"),
        (dict(carryover="no"), "carryover is 'no', must be True, False or None"),
    ],
)
def test_arguments_of_the_wrong_kind(qwen, change, sentence, monkeypatch):
    target, drafter = qwen
    monkeypatch.setattr(target, "run", lambda *args: pytest.fail("a pass ran before the arguments were checked"))
    with pytest.raises((TypeError, ValueError)) as caught:
        generate(target, drafter, **(dict(prompts=[[5, 6, 7]], max_new_tokens=5) | change))
    assert str(caught.value) == f"generate: {sentence}"


def test_numbers_of_numpy_and_tensors_are_numbers(qwen):
    target, drafter = qwen
    options = dict(temperature=0.8, top_p=0.9)
    plain = tokens(generate(target, drafter, [[5, 6], [7, 8]], 6, seed=3, **options))
    options = dict(temperature=numpy.float32(0.8), top_p=numpy.float64(0.9))
    assert tokens(generate(target, drafter, torch.tensor([[5, 6], [7, 8]]), numpy.int64(6), seed=numpy.int64(3), **options)) == plain


def test_a_session_of_no_tokens_is_refused(qwen):
    with pytest.raises(ValueError, match="generate: max_tokens is 0, must be at least 1"):
        DecodingSession(*qwen, max_tokens=0)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_end_exactly(family, tmp_path):
    """A request at the model's last position shares a batch with one that still drafts: the padding behind it has no position of its own."""
    import transformers

    common = dict(vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=4, n_head=4, n_positions=24, n_inner=48, initializer_range=0.3, **common
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.OPTConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_dim=48, max_position_embeddings=24, word_embed_proj_dim=32,
            pad_token_id=0, init_std=0.3, **common,
        )  # fmt: skip
        model = transformers.OPTForCausalLM(config)
    target = Target(model.float().eval())
    drafter = tiny_drafter(tmp_path / "d", target)
    limits = [21, 23, 7, 22]  # each prompt and its answer fill the 24 positions
    assert tokens(generate(target, drafter, PROMPTS, limits)) == tokens(generate(target, None, PROMPTS, limits))


def test_a_callback_that_raises_costs_the_others_nothing(qwen):
    target, drafter = qwen
    heard = [[] for _ in PROMPTS]

    def listener(index):
        def hear(request, new, origins):
            heard[index] += new
            if index == 0:
                raise OSError("the client is gone")

        return hear

    session = DecodingSession(target, drafter, len(PROMPTS), 64)
    requests = []
    for index, prompt in enumerate(PROMPTS):
        try:
            requests.append(session.join(prompt, 9, stream=listener(index)))
        except OSError:
            requests.append(session.active[0])
    rounds = 0
    while session.active:
        rounds += 1
        try:
            session.step()
        except OSError:
            assert not requests[0].finished or rounds > 1
    assert heard == tokens(requests) == tokens(generate(target, None, PROMPTS, 9))


def test_inference_mode_may_come_and_go(qwen):
    target, drafter = qwen
    alone = tokens(generate(target, None, PROMPTS[:2], 12))
    with torch.inference_mode():
        session = DecodingSession(target, drafter, 2, 64)
        first = session.join(PROMPTS[0], 12)
    session.step()
    with torch.inference_mode():
        session.step()
    second = session.join(PROMPTS[1], 12)
    while session.active:
        session.step()
    assert tokens([first, second]) == alone
