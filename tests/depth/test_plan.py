from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported

drop_steps = st.lists(st.one_of(st.integers(1, 40), st.just(NEVER)), min_size=1, max_size=12)


@given(drop_steps, st.integers(1, 60))
def test_mean_depth_is_the_mean_over_the_steps(drops: list[int], num_tokens: int) -> None:
    plan = DepthPlan.whole_layers(drops)
    brute = sum(len(plan.layers(step)) for step in range(num_tokens)) / num_tokens
    assert plan.mean_depth(num_tokens) == pytest.approx(brute, abs=1e-12)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12), st.integers(1, 60))
def test_a_lone_sublayer_counts_half(drops: list[tuple[int, int]], num_tokens: int) -> None:
    plan = DepthPlan(tuple(a for a, _ in drops), tuple(m for _, m in drops))
    brute = sum((step < a) + (step < m) for a, m in drops for step in range(num_tokens)) / 2 / num_tokens
    assert plan.mean_depth(num_tokens) == pytest.approx(brute, abs=1e-12)
    assert sum(plan.depth(step) for step in range(num_tokens)) / num_tokens == pytest.approx(brute, abs=1e-12)


@given(drop_steps)
def test_a_layer_runs_up_to_its_drop_step(drops: list[int]) -> None:
    plan = DepthPlan.whole_layers(drops)
    runs = [sum(layer in plan.layers(step) for step in range(42)) for layer in range(len(drops))]
    assert runs == [min(drop, 42) for drop in drops]


def test_counts_that_grow_are_refused() -> None:
    with pytest.raises(Unsupported, match="grows from 2 to 3 layers at step 2"):
        DepthPlan.from_counts((4, 2, 3), (1, 2), 4)


def test_counts_below_the_core_are_refused() -> None:
    with pytest.raises(ValueError, match="only 2 of 4"):
        DepthPlan.from_counts((4, 1), (1, 2), 4)


def test_a_table_that_never_drops_is_the_full_plan() -> None:
    assert DepthPlan.from_counts((4, 4, 4), (1, 2), 4) == DepthPlan.full(4)
    assert DepthPlan.full(4).is_full
    assert not DepthPlan.from_counts((4, 4, 3), (1, 2), 4).is_full
