"""CARRYOVER_CHECK=1: what only a host sync can tell raises one sentence before anything is written."""

import pytest
import torch

import carryover_kernels.ops as ck


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def attention(**changes):
    arguments = dict(
        q=torch.randn(1, 2, 2, 8), k_block=torch.randn(1, 2, 1, 8), v_block=torch.randn(1, 2, 1, 8), k_cache=torch.randn(4, 4, 1, 8),
        v_cache=torch.randn(4, 4, 1, 8), block_table=i32(0, 3)[None], seq_lens=i32(5), carry_k=torch.randn(2, 3, 1, 8),
        carry_v=torch.randn(2, 3, 1, 8), carry_lens=i32(0, 2), carry_slot_ids=i32(1),
    )  # fmt: skip
    return lambda: ck.block_attention(**{**arguments, **changes})


def plan(**changes):
    arguments = dict(
        query_start_loc=i32(0, 2, 4), num_rejected=i32(0, 1), positions=torch.arange(4), slot_mapping=torch.arange(4),
        carry_slot_ids=i32(3, 2), carry_lens=i32(7, 7, 7, 7), carry_capacity=8,
    )  # fmt: skip
    return lambda: ck.plan_round(**{**arguments, **changes})


def project(**changes):
    arguments = dict(
        states=torch.randn(2, 6), fc_weight=torch.randn(4, 6), kv_weight=torch.randn(16, 4), kv_bias=None, k_norm_weight=None,
        mark=torch.zeros(4), mark_kv=None, rope_table=torch.ones(8, 8), row_cache_slot=torch.tensor([5, -1]),
        row_carry_slot=torch.tensor([-1, 2]), row_position=torch.tensor([3, 4]), k_cache=[torch.zeros(2, 4, 1, 8)],
        v_cache=[torch.zeros(2, 4, 1, 8)], carry_k=torch.zeros(1, 2, 3, 1, 8), carry_v=torch.zeros(1, 2, 3, 1, 8),
    )  # fmt: skip
    return lambda: ck.project_states(**{**arguments, **changes})


def with_nan(tensor, *index):
    tensor[index] = float("nan")
    return tensor


def rope(**changes):
    arguments = dict(
        qkv=torch.ones(3, 32), positions=torch.tensor([0, 1, -1]), rope_table=torch.ones(16, 8), q_norm_weight=None, k_norm_weight=None,
        num_q_heads=2, num_kv_heads=1,
    )  # fmt: skip
    return lambda: ck.qk_norm_rope(**{**arguments, **changes})


def sample(**changes):
    arguments = dict(base_logits=torch.zeros(1, 2, 8), anchor_tokens=torch.tensor([1]))
    return lambda: ck.markov_sample(**{**arguments, **changes})


def verify(**changes):
    arguments = dict(draft_tokens=torch.tensor([[1, 2]]), query_start_loc=i32(0, 3), target_logits=torch.zeros(3, 8))
    return lambda: ck.verify_draft(**{**arguments, **changes})


def to_pages(**changes):
    arguments = dict(
        row_cache_slot=torch.tensor([4, -1]), row_carry_slot=torch.tensor([-1, 0]), query_start_loc=i32(0, 2),
        block_table=i32(1, 2)[None], seq_lens=i32(1), page_size=4, num_block_rows=2,
    )  # fmt: skip
    return lambda: ck.carry_to_pages(**{**arguments, **changes})


GOOD = {
    "plan_round": plan(),
    "project_states": project(),
    "qk_norm_rope": rope(),
    "block_attention": attention(),
    "carry_to_pages": to_pages(),
    "markov_sample": sample(),
    "verify_draft": verify(),
    "clear_carry": lambda: ck.clear_carry(i32(1, -1), i32(3, 3)),
}

