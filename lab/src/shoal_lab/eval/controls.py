"""Controls for D3: other schedules with the same realised mean depth.

A depth schedule makes three choices: how many layers, when, and which. Each control changes one of them and keeps the
mean. Speeds are ideal speed-ups, (L + e) / (mean + e).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.depth.order import BY_KIND, Core, default_core, removal_order
from shoal.engine.engine import Engine
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.schedule import Schedule
from shoal.methods.unified_layer_skipping import evenly_spaced
from shoal_lab.eval.decoders import Candidate, candidate
from shoal_lab.eval.equal_depth import Counts, Lengths, linear, power_law, rising, two_levels
from shoal_lab.eval.rising import RisingPlan
from shoal_lab.methods.skipdecode import SkipDecode

_BLENDS = 200
_PLACES = ("center_out", "late_middle", "low_first", "spread")
Make = Callable[[], Candidate]
STARTS = (0.2, 0.4, 0.6)
GROUPS = ("constant", "budgets", "geometry", "random", "orders", "starts")
"""In D3's order, a constant depth and other budgets; published geometries; random and named orders; a delayed decay."""
_PARTS = {"budgets": ("linear", "reversed")}
"""Groups whose controls can also be asked for one by one."""


@dataclass(frozen=True)
class ControlSetting:
    """What controls are made for.

    Attributes:
        engine: the model.
        lengths: answer lengths for which means are solved.
        mean: realised layers per token.
        order: removal order of D3 and of every control that does not change it.
        core: layers that always run.
        max_new_tokens: the longest answer.
        seeds: of the random orders.
        curve: calibrated schedules, deepest first, that drop layers in one order.
    """

    engine: Engine
    lengths: Lengths
    mean: float
    order: tuple[int, ...]
    core: Core
    max_new_tokens: int
    seeds: tuple[int, ...] = (0, 1, 2)
    curve: tuple[Schedule, ...] = ()

    @property
    def num_layers(self) -> int:
        """L."""
        return self.engine.runner.num_layers


