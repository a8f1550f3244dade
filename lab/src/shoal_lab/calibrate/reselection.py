"""Which layer selects KV slots again, for the method `tidal`: the one that agrees most with the full model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from shoal.engine.engine import Engine
from shoal.methods.base import whole_layers
from shoal.methods.calibrated import Calibrated
from shoal.methods.common.selection import SELECTS
from shoal.methods.tidal import Tidal
from shoal_lab.eval.long import study
from shoal_lab.eval.long.contexts import Maker, Wanted
from shoal_lab.eval.long.measure import LongEvaluator

OTHER_SEEDS = 1_000_000
"""Added to a seed, so that an evaluation draws other contexts."""


def choices(engine: Engine, k: int) -> dict[int, Tidal]:
    """Methods by the layer that selects again: one for each possible layer, and under the number of layers one without.

    Raises:
        Unsupported: no layer sees the whole text, or attention does not show its queries.
        ValueError: `k` is below 1.
    """
    info = engine.info()
    first, _ = selecting(engine, Tidal(k))
    later = [layer for layer in whole_layers(Tidal.name, info) if layer > first][:-1]
    return {layer: Tidal(k, reselect=layer) for layer in (*later, info.num_layers)}


def selecting(engine: Engine, method: Tidal) -> tuple[int, int]:
    """The first selecting layer, and the one that selects again; the number of layers if there is none."""
    roles = method.roles(engine.info())
    found = [layer for layer, role in enumerate(roles) if role == SELECTS]
    return found[0], (*found, len(roles))[1]


def reselection_card(
    engine: Engine, wanted: Sequence[Wanted], maker: Maker, k: int, *, progress: bool | None = None
) -> dict[str, Any]:
    """The method with the best layer as a card, which runs wherever a method does and refuses other models.

    The best layer agrees most with the full model's answers, or scored ends of novels: the mean over `wanted`; the
    earliest layer wins ties. See `shoal_lab.eval.long.study.run` for the agreement.

    Args:
        engine: the model.
        wanted: contexts to measure on.
        maker: makes them.
        k: KV slots that a query reads in layers that do not select.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.
    """
    methods, evaluator = choices(engine, k), LongEvaluator(engine, progress=progress)
    parts = [study.run(evaluator, one, maker.make(one), {str(layer): method for layer, method in methods.items()})
             for one in wanted]
    agreed = {layer: [row["agreement"] for part in parts for row in part["rows"] if row["label"] == str(layer)]
              for layer in methods}
    best = max(agreed, key=lambda layer: (mean(agreed[layer]), -layer))
    return {
        "format": 1, "method": Calibrated(methods[best], engine.fingerprint).to_dict(),
        "data": [{**asdict(one), "questions": part["rows"][0]["n"]} for one, part in zip(wanted, parts, strict=True)],
        "agreement": {str(layer): [round(share, 4) for share in shares] for layer, shares in agreed.items()},
        "reselect": best, "default": selecting(engine, Tidal(k))[1],
    }
