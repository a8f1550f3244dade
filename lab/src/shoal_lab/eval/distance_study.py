"""A comparison by distance to the full model: D3 and its controls at equal mean depth, on many prompts, as one report.

Schedules are solved for the lengths of all texts of all suites together. Answers are the full model's, so the lengths
are the same for every candidate and nothing is solved twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import mean, median
from typing import Any

from shoal.depth.budget import ideal_speedup
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.methods.full import Full
from shoal.model.packed.runner import PackedRunner
from shoal_lab.components.cost import CostCard
from shoal_lab.eval.controls import controls, setting
from shoal_lab.eval.decoders import Candidate, Decoder, candidate
from shoal_lab.eval.distance import Distances, Told, bin_sizes, other_model, variant
from shoal_lab.eval.equal_depth import Lengths
from shoal_lab.eval.evaluate import BIN
from shoal_lab.eval.items import Item, Sample, encode
from shoal_lab.eval.paired import Difference, ratio_difference
from shoal_lab.eval.prompts import prompt_of
from shoal_lab.eval.study import Study
from shoal_lab.eval.suites import Suite
from shoal_lab.eval.summary import Found, adjust
from shoal_lab.eval.timing import alone

_MEASURES = ("kl", "kept", "nll")


def texts_of(distances: Distances, suites: Sequence[tuple[Suite, Sequence[Item]]]) -> list[Told]:
    """Texts of some suites, suite by suite in turn: given ones, or the full model's answers.

    Raises:
        TimeoutError: answers are missing and the time is over.
    """
    engine = distances.engine
    bare = not getattr(engine.tokenizer, "chat_template", None)
    found = []
    for suite, items in suites:
        if suite.kind == "text":
            samples = encode(items, engine.tokenizer, None, engine.runner.max_positions)
            found.append([Told(suite.name, one.item.id, one.prompt, one.reference) for one in samples])
        else:
            prompts = {item.id: prompt_of(item, engine.tokenizer) for item in items}
            room = (engine.runner.max_positions or math.inf) - distances.max_new_tokens
            fitting = {item: prompt for item, prompt in prompts.items() if len(prompt) < room}
            found.append(distances.answered(suite.name, fitting, sampled=bare))
    return [text for row in zip_longest(*found) for text in row if text is not None]


def run(
    distances: Distances, texts: Sequence[Told], study: Study, others: Mapping[str, Engine] | None = None
) -> dict[str, Any]:
    """Compare on some texts: a row of figures per candidate, over all suites and for each suite.

    Args:
        distances: measures the model.
        texts: the texts to read.
        study: the comparison.
        others: other models by label, which run all their layers.

    Raises:
        Unsupported: another model has other tokens.
        TimeoutError: no text was read in time.
    """
    beyond = [(label, other, other_model(other, distances.engine)) for label, other in (others or {}).items()]
    groups = candidates_of(distances, texts, study)
    everyone = [variant(distances.engine.runner, who) for _, rivals in groups for who in rivals]
    found = distances.measure(texts, [*everyone, *(who for *_, who in beyond)])
    if not found[0]:
        raise TimeoutError("no time was left to read any text; the same command goes on from here")
    layers, head = distances.engine.runner.num_layers, distances.engine.runner.head_layers
    rows = []
    for (speed, who), outcomes, first in zip(_labelled(groups), found, _firsts(groups, found), strict=False):
        row = {"label": who.label, "method": who.spec, **figures(outcomes, found[0], layers, head)}
        if speed is not None:
            row |= {"speedup": speed, "versus_d3": compared(first, outcomes)}
        row["by_suite"] = {suite: _short(part, _of_suite(found[0], suite), _of_suite(first, suite), layers, head)
                           for suite, part in _suites(outcomes).items()}
        rows.append(row)
    for (label, other, one), outcomes in zip(beyond, found[len(everyone) :], strict=True):
        size = {"step_bytes": step_bytes(other), "ideal_speedup": step_bytes(distances.engine) / step_bytes(other)}
        rows.append({"label": label, "method": one.spec, **figures(outcomes, found[0], layers, head), **size})
    for measure in ("kl", "kept", "prefix"):
        adjust([row["versus_d3"] for row in rows if row["label"] not in ("d3", "full") and "versus_d3" in row], measure)
    return {
        "items": len(texts),
        "read": len(found[0]),
        "suites": {suite: len(part) for suite, part in _suites(found[0]).items()},
        "bin": BIN,
        "rows": rows,
    }


def step_bytes(engine: Engine) -> int:
    """Bytes of weights that a decoding step reads: layers and LM head; for a model's own modules, all weights."""
    runner = engine.runner
    if isinstance(runner, PackedRunner):
        return sum(layer.nbytes for layer in runner.weights.layers) + runner.weights.head.nbytes
    return sum(weights.nbytes for weights in engine.model.parameters())