def setting(
    engine: Engine, lengths: Lengths, speedup: float, max_new_tokens: int, order: str | Sequence[int] = "auto",
    core: int | None = None, seeds: Sequence[int] = (0, 1, 2), curve: Sequence[Schedule] = (),
) -> ControlSetting:
    """The setting of an ideal speed-up; ValueError if the core alone costs more."""
    layers, head = engine.runner.num_layers, engine.runner.head_layers
    kept = default_core(layers) if core is None else Core(core - core // 2, core // 2)
    mean = (layers + head) / speedup - head
    if speedup < 1 or mean < kept.size:
        most = (layers + head) / (kept.size + head)
        raise ValueError(f"an ideal speed-up of {speedup:g} is out of reach; with {kept.size} core layers of {layers} "
                         f"it is 1..{most:.2f}. Change it, or core")
    removal = removal_order(order if isinstance(order, str) else tuple(order), layers, *kept,
                            engine.card.layer_scores, engine.card.order, engine.info().attends)
    return ControlSetting(engine, lengths, mean, removal, kept, max_new_tokens, tuple(seeds), tuple(curve))


def controls(at: ControlSetting, groups: Sequence[str] = GROUPS) -> list[Candidate]:
    """D3 first, then the controls of the given groups, all at the setting's mean depth.

    A control that cannot reach the mean is left out.
    """
    makers = {"constant": _constant, "linear": _linear, "reversed": _reversed, "geometry": _geometry,
              "random": _random, "orders": _orders, "starts": _starts}
    found = [d3(at, "d3", 0.0, at.order)]
    for group in dict.fromkeys(part for name in check_groups(groups) for part in _PARTS.get(name, (name,))):
        for make in makers[group](at):
            with suppress(ValueError):  # this control cannot reach the mean
                found.append(make())
    return found + list(_calibrated(at))


def check_groups(groups: Sequence[str]) -> Sequence[str]:
    """Check names of groups; ValueError for an unknown one."""
    parts = [part for names in _PARTS.values() for part in names]
    for group in groups:
        if group not in (*GROUPS, *parts):
            raise ValueError(f"there are no controls {group!r}; there are {', '.join(GROUPS)}, and as parts of them "
                             f"{', '.join(parts)}")
    return groups


def d3(at: ControlSetting, label: str, start: float, order: tuple[int, ...]) -> Candidate:
    """D3 at the setting's mean; ValueError if that start cannot reach it."""
    alpha, _ = power_law(at.lengths, at.num_layers, at.core.size, at.mean, start)
    method = D3(alpha=alpha, start=start, order=order, core=at.core.size, horizon=at.lengths.horizon)
    return _named(at, method, label)


def _named(at: ControlSetting, method: Method, label: str) -> Candidate:
    return candidate(at.engine, method, at.max_new_tokens, label)


def _scheduled(at: ControlSetting, label: str, table: Counts, order: Sequence[int]) -> Candidate:
    return _named(at, schedule(table, order, at.num_layers), label)


def schedule(table: Counts, order: Sequence[int], num_layers: int) -> Schedule:
    """The method with budget k(i) and a removal order."""
    least = min(table)
    steps = [next(i for i, k in enumerate(table) if k < num_layers - gone) for gone in range(num_layers - least)]
    return Schedule(tuple(order[: num_layers - least]), tuple(max(step, 1) for step in steps))


def _constant(at: ControlSetting) -> list[Make]:
    return [lambda: constant(at, "constant")]


def constant(at: ControlSetting, label: str) -> Candidate:
    """One depth for all tokens but the first, between two integers, at the setting's mean."""
    return _scheduled(at, label, two_levels(at.lengths, at.num_layers, at.core.size, at.mean), at.order)


def _linear(at: ControlSetting) -> list[Make]:
    core = at.core.size
    return [lambda: _scheduled(at, "linear", linear(at.lengths, at.num_layers, core, at.mean)[2], at.order)]


def _reversed(at: ControlSetting) -> list[Make]:
    def backwards() -> Candidate:
        counts = rising(at.lengths, at.num_layers, at.core.size, at.mean)
        plan = RisingPlan(counts, at.order, at.num_layers)
        spec = {"method": "reversed_d3", "method_args": {"counts": list(counts), "order": list(at.order)}}
        return Candidate("reversed d3", spec, plan)

    return [backwards]


def _geometry(at: ControlSetting) -> list[Make]:
    layers = at.num_layers

    def skipdecode() -> Candidate:
        budget, horizon, _ = linear(at.lengths, layers, 1, at.mean)
        return _named(at, SkipDecode(maximum=1.0, minimum=budget.minimum, warm_up=1, horizon=horizon), "skipdecode")

    def evenly() -> Candidate:
        levels = two_levels(at.lengths, layers, 1, at.mean)
        return _scheduled(at, "unified layer skipping", levels, even_order(layers, min(levels)))

    def exits() -> Candidate:
        levels = two_levels(at.lengths, layers, 1, at.mean)
        return _scheduled(at, "early exit", levels, tuple(range(layers - 1, 0, -1)))

    return [skipdecode, exits, evenly]


def even_order(num_layers: int, count: int) -> tuple[int, ...]:
    """An order whose first drops leave count + 1 evenly spaced layers, and the next drop the most even subset of these.

    Evenly spaced sets of different sizes are not nested, so this is the nearest match to a depth between two integers.
    """
    many = evenly_spaced(num_layers, min(count + 1, num_layers))
    gone = [layer for layer in range(num_layers) if layer not in many]
    inner = range(1, len(many) - 1)
    last = min(inner, key=lambda i: (many[i + 1] - many[i - 1], i))
    return (*gone, many[last])


def _calibrated(at: ControlSetting) -> Iterator[Candidate]:
    """A blend of the two schedules of the curve that enclose the mean; none if the curve does not reach it."""
    longest = max(at.lengths.tokens)
    plans = [_named(at, schedule, "calibrated") for schedule in (Schedule((), ()), *at.curve)]
    for deeper, shallower in zip(plans, plans[1:], strict=False):
        means = [at.lengths.mean_layers(who.plan) for who in (deeper, shallower)]
        if means[0] >= at.mean >= means[1]:
            between = [_named(at, blend(deeper.method, shallower.method, i / _BLENDS, longest), "calibrated")
                       for i in range(_BLENDS + 1)]
            yield min(between, key=lambda who: abs(at.lengths.mean_layers(who.plan) - at.mean))
            return


def blend(deeper: Any, shallower: Any, share: float, longest: int) -> Schedule:
    """A schedule between two that drop layers in the same order: each layer goes at a step between its two steps.

    Args:
        deeper, shallower: schedules; the order of the first is the beginning of the second's.
        share: 0 gives the first, 1 the second.
        longest: step of a layer that never goes.
    """
    late = [*deeper.steps, *[longest] * (len(shallower.order) - len(deeper.order))]
    steps = [max(1, round(a + share * (b - a))) for a, b in zip(late, shallower.steps, strict=True)]
    return Schedule(shallower.order, tuple(steps))


def _random(at: ControlSetting) -> list[Make]:
    return [partial(d3, at, f"d3, random order {seed}", 0.0, _shuffled(at.order, seed)) for seed in at.seeds]


def _shuffled(order: Sequence[int], seed: int) -> tuple[int, ...]:
    return tuple(random.Random(f"order/{seed}").sample(order, len(order)))


def _orders(at: ControlSetting) -> list[Make]:
    scores = at.engine.card.layer_scores
    names = [*_PLACES, *(kind for kind in ("influence", "leave_one_out") if kind in scores)]
    attends = at.engine.info().attends
    if len(set(attends)) > 1:
        names += BY_KIND
    named = {name: removal_order(name, at.num_layers, *at.core, scores, at.engine.card.order, attends)
             for name in names}
    return [partial(d3, at, f"d3, {name}", 0.0, order) for name, order in named.items() if order != at.order]


def _starts(at: ControlSetting) -> list[Make]:
    return [partial(d3, at, f"d3, start {start:g}", start, at.order) for start in STARTS]
