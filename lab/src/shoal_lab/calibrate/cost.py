"""Measures an engine's cost card: whole steps of its loop at a few constant depths and two context lengths.

The cases take turns, call by call, so that a slow moment of the machine affects all of them.

The cost of layers is measured with an LM head that reads all its rows. The head that searches for the argmax alone
reads few rows after the full model, and many after a few layers, whose distributions are flat: with a vocabulary of
152,000 this hid half of a layer's cost. Shallow steps are then reduced by what the searching head saves at full depth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.methods.early_exit import EarlyExit
from shoal_lab.components.cost import CostCard, Observation, attended

SHARES = (1.0, 0.75, 0.5)
CONTEXTS = (32, 512)
_FEWEST = 3
_MOST = 256
_LIKELIEST: Mapping[str, Any] = {}
_ALL_LOGITS: Mapping[str, Any] = {"logit_bias": {0: 0.0}}
"""Options of a stream for greedy tokens from all logits, which a bias of 0 enforces."""


def measure(
    engine: Engine,
    *,
    rows: int = 1,
    contexts: Sequence[int] = CONTEXTS,
    shares: Sequence[float] = SHARES,
    seconds: float = 1.0,
) -> CostCard:
    """Fit a cost card to this engine on this machine, now.

    Args:
        engine: the engine to measure.
        rows: prompts decoded together.
        contexts: prompt lengths. All depths are measured at the shortest one, full depth also at the others.
        shares: depths as shares of the layers.
        seconds: decoding time for each case.

    Raises:
        ValueError: fewer than two depths.
    """
    layers = engine.runner.num_layers
    depths = sorted({max(1, round(share * layers)) for share in (1.0, *shares)}, reverse=True)
    limit = engine.runner.max_positions
    longest = max(2, limit - _MOST) if limit is not None else None
    lengths = sorted({length if longest is None else min(length, longest) for length in contexts})
    cases = [(length, layers, _LIKELIEST) for length in lengths]
    cases += [(lengths[0], depth, _ALL_LOGITS) for depth in depths]
    with ExitStack() as open_streams:
        courses = [open_streams.enter_context(_Course(engine, rows, *case)) for case in cases]
        _take_turns(courses, seconds * len(courses))
    prefill = [(length, min(c.first for c in courses if c.length == length)) for length in lengths]
    seen = [course.observation() for course in courses]
    observations = _under_one_head(seen[: len(lengths)], seen[len(lengths) :])
    return CostCard.fit(observations, engine.runner.windows, engine.runner.head_layers, prefill, rows)


def _under_one_head(full: Sequence[Observation], whole_head: Sequence[Observation]) -> list[Observation]:
    """Full steps unchanged, and shallow ones less what searching for the argmax alone saves a full step.

    Args:
        full: all layers; the first one with prompts as long as the others'.
        whole_head: the same depth and smaller ones, with a head that reads all its rows; the full depth first.
    """
    deepest, *shallow = whole_head
    spared = deepest.seconds - full[0].seconds
    return [*full, *(replace(one, seconds=one.seconds - spared) for one in shallow)]


def _take_turns(courses: Sequence[_Course], seconds: float) -> None:
    """Run steps of each in turn for that long, after one round that does not count."""
    for course in courses:
        course.step()
        course.steps.clear()
    start, done = time.perf_counter(), 0
    while min(course.left for course in courses) and (done < _FEWEST or time.perf_counter() - start < seconds):
        for course in courses:
            course.step()
        done += 1


class _Course(AbstractContextManager["_Course"]):
    """One case in progress: `rows` prompts of one length, decoded at one depth.

    Attributes:
        first: seconds until the first tokens.
        steps: seconds of each step after that.
        left: how many steps there may still be.
    """

    def __init__(self, engine: Engine, rows: int, length: int, depth: int, asked: Mapping[str, Any]) -> None:
        self.length, self.rows, self.steps, self.left = length, rows, list[float](), _MOST
        self._engine, self._method = engine, EarlyExit(exit_layer=depth)
        prompts = [[(7 * place + row) % engine.runner.vocab_size for place in range(length)] for row in range(rows)]
        self._stream = engine.stream(prompts, method=self._method, max_new_tokens=_MOST, ignore_eos=True, **asked)
        self.step()
        self.first = self.steps.pop()

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def step(self) -> None:
        """Time a step of all rows, or several that one call makes: each of them counts as their mean."""
        start, taken = time.perf_counter(), 0
        while taken < self.rows or self._stream.pending:
            next(self._stream)
            taken += 1
        count = taken // self.rows
        self.steps += [(time.perf_counter() - start) / count] * count
        self.left -= count

    def observation(self) -> Observation:
        """The median step."""
        plan: DepthPlan = self._engine.recipe(self._method, _MOST).plan
        read = attended(plan, 1, self.length + len(self.steps) // 2, self._engine.runner.windows)
        return Observation(plan.depth(1), read, statistics.median(self.steps))