def candidates_of(
    distances: Distances, texts: Sequence[Told], study: Study
) -> list[tuple[float | None, list[Candidate]]]:
    """The full model and the methods asked for, then D3 and its controls for every speed-up."""
    engine, longest = distances.engine, distances.max_new_tokens
    fixed = [candidate(engine, method, longest, label) for label, method in study.methods.items()]
    groups: list[tuple[float | None, list[Candidate]]] = [(None, [candidate(engine, Full(), longest, "full"), *fixed])]
    lengths = Lengths(tuple(len(text.answer) for text in texts))
    for speed in study.speedups:
        at = setting(engine, lengths, speed, longest, study.order, study.core, study.seeds, study.curve)
        groups.append((speed, controls(at, study.loss_groups)))
    return groups


def figures(found: Found, full: Found, num_layers: int, head_layers: float) -> dict[str, Any]:
    """Figures of one candidate: means per judged token with 95 % intervals over prompts, and by position.

    Args:
        found: the candidate's outcomes.
        full: the full model's outcomes on the same texts.
        num_layers: L.
        head_layers: cost of the LM head in layers.
    """
    rows = list(found.values())
    layers = sum(row["layers"] for row in rows) / sum(row["count"] + 1 for row in rows)
    prefixes = {"prefix": _prefixes(rows)} if all("prefix" in row for row in rows) else {}
    return {
        "n": len(rows),
        "tokens": sum(row["count"] for row in rows),
        "mean_layers": layers,
        "ideal_speedup": ideal_speedup(num_layers, layers, head_layers),
        **{measure: _mean(found, measure) for measure in _MEASURES},
        "added_loss": _difference(_ratio(full, found, "nll")),
        **prefixes,
        "by_position": by_position(found),
    }


def compared(base: Found, other: Found) -> dict[str, Any]:
    """`other` minus `base` on the same texts, paired by prompt: per token, by position, and in common tokens."""
    bins = max(len(row["kl"]) for row in other.values())
    prefixes = {}
    if all("prefix" in row for row in other.values()):
        before, after = ([row["prefix"] for row in found.values()] for found in (base, other))
        prefixes["prefix"] = _difference(ratio_difference(before, after, [1] * len(base)))
    return {
        **{measure: _difference(_ratio(base, other, measure)) for measure in ("kl", "kept")},
        **prefixes,
        "kl_by_position": [_difference(_ratio(base, other, "kl", index)) for index in range(bins)],
    }


def by_position(found: Found) -> list[dict[str, Any]]:
    """Means per token in bins of positions, with intervals for KL and loss."""
    bins = max(len(row["kl"]) for row in found.values())
    return [{"first": index * BIN, "tokens": sum(_weights(found, index)),
             **{measure: _mean(found, measure, index) for measure in _MEASURES}} for index in range(bins)]


