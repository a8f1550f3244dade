"""A cost card measured on an engine whose clock follows a formula recovers that formula."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from shoal.engine.loading.load import engine_for
from shoal.model.runner import greedy
from shoal_lab.calibrate import cost
from shoal_lab.components.cost import attended

OVERHEAD, LAYER, KV, TOKEN = 4e-3, 2e-3, 5e-6, 1e-3


@pytest.fixture
def engine(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny Llama; every forward advances the clock by the cost of its work."""
    made, now = engine_for(llama), [0.0]
    made.slowness, made.spared = lambda seconds: 1.0, 0.0
    forward = made.runner.forward

    def timed(chunks: Sequence[Any], cache: Any, hook: Any = None, logits: bool = True) -> Any:
        step, chunk = chunks[0].steps[0], chunks[0]
        if step == 0:
            now[0] += 0.01 + TOKEN * sum(len(one.tokens) for one in chunks)
        else:
            read = sum(attended(chunk.plan, step, cache.positions[one.seq] + 1, made.runner.windows) for one in chunks)
            whole = chunk.plan.depth(step) < made.runner.num_layers or logits
            work = OVERHEAD + LAYER * chunk.plan.depth(step) + KV * read + whole * made.spared
            now[0] += work * made.slowness(now[0])
        found = forward(chunks, cache, hook)
        return found if logits else greedy(found)

    monkeypatch.setattr(made.runner, "forward", timed)
    monkeypatch.setattr(made.runner, "argmax", partial(timed, logits=False))
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return made


@pytest.mark.parametrize("rows", [1, 3])
def test_the_formula_comes_back(engine: Any, rows: int) -> None:
    card = cost.measure(engine, rows=rows, contexts=(40, 8), seconds=0.2)
    assert card.layer_seconds == pytest.approx(LAYER, rel=0.02)
    assert card.kv_seconds_per_position == pytest.approx(KV * rows, rel=0.05)
    assert card.head_seconds + card.overhead_seconds == pytest.approx(OVERHEAD, rel=0.02)
    assert card.rows == rows and [length for length, _ in card.prefill] == [8, 40]
    assert [seconds for _, seconds in card.prefill] == pytest.approx([0.01 + TOKEN * rows * p for p in (8, 40)])


def test_a_prediction_is_what_a_method_then_takes(engine: Any) -> None:
    card, spent = cost.measure(engine, contexts=(8, 40), seconds=0.2), []
    method = {"method": "d3", "method_args": {"mean": 0.85}}
    start = cost.time.perf_counter()
    for _ in engine.stream(list(range(20)), method=method, max_new_tokens=30, ignore_eos=True):
        spent.append(cost.time.perf_counter() - start)
    plan = engine.recipe(method, 30).plan
    assert card.predict(plan, 20, 30) == pytest.approx(spent[-1], rel=0.02)
    assert card.tpot(plan, 20, 30) == pytest.approx((spent[-1] - spent[0]) / 29, rel=0.02)


def test_layers_cost_what_they_cost_where_the_full_model_spares_most_of_the_head(engine: Any) -> None:
    engine.spared = 3 * LAYER
    card = cost.measure(engine, contexts=(8, 40), seconds=0.2)
    assert card.layer_seconds == pytest.approx(LAYER, rel=0.02)
    assert card.head_seconds + card.overhead_seconds == pytest.approx(OVERHEAD, rel=0.02)


def test_prompts_leave_room_in_the_context(engine: Any) -> None:
    engine.runner.max_positions = cost._MOST + 30
    card = cost.measure(engine, contexts=(8, 4000), seconds=0.01)
    assert [length for length, _ in card.prefill] == [8, 30]


def test_a_machine_that_wanders_is_slower_for_every_depth_alike(engine: Any) -> None:
    engine.slowness = lambda seconds: 2.0 if int(seconds / 0.7) % 2 else 1.0
    card = cost.measure(engine, contexts=(8, 40), seconds=0.5)
    assert (card.head_seconds + card.overhead_seconds) / card.layer_seconds == pytest.approx(OVERHEAD / LAYER, rel=0.1)
