"""Budgets, the decay that has a wanted mean depth, and the ideal speed-up."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from depth_strategies import budgets
from shoal.depth.budget import (
    Constant,
    PowerLaw,
    StepDown,
    as_layers,
    counts,
    ideal_speedup,
    lowest_mean,
    mean_depth,
    solve_alpha,
)

LENGTHS = (32, 64, 128, 256, 512)
TABLE = [
    (32, 19.17, 0.0, (".966", ".983", ".9916", ".9958", ".9979")),
    (32, 19.17, 0.2, (".9416", ".9713", ".9853", ".9926", ".9963")),
    (32, 19.17, 0.4, (".8706", ".9299", ".9634", ".9818", ".9909")),
    (40, 20.33, 0.0, (".9529", ".9764", ".9883", ".9942", ".9971")),
    (40, 20.33, 0.4, (".63", ".765", ".862", ".932", ".967")),
    (80, 48.43, 0.0, (".9655", ".983", ".9915", ".9958", ".9979")),
]
CELLS = [
    (num_layers, mean, start, horizon, printed)
    for num_layers, mean, start, row in TABLE
    for horizon, printed in zip(LENGTHS, row, strict=True)
]


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


def half_a_digit(printed: str) -> float:
    return 0.5 * 10.0 ** -(len(printed) - 1) + 1e-12


def brute_mean(alpha: float, num_layers: int, horizon: int, first: int, core: int) -> float:
    depths = [max(core, int(num_layers * alpha ** max(0, i - first) + 1e-9)) for i in range(horizon)]
    return sum(depths) / horizon


@pytest.mark.parametrize(("num_layers", "mean", "start", "horizon", "printed"), CELLS)
def test_alpha_for_the_mean_depths_that_the_paper_reports(
    num_layers: int, mean: float, start: float, horizon: int, printed: str
) -> None:
    # The reference table truncates start * T, where PowerLaw rounds it: hence the number of tokens, not the share.
    core, first = max(4, num_layers // 8), int(start * horizon)
    alpha = solve_alpha(num_layers, mean, horizon, first, core)
    assert alpha == pytest.approx(float(printed), abs=half_a_digit(printed))
    if round(start * horizon) == first:
        assert solve_alpha(num_layers, mean, horizon, start, core) == alpha


@settings(max_examples=40, deadline=None)
@given(st.integers(6, 80), st.integers(8, 96), st.integers(0, 6), st.floats(0, 1))
def test_no_other_alpha_comes_nearer(num_layers: int, horizon: int, first: int, share: float) -> None:
    core = 4
    lowest = lowest_mean(num_layers, horizon, first, core)
    assert lowest == pytest.approx(brute_mean(1e-9, num_layers, horizon, first, core))
    mean = lowest + share * (num_layers - lowest)
    alpha = solve_alpha(num_layers, mean, horizon, first, core)
    assert 0 < alpha <= 1
    found = abs(brute_mean(alpha, num_layers, horizon, first, core) - mean)
    for k in range(1, 1001):
        assert found <= abs(brute_mean(k / 1000, num_layers, horizon, first, core) - mean) + 1e-9


@pytest.mark.parametrize("rounding", ["floor", "ceil", "round"])
def test_the_mean_is_that_of_the_table(rounding: str) -> None:
    alpha = solve_alpha(32, 20.0, 256, 0.25, 4, rounding)  # type: ignore[arg-type]
    table = counts(PowerLaw(alpha, 0.25, rounding), 32, 4, 256, 256)  # type: ignore[arg-type]
    assert sum(table) / 256 == pytest.approx(20.0, abs=0.02)


@given(st.floats(1e-3, 1), st.floats(0, 1) | st.integers(0, 50), st.integers(1, 300), st.data())
def test_a_mean_depth_is_that_of_the_counts(
    alpha: float, start: float | int, horizon: int, data: st.DataObject
) -> None:
    rounding = data.draw(st.sampled_from(["floor", "ceil", "round"]))
    num_layers = data.draw(st.integers(1, 40))
    core = data.draw(st.integers(0, num_layers))
    budget = PowerLaw(alpha, start, rounding)
    table = counts(budget, num_layers, core, horizon, horizon)
    assert mean_depth(budget, num_layers, core, horizon) == sum(table) / horizon


def test_the_whole_stack_is_alpha_one() -> None:
    assert solve_alpha(32, 32, 64, 0.0, 4) == 1.0
    assert solve_alpha(32, 31.9, 32, 0.0, 4) == 1.0


def test_one_token_and_the_whole_horizon_are_not_confused() -> None:
    assert solve_alpha(32, 20.0, 64, 1, 4) < 1
    with pytest.raises(ValueError, match="out of reach"):
        solve_alpha(32, 20.0, 64, 1.0, 4)


@pytest.mark.parametrize("mean", [3.0, 33.0])
def test_a_mean_out_of_reach_names_the_range(mean: float) -> None:
    with pytest.raises(ValueError, match=r"lies in 4\.4375\.\.32"):
        solve_alpha(32, mean, 64, 0.0, 4)


def llama_head_layers(hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int = 32000) -> float:
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    return vocab * hidden / (attention + 3 * hidden * ffn)


@pytest.mark.parametrize(
    ("num_layers", "mean", "shape", "head", "speedup"),
    [
        (32, 19.17, (4096, 11008, 32, 32), 0.648, 1.65),
        (40, 20.33, (5120, 13824, 40, 40), 0.517, 1.94),
        (80, 48.43, (8192, 28672, 64, 8), 0.306, 1.65),
    ],
)
def test_the_figures_reported_for_llama_2(
    num_layers: int, mean: float, shape: tuple[int, int, int, int], head: float, speedup: float
) -> None:
    cost = llama_head_layers(*shape)
    assert cost == pytest.approx(head, abs=5e-4)
    assert ideal_speedup(num_layers, mean, cost) == pytest.approx(speedup, abs=5e-3)


def test_full_depth_gains_nothing_and_the_head_damps_the_gain() -> None:
    assert ideal_speedup(32, 32, 0.6) == 1
    assert ideal_speedup(32, 16) == 2
    assert ideal_speedup(32, 16, 32) == pytest.approx(64 / 48)


@pytest.mark.parametrize("mean", [0, -1, 33])
def test_the_mean_must_lie_in_the_stack(mean: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 32\]"):
        ideal_speedup(32, mean)
