"""The split planner: integers only, through the bindings, against what a plan must be and a brute-force search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryover_kernels import _native

MOST = 64


@pytest.fixture(scope="module")
def plan():
    build = _native.build_info()
    assert build is not None, "carryover_kernels._build is missing, must be built: run 'make native'"
    return build.plan_splits


def cost(tasks, keys, workers, tile, splits):
    """Rounds of workers times tiles in the longest part, a merge counted as a quarter of a tile: what the planner minimises."""
    rounds = -(-tasks * splits // workers)
    return 4 * rounds * -(-(-(-keys // tile)) // splits) + (rounds if splits > 1 else 0)


sizes = {
    "tasks": st.integers(1, 400), "keys": st.integers(1, 70000), "workers": st.integers(1, 264), "tile": st.sampled_from([16, 64, 128, 256])
}  # fmt: skip


@given(**sizes)
def test_is_the_cheapest_plan_and_the_fewest_parts_of_it(plan, tasks, keys, workers, tile):
    splits = plan(tasks, keys, workers, tile)
    allowed = range(1, min(MOST, -(-keys // tile)) + 1)
    assert splits in allowed
    best = min(cost(tasks, keys, workers, tile, s) for s in allowed)
    assert cost(tasks, keys, workers, tile, splits) == best
    assert all(cost(tasks, keys, workers, tile, s) > best for s in allowed if s < splits)


@given(**sizes)
def test_enough_tasks_are_never_split(plan, tasks, keys, workers, tile):
    """Where tasks fill whole rounds of workers, a part more is only a merge more."""
    assert plan(tasks * workers, keys, workers, tile) == 1


def test_one_request_uses_every_worker(plan):
    assert plan(1, 32768, 2, 256) == 2
    assert plan(8, 32768, 132, 64) * 8 >= 132 - 8
    assert plan(1, 256, 132, 256) == 1, "one tile cannot be cut"


@pytest.mark.parametrize("sizes", [(0, 100, 4, 16), (3, 0, 4, 16), (3, 100, 0, 16), (-1, 100, 4, 16)])
def test_nothing_to_plan_is_one_part(plan, sizes):
    assert plan(*sizes) == 1
