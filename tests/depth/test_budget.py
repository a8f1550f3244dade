from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from depth_strategies import budgets
from shoal.depth.budget import Constant, LinearFall, PowerLaw, StepDown, as_layers, counts


@given(st.integers(1, 99), st.integers(1, 80), st.integers(1, 40), st.sampled_from(["floor", "ceil"]))
def test_power_law_equals_exact_arithmetic(percent: int, num_layers: int, step: int, rounding: str) -> None:
    exact = num_layers * Fraction(percent, 100) ** step
    assume(exact.denominator == 1 or abs(exact - round(exact)) > Fraction(1, 10**8))
    expected = math.floor(exact) if rounding == "floor" else math.ceil(exact)
    assert PowerLaw(percent / 100, 0, rounding).layers(step, num_layers, 64) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("alpha", "num_layers", "step", "expected"),
    [(0.5, 32, 1, 16), (0.9, 10, 1, 9), (0.1, 1000, 2, 10), (0.7, 100, 1, 70), (0.99, 32, 64, 16), (0.99, 32, 256, 2)],
)
def test_power_law_at_integers_and_known_points(alpha: float, num_layers: int, step: int, expected: int) -> None:
    assert PowerLaw(alpha).layers(step, num_layers, 100) == expected


@pytest.mark.parametrize("num_layers", [10, 100, 1000])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_products_that_are_integers_on_paper_round_to_themselves(num_layers: int, power: int) -> None:
    for tenth in range(1, 10):
        exact = num_layers * Fraction(tenth, 10) ** power
        if exact.denominator == 1:
            for rounding in ("floor", "ceil", "round"):
                assert PowerLaw(tenth / 10, 0, rounding).layers(power, num_layers, 9) == exact  # type: ignore[arg-type]


def test_a_float_start_is_a_share_and_an_int_start_is_tokens() -> None:
    assert PowerLaw(0.5, 0.25).first_decay(64) == 16
    assert PowerLaw(0.5, 1).first_decay(64) == 1
    assert PowerLaw(0.5, 1.0).first_decay(64) == 64
    assert counts(PowerLaw(0.5, 2), 32, 1, 64, 6) == (32, 32, 32, 16, 8, 4)


def test_roundings_are_ordered() -> None:
    at = {name: PowerLaw(0.9, 0, name).layers(2, 32, 8) for name in ("floor", "round", "ceil")}  # 25.92
    assert at == {"floor": 25, "round": 26, "ceil": 26}
    at = {name: PowerLaw(0.9, 0, name).layers(3, 32, 8) for name in ("floor", "round", "ceil")}  # 23.328
    assert at == {"floor": 23, "round": 23, "ceil": 24}


@given(st.integers(1, 80), st.integers(1, 300))
def test_alpha_one_keeps_every_layer(num_layers: int, step: int) -> None:
    assert PowerLaw(1.0).layers(step, num_layers, 128) == num_layers


@given(st.integers(2, 80), st.integers(2, 300), st.data())
def test_linear_and_cosine_hit_their_ends_and_stay_there(num_layers: int, horizon: int, data: st.DataObject) -> None:
    high = data.draw(st.integers(1, num_layers))
    low = data.draw(st.integers(1, high))
    budget = LinearFall(high, low)
    assert budget.layers(0, num_layers, horizon) == high
    assert budget.layers(horizon - 1, num_layers, horizon) == low
    assert budget.layers(horizon + 50, num_layers, horizon) == low


def test_linear_follows_its_formula() -> None:
    got = [LinearFall(22, 11).layers(i, 32, 100) for i in range(100)]
    assert got == [round(22 - (22 - 11) * i / 99) for i in range(100)]


def test_a_staircase_holds_from_each_step_on() -> None:
    budget = StepDown(((3, 20), (5, 0.25)))
    assert counts(budget, 32, 4, 8, 7) == (32, 32, 32, 20, 20, 8, 8)


@given(budgets, st.integers(4, 80), st.integers(1, 150), st.integers(1, 200), st.data())
def test_every_table_begins_full_never_grows_and_keeps_the_core(
    budget: object, num_layers: int, horizon: int, steps: int, data: st.DataObject
) -> None:
    core = data.draw(st.integers(0, num_layers))
    table = counts(budget, num_layers, core, horizon, steps)  # type: ignore[arg-type]
    assert len(table) == steps
    assert table[0] == num_layers
    assert all(after <= before for before, after in zip(table, table[1:], strict=False))
    assert min(table) >= core


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: PowerLaw(0.0), "alpha"),
        (lambda: PowerLaw(1.01), "alpha"),
        (lambda: PowerLaw(math.nan), "alpha"),
        (lambda: PowerLaw(0.9, 1.5), "start"),
        (lambda: PowerLaw(0.9, -1), "start"),
        (lambda: PowerLaw(0.9, math.nan), "start"),
        (lambda: PowerLaw(0.9, 0.0, "up"), "rounding"),  # type: ignore[arg-type]
        (lambda: LinearFall(10, 20), "minimum"),
        (lambda: LinearFall(0, 0), "maximum"),
        (lambda: LinearFall(10, 0.9).layers(1, 32, 8), "minimum"),
        (lambda: Constant(0), "constant"),
        (lambda: Constant(1.5), "constant"),
        (lambda: StepDown(((0, 3),)), "stairs"),
        (lambda: StepDown(((5, 3), (4, 2))), "stairs"),
        (lambda: StepDown(((4, 2), (5, 3))), "increase"),
        (lambda: as_layers(33, 32), "32"),
        (lambda: counts(Constant(2), 32, 33, 8, 8), "core"),
        (lambda: counts(Constant(2), 32, 4, 0, 8), "horizon"),
    ],
)
def test_bad_values_are_named(build: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        build()  # type: ignore[operator]
