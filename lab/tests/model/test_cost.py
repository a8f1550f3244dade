"""Cost cards: fits recover their source, predictions add up and move in the right direction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from shoal.depth.plan import NEVER, DepthPlan
from shoal_lab.components.cost import CostCard, Observation, Traffic, attended, non_negative_least_squares

CARD = CostCard(2e-3, 5e-3, 1e-3, 3e-6, (None, 4, None, None), ((10, 0.1), (20, 0.2), (100, 1.8)))
coefficients = st.floats(1e-6, 1e-1)
drops = st.lists(st.one_of(st.integers(1, 50), st.just(NEVER)), min_size=4, max_size=4).map(tuple)
plans = st.builds(DepthPlan, drops, drops)


def by_hand(card: CostCard, plan: DepthPlan, prompt: int, new_tokens: int) -> float:
    """Sublayer by sublayer, token by token."""
    total = 0.0
    for step in range(1, new_tokens):
        total += card.overhead_seconds + card.head_seconds
        for layer, window in enumerate(card.windows):
            half = card.layer_seconds / 2
            if step < plan.mlp[layer]:
                total += half
            if step < plan.attention[layer]:
                positions = prompt + step
                total += half + card.kv_seconds_per_position * (positions if window is None else min(window, positions))
    return total


@given(fixed=coefficients, layer=coefficients, kv=coefficients, head_layers=st.floats(0, 5))
def test_a_fit_recovers_the_coefficients(fixed: float, layer: float, kv: float, head_layers: float) -> None:
    sizes = [(16, 16 * 40), (12, 12 * 40), (8, 8 * 40), (16, 16 * 600)]
    seen = [Observation(depth, read, fixed + depth * layer + read * kv) for depth, read in sizes]
    card = CostCard.fit(seen, [None] * 16, head_layers)
    assert card.layer_seconds == pytest.approx(layer, rel=1e-6)
    assert card.kv_seconds_per_position == pytest.approx(kv, rel=1e-6)
    assert card.head_seconds + card.overhead_seconds == pytest.approx(fixed, rel=1e-6, abs=1e-9)
    assert card.head_seconds == pytest.approx(min(fixed, head_layers * layer), rel=1e-6, abs=1e-9)


def test_a_fit_needs_two_depths() -> None:
    with pytest.raises(ValueError, match="at least two depths"):
        CostCard.fit([Observation(4, 40, 1.0), Observation(4, 400, 2.0)], [None] * 4, 1.0)


def test_noise_never_makes_a_part_cheaper_than_free() -> None:
    seen = [Observation(16, 640, 1.0), Observation(12, 480, 1.1), Observation(8, 320, 1.2), Observation(16, 9600, 0.9)]
    card = CostCard.fit(seen, [None] * 16, 2.0)
    parts = card.layer_seconds, card.head_seconds, card.overhead_seconds, card.kv_seconds_per_position
    assert min(parts) >= 0 and sum(parts) > 0


@given(st.integers(0, 10_000))
def test_least_squares_agrees_with_scipy(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(6, 3, generator=random, dtype=torch.float64)
    targets = torch.randn(6, generator=random, dtype=torch.float64)
    expected, _ = nnls(features.numpy(), targets.numpy())
    assert non_negative_least_squares(features, targets) == pytest.approx(expected.tolist(), abs=1e-9)


@given(plan=plans, prompt=st.integers(1, 30), new_tokens=st.integers(2, 40))
def test_a_prediction_is_the_sum_of_its_parts(plan: DepthPlan, prompt: int, new_tokens: int) -> None:
    steps = by_hand(CARD, plan, prompt, new_tokens)
    assert CARD.tpot(plan, prompt, new_tokens) * (new_tokens - 1) == pytest.approx(steps)
    assert CARD.predict(plan, prompt, new_tokens) == pytest.approx(CARD.prefill_seconds(prompt) + steps)


@given(plan=plans, prompt=st.integers(1, 200), new_tokens=st.integers(2, 40))
def test_more_work_takes_longer(plan: DepthPlan, prompt: int, new_tokens: int) -> None:
    seconds = CARD.predict(plan, prompt, new_tokens)
    assert CARD.predict(plan, prompt, new_tokens + 1) > seconds
    assert CARD.predict(plan, prompt + 1, new_tokens) >= seconds
    assert CARD.predict(plan, prompt + 10, new_tokens) > seconds
    assert CARD.predict(DepthPlan.full(4), prompt, new_tokens) >= seconds


def test_a_prefill_lies_on_straight_lines_between_what_was_measured() -> None:
    assert [CARD.prefill_seconds(p) for p in (10, 20, 100)] == pytest.approx([0.1, 0.2, 1.8])
    assert CARD.prefill_seconds(15) == pytest.approx(0.15)
    assert CARD.prefill_seconds(60) == pytest.approx(1.0)
    assert CARD.prefill_seconds(200) == pytest.approx(3.8)
    assert CARD.prefill_seconds(5) == pytest.approx(0.1)


def test_one_measured_prompt_makes_a_proportional_prefill() -> None:
    card = CostCard(1.0, 0.0, 0.0, 0.0, (None,), ((8, 0.4),))
    assert [card.prefill_seconds(p) for p in (4, 8, 16)] == pytest.approx([0.2, 0.4, 0.8])


def test_a_card_without_prefill_says_so() -> None:
    with pytest.raises(ValueError, match="no prefill times"):
        CostCard(1.0, 0.0, 0.0, 0.0, (None,)).predict(DepthPlan.full(1), 4, 4)


def test_time_per_output_token_needs_two() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        CARD.tpot(DepthPlan.full(4), 4, 1)


def test_positions_are_counted_where_attention_runs_and_no_further_than_its_window() -> None:
    plan = DepthPlan((NEVER, NEVER, 3, NEVER), (NEVER, 2, 2, NEVER))
    assert attended(plan, 2, 10, CARD.windows) == 10 + 4 + 10 + 10
    assert attended(plan, 3, 10, CARD.windows) == 10 + 4 + 10


def test_bytes_of_a_step() -> None:
    traffic = Traffic(layer=100.0, head=30.0, kv=2.0, windows=(None, 4))
    plan = DepthPlan.whole_layers((NEVER, 2))
    steps = [30 + 200 + 3 * 2 * (6 + 4), 30 + 100 + 3 * 2 * 7]
    assert traffic.mean_step(plan, 5, 3, rows=3) == pytest.approx(sum(steps) / 2)


def test_at_the_roof_a_step_takes_its_bytes_over_the_bandwidth() -> None:
    traffic = Traffic(layer=100.0, head=30.0, kv=2.0, windows=(None,) * 4, layer_weights=50.0)
    card = CostCard.at_roof(traffic, 1000.0, flops_per_second=500.0, rows=2)
    plan = DepthPlan.full(4)
    assert card.tpot(plan, 6, 9) * 1000 == pytest.approx(traffic.mean_step(plan, 6, 9, rows=2))
    assert card.prefill_seconds(6) == pytest.approx(2 * 50 * 4 * 6 * 2 / 500)
