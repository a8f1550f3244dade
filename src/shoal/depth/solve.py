"""From a wanted mean depth to the decay that has it.

One alpha means different things for answers of different lengths; a mean depth does not.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.depth.budget import PowerLaw, Rounding, counts

_LOWEST_ALPHA = 1e-12
_HIGHEST_DECAY = 1 - 1e-8
_HALVINGS = 45


# Typed, since start=1 (a token) and start=1.0 (the whole horizon) are equal keys otherwise.
@lru_cache(maxsize=256, typed=True)
def solve_alpha(
    num_layers: int, mean: float, horizon: int, start: float | int, core: int, rounding: Rounding = "floor"
) -> float:
    """The alpha whose power law comes nearest to a mean depth, by bisection: the mean never falls as alpha grows.

    Args:
        num_layers: L.
        mean: wanted mean of k(i) over tokens 0..horizon-1, in layers.
        horizon: number of tokens.
        start: where the decay begins, see `PowerLaw`.
        core: number of layers that always run.
        rounding: see `PowerLaw`.

    Raises:
        ValueError: no alpha reaches this mean.
    """

    def mean_at(alpha: float) -> float:
        return mean_depth(PowerLaw(alpha, start, rounding), num_layers, core, horizon)

    lowest = mean_at(_LOWEST_ALPHA)
    if not lowest <= mean <= num_layers:
        raise ValueError(
            f"a mean depth of {mean:g} layers over {horizon} tokens is out of reach: with start={start!r} and "
            f"{core} core layers it lies in {lowest:g}..{num_layers}. Change mean, start, core or horizon"
        )
    low, high = _LOWEST_ALPHA, _HIGHEST_DECAY
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_at(middle) < mean else (low, middle)
    return min(1.0, high, low, key=lambda alpha: abs(mean_at(alpha) - mean))


def lowest_mean(num_layers: int, horizon: int, start: float | int, core: int, rounding: Rounding = "floor") -> float:
    """The smallest mean depth in layers that a power law can have: the core alone from `start` on."""
    return mean_depth(PowerLaw(_LOWEST_ALPHA, start, rounding), num_layers, core, horizon)


def mean_depth(budget: PowerLaw, num_layers: int, core: int, horizon: int) -> float:
    """Mean number of layers of tokens 0..horizon-1, token 0 at L."""
    return sum(counts(budget, num_layers, core, horizon, horizon)) / horizon
