from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.depth.budget import PowerLaw, counts, lowest_mean, solve_alpha

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
