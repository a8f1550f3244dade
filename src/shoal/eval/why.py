"""Why a schedule loses what it loses: depth of a position, depth of its context, removal order, sublayers.

Each question is a set of subjects for `shoal.eval.distance`, read on the same texts. Depths are numbers of layers in one
removal order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.depth.plan import NEVER, DepthPlan
from shoal.eval.distance import Subject
from shoal.eval.reread import Way, way
from shoal.eval.rising import RisingPlan
from shoal.model.stack import Stack


def apart(stack: Stack, context: int, judged: int, order: Sequence[int]) -> Way:
    """Tokens judged at one depth that see tokens computed at another: see `Reread.apart`.

    A layer that a token runs and its context did not still finds keys and values there, of the stream that passed by:
    see `shoal.eval.rising`.

    Raises:
        Unsupported: the context is the shallower one, and the model is not packed.
    """
    layers = stack.num_layers
    if judged > context:
        return way(stack, RisingPlan((layers, context, judged), tuple(order), layers))
    steps = [NEVER] * layers
    for layer in order[: layers - judged]:
        steps[layer] = 2
    for layer in order[: layers - context]:
        steps[layer] = 1
    return stack, DepthPlan.whole_layers(steps)
