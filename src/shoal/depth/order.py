"""Removal orders: which flex layer goes first.

An order is a permutation of the flex layers, so falling budgets give nested sets. The core, some layers at the head and
some at the tail of the stack, always runs and is in no order. Of two equally good layers the deeper one goes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shoal.errors import Unsupported, unknown

Order = str | Sequence[int]
FALLBACK = "center_out"
"""The order that "auto" means for a model without a recommended one."""


class Core(NamedTuple):
    """How many layers at the head and at the tail of the stack always run."""

    head: int
    tail: int

    @property
    def size(self) -> int:
        """Number of core layers."""
        return self.head + self.tail

    def flex(self, num_layers: int) -> range:
        """The layers between head and tail; ValueError if the core does not fit into the stack."""
        if self.head < 0 or self.tail < 0 or self.size > num_layers:
            raise ValueError(f"a core of {self.head} head and {self.tail} tail layers does not fit {num_layers} "
                             f"layers; both must be >= 0 and their sum at most {num_layers}")
        return range(self.head, num_layers - self.tail)


def default_core(num_layers: int) -> Core:
    """max(4, L/8) layers, at most L, split evenly; the head gets the odd one."""
    return core_for(num_layers)


def core_for(
    num_layers: int, size: int | None = None, order: Order = FALLBACK, recommended: Order | None = None, least: int = 0
) -> Core:
    """The core that goes with an order: split evenly, but `high_first` has no tail; `size` None is max(4, L/8).

    Args:
        least: how many layers at the head must always run, since later ones read them. Without `size` they come in
            addition to the tail, which is at most half of the others.
    """
    total = min(max(4, num_layers // 8), num_layers) if size is None else size
    chosen = (recommended or FALLBACK) if order == "auto" else order
    tail = 0 if chosen == "high_first" else total // 2
    if size is None and least:
        tail = min(tail, (num_layers - least) // 2)
        total = max(total, least + tail)
    if not max(1, least) <= total <= num_layers:
        raise ValueError(f"core is {total} layers; it must be in {max(1, least)}..{num_layers}, the model's number of "
                         "layers" + (f"; later ones read the first {least}" if least else ""))
    head = max(total - tail, least)
    return Core(head, total - head)


def _center_out(flex: range, num_layers: int) -> tuple[int, ...]:
    """Nearest to the middle of the stack first."""
    return tuple(sorted(flex, key=lambda layer: (abs(2 * layer - (num_layers - 1)), -layer)))


def _spread(flex: range, num_layers: int) -> tuple[int, ...]:
    """Evenly spaced at every count: the reverse of an order that keeps filling the middle of the widest gap."""
    kept = [flex.start - 1, flex.stop]
    filled: list[int] = []
    while len(filled) < len(flex):
        below = max(range(len(kept) - 1), key=lambda i: kept[i + 1] - kept[i])
        middle = (kept[below] + kept[below + 1]) // 2
        kept.insert(below + 1, middle)
        filled.append(middle)
    return tuple(reversed(filled))


def ascending(scores: Sequence[float], flex: range, num_layers: int) -> tuple[int, ...]:
    """The lowest score first, out of the costs of dropping each of the L layers."""
    if len(scores) != num_layers or any(math.isnan(score) for score in scores):
        raise ValueError(f"layer scores must be {num_layers} numbers, one per layer; got {list(scores)}")
    return tuple(sorted(flex, key=lambda layer: (scores[layer], -layer)))


_BY_PLACE: Mapping[str, Callable[[range, int], tuple[int, ...]]] = {
    "center_out": _center_out,
    "late_middle": lambda flex, _: tuple(reversed(flex)),  # from the layer before the tail core downward
    "low_first": lambda flex, _: tuple(flex),  # as in SkipDecode
    "high_first": lambda flex, _: tuple(reversed(flex)),  # an early exit, as its core has no tail
    "spread": _spread,
}
_BY_SCORE = ("influence", "leave_one_out")
BY_KIND = {"attention_first": True, "recurrent_first": False}
"""Of a model with layers of both kinds, all of one kind before the others; within a kind as "auto" has them."""
ORDERS = ("auto", *_BY_PLACE, *_BY_SCORE, *BY_KIND)
"""Every name that `removal_order` takes."""


def removal_order(
    order: Order, num_layers: int, head: int, tail: int, scores: Mapping[str, Sequence[float]] | None = None,
    recommended: Order | None = None, attends: Sequence[bool] = (),
) -> tuple[int, ...]:
    """The flex layers in the order in which they are dropped.

    Args:
        order: one of `ORDERS`, or the permutation itself. "auto" is the model's recommended order, or `center_out`.
        head, tail: core layers at the head and at the tail of the stack.
        scores: cost of dropping each layer, by kind (`influence`, `leave_one_out`).
        recommended: the order of the model's calibration card. A list of layers may have been found with another core:
            layers of this core are left out, and flex layers that the list lacks go last.
        attends: of each layer, whether it has attention; empty if all have.

    Raises:
        Unsupported: the order needs scores, or kinds of layers, that the model does not have.
        ValueError: an unknown name, or layers that are not a permutation of the flex layers.
    """
    flex = Core(head, tail).flex(num_layers)
    if isinstance(order, str) and order in BY_KIND:
        if len(set(attends)) < 2:
            raise Unsupported(f"removal order {order!r}", "the model's layers are all of one kind",
                              f"Take another order, such as {FALLBACK!r}")
        usual = removal_order("auto", num_layers, head, tail, scores, recommended)
        return tuple(sorted(usual, key=lambda layer: attends[layer] != BY_KIND[order]))
    chosen = (recommended or FALLBACK) if order == "auto" else order
    if isinstance(chosen, str):
        return _named(chosen, flex, num_layers, scores or {})
    if order == "auto":
        rest = [layer for layer in _center_out(flex, num_layers) if layer not in chosen]
        chosen = [*(layer for layer in chosen if layer in flex), *rest]
    return _explicit(chosen, flex)


def _named(name: str, flex: range, num_layers: int, scores: Mapping[str, Sequence[float]]) -> tuple[int, ...]:
    if name in _BY_PLACE:
        return _BY_PLACE[name](flex, num_layers)
    if name not in _BY_SCORE:
        raise unknown("removal order", name, ORDERS)
    if name not in scores:
        raise Unsupported(f"removal order {name!r}", f"the model has no {name} scores",
                          "Measure them with shoal.quick_card(engine), or take an order that needs none, such as "
                          f"{FALLBACK!r}")
    return ascending(scores[name], flex, num_layers)


def _explicit(layers: Sequence[int], flex: range) -> tuple[int, ...]:
    if sorted(layers) != list(flex):
        span = f"{flex.start}..{flex.stop - 1}" if flex else "none"
        raise ValueError(f"removal order {list(layers)} must name each flex layer ({span}) once; missing "
                         f"{sorted(set(flex) - set(layers))}, not flex {sorted(set(layers) - set(flex))}. Complete "
                         "it, or change core")
    return tuple(layers)