INF = float("inf")
BAD = [
    (plan(num_rejected=i32(0, 3)), "plan_round: num_rejected[1] is 3, must be at most 2: the request's rows"),
    (plan(num_rejected=i32(-1, 0)), "plan_round: num_rejected[0] is -1, must be at least 0"),
    (plan(query_start_loc=i32(0, 4, 2)), "plan_round: query_start_loc[2] is 2, must be at least 4: it never decreases"),
    (plan(query_start_loc=i32(0, 2, 9)), "plan_round: query_start_loc[2] is 9, must be at most 4: the packed rows"),
    (plan(positions=torch.tensor([0, -5, 1, 2])), "plan_round: positions[1] is -5, must be at least 0"),
    (plan(carry_slot_ids=i32(3, 4)), "plan_round: carry_slot_ids[1] is 4, must be below 4: carry slots"),
    (plan(carry_slot_ids=i32(3, 3)), "plan_round: carry_slot_ids names 3 twice, must name each slot at most once"),
    (project(states=with_nan(torch.zeros(2, 6), 1, 2)), "project_states: states[1, 2] is nan, must be finite"),
    (project(mark=torch.tensor([0, INF, 0, 0])), "project_states: mark[1] is inf, must be finite"),
    (project(row_cache_slot=torch.tensor([8, -1])), "project_states: row_cache_slot[0] is 8, must be below 8: pages * page"),
    (project(row_cache_slot=torch.tensor([3, 3])), "project_states: row_cache_slot names 3 twice, must name each slot at most once"),
    (project(row_carry_slot=torch.tensor([-1, 6])), "project_states: row_carry_slot[1] is 6, must be below 6: slots * C"),
    (project(row_position=torch.tensor([3, 8])), "project_states: row_position[1] is 8, must be below 8: rows of rope_table"),
    (project(row_position=torch.tensor([-3, 4])), "project_states: row_position[0] is -3, must be at least 0"),
    (rope(qkv=with_nan(torch.zeros(3, 32), 1, 0)), "qk_norm_rope: qkv[1, 0] is nan, must be finite"),
    (rope(positions=torch.tensor([0, 16, 1])), "qk_norm_rope: positions[1] is 16, must be below 16: rows of rope_table"),
    (attention(q=with_nan(torch.zeros(1, 2, 2, 8), 0, 1, 1, 3)), "block_attention: q[0, 1, 1, 3] is nan, must be finite"),
    (attention(seq_lens=i32(9)), "block_attention: seq_lens[0] is 9, must be at most 8: P * page"),
    (attention(block_table=i32(0, -2)[None]), "block_attention: block_table[0, 1] is -2, must be at least 0"),
    (attention(block_table=i32(4, 0)[None]), "block_attention: block_table[0, 0] is 4, must be below 4: pages"),
    (
        attention(v_cache=with_nan(torch.zeros(4, 4, 1, 8), 3, 0)),
        "block_attention: v_cache has a value that is not finite among the 5 committed keys of request 0, must be finite",
    ),
    (attention(carry_lens=i32(0, 4)), "block_attention: carry_lens[1] is 4, must be at most 3: C"),
    (attention(carry_slot_ids=i32(2)), "block_attention: carry_slot_ids[0] is 2, must be below 2: carry slots"),
    (
        attention(carry_k=with_nan(torch.zeros(2, 3, 1, 8), 1, 1)),
        "block_attention: carry_k has a value that is not finite among the 2 carried keys of slot 1, must be finite",
    ),
    (to_pages(seq_lens=i32(9)), "carry_to_pages: seq_lens[0] is 9, must be at most 8: P * page_size"),
    (to_pages(slot_capacity=i32(9)), "carry_to_pages: slot_capacity[0] is 9, must be at most 8: P * page_size"),
    (sample(base_logits=with_nan(torch.zeros(1, 2, 8), 0, 1, 4)), "markov_sample: base_logits[0, 1, 4] is nan, must be finite or -inf"),
    (
        sample(temperature=torch.tensor([-1.0]), seeds=torch.tensor([1]), offsets=torch.tensor([0])),
        "markov_sample: temperature[0] is -1.0, must be at least 0",
    ),
    (verify(draft_tokens=torch.tensor([[1, 8]])), "verify_draft: draft_tokens[0, 1] is 8, must be below 8: the target's vocabulary"),
    (verify(target_logits=torch.full((3, 8), -INF)), "verify_draft: target_logits[0] is all -inf, must leave at least one token"),
    (verify(target_logits=torch.full((3, 8), INF)), "verify_draft: target_logits[0, 0] is inf, must be finite or -inf"),
    (lambda: ck.clear_carry(i32(2), i32(3, 3)), "clear_carry: carry_slot_ids[0] is 2, must be below 2: carry slots"),
]


@pytest.mark.parametrize("op", GOOD)
def test_good_input_passes(op, monkeypatch):
    monkeypatch.setenv("CARRYOVER_CHECK", "1")
    GOOD[op]()


@pytest.mark.parametrize("call, sentence", BAD, ids=[sentence for _, sentence in BAD])
def test_bad_value_is_named(call, sentence, monkeypatch):
    monkeypatch.setenv("CARRYOVER_CHECK", "1")
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == sentence


def test_garbage_where_nothing_looks_is_no_error(monkeypatch):
    """Padding rows, table tails and unused slots hold what they like."""
    monkeypatch.setenv("CARRYOVER_CHECK", "1")
    cache = with_nan(torch.zeros(4, 4, 1, 8), 2)
    attention(k_cache=cache, block_table=i32(0, 3, 999)[None])()
    attention(seq_lens=i32(-1), q=torch.full((1, 2, 2, 8), float("nan")), block_table=i32(-5, 77)[None])()
    project(states=with_nan(torch.zeros(2, 6), 1), row_carry_slot=torch.tensor([-1, -1]))()
    rope(qkv=with_nan(torch.zeros(3, 32), 2))()


def test_shapes_are_checked_before_values(monkeypatch):
    monkeypatch.setenv("CARRYOVER_CHECK", "1")
    with pytest.raises(ValueError, match="carry_lens has 2 dimensions"):
        plan(carry_lens=torch.zeros(2, 2, dtype=torch.int32))()


def test_nothing_is_written_before_the_error(monkeypatch):
    monkeypatch.setenv("CARRYOVER_CHECK", "1")
    carry_lens = i32(7, 7, 7, 7)
    with pytest.raises(ValueError):
        plan(carry_lens=carry_lens, carry_slot_ids=i32(3, 4))()
    assert carry_lens.tolist() == [7, 7, 7, 7]
