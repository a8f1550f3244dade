"""Tables of lab/reports/choosing: two models that take turns, searches, and choices of the next token.

    python lab/benchmarks/choosing.py            writes them
    python lab/benchmarks/choosing.py --check    exits with code 1 if they are out of date

lab/reports/choosing/KIND-MODEL-SUITE.json is the results.json of `shoal eval --suite SUITE --measure answers
--methods ...`, where KIND is `switching`, `search` or `tokens`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import evidence
from pages import markdown
from quality_tables import between

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "lab" / "reports" / "choosing"
PAGE = REPORTS / "README.md"

ALIKE = 0.05
"""Largest difference between shares of the large model that are compared."""

Report = Mapping[str, Any]
Row = Mapping[str, Any]


def main(argv: Sequence[str]) -> int:
    """Write the page's tables, or compare them."""
    text = PAGE.read_text("utf-8")
    new = between(text, tables())
    if new != text:
        print(f"{'out of date' if '--check' in argv else 'written'}: {PAGE.relative_to(ROOT)}")
    if "--check" in argv:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def tables() -> dict[str, str]:
    """Markdown tables by the name of their mark."""
    makers = {"switching": switching, "search": search, "tokens": tokens}
    found = {kind: load(kind) for kind in makers}
    every = {f"{kind}, {name}": report for kind, reports in found.items() for name, report in reports.items()}
    return {
        **{kind: "\n\n".join(f"{head(name, report)}\n\n{makers[kind](report)}" for name, report in reports.items())
           for kind, reports in found.items()},
        "commands": "\n\n".join(evidence.command(name, report) for name, report in every.items()),
    }


def load(kind: str) -> dict[str, Report]:
    """Reports of a kind by model and suite."""
    return {path.stem.removeprefix(f"{kind}-"): json.loads(path.read_text("utf-8"))
            for path in sorted(REPORTS.glob(f"{kind}-*.json"))}


def head(name: str, report: Report) -> str:
    """The model, the items, and the temperature."""
    suite = report["suites"][0]
    how = f"temperature {report['temperature']:g}" if "temperature" in report else "greedy"
    return f"**{name.removesuffix('-' + suite['suite'])}, {suite['suite']}**, {suite['items']:,} items, {how}:"


def switching(report: Report) -> str:
    """Share of each model, and right answers compared with chance at an equal share."""
    rows = answers(report)
    control = {one["label"]: one for one in rows if one["method"]["method"] == "random_switching"}
    lines = []
    for row in rows:
        twin = None if row["label"] in control or not 0 < share(row) < 1 else min(
            (one for one in control.values() if abs(share(one) - share(row)) <= ALIKE),
            key=lambda one: abs(share(one) - share(row)), default=None)
        beside = "" if twin is None else f"{gap(versus(report, row, twin))} ({100 * share(twin):.0f} %)"
        lines.append([shown(row), f"{100 * share(row):.0f}", f"{row.get('switches_per_answer', 0):.1f}", right(row),
                      gained(row), beside, pace(row)])
    header = ["who writes", "large model's share of tokens, %", "switches an answer", "right % [95 %]",
              "points more than the large model [95 %]", "points more than chance at a like share", "seconds an answer"]
    return markdown(header, lines)


def search(report: Report) -> str:
    """Right answers, and the tokens decoded for them."""
    rows = answers(report)
    lines = []
    for row in rows:
        twin = min(rivals(row, rows), key=lambda one: abs(spent(one) - spent(row)), default=None)
        lines.append([shown(row, plain="one sample"), f"{spent(row):.0f}", right(row), gained(row),
                      "" if twin is None else f"{gap(versus(report, row, twin))} ({shown(twin)})"])
    header = ["method", "tokens decoded an answer", "right % [95 %]", "points more than one sample [95 %]",
              "points more than best_of at the nearest number of tokens"]
    return markdown(header, lines)


def rivals(row: Row, rows: Sequence[Row]) -> list[Row]:
    """Samples chosen by the same verifier; for these themselves, samples chosen by likelihood."""
    kind, verifier = row["method"]["method"], judge(row)
    if kind == "full" or (kind, verifier) == ("best_of", "likelihood"):
        return []
    wanted = "likelihood" if kind == "best_of" else verifier
    return [one for one in rows if one["method"]["method"] == "best_of" and judge(one) == wanted]


def judge(row: Row) -> str:
    """The judge that chooses the best answer."""
    return str(row["method"].get("method_args", {}).get("verifier", "likelihood"))


def tokens(report: Report) -> str:
    """Right answers, repetition, and forwards."""
    layers = report["num_layers"]
    lines = [[shown(row), right(row), gained(row), f"{100 * row['repeated']:.1f}",
              f"{100 * row['share_cut']:.1f}", f"{row['tokens_per_answer']:.0f}",
              f"{row['mean_layers'] / layers:.2f}"] for row in answers(report)]
    header = ["method", "right % [95 %]", "points more than plain [95 %]", "4-grams that repeat, %", "cut off, %",
              "tokens an answer", "forwards a token"]
    return markdown(header, lines)


def answers(report: Report) -> list[Row]:
    """Rows of answers, the full model's first."""
    return list(report["suites"][0]["answers"])


def shown(row: Row, plain: str = "the model alone") -> str:
    """A candidate's label without its models' files; for a card, the numbers that it sets."""
    parts = [part for part in row["label"].split(":") if not part.startswith(("draft=", "judge="))]
    if row["method"]["method"] == "calibrated":
        held = row["method"]["inner"]
        parts = [held["method"], *(f"{option}={value}" for option, value in held["method_args"].items()
                                   if isinstance(value, (int, float)))]
    return plain if parts == ["full"] else ", ".join([f"`{parts[0]}`", *parts[1:]])


def share(row: Row) -> float:
    """Share of tokens from the engine's own model."""
    return 1 - float(row.get("second_tokens_per_answer", 0)) / float(row["tokens_per_answer"])


def spent(row: Row) -> float:
    """Tokens decoded per answer, rejected ones included."""
    return float(row["tokens_per_answer"]) + float(row.get("thrown_away_per_answer", 0))


def versus(report: Report, row: Row, other: Row) -> Mapping[str, float]:
    """How many more answers `row` has right than `other`, on the same items."""
    for one in report["suites"][0]["between"]:
        if {one["label"], one["than"]} == {row["label"], other["label"]}:
            sign = 1 if one["label"] == row["label"] else -1
            low, high = sorted((sign * one["low"], sign * one["high"]))
            return {"mean": sign * one["mean"], "low": low, "high": high, "p": one["p"]}
    raise KeyError((row["label"], other["label"]))


def right(row: Row) -> str:
    """Share of right answers."""
    low, high = row["accuracy_interval"]
    return f"{100 * row['accuracy']:.1f} [{100 * low:.1f} to {100 * high:.1f}]"


def gained(row: Row) -> str:
    """The gain over the full model; empty for the full model itself."""
    return "" if row["label"] == "full" else gap(row["difference"])


def gap(found: Mapping[str, float]) -> str:
    """Points, bold if significant after Holm's adjustment if there is one."""
    text = f"{100 * found['mean']:+.1f} [{100 * found['low']:+.1f} to {100 * found['high']:+.1f}]"
    return f"**{text}**" if found.get("p_holm", found["p"]) < 0.05 else text


def pace(row: Row) -> str:
    """Seconds of a single answer, prefill by both models included."""
    timing = row.get("timing")
    return "" if timing is None else f"{timing['seconds_per_answer']:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
