"""What D3 has to beat: other schedules at the same mean depth as realised.

A depth schedule makes three choices: how many layers, when, and which. Each control changes one of them and keeps the
mean. Speeds are ideal speed-ups, (L + e) / (mean + e).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.depth.order import Core, default_core, removal_order
from shoal.engine.engine import Engine
from shoal.eval.decoders import Contender, contender
from shoal.eval.equal_depth import Counts, Lengths, linear, power_law, rising, two_levels
from shoal.eval.layer_table import LayerTable
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.schedule import Schedule
from shoal.methods.skipdecode import SkipDecode
from shoal.methods.unified_layer_skipping import evenly_spaced

STARTS = (0.2, 0.4, 0.6)
GROUPS = ("budgets", "geometry", "random", "orders", "starts")
"""Other budgets in D3's order, the published geometries, random orders, named orders, a delayed decay."""


@dataclass(frozen=True)
class Setting:
    """What controls are made for.

    Attributes:
        engine: the model.
        lengths: answer lengths for which means are solved.
        mean: layers per token, as realised.
        order: removal order of D3 and of every control that does not change it.
        core: layers that always run.
        max_new_tokens: the longest answer.
        seeds: of the random orders.
    """

    engine: Engine
    lengths: Lengths
    mean: float
    order: tuple[int, ...]
    core: Core
    max_new_tokens: int
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.engine.stack.num_layers


def setting(
    engine: Engine, lengths: Lengths, speedup: float, max_new_tokens: int, order: str | Sequence[int] = "auto",
    core: int | None = None, seeds: Sequence[int] = (0, 1, 2),
) -> Setting:
    """The setting of an ideal speed-up; ValueError where the core alone costs more."""
    layers, head = engine.stack.num_layers, engine.stack.head_layers
    kept = default_core(layers) if core is None else Core(core - core // 2, core // 2)
    mean = (layers + head) / speedup - head
    if speedup < 1 or mean < kept.size:
        most = (layers + head) / (kept.size + head)
        raise ValueError(f"an ideal speed-up of {speedup:g} is out of reach; with {kept.size} core layers of {layers} "
                         f"it is 1..{most:.2f}. Change it, or core")
    removal = removal_order(order if isinstance(order, str) else tuple(order), layers, *kept,
                            engine.card.layer_scores, engine.card.order)
    return Setting(engine, lengths, mean, removal, kept, max_new_tokens, tuple(seeds))


def controls(at: Setting, groups: Sequence[str] = GROUPS) -> list[Contender]:
    """D3 first, then the controls of the given groups, all at the setting's mean depth.

    A control that cannot reach the mean is left out.
    """
    makers = {"budgets": _budgets, "geometry": _geometry, "random": _random, "orders": _orders, "starts": _starts}
    found = [_d3(at, "d3", 0.0, at.order)]
    for group in groups:
        if group not in makers:
            raise ValueError(f"there are no controls {group!r}; there are {', '.join(GROUPS)}")
        found += makers[group](at)
    return found


def _d3(at: Setting, label: str, start: float, order: tuple[int, ...]) -> Contender:
    alpha, _ = power_law(at.lengths, at.num_layers, at.core.size, at.mean, start)
    method = D3(alpha=alpha, start=start, order=order, core=at.core.size, horizon=at.lengths.horizon)
    return _named(at, method, label)


def _named(at: Setting, method: Method, label: str) -> Contender:
    return contender(at.engine, method, at.max_new_tokens, label)


def _scheduled(at: Setting, label: str, table: Counts, order: Sequence[int]) -> Contender:
    return _named(at, schedule(table, order, at.num_layers), label)


def schedule(table: Counts, order: Sequence[int], num_layers: int) -> Schedule:
    """k(i) x order as a method."""
    least = min(table)
    steps = [next(i for i, k in enumerate(table) if k < num_layers - gone) for gone in range(num_layers - least)]
    return Schedule(tuple(order[: num_layers - least]), tuple(max(step, 1) for step in steps))


def _budgets(at: Setting) -> Iterator[Contender]:
    layers, core = at.num_layers, at.core.size
    yield _scheduled(at, "constant", two_levels(at.lengths, layers, core, at.mean), at.order)
    yield _scheduled(at, "linear", linear(at.lengths, layers, core, at.mean)[2], at.order)
    table = LayerTable.rising(rising(at.lengths, layers, core, at.mean), at.order, layers)
    spec: dict[str, Any] = {"method": "reversed_d3",
                            "method_args": {"counts": list(table.counts), "order": list(at.order)}}
    yield Contender("reversed d3", spec, table)


def _geometry(at: Setting) -> Iterator[Contender]:
    layers = at.num_layers
    budget, horizon, _ = linear(at.lengths, layers, 1, at.mean)
    yield _named(at, SkipDecode(maximum=1.0, minimum=budget.minimum, warm_up=1, horizon=horizon), "skipdecode")
    levels = two_levels(at.lengths, layers, 1, at.mean)
    yield _scheduled(at, "early exit", levels, tuple(range(layers - 1, 0, -1)))
    yield _scheduled(at, "unified layer skipping", levels, even_order(layers, min(levels)))


def even_order(num_layers: int, count: int) -> tuple[int, ...]:
    """An order whose first drops leave count + 1 evenly spaced layers, and the next one the most even subset of these.

    Evenly spaced sets of different sizes are not nested; this is the nearest that a depth between two integers has.
    """
    many = evenly_spaced(num_layers, min(count + 1, num_layers))
    gone = [layer for layer in range(num_layers) if layer not in many]
    inner = range(1, len(many) - 1)
    last = min(inner, key=lambda i: (many[i + 1] - many[i - 1], i))
    return (*gone, many[last])


def _random(at: Setting) -> Iterator[Contender]:
    for seed in at.seeds:
        order = list(at.order)
        random.Random(f"order/{seed}").shuffle(order)
        yield _d3(at, f"d3, random order {seed}", 0.0, tuple(order))


def _orders(at: Setting) -> Iterator[Contender]:
    scores = at.engine.card.layer_scores
    names = ["center_out", "late_middle", "low_first", "spread", *(kind for kind in ("influence", "leave_one_out")
                                                                   if kind in scores)]
    for name in names:
        order = removal_order(name, at.num_layers, *at.core, scores)
        if order != at.order:
            yield _d3(at, f"d3, {name}", 0.0, order)


def _starts(at: Setting) -> Iterator[Contender]:
    for start in STARTS:
        try:
            yield _d3(at, f"d3, start {start:g}", start, at.order)
        except ValueError:  # so late a decay cannot save so much
            continue
