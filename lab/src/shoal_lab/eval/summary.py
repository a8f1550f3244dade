"""Rows of figures per candidate from outcomes of items, each beside the full model on the same items."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from shoal.depth.budget import ideal_speedup
from shoal_lab.eval.agreement import agreement
from shoal_lab.eval.decoders import WORK
from shoal_lab.eval.paired import (
    Difference,
    accuracy_difference,
    clustered_difference,
    detectable,
    holm,
    ratio_difference,
    wilson,
)

Found = Mapping[str, Mapping[str, Any]]
_IDLE = 0.02
"""Share of the layers below which a saving counts as none."""


def answers_row(full: Found, other: Found, num_layers: int, head_layers: float) -> dict[str, Any]:
    """Figures of a candidate's answers.

    Args:
        full: outcomes of the full model by item id; the same items as `other`.
        other: the candidate's outcomes.
        num_layers: L.
        head_layers: cost of the LM head in layers.
    """
    items = sorted(other)
    rows = [other[item] for item in items]
    right = [bool(row["right"]) for row in rows]
    tokens = sum(len(row["tokens"]) for row in rows)
    layers = sum(row["layers"] for row in rows) / tokens
    ended = [row for row in rows if not row["cut"]]
    return {
        "n": len(items),
        "accuracy": sum(right) / len(items),
        "accuracy_interval": list(wilson(sum(right), len(items))),
        "difference": _accuracy_difference(full, other, items),
        "mean_layers": layers,
        # A falling schedule is cheapest in endless answers, which make its mean look low.
        "mean_layers_ended": sum(r["layers"] for r in ended) / sum(len(r["tokens"]) for r in ended) if ended else None,
        "ideal_speedup": (num_layers + head_layers) / (layers + head_layers),  # below 1 if drafting does not pay
        "tokens_per_answer": tokens / len(items),
        "share_cut": mean(bool(row["cut"]) for row in rows),
        "repeated": mean(repeated(row["tokens"]) for row in rows),
        **_work(rows),
        **({"f1": mean(row["f1"] for row in rows)} if "f1" in rows[0] else {}),
        **({"verdicts": dict(Counter(row["verdict"] for row in rows))} if "verdict" in rows[0] else {}),
        **_agreement(full, other, items),
    }


def _work(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean counts of the answers' work, as far as there is any."""
    found = [name for name in WORK if any(name in row for row in rows)]
    return {f"{name}_per_answer": mean(row.get(name, 0) for row in rows) for name in found}


def repeated(tokens: Sequence[int], width: int = 4) -> float:
    """Share of an answer's n-grams that occurred in it before: seq-rep-n of Welleck et al., arXiv 1908.04319, 6.1."""
    found = list(zip(*(tokens[first:] for first in range(width)), strict=False))
    return 1 - len(set(found)) / len(found) if found else 0.0


def loss_row(full: Found, other: Found, num_layers: int, head_layers: float) -> dict[str, Any]:
    """Figures of the references' loss under a candidate's plan; arguments as for `answers_row`."""
    items = sorted(other)
    counts = [other[item]["count"] for item in items]
    base, mine = ([sum(found[item]["nll"]) for item in items] for found in (full, other))
    layers = sum(other[item]["layers"] for item in items) / sum(counts)
    loss = sum(mine) / sum(counts)
    return {
        "n": len(items),
        "tokens": sum(counts),
        "loss": loss,
        "perplexity": math.exp(loss),
        "loss_difference": _difference(ratio_difference(base, mine, counts)),
        "mean_layers": layers,
        "ideal_speedup": ideal_speedup(num_layers, layers, head_layers),
    }


def versus(base: Found, other: Found) -> dict[str, float]:
    """`other` minus `base` on the same items: accuracy of answers, nats per token of losses."""
    items = sorted(other)
    if "right" in other[items[0]]:
        return _accuracy_difference(base, other, items)
    lost, mine = ([sum(found[item]["nll"]) for item in items] for found in (base, other))
    return _difference(ratio_difference(lost, mine, [other[item]["count"] for item in items]))


def by_group(found: Found) -> dict[str, dict[str, Any]]:
    """Accuracy by origin of the items: the part of their ids before the slash."""
    groups: dict[str, list[bool]] = {}
    for item, row in sorted(found.items()):
        groups.setdefault(item.rpartition("/")[0], []).append(bool(row["right"]))
    return {
        name: {"n": len(right), "accuracy": mean(right), "accuracy_interval": list(wilson(sum(right), len(right)))}
        for name, right in groups.items()
    }


def by_position(found: Found, width: int) -> list[dict[str, float]]:
    """Mean loss and number of tokens by token position, in bins of `width` tokens."""
    longest = max((len(row["nll"]) for row in found.values()), default=0)
    bins = []
    for index in range(longest):
        rows = [row for row in found.values() if len(row["nll"]) > index]
        counts = [min(width, row["count"] - index * width) for row in rows]
        values = [row["nll"][index] for row in rows]
        loss = sum(values) / sum(counts)
        rests = [value - loss * count for value, count in zip(values, counts, strict=True)]
        error = math.sqrt(sum(rest * rest for rest in rests)) / sum(counts)
        bins.append({"first": index * width, "tokens": sum(counts), "loss": loss, "error": error})
    return bins


def adjust(rows: Sequence[dict[str, Any]], key: str) -> None:
    """Add Holm's adjusted p-value to the differences under `key` of all rows that have one."""
    for name in ("p", "p_cluster"):
        differences = [row[key] for row in rows if name in row.get(key, ())]
        for difference, p in zip(differences, holm([found[name] for found in differences]), strict=True):
            difference[f"{name}_holm"] = p


def idle_warning(label: str, suite: str, mean_layers: float, num_layers: int, planned: float) -> str | None:
    """Why a comparison says little about a method: its answers were too short for it to skip much.

    Args:
        label: the candidate.
        suite: the suite.
        mean_layers: realised mean.
        num_layers: L.
        planned: mean layers of the candidate's plan over the longest answer.
    """
    saved, meant = num_layers - mean_layers, num_layers - planned
    if meant <= 0 or (saved >= _IDLE * num_layers and saved >= meant / 4):
        return None
    return (
        f"{suite} does not exercise {label}: {mean_layers:.2f} of {num_layers} layers ran, where its plan over the "
        f"longest answer means {planned:.2f}. Its answers are short; lay the schedule out over fewer tokens (horizon), "
        f"or take a suite with longer answers"
    )


def _agreement(full: Found, other: Found, items: Sequence[str]) -> dict[str, Any]:
    pairs = [agreement(full[item]["tokens"], other[item]["tokens"]) for item in items]
    return {
        "same": mean(pair.same for pair in pairs),
        "first_divergence": median(pair.first_divergence for pair in pairs),
        "token_agreement": mean(pair.token_agreement for pair in pairs),
        "rouge_l": mean(pair.rouge_l for pair in pairs),
    }


def _accuracy_difference(base: Found, other: Found, items: Sequence[str]) -> dict[str, float]:
    """With an interval, and over clusters if items have them, a second p-value beside McNemar's."""
    before, after = ([bool(found[item]["right"]) for item in items] for found in (base, other))
    figures = _difference(accuracy_difference(before, after)) | {"detectable": detectable(before, after)}
    clusters = [other[item].get("cluster") for item in items]
    if None not in clusters:
        found = clustered_difference(before, after, clusters)
        figures |= {"low": found.low, "high": found.high, "p_cluster": found.p}
    return figures


def _difference(found: Difference) -> dict[str, float]:
    return {"mean": found.mean, "low": found.low, "high": found.high, "p": found.p}
