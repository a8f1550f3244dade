"""The questions of why.py, and the best depths by position against enumeration."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from passing import ids
from scripts import script
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.engine import Engine
from shoal_lab.eval import why
from shoal_lab.eval.controls import setting
from shoal_lab.eval.distance import Distances, FullReading, Told
from shoal_lab.eval.equal_depth import Lengths


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_the_cheapest_depths_are_those_of_trying_all(seed: int, falling: bool) -> None:
    rng = random.Random(seed)
    costs = [[rng.random() for _ in range(4)] for _ in range(4)]
    found = why._cheapest(costs, falling)

    def cost(gone: Any) -> float:
        return sum(row[less] for row, less in zip(costs, gone, strict=True))

    assert cost(found) == pytest.approx(min(map(cost, every(4, 3, falling))))
    assert not falling or found == sorted(found)


@pytest.mark.parametrize("falling", [True, False])
def test_layers_go_where_they_are_worth_least(falling: bool) -> None:
    lengths = Lengths((30, 17, 9, 22, 25, 30))
    for seed in range(8):
        rng = random.Random(seed)
        losses = [list(itertools.accumulate((rng.random() for _ in range(4)), initial=0.0)) for _ in range(6)]
        mean = rng.uniform(4.3, 5.8)
        found = why.best_counts(losses, lengths, 6, 5, mean, falling)
        assert found[0] == 6 and len(found) == 30 and lengths.mean(found) == pytest.approx(mean, abs=0.15)
        assert not falling or list(found) == sorted(found, reverse=True)
    late = [[0.0, worth, 2 * worth] for worth in (9, 9, 9, 1, 1, 1)]
    assert set(why.best_counts(late, lengths, 6, 5, 5.4, falling)[1:15]) == {6}
    early = [[0.0, worth, 2 * worth] for worth in (1, 1, 1, 9, 9, 9)]
    counts = why.best_counts(early, lengths, 6, 5, 5.2, falling)
    assert counts[15:] == (6,) * 15 if not falling else min(counts) == counts[29]


def test_a_sublayer_is_left_out_alone(tiny_engine: Engine) -> None:
    read = [Told("s", "0", (1, 2, 3), tuple(ids(12)[0]))]
    judge = FullReading(tiny_engine, read)
    for part, attention, mlp in (("attention", 1, NEVER), ("mlp", NEVER, 1), ("layer", 1, 1)):
        every = [NEVER] * 6
        plan = DepthPlan((NEVER, NEVER, attention, *every[3:]), (NEVER, NEVER, mlp, *every[3:]))
        asked = why.without(tiny_engine.runner, 2, part)
        assert asked.read(judge)[0].kl == judge.under((tiny_engine.runner, plan))[0].kl
        assert asked.layers(12) == plan.layer_tokens(12)


def test_every_question_is_answered_and_goes_on(tiny_engine: Engine, tmp_path: Path) -> None:
    asked = script("lab/benchmarks/why.py")
    read = [Told("s", str(at), (1, 2, at), tuple(answer)) for at, answer in enumerate(ids(60, 47, 64, 31))]
    at = setting(tiny_engine, Lengths((60, 47, 64, 31)), 1.2, 64, order="late_middle", core=2)
    distances = Distances(tiny_engine, max_new_tokens=64)
    questions = asked.Asked(distances, read, at, [1.25])
    questions.few = [5, 4]
    found = {part: getattr(questions, part)() for part in asked.PARTS}
    assert json.loads(json.dumps(found)) == {part: getattr(questions, part)() for part in asked.PARTS}
    depth = {(row["which"], row["depth"]): row for row in found["depth"]}
    assert set(depth) == {("all", 5), ("all", 4), ("one", 5), ("one", 4)}
    context = {(row["judged"], row["context"]): row["kl"]["mean"] for row in found["context"]}
    assert context[5, 6] == depth["one", 5]["kl"]["mean"] and (6, 6) not in context
    assert context[5, 5] == pytest.approx(depth["all", 5]["kl"]["mean"], rel=0.01)
    assert len(found["sublayers"]) == 18 and found["sublayers"][2]["bytes"] == sum(
        row["bytes"] for row in found["sublayers"][:2])
    assert {"best falling", "best of any", "d3", "constant"} <= {row["label"] for row in found["schedule"]}
    for row in found["schedule"]:
        assert row["mean_layers"] == pytest.approx(found["schedule"][0]["mean_layers"], abs=0.2)
    late = asked.Asked(Distances(tiny_engine, max_new_tokens=64, until=0.0), read, at, [1.25])
    assert all(getattr(late, part)() == [] for part in asked.PARTS)


def every(bins: int, most: int, falling: bool) -> Any:
    """All numbers of skipped layers by bin."""
    for gone in itertools.product(range(most + 1), repeat=bins):
        if not falling or list(gone) == sorted(gone):
            yield gone
