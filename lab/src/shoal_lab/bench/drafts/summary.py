"""Figures of the suite of drafts by kind of text, and their table."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal_lab.bench import table
from shoal_lab.bench.drafts.suite import PLAIN

_RESAMPLES = 10_000


def usable(texts: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """The timed texts of a kind."""
    return [text for text in texts if text["kind"] == kind and "systems" in text]


def rows(texts: Sequence[Mapping[str, Any]], kinds: Sequence[str], labels: Sequence[str]) -> list[dict[str, Any]]:
    """A row for every kind of text and every system."""
    return [row(kind, label, some) for kind in kinds if (some := usable(texts, kind)) for label in labels]


def row(kind: str, label: str, texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One system on the texts of a kind.

    `times_faster` is the geometric mean over texts of the ratio of median seconds per token, plain over this system,
    with a 95 % bootstrap interval over texts. `nats` is `Departure.nats` over all texts, 0 where they are equal.
    """
    found = [text["systems"][label] for text in texts]
    differences = [one["difference"] for one in found]
    ratios = [ratio for text in texts if (ratio := times_faster(text, label)) is not None]
    return {
        "kind": kind,
        "system": label,
        "texts": len(texts),
        "times_faster": mean_of(ratios, f"{kind}/{label}") if ratios else None,
        "tokens_per_forward": _mean([one["tokens_per_forward"] for one in found]),
        "acceptance": _share(found),
        "ideal_speedup": _mean([one["ideal_speedup"] for one in found]),
        "equal": differences.count(None),
        "ties": sum(one["tie"] for one in differences if one is not None),
        "nats": statistics.mean(0.0 if one is None else one["nats"] for one in differences),
        "agreement": statistics.mean(1.0 if one is None else one["agreement"] for one in differences),
    }


def times_faster(text: Mapping[str, Any], label: str) -> float | None:
    """Median seconds per token of plain decoding over those of a system, on one text; None if one timed nothing."""
    plain, other = (text["systems"][name]["seconds_per_token"] for name in (PLAIN, label))
    return statistics.median(plain) / statistics.median(other) if plain and other else None


def mean_of(ratios: Sequence[float], key: str) -> dict[str, Any]:
    """Geometric mean with a 95 % bootstrap interval; `key` seeds the draws."""
    dice = random.Random(key)
    means = sorted(statistics.geometric_mean(dice.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    low, high = means[int(0.025 * _RESAMPLES)], means[int(0.975 * _RESAMPLES)]
    return {"mean": statistics.geometric_mean(ratios), "low": low, "high": high, "each": list(ratios)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _share(found: Sequence[Mapping[str, Any]]) -> float | None:
    """Accepted share of the guesses of all texts; None if there were no guesses."""
    drafted = sum(one["drafted"] or 0 for one in found)
    return sum(one["accepted"] or 0 for one in found) / drafted if drafted else None


HEADER = ["text", "system", "texts", "times faster than plain", "guesses kept", "tokens per forward", "equal + ties"]


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a text table."""
    return "\n".join(table.aligned([HEADER, *map(_line, rows)]))


def _line(row: Mapping[str, Any]) -> list[str]:
    ratio, forward, kept = row["times_faster"], row["tokens_per_forward"], row["acceptance"]
    return [
        row["kind"],
        row["system"],
        str(row["texts"]),
        "" if ratio is None else f"{ratio['mean']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})",
        "" if kept is None else f"{100 * kept:.0f} %",
        "" if forward is None else f"{forward:.2f}",
        f"{row['equal']} + {row['ties']}",
    ]
