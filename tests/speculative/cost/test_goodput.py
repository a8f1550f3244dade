"""Draft lengths against brute force, and their policy in a simulated machine whose clock goes by a formula."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.decode.rules.accept import Outcome
from shoal.decode.tree import TokenTree
from shoal.decode.worker import StepReport
from shoal.speculative.cost import policy
from shoal.speculative.cost.model import Acceptance, LinearLatency, expected_tokens
from shoal.speculative.cost.policy import Goodput, goodput_lengths


def line(fixed: float, slope: float) -> LinearLatency:
    """A latency that was measured to be fixed + slope * size."""
    made = LinearLatency()
    for size in (1, 4, 9):
        made.observe(size, fixed + slope * size)
    return made


def brute_force(rates: list[float], most: int, target: LinearLatency, draft: LinearLatency) -> float:
    """The best quotient over all combinations of lengths."""
    best = 0.0
    for lengths in itertools.product(range(most + 1), repeat=len(rates)):
        tokens = sum(sum(rate**j for j in range(k + 1)) for rate, k in zip(rates, lengths, strict=True))
        drafting = draft.seconds(max(lengths)) if any(lengths) else 0.0
        best = max(best, tokens / (target.seconds(sum(lengths) + len(lengths)) + drafting))
    return best


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0.02, 0.98), min_size=1, max_size=3),
    st.floats(0.1, 5),
    st.floats(0, 1),
    st.floats(0, 2),
    st.floats(0, 1),
)
def test_lengths_are_those_of_brute_force(rates: list[float], c: float, b: float, d0: float, d1: float) -> None:
    target, draft = line(c, b), line(d0, d1)
    lengths = goodput_lengths(rates, 4, target, draft)
    tokens = sum(expected_tokens(rate, k) for rate, k in zip(rates, lengths, strict=True))
    drafting = draft.seconds(max(lengths)) if any(lengths) else 0.0
    reached = tokens / (target.seconds(sum(lengths) + len(lengths)) + drafting)
    assert reached == pytest.approx(brute_force(rates, 4, target, draft), rel=1e-9)


def test_while_a_plain_step_seems_to_take_no_time_nothing_is_guessed() -> None:
    target = LinearLatency()
    target.observe(4, 0.001)
    target.observe(8, 1.0)
    assert target.seconds(1) == target.seconds(2) == 0.0
    assert goodput_lengths([0.9], 2, target, LinearLatency()) == [0]


def test_better_guesses_are_never_fewer_and_dearer_tokens_never_more() -> None:
    free = line(0, 0)
    by_rate = [goodput_lengths([rate], 8, line(1, 0.1), free)[0] for rate in (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)]
    by_cost = [goodput_lengths([0.7], 8, line(1, slope), free)[0] for slope in (0, 0.02, 0.1, 0.3, 1, 3)]
    assert by_rate == sorted(by_rate) and by_cost == sorted(by_cost, reverse=True)
    assert by_rate[0] == 0 and by_rate[-1] > 3 and by_cost[0] == 8 and by_cost[-1] == 0


def test_the_line_is_found_and_forgets() -> None:
    made, dice = LinearLatency(), random.Random(1)
    for _ in range(200):
        size = dice.randint(1, 9)
        made.observe(size, (0.05 + 0.002 * size) * dice.uniform(0.95, 1.05))
    assert made.seconds(1) == pytest.approx(0.052, rel=0.03) and made.seconds(9) == pytest.approx(0.068, rel=0.03)
    made.observe(5, 40.0)
    assert made.seconds(5) < 0.08
    for _ in range(200):
        made.observe(dice.randint(1, 9), 0.01)
    assert made.seconds(5) == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_acceptance_is_not_biased_by_rejections(rate: float) -> None:
    made, dice = Acceptance(fade=1.0), random.Random(2)
    for _ in range(4000):
        offered = dice.randint(1, 8)
        kept = next((i for i in range(offered) if dice.random() >= rate), offered)
        made.observe(kept, offered)
    assert made.rate == pytest.approx(rate, abs=0.02)


def play(
    rates: list[float], steps: int, fixed: float, slope: float, draft: float, change: Any = None
) -> tuple[float, float]:
    """(seconds per token with the policy, without guessing) of sequences whose guesses are kept at `rates`."""
    policy, dice = Goodput(most=8), random.Random(3)
    rows: list[Any] = [SimpleNamespace(number=i) for i in range(len(rates))]
    seconds = tokens = 0.0
    for number in range(steps):
        now = change(number) if change else rates
        limits = policy.limits(rows)
        trees = [TokenTree.chain([0] * (1 + most)) for most in limits]
        kept = [next((i for i in range(k) if dice.random() >= rate), k) for k, rate in zip(limits, now, strict=True)]
        outcomes = [Outcome(tuple(range(1 + k)), 0) for k in kept]
        spent = draft * max(limits), fixed + slope * sum(map(len, trees))
        policy.observe(StepReport(rows, trees, outcomes, *spent))
        seconds, tokens = seconds + sum(spent), tokens + sum(kept) + len(rows)
    return seconds / tokens, (fixed + slope * len(rows)) / len(rows)


def test_where_guessing_never_pays_it_costs_next_to_nothing() -> None:
    ours, plain = play([0.02], 1000, 1.0, 0.05, 0.3)
    assert ours / plain < 1.02


@pytest.mark.parametrize(("rate", "most"), [(0.02, 30), (0.9, 120)])
def test_lengths_are_not_thought_over_in_every_tick(rate: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    thought: list[int] = []

    def counted(*args: Any) -> list[int]:
        thought.append(1)
        return goodput_lengths(*args)

    monkeypatch.setattr(policy, "goodput_lengths", counted)
    play([rate], 400, 1.0, 0.05, 0.02)
    assert 5 < len(thought) < most


def test_where_guessing_pays_it_is_used() -> None:
    ours, plain = play([0.9], 300, 1.0, 0.01, 0.02)
    best = min((1 + 0.01 * (k + 1) + 0.02 * k) / expected_tokens(0.9, k) for k in range(9))
    assert ours < plain / 3 and ours == pytest.approx(best, rel=0.1)


def test_a_row_that_gave_up_begins_again() -> None:
    def change(number: int) -> list[float]:
        return [0.0] if number < 300 else [0.95]

    ours, plain = play([0.0], 1500, 1.0, 0.01, 0.02, change)
    assert ours < plain / 2


def test_rows_are_told_apart() -> None:
    target, draft = line(1, 0.12), line(0, 0.0)
    lengths = goodput_lengths([0.95, 0.05], 6, target, draft)
    assert lengths[0] >= 3 and lengths[1] == 0


class Prompted(TokenTree):
    """A tree with a vector behind its nodes."""

    vectors = [0.0]  # type: ignore[assignment]


def test_a_step_that_gets_guesses_ready_is_tried_again() -> None:
    """Vectors without a guess tell nothing: neither the first trial nor a probe has taken place."""
    policy, row = Goodput(most=4), SimpleNamespace()
    ready = Prompted((7,), (-1,))
    plain, outcome = TokenTree.chain([7]), Outcome((0,), 1)

    def step(tree: TokenTree, seconds: float = 1.0) -> None:
        policy.observe(StepReport([row], [tree], [outcome], 0.0, seconds))  # type: ignore[list-item]

    asked = []
    for tree in (plain, plain, ready, TokenTree.chain([7, 1, 1, 1, 1])):
        asked += policy.limits([row])  # type: ignore[list-item]
        step(tree, 1.0 if len(tree) == 1 else 50.0)
    assert asked == [0, 0, 4, 4]
    asked = []
    for _ in range(200):
        asked += policy.limits([row])  # type: ignore[list-item]
        step(ready if asked[-1] and asked[-2:-1] != [1] else plain)
    probes = [place for place, limit in enumerate(asked) if limit]
    assert probes and all(second - first == 1 for first, second in zip(probes[::2], probes[1::2], strict=False))
