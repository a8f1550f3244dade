"""The forecast against a closed loop that is played tick by tick, row by row, sublayer by sublayer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest

from drive import decode, prompt
from families import tiny
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.forecast import Answer, Forecast, Pace, _longest
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.cost import CostCard
from shoal.types import ModelInfo

TICK, ROW, LAYER, LAYER_ROW, KV, PROMPT = 3e-3, 2e-4, 2e-3, 5e-5, 2e-7, 1e-4
WINDOWS = (None, 40, None, None, 40, None, None, None)
LAYERS = len(WINDOWS)
FULL = DepthPlan.full(LAYERS)
STEEP = DepthPlan.whole_layers([NEVER, 3, 6, 10, 14, 20, 30, NEVER])
MILD = DepthPlan.whole_layers([NEVER, NEVER, 60, 110, 130, 160, NEVER, NEVER])
SPLIT = DepthPlan((NEVER, 2, 20, 30, NEVER, 50, 5, 8), (NEVER, 20, 10, 30, 9, NEVER, 5, NEVER))


@dataclass(frozen=True)
class Job:
    """An answer of `tokens` tokens to a prompt of `prompt` tokens."""

    plan: DepthPlan
    tokens: int
    prompt: int = 50

    @property
    def answer(self) -> Answer:
        """What the forecast would be told."""
        ticks = self.tokens - 1
        runs = [[step < drop for step in range(1, self.tokens)] for drop in self.plan.attention + self.plan.mlp]
        return Answer(ticks, tuple(map(sum, runs)), self.prompt, self.prompt)


@dataclass
class Playing:
    """A job whose next tick is step `step`."""

    job: Job
    step: int = 1


def card(rows: int) -> CostCard:
    return CostCard(LAYER + rows * LAYER_ROW, rows * ROW, TICK, rows * KV, WINDOWS, ((70, rows * 70 * PROMPT),), rows)


def pace(rows: int) -> Pace:
    return Pace.between(card(1), card(rows))


def tick(rows: Sequence[Playing]) -> float:
    """Seconds; every row moves on by a step."""
    seconds = TICK + ROW * len(rows)
    for layer, window in enumerate(WINDOWS):
        for attention, drops in ((True, "attention"), (False, "mlp")):
            busy = [row for row in rows if row.step < getattr(row.job.plan, drops)[layer]]
            seconds += (LAYER * bool(busy) + LAYER_ROW * len(busy)) / 2
            if attention:
                seconds += KV * sum(min(row.job.prompt + row.step, window or 10**9) for row in busy)
    for row in rows:
        row.step += 1
    return seconds


def play_join(jobs: Sequence[Job], rows: int, draw: random.Random) -> float:
    """Seconds per answer where every ended row makes room for one at once; begun anew at unrelated steps."""
    seconds, moved, weights = 0.0, 0, [job.tokens - 1 for job in jobs]
    for _ in range(40):
        running = [Playing(job, draw.randrange(1, job.tokens)) for job in draw.choices(jobs, weights, k=rows)]
        for _ in range(150):
            seconds += tick(running)
            moved += rows
            running = [row if row.step < row.job.tokens else Playing(draw.choice(jobs)) for row in running]
    mean = sum(weights) / len(jobs)
    return seconds * mean / moved + PROMPT * sum(job.prompt for job in jobs) / len(jobs)


def play_waves(jobs: Sequence[Job], rows: int, draw: random.Random) -> float:
    """Seconds per answer where groups start together and the next one when all have ended."""
    seconds, done = 0.0, 0
    for _ in range(40):
        order = draw.sample(jobs, len(jobs))
        for first in range(0, len(jobs) - rows + 1, rows):
            running = [Playing(job) for job in order[first : first + rows]]
            seconds += sum(PROMPT * row.job.prompt for row in running)
            done += rows
            while running := [row for row in running if row.step < row.job.tokens]:
                seconds += tick(running)
    return seconds / done


def lengths(draw: random.Random, mean: float) -> int:
    return 2 + int(draw.expovariate(1 / mean))


LOADS: dict[str, tuple[str, Callable[[random.Random], Job]]] = {
    "equal lengths, steep": ("waves", lambda draw: Job(STEEP, 64, draw.choice([10, 90]))),
    "similar lengths, split": ("waves", lambda draw: Job(SPLIT, draw.randrange(50, 60))),
    "unequal lengths, mild": ("join", lambda draw: Job(MILD, lengths(draw, 60), draw.choice([10, 90]))),
    "full depth": ("join", lambda draw: Job(FULL, draw.randrange(20, 100))),
    "plans of all kinds": ("join", lambda draw: Job(draw.choice([FULL, STEEP, SPLIT]), lengths(draw, 30))),
}


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("load", LOADS)
def test_the_forecast_is_what_a_closed_loop_takes(load: str, rows: int) -> None:
    better, make = LOADS[load]
    draw = random.Random(rows)
    jobs = [make(draw) for _ in range(64)]
    forecast = Forecast.of([job.answer for job in jobs], rows, pace(16))
    join, waves = play_join(jobs, rows, draw), play_waves(jobs, rows, draw)
    assert better == ("join" if join < waves else "waves")
    assert forecast.join == pytest.approx(join, rel=0.04)
    assert forecast.waves == pytest.approx(waves, rel=0.04)
    assert (forecast.join < forecast.waves) == (join < waves)


def test_what_a_row_costs_by_itself() -> None:
    job, seconds = Job(SPLIT, 40, prompt=50), 50 * PROMPT
    for step in range(1, job.tokens):
        seconds += ROW
        for window, attention, mlp in zip(WINDOWS, SPLIT.attention, SPLIT.mlp, strict=True):
            seconds += LAYER_ROW * ((step < attention) + (step < mlp)) / 2
            seconds += KV * (step < attention) * min(50 + step, window or 10**9)
    assert job.answer.own_seconds(pace(16)) == pytest.approx(seconds)


def test_one_depth_never_gains() -> None:
    draw = random.Random(1)
    for plan in (FULL, DepthPlan.whole_layers([NEVER, 1, 1, NEVER, 1, NEVER, NEVER, 1])):
        answers = [Job(plan, draw.randrange(1, 90)).answer for _ in range(20)]
        for rows in (2, 7, 20):
            forecast = Forecast.of(answers, rows, pace(16))
            assert forecast.join <= forecast.waves * (1 + 1e-12)
        same = Forecast.of([answers[0]] * 5, 4, pace(16))
        assert same.join == pytest.approx(same.waves)


def test_answers_of_one_token_cost_their_prompt() -> None:
    forecast = Forecast.of([Job(FULL, 1, 30).answer] * 4, 2, pace(4))
    assert forecast.join == pytest.approx(30 * PROMPT) and forecast.waves == pytest.approx(30 * PROMPT)


@pytest.mark.parametrize("rows", [1, 2, 5, 7])
def test_the_longest_life_is_the_mean_over_all_groups(rows: int) -> None:
    lives = [3, 9, 9, 0, 14, 2, 5]
    groups = list(combinations(lives, rows))
    assert _longest(lives, rows) == pytest.approx(sum(map(max, groups)) / len(groups))


def test_a_pace_gives_its_parts_back() -> None:
    found = pace(16)
    assert (found.tick, found.row) == pytest.approx((TICK, ROW))
    assert (found.layer, found.layer_row) == pytest.approx((LAYER, LAYER_ROW))


@pytest.mark.parametrize(("one", "many", "parts"), [(5.0, 4.0, (4.0, 0.0)), (0.0, 8.0, (0.0, 2.0))])
def test_a_noisy_card_makes_no_negative_costs(one: float, many: float, parts: tuple[float, float]) -> None:
    few, full = (CostCard(layer, layer, 0.0, 0.0, WINDOWS, ((1, 0.0),), n) for layer, n in ((one, 1), (many, 4)))
    found = Pace.between(few, full)
    assert (found.layer, found.layer_row) == (found.tick, found.row) == parts


def rows_of(recipe: Any, new: int) -> Any:
    return decode(tiny("llama", layers=4), [prompt(9, 1)], recipe, new).rows[0]


@pytest.mark.parametrize("new", [1, 2, 9])
def test_a_row_is_remembered_by_what_it_ran(new: int) -> None:
    plan = DepthPlan((NEVER, 3, 5, NEVER), (NEVER, 3, 2, 1))
    answer = Answer.of(rows_of(plan, new))
    assert answer == Job(plan, new, 9).answer
    assert sum(answer.lives) / 2 + 4 == sum(plan.depth(step) for step in range(new))


def test_a_row_that_drafts_needs_every_layer_in_each_of_its_ticks() -> None:
    inner = DepthPlan.whole_layers([NEVER, 2, 3, NEVER])
    proposer = PromptLookup(length=3).recipe(ModelInfo(num_layers=4, max_new_tokens=24)).proposer
    row = decode(tiny("llama", layers=4), [[4, 8] * 6], Recipe(inner, proposer), 24).rows[0]
    answer = Answer.of(row)
    assert answer.ticks == row.ledger.target_forwards - 1
    assert answer.lives == (answer.ticks,) * 8 and answer.read == 12
