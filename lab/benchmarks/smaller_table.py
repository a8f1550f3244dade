"""Speed and distance: the results of `smaller.py` and `shoal eval --measure distance`, joined by name.

    python lab/benchmarks/smaller_table.py --model NAME SPEED.json,... DISTANCE.json,... [--model ...] [--plot OUT.png]

Prints a Markdown table per model; the plot, which needs matplotlib, has a panel for each. Names that only one of them
has are left out, and so are the full model's own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
_HEAD = "| who goes | speed | realised | divergence, nats | likeliest words kept, % |\n|---|---|---|---|---|"
_KINDS = {"d3": ("#0b6fb8", "d3"), "shortgpt": ("#d1495b", "constant depth"), "cfsp": ("#2e8b57", "cfsp: narrower"),
          "depth": ("#c98a1b", "depth: shorter"), "read_me": ("#8d6bb0", "read_me: experts"),
          "consensus": ("#77a6b6", "consensus: narrower"), "lot": ("#9a9a9a", "neurons by lot"),
          "ppm": ("#5b5b5b", "ppm: narrower"), "int8": ("#000000", None), "int4": ("#000000", None)}


def main(argv: Sequence[str]) -> int:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=3, action="append", required=True, metavar=("NAME", "SPEED", "DISTANCE"))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    models = {name: joined(_reports(speed), _reports(distance)) for name, speed, distance in args.model}
    for name, rows in models.items():
        print(f"{name}\n\n{_HEAD}", *map(line, rows.items()), "", sep="\n")
    if args.plot is not None:
        draw(models, args.plot)
    return 0


def _reports(names: str) -> Iterator[Mapping[str, Any]]:
    for name in names.split(","):
        yield json.loads(Path(name).read_text(encoding="utf-8"))


def joined(speeds: Iterator[Mapping[str, Any]], distances: Iterator[Mapping[str, Any]]) -> Rows:
    """Candidates that were both timed and measured, by name, the slowest first; the first timing counts."""
    timed = {name: row for report in reversed([*speeds]) for name, row in report["rows"].items() if name != "full"}
    measured = {row["label"]: row for report in distances for row in report["distance"]["rows"]}
    both = {name: {**timed[name], **measured[name]} for name in timed if name in measured}
    return dict(sorted(both.items(), key=lambda one: one[1]["speed"]["median"]))


def line(named: tuple[str, Mapping[str, Any]]) -> str:
    """One row of the table."""
    name, row = named
    speed, kl, kept = row["speed"], row["kl"], {end: 100 * value for end, value in row["kept"].items()}
    return (f"| `{name}` | {speed['median']:.2f} [{speed['low']:.2f}, {speed['high']:.2f}] | {row['realised']:.2f} | "
            f"{kl['mean']:.3f} [{kl['low']:.3f}, {kl['high']:.3f}] | "
            f"{kept['mean']:.1f} [{kept['low']:.1f}, {kept['high']:.1f}] |")


def draw(models: Mapping[str, Rows], path: Path) -> None:
    """Divergence over measured speed: lower loses less, further right is faster."""
    from matplotlib.figure import Figure

    from shoal_lab.eval.plots import bare

    figure = Figure(figsize=(4.6 * len(models), 4.2), layout="constrained")
    for axes, (model, rows) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items(), strict=True):
        for kind, (colour, label) in _KINDS.items():
            found = [row for name, row in rows.items() if kind in re.split(r"[@:-]", name)]
            found.sort(key=lambda row: row["kl"]["mean"])
            times, values = [row["speed"]["median"] for row in found], [row["kl"] for row in found]
            errors = [[one["mean"] - one["low"] for one in values], [one["high"] - one["mean"] for one in values]]
            axes.errorbar(times, [one["mean"] for one in values], yerr=errors, marker="s" if label is None else "o",
                          color=colour, label=label if found else None)
            if found and label is None:
                axes.annotate(kind, (times[0], values[0]["mean"]), (5, 5), textcoords="offset points")
        axes.set(title=model, xlabel="times faster, measured", ylabel="KL, nats per token", yscale="log")
        bare(axes)
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
