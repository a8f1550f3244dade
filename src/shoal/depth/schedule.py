"""From a budget and a removal order to the plan of one request."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.depth.budget import Budget, counts
from shoal.depth.plan import DepthPlan


def lay_out(budget: Budget, removal: Sequence[int], num_layers: int, horizon: int, max_new_tokens: int) -> DepthPlan:
    """The plan of a request; layers outside `removal` are core.

    Args:
        budget: how many layers each step runs.
        removal: flex layers in the order in which they are dropped.
        num_layers: L.
        horizon: tokens over which the budget is laid out.
        max_new_tokens: tokens that the request may ask for; the plan covers them where they go beyond the horizon.
    """
    steps = max(horizon, max_new_tokens)
    table = counts(budget, num_layers, num_layers - len(removal), horizon, steps)
    return DepthPlan.from_counts(table, removal, num_layers)
