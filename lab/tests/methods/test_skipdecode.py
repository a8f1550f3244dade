"""SkipDecode: the first layers and the top ones, fewer of them with every token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.depth.plan import DepthPlan
from shoal.types import ModelInfo
from shoal_lab.methods.skipdecode import LinearFall, SkipDecode


def info(num_layers: int = 32, max_new_tokens: int = 64) -> ModelInfo:
    return ModelInfo(num_layers, max_new_tokens)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 16, 32, 80])
def test_neutral_settings_are_the_full_plan(num_layers: int) -> None:
    for method in (SkipDecode(maximum=num_layers, minimum=num_layers), SkipDecode(maximum=1.0, minimum=1.0)):
        recipe = method.recipe(info(num_layers))
        assert recipe.plan == DepthPlan.full(num_layers) and recipe.exact_to == "full"


@pytest.mark.parametrize("num_layers", [16, 30, 32, 80])
def test_defaults_are_lossy_and_gentle(num_layers: int) -> None:
    recipe = SkipDecode().recipe(info(num_layers))
    assert recipe.exact_to == "plan" and recipe.components == ("plan",)
    assert 0.8 <= recipe.plan.mean_depth(64) / num_layers <= 0.9


def test_it_runs_the_warm_up_layers_and_the_top() -> None:
    for warm_up in (1, 3):
        plan = SkipDecode(maximum=22, minimum=11, warm_up=warm_up).recipe(info()).plan
        assert plan.layers(0) == tuple(range(32))
        for step in range(1, 64):
            count = round(22 - 11 * step / 63)
            assert plan.layers(step) == (*range(warm_up), *range(32 - (count - warm_up), 32))


def test_it_reaches_its_minimum_at_the_end_of_its_horizon() -> None:
    plan = SkipDecode(maximum=1.0, minimum=0.5, horizon=20).recipe(info(32, 40)).plan
    assert [plan.depth(step) for step in (0, 18, 19, 39)] == [32, 17, 16, 16]


@pytest.mark.parametrize(("build", "message"), [
    (lambda: SkipDecode(maximum=10, minimum=11), "minimum is 11"),
    (lambda: SkipDecode(warm_up=0), "warm_up is 0"),
    (lambda: SkipDecode(horizon=0), "horizon is 0"),
    (lambda: SkipDecode(maximum=33, minimum=8).recipe(info()), "33 layers.*has 32"),
    (lambda: SkipDecode(maximum=32, minimum=4, warm_up=5).recipe(info()), r"warm_up is 5.*1\.\.4"),
])
def test_bad_options_are_named(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@given(st.integers(2, 80), st.integers(2, 300), st.data())
def test_a_linear_budget_hits_its_ends_and_stays_there(num_layers: int, horizon: int, data: st.DataObject) -> None:
    high = data.draw(st.integers(1, num_layers))
    low = data.draw(st.integers(1, high))
    budget = LinearFall(high, low)
    assert budget.layers(0, num_layers, horizon) == high
    assert budget.layers(horizon - 1, num_layers, horizon) == low
    assert budget.layers(horizon + 50, num_layers, horizon) == low


def test_linear_follows_its_formula() -> None:
    got = [LinearFall(22, 11).layers(i, 32, 100) for i in range(100)]
    assert got == [round(22 - (22 - 11) * i / 99) for i in range(100)]


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: LinearFall(10, 20), "minimum"),
        (lambda: LinearFall(0, 0), "maximum"),
        (lambda: LinearFall(10, 0.9).layers(1, 32, 8), "minimum"),
    ],
)
def test_ends_that_do_not_fit_are_refused(build: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        build()