def times(
    distances: Distances, texts: Sequence[Told], study: Study, count: int, card: CostCard
) -> list[dict[str, Any]]:
    """What a speed-up saves in time: full depth, D3 and constant depth, predicted and measured one at a time.

    Args:
        distances: measures the model.
        texts: `count` of them, evenly spread, are answered by each.
        study: the comparison.
        count: number of texts.
        card: current cost of steps on this machine.
    """
    chosen = [texts[index * len(texts) // count] for index in range(min(count, len(texts)))]
    groups = candidates_of(distances, texts, study)
    labelled = [(speed, who) for speed, who in _labelled(groups) if who.label in ("full", "d3", "constant")]
    samples = [Sample(Item(text.id, "", ""), text.prompt, ()) for text in chosen]
    measured = alone(Decoder(distances.engine), samples, [who for _, who in labelled], distances.max_new_tokens,
                     distances.progress)
    prompt, answer = (round(mean(len(part) for part in parts))
                      for parts in zip(*((text.prompt, text.answer) for text in texts), strict=True))
    found = []
    for (speed, who), timing in zip(labelled, measured, strict=True):
        assert isinstance(who.plan, DepthPlan)
        predicted = card.tpot(who.plan, prompt, answer)
        found.append({"label": who.label, "speedup": speed, "predicted": predicted, **(timing or {})})
    return [{**row, "predicted_speedup": found[0]["predicted"] / row["predicted"]} for row in found]


def _prefixes(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of greedy answers: length of the prefix shared with the full model's, and the share that never diverges."""
    lengths = [row["prefix"] for row in rows]
    return {"mean": mean(lengths), "median": median(lengths),
            "never_parts": mean(row["prefix"] > row["count"] for row in rows)}


def _labelled(groups: Sequence[tuple[float | None, list[Candidate]]]) -> list[tuple[float | None, Candidate]]:
    return [(speed, who) for speed, rivals in groups for who in rivals]


def _firsts(groups: Sequence[tuple[float | None, list[Candidate]]], found: Sequence[Found]) -> list[Found]:
    """For each candidate, the outcomes of the first of its group; that is D3 at a speed-up."""
    firsts, place = [], 0
    for _, rivals in groups:
        firsts += [found[place]] * len(rivals)
        place += len(rivals)
    return firsts


def _short(found: Found, full: Found, first: Found, num_layers: int, head_layers: float) -> dict[str, Any]:
    """A suite's figures without those by position."""
    whole = {**figures(found, full, num_layers, head_layers), "versus_d3": compared(first, found)}
    del whole["by_position"], whole["versus_d3"]["kl_by_position"]
    return whole


def _suites(found: Found) -> dict[str, Found]:
    return {suite: _of_suite(found, suite) for suite in dict.fromkeys(name.partition("/")[0] for name in found)}


def _of_suite(found: Found, suite: str) -> Found:
    return {name: row for name, row in found.items() if name.partition("/")[0] == suite}


def _mean(found: Found, measure: str, index: int | None = None) -> dict[str, float]:
    nothing = {name: {**row, measure: [0] * len(row[measure])} for name, row in found.items()}
    both = _difference(_ratio(nothing, found, measure, index))
    return {key: both[key] for key in ("mean", "low", "high")}


def _ratio(base: Found, other: Found, measure: str, index: int | None = None) -> Difference:
    """Difference per token over all positions or those of a bin; prompts are the sampling unit."""
    before, after = ([_sum(row[measure], index) for row in found.values()] for found in (base, other))
    return ratio_difference(before, after, _weights(other, index))


def _weights(found: Found, index: int | None) -> list[int]:
    return [round(_sum(bin_sizes(row["count"]), index)) for row in found.values()]


def _sum(bins: Sequence[float], index: int | None) -> float:
    if index is None:
        return sum(bins)
    return bins[index] if index < len(bins) else 0.0


def _difference(found: Difference) -> dict[str, float]:
    values = {"mean": found.mean, "low": found.low, "high": found.high, "p": found.p}
    return {name: float(f"{value:.7g}") for name, value in values.items()}  # keeps reports small
