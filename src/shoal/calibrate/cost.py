"""Measure an engine's cost card: whole ticks of its loop at a few constant depths and two context lengths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.methods.early_exit import EarlyExit
from shoal.model.cost import CostCard, Observation, attended

SHARES = (1.0, 0.75, 0.5)
CONTEXTS = (32, 512)
_FEWEST = 3
_MOST = 256


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
        engine: what to measure.
        rows: prompts that decode together.
        contexts: prompt lengths. All depths are measured at the first, full depth also at the others.
        shares: depths as shares of the layers.
        seconds: how long to decode for each measurement.

    Raises:
        ValueError: fewer than two depths.
    """
    layers = engine.stack.num_layers
    depths = sorted({max(1, round(share * layers)) for share in (1.0, *shares)}, reverse=True)
    limit = engine.stack.max_positions
    longest = max(2, limit - _MOST) if limit is not None else None
    lengths = sorted({length if longest is None else min(length, longest) for length in contexts})
    cases = [(lengths[0], depth) for depth in depths] + [(length, layers) for length in lengths[1:]]
    _time(engine, rows, lengths[0], layers, 0.0)
    observations, prefill = [], dict[int, float]()
    for length, depth in cases:
        first, observation = _time(engine, rows, length, depth, seconds)
        prefill[length] = min(first, prefill.get(length, first))
        observations.append(observation)
    return CostCard.fit(observations, engine.stack.windows, engine.stack.head_layers, list(prefill.items()), rows)


def _time(engine: Engine, rows: int, length: int, depth: int, seconds: float) -> tuple[float, Observation]:
    """Time to the first token, and the median of the ticks after it."""
    prompts = [[(7 * position + row) % engine.stack.vocab_size for position in range(length)] for row in range(rows)]
    method = EarlyExit(exit_layer=depth)
    ticks: list[float] = []
    start = time.perf_counter()
    with engine.stream(prompts, method=method, max_new_tokens=_MOST, ignore_eos=True) as stream:
        for step in stream:
            if step.row < rows - 1:
                continue
            now = time.perf_counter()
            ticks.append(now - start)
            start = now
            if len(ticks) > _FEWEST and sum(ticks[1:]) >= seconds:
                break
    plan: DepthPlan = engine.recipe(method, _MOST).plan
    middle = length + len(ticks) // 2
    read = attended(plan, 1, middle, engine.stack.windows)
    return ticks[0], Observation(plan.depth(1), read, statistics.median(ticks[1:]))
