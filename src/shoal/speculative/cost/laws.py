"""Laws of what a trained drafter brings (Scylla, arXiv 2505.07858). Imports no torch.

Tokens per forward grow with the logarithm of what the drafter was trained on, and with that of its layers. The paper
fits both laws to drafters of one large model; here they are fitted to those of the model at hand, three or more of a
kind, and say nothing far beyond what was measured. Its third law, of the width of a block, is `policy.Width`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""0.975 quantiles of Student's t for 1, 2, ... degrees of freedom; the last one stands for more."""
LEAST_POINTS = 3
"""Fewer different places would fit any law."""


@dataclass(frozen=True)
class TrainedDrafter:
    """What was measured of a drafter.

    Attributes:
        kind: drafters of one kind are compared, such as "eagle".
        tokens: tokens of training, counted as often as they were seen.
        accepted: tokens per forward of the model, its own included.
        layers: of the drafter.
        guesses: one after another.
    """

    kind: str
    tokens: float
    accepted: float
    layers: int = 1
    guesses: int = 3


@dataclass(frozen=True)
class LogLaw:
    """y = slope log10(x) + base.

    Attributes:
        r2: share of the variance of y that it explains; 1 where y does not vary.
        points: how many were fitted.
        least, most: the range of their x.
        error: standard deviation of y about the law.
        middle, spread: mean of log10(x), and the sum of squared distances from it.
    """

    slope: float
    base: float
    r2: float
    points: int
    least: float
    most: float
    error: float
    middle: float
    spread: float

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> LogLaw:
        """The law by least squares; ValueError if x has fewer than three different values, or one that is not positive.

        Args:
            points: pairs of x and y.
        """
        places = {x for x, _ in points}
        if len(places) < LEAST_POINTS or min(places) <= 0:
            raise ValueError(f"a law needs at least {LEAST_POINTS} different positive places, not {sorted(places)}")
        logs, count = [math.log10(x) for x, _ in points], len(points)
        middle, height = sum(logs) / count, sum(y for _, y in points) / count
        spread = sum((log - middle) ** 2 for log in logs)
        slope = sum((log - middle) * (y - height) for log, (_, y) in zip(logs, points, strict=True)) / spread
        base = height - slope * middle
        left = sum((y - slope * log - base) ** 2 for log, (_, y) in zip(logs, points, strict=True))
        total = sum((y - height) ** 2 for _, y in points)
        return cls(slope, base, 1 - left / total if total else 1.0, count, min(places), max(places),
                   math.sqrt(left / (count - 2)), middle, spread)

    def at(self, x: float) -> float:
        """The law's y."""
        return self.slope * math.log10(x) + self.base

    def band(self, x: float) -> float:
        """By how much one more measurement at x may differ from the law, at 95 % if errors are normal."""
        quantile = _QUANTILES[min(self.points - 2, len(_QUANTILES)) - 1]
        far = (math.log10(x) - self.middle) ** 2 / self.spread
        return quantile * self.error * math.sqrt(1 + 1 / self.points + far)


def over_training(drafters: Iterable[TrainedDrafter]) -> dict[str, LogLaw]:
    """By kind, tokens per forward over tokens of training, of drafters that are alike otherwise."""
    return _laws(drafters, lambda one: (one.layers, one.guesses), lambda one: one.tokens)


def over_layers(drafters: Iterable[TrainedDrafter]) -> dict[str, LogLaw]:
    """By kind, tokens per forward over layers of the drafter, of drafters that are alike otherwise."""
    return _laws(drafters, lambda one: (one.tokens, one.guesses), lambda one: float(one.layers))


def _laws(
    drafters: Iterable[TrainedDrafter], alike: Callable[[TrainedDrafter], Hashable],
    place: Callable[[TrainedDrafter], float],
) -> dict[str, LogLaw]:
    """By kind, the law of the group with most different places, where it has enough."""
    groups = defaultdict[tuple[str, Hashable], list[TrainedDrafter]](list)
    for one in drafters:
        groups[one.kind, alike(one)].append(one)
    found = dict[str, LogLaw]()
    for (kind, _), group in sorted(groups.items(), key=lambda item: len(set(map(place, item[1])))):
        if len(set(map(place, group))) >= LEAST_POINTS:
            found[kind] = LogLaw.fit([(place(one), one.accepted) for one in group])
    return found


def best_layers(law: LogLaw, cost: Callable[[int], float]) -> int:
    """The layers, in the measured range, with most tokens per cost of a step.

    Args:
        law: tokens per forward over the drafter's layers.
        cost: of a step with the guesses of a drafter of so many layers, in any unit.
    """
    return max(range(int(law.least), int(law.most) + 1), key=lambda layers: (law.at(layers) / cost(layers), -layers))
