"""Plot the loss of each kind of text over the tokens of a training, its runs one after the other.

    python -m tools.reference.curve run/curve.json more/curve.json --out curve.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .build import KINDS

WINDOW = 40
Line = tuple[list[float], list[float]]


def lines(curves: list[list[dict[str, float]]]) -> dict[str, Line]:
    """Tokens so far and mean loss of the last WINDOW values, for each kind; tokens of later runs are added on."""
    found: dict[str, Line] = {}
    before = 0.0
    for curve in curves:
        for kind in KINDS:
            points = [(before + point["tokens"], point[kind]) for point in curve if kind in point]
            tokens, values = found.setdefault(kind, ([], []))
            tokens += [at for at, _ in points]
            values += [_mean([value for _, value in points[max(0, n - WINDOW) : n]]) for n in range(1, len(points) + 1)]
        before += curve[-1]["tokens"]
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def draw(curves: list[list[dict[str, float]]], file: Path) -> None:
    """Write the plot; a dotted line marks where a run ends and the next begins."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for kind, (tokens, values) in lines(curves).items():
        axes.plot([at / 1e6 for at in tokens], values, label=kind, linewidth=1.2)
    ends = [curve[-1]["tokens"] / 1e6 for curve in curves[:-1]]
    for count in range(1, len(ends) + 1):
        axes.axvline(sum(ends[:count]), color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="million tokens", ylabel="loss of answers, nats per token", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=len(KINDS), loc="upper center", bbox_to_anchor=(0.5, 1.14))
    figure.savefig(file, dpi=110)


def main() -> None:
    """Read the curves and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="+", type=Path, help="curve.json of each run, in their order")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    draw([json.loads(path.read_text("utf-8")) for path in args.curves], args.out)


if __name__ == "__main__":
    main()
