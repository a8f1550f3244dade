"""The admission policy that the options ask for; `auto` measures what ticks of this engine cost."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.engine.admission import Policy
    from shoal.engine.engine import Engine
    from shoal.engine.forecast import Pace

_CONTEXTS = (16, 128)
_SHARES = (1.0, 0.5)
_SECONDS = 0.5


def admission(args: argparse.Namespace, engine: Engine) -> Policy:
    """By `--admission`, `--patience` and `--max-rows`; says on stderr what was measured.

    Raises:
        ValueError: patience is negative.
    """
    from shoal.engine.admission import Join, policy

    patience = math.inf if args.patience is None else args.patience
    if args.admission != "auto":
        return policy(args.admission, patience)
    policy("waves", patience)  # refused before anything is measured
    if args.max_rows < 2 or engine.stack.num_layers < 2:  # nothing to choose
        return Join()
    pace = measure(engine, args.max_rows)
    print(said(pace), file=sys.stderr, flush=True)
    return policy("auto", patience, pace)


def measure(engine: Engine, rows: int) -> Pace:
    """What a tick costs with one row and with `rows`, now; takes as long as some 160 prompt tokens per row and 3 s."""
    from shoal.calibrate import cost
    from shoal.engine.forecast import Pace

    one, many = (
        cost.measure(engine, rows=number, contexts=_CONTEXTS, shares=_SHARES, seconds=_SECONDS) for number in (1, rows)
    )
    return Pace.between(one, many)


def said(pace: Pace) -> str:
    """One line."""
    tick, layer, row, layer_row = (1000 * part for part in (pace.tick, pace.layer, pace.row, pace.layer_row))
    return (f"admission auto, measured with 1 and {pace.card.rows} rows: a tick takes {tick:.3g} ms and {row:.3g} per "
            f"row, each layer {layer:.3g} ms and {layer_row:.3g} per row")
