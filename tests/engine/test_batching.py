"""Admission: which policy spares layers on which load, and that neither changes a token."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from drive import prompt
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.batching import Policy
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods.d3 import D3

STEEP = D3(alpha=0.9, core=1, horizon=16)
CLIENTS, ASKED = 4, 80


@functools.cache
def engine() -> Engine:
    return engine_for(tiny("llama", layers=4))


def test_by_name() -> None:
    with pytest.raises(ValueError, match="admission policy 'auto'"):
        Policy("auto")


@pytest.mark.parametrize("patience", [-1.0, math.nan])
@pytest.mark.parametrize("name", ["join", "waves"])
def test_an_impossible_patience_is_refused(name: str, patience: float) -> None:
    with pytest.raises(ValueError, match="patience"):
        Policy(name, patience)


def play(how: Policy, seed: int, tokens: Sequence[int], method: Any) -> tuple[float, list[Any]]:
    """Layers that the forwards of a closed loop of clients went through, each counted once per forward; the answers."""
    one, draw, layers = engine(), random.Random(seed), 0.0
    scheduler, handles = Scheduler(one, max_seqs=CLIENTS, policy=how, start=False), list[Any]()
    forward = one.runner.forward

    def counted(chunks: Any, cache: Any, *hook: Any) -> Any:
        nonlocal layers
        layers += len({layer for chunk in chunks for layer in chunk.plan.layers(chunk.steps[0])})
        return forward(chunks, cache, *hook)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.runner, "forward", counted)
        while len(handles) < ASKED or scheduler.running or scheduler.waiting:
            while len(handles) < ASKED and scheduler.running + scheduler.waiting < CLIENTS:
                options = {"max_new_tokens": draw.choice(tokens), "method": method, "ignore_eos": True}
                handles.append(scheduler.submit(prompt(5, len(handles) % 9), **options))
            scheduler.turn()
    return layers, [handle.results[0].tokens for handle in handles]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "method", "waves_win"),
    [((10, 13, 16), STEEP, True), ((2, 3, 30), STEEP, False), ((6, 12, 18), "full", False)],
    ids=["similar", "unequal", "full"],
)
def test_waves_spare_layers_where_answers_are_alike(tokens: Sequence[int], method: Any, waves_win: bool) -> None:
    join, expected = play(Policy(), 1, tokens, method)
    waves, answers = play(Policy("waves"), 1, tokens, method)
    assert answers == expected and len({len(answer) for answer in answers}) == len(tokens)
    assert (waves < 0.9 * join) if waves_win else (join < waves)
