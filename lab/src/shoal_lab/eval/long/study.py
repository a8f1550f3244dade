"""The report of long contexts: a row of figures per method, with the full model's and the controls'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from statistics import mean
from typing import Any

from shoal.methods.base import Method
from shoal_lab.eval.floors import floors
from shoal_lab.eval.long.budgets import CONTROLS, at_budget
from shoal_lab.eval.long.contexts import LongContext, Wanted
from shoal_lab.eval.long.measure import FULL, STRANGE, LongEvaluator
from shoal_lab.eval.paired import clustered_difference
from shoal_lab.eval.summary import Found, adjust

_FROM = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Places in an answer at which bins of the agreement by position begin."""


def at_budgets(methods: Mapping[str, Method], budgets: Sequence[Fraction], length: int) -> dict[str, Method]:
    """Methods by label: those with a budget at each share, with the controls, and the others unchanged.

    Raises:
        ValueError: a method cannot work with so few KV slots.
    """
    found: dict[str, Method] = {}
    for share in budgets or (None,):
        slots = 0 if share is None else max(1, round(share * length))
        for label, method in methods.items():
            cut = None if share is None else at_budget(method, slots, length)
            found |= {label: method} if cut is None else {f"{label} at {share}": cut}
        for name, control in CONTROLS.items():
            if share is not None and (cut := at_budget(control, slots, length)) is not None:
                found[f"{name} at {share}"] = cut
    return found


def run(
    evaluator: LongEvaluator, wanted: Wanted, contexts: Sequence[LongContext], methods: Mapping[str, Method]
) -> dict[str, Any]:
    """One suite at one length: each method's score, its distance from the full model, and what a guess is worth.

    Scores are means over questions of the judge's score; for novels, the mean loss in nats. Agreement is the share of
    tokens at which a method, fed the full model's greedy answer (for novels, the scored text), predicts what the full
    model predicts. Contexts are the sampling unit of all intervals and p-values.

    Args:
        evaluator: measures and keeps outcomes.
        wanted: how the contexts were made.
        contexts: the contexts to measure.
        methods: methods by label, besides the full model; see `at_budgets`.
    """
    found = evaluator.run(wanted, contexts, methods)
    strange = found.pop(STRANGE, {})
    key = "loss" if wanted.suite == "novels" else "score"
    rows = [_row(label, found[FULL], outcomes, key) for label, outcomes in found.items()]
    for row in rows[1:]:
        row["method"] = _plain(methods[row["label"]].to_dict())
        name, _, share = row["label"].rpartition(" at ")
        rivals = [] if name in (*CONTROLS, "") else [(one, f"{one} at {share}") for one in CONTROLS]
        row["versus"] = {one: _difference(found[label], found[row["label"]], key) for one, label in rivals
                         if label in found}
    adjust(rows[1:], "difference")
    report = {"suite": wanted.suite, **asdict(wanted), "contexts": len(contexts), "rows": rows,
              "prompt_tokens": mean(len(one.prompt) for context in contexts for one in context.samples)}
    if key == "score":
        samples = [sample for context in contexts for sample in context.samples]
        report["floors"] = {name: figures["score"] for name, figures in
                            floors(samples, evaluator.engine.tokenizer, wanted.longest).items()}
        if strange:
            report["floors"]["another context"] = mean(row["score"] for row in strange.values())
    return report


def _row(label: str, full: Found, other: Found, key: str) -> dict[str, Any]:
    rows = list(other.values())
    values, clusters = [_value(row, key) for row in rows], [row["cluster"] for row in rows]
    middle = clustered_difference([0.0] * len(values), values, clusters)
    same = [(place, float(mine == theirs), row["cluster"]) for item, row in other.items()
            for place, (mine, theirs) in enumerate(zip(row["argmax"], full[item]["argmax"], strict=True))]
    agreed = clustered_difference([0.0] * len(same), [one[1] for one in same], [one[2] for one in same])
    groups = sorted({row["group"] for row in rows} - {""})
    return {
        "label": label, "n": len(rows), key: middle.mean, f"{key}_interval": [middle.low, middle.high],
        **({"perplexity": math.exp(middle.mean)} if key == "loss" else {}),
        "difference": _difference(full, other, key),
        "agreement": agreed.mean, "agreement_interval": [agreed.low, agreed.high], "tokens": len(same),
        "by_position": _by_position(same),
        "by_group": {group: mean(_value(row, key) for row in rows if row["group"] == group) for group in groups},
        "kv": sum(row["kv_bytes"] for row in rows) / sum(full[item]["kv_bytes"] for item in other),
        **({"f1": mean(row["f1"] for row in rows)} if "f1" in rows[0] else {}),
    }


def _difference(base: Found, other: Found, key: str) -> dict[str, float]:
    """`other` minus `base`, on the same items."""
    before, after = ([_value(outcomes[item], key) for item in other] for outcomes in (base, other))
    found = clustered_difference(before, after, [row["cluster"] for row in other.values()])
    return {"mean": found.mean, "low": found.low, "high": found.high, "p": found.p}


def _value(row: Mapping[str, Any], key: str) -> float:
    return mean(row["nll"]) if key == "loss" else float(row["score"])


def _by_position(same: Sequence[tuple[int, float, str]]) -> list[dict[str, float]]:
    bins = []
    for first, end in zip(_FROM, (*_FROM[1:], math.inf), strict=True):
        flags = [flag for place, flag, _ in same if first <= place < end]
        if flags:
            bins.append({"first": first, "tokens": len(flags), "agreement": mean(flags)})
    return bins


def _plain(spec: Any) -> Any:
    """A method as JSON, without a card's ranking for each head."""
    if isinstance(spec, dict):
        return {name: "of a card" if name == "channels" else _plain(value) for name, value in spec.items()}
    return spec
