from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported

drop_steps = st.lists(st.one_of(st.integers(1, 40), st.just(NEVER)), min_size=1, max_size=12)


def evenly_spaced(num_layers: int, count: int) -> set[int]:
    return {round(j * (num_layers - 1) / (count - 1)) for j in range(count)}


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
def test_the_sets_of_a_plan_give_it_back(drops: list[int]) -> None:
    plan = DepthPlan.whole_layers(drops)
    assert DepthPlan.from_sets(len(drops), [plan.layers(step) for step in range(42)]) == plan


def test_even_spacing_is_not_nested_from_one_count_to_the_next() -> None:
    sets = {count: evenly_spaced(32, count) for count in range(2, 32)}
    broken = [count for count in range(3, 32) if not sets[count - 1] <= sets[count]]
    assert (len(broken), len(range(3, 32))) == (27, 29)
    for count in range(3, 32):
        falling = [range(32), sets[count], sets[count - 1]]
        if count in broken:
            with pytest.raises(Unsupported, match="at step 2"):
                DepthPlan.from_sets(32, falling)
        else:
            DepthPlan.from_sets(32, falling)


def test_sets_that_bring_a_layer_back_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"layers \[2\] back at step 2"):
        DepthPlan.from_sets(4, [range(4), (0, 1, 3), (0, 2, 3)])


def test_the_first_set_is_the_prefills() -> None:
    with pytest.raises(ValueError, match="prefill"):
        DepthPlan.from_sets(4, [(0, 1, 3)])


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
