"""What a million generated tokens cost on paper: cost cards that were measured, times the price of an hour.

    python lab/benchmarks/price.py lab/reports/results/1b-batch.json --per-hour 0.10

One replica is taken to be busy all the time with as many rows as the card was measured for, all in phase; prompts are
read for every request anew. A fleet multiplies tokens and cost alike. What it leaves out raises the price: idle hours,
mixed arrivals, longer contexts than asked for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.depth.plan import DepthPlan
from shoal.methods.d3 import D3
from shoal.types import ModelInfo
from shoal_lab.components.cost import CostCard


@dataclass(frozen=True)
class Demand:
    """A request: prompt tokens, generated tokens; and what an hour of a replica costs."""

    prompt: int
    answer: int
    per_hour: float


@dataclass(frozen=True)
class PriceLine:
    """One line of the table.

    Attributes:
        quant: weight format, None for the plain one.
        rows: rows that decode together.
        mean: layers per generated token.
        layers: layers of the model.
        tokens_per_second: generated, of one replica, the reading of prompts included.
        price: of a million generated tokens, in the currency of the price of an hour.
    """

    quant: str | None
    rows: int
    mean: float
    layers: int
    tokens_per_second: float
    price: float


def lines(report: Mapping[str, Any], demand: Demand, shares: Sequence[float]) -> list[PriceLine]:
    """Estimates for every cost card of a benchmark and every mean depth, as shares of the layers."""
    layers = int(report["subject"]["num_hidden_layers"])
    return [_line(card, layers, demand, share) for card in report["cost_cards"] for share in shares]


def _line(card: Mapping[str, Any], layers: int, demand: Demand, share: float) -> PriceLine:
    measured = CostCard.from_dict(card, (None,) * layers)
    plan = _plan(share, layers, demand.answer)
    made = measured.rows * demand.answer
    rate = made / measured.predict(plan, demand.prompt, demand.answer)
    mean = plan.mean_depth(demand.answer)
    return PriceLine(card["quant"], measured.rows, mean, layers, rate, 1e6 / rate / 3600 * demand.per_hour)


def _plan(share: float, layers: int, answer: int) -> DepthPlan:
    if share == 1:
        return DepthPlan.full(layers)
    return D3(mean=share).recipe(ModelInfo(layers, answer)).plan


def table(found: Sequence[PriceLine]) -> str:
    """The lines as Markdown."""
    head = "| weights | rows | layers on average | tokens/s of a replica | per million tokens |\n|---|---|---|---|---|"
    body = [f"| {line.quant or 'bfloat16'} | {line.rows} | {line.mean:.1f} of {line.layers} | "
            f"{line.tokens_per_second:.1f} | {line.price:.2f} |" for line in found]
    return "\n".join([head, *body])


def main(words: Sequence[str] | None = None) -> None:
    """Print the table for the files that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="JSON files that `shoal bench` has written")
    parser.add_argument("--per-hour", type=float, required=True, help="price of an hour of one replica's machine")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of a request")
    parser.add_argument("--answer", type=int, default=256, help="generated tokens of a request")
    parser.add_argument("--depths", default="1,0.8,0.6", help="mean depths, as shares of the layers")
    args = parser.parse_args(words)
    shares = [float(word) for word in args.depths.split(",")]
    demand = Demand(args.prompt, args.answer, args.per_hour)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in args.reports]
    print(table([line for report in reports for line in lines(report, demand, shares)]))


if __name__ == "__main__":
    main()
