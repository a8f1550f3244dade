"""Figures of traces: speed, percentiles of the times that a user feels, and the share within an objective."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from shoal_lab.bench.load.trace import Trace
from shoal_lab.bench.rounds import figure

_SHARES = (50, 90, 99)


@dataclass(frozen=True)
class Objective:
    """Limits that a good request keeps; those that are None do not count.

    Attributes:
        ttft: most seconds until the first text.
        tpot: most seconds per token after that.
        latency: most seconds until the end.
    """

    ttft: float = math.inf
    tpot: float = math.inf
    latency: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse text such as `ttft=1,tpot=0.2`; ValueError for anything else."""
        known = [field.name for field in fields(cls)]
        found: dict[str, float] = {}
        for word in filter(None, text.split(",")):
            name, _, value = word.partition("=")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = -1.0
            if name not in known or not found[name] > 0:
                raise ValueError(f"the objective holds {word!r}; it takes {', '.join(known)}, such as ttft=1,tpot=0.2")
        return cls(**found)

    def kept(self, trace: Trace) -> bool:
        """Whether a request kept the limits; a failed one did not."""
        if trace.error is not None or trace.ttft is None:
            return False
        latency = trace.end - trace.due
        return trace.ttft <= self.ttft and (trace.tpot or 0.0) <= self.tpot and latency <= self.latency

    def to_dict(self) -> dict[str, float]:
        """The limits that are given."""
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: limit for name, limit in limits.items() if limit != math.inf}


def seconds_of(traces: Sequence[Trace]) -> float:
    """Seconds from the first request until the last one is over."""
    return max(trace.end for trace in traces) - min(trace.due for trace in traces)


def speed(traces: Sequence[Trace]) -> float:
    """Tokens per second of all requests together over the whole turn, its end with fewer requests included."""
    return sum(trace.tokens for trace in traces) / max(seconds_of(traces), 1e-9) if traces else 0.0


def figures(turns: Sequence[Sequence[Trace]], objective: Objective) -> dict[str, Any]:
    """All figures of one load on one system.

    Args:
        turns: the traces of each round.
        objective: limits of a good request.
    """
    traces = [trace for turn in turns for trace in turn]
    whole = [trace for trace in traces if trace.error is None]
    seconds = sum(seconds_of(turn) for turn in turns if turn)
    good = sum(map(objective.kept, traces))
    return {
        "requests": len(traces),
        "errors": len(traces) - len(whole),
        "messages": dict(Counter(trace.error for trace in traces if trace.error is not None).most_common(5)),
        "seconds": seconds,
        "prompt_tokens": sum(trace.prompt_tokens for trace in traces),
        "tokens": sum(trace.tokens for trace in traces),
        "tokens_per_second": figure(speed(turn) for turn in turns),
        "requests_per_second": len(whole) / max(seconds, 1e-9),
        "ttft_seconds": percentiles(trace.ttft for trace in whole),
        "tpot_seconds": percentiles(trace.tpot for trace in whole),
        "gap_seconds": percentiles(gap for trace in whole for gap in trace.gaps),
        "latency_seconds": percentiles(trace.end - trace.due for trace in whole),
        "queue_seconds": percentiles(trace.queue_seconds for trace in whole),
        "goodput": {
            "objective": objective.to_dict(),
            "share": good / max(1, len(traces)),
            "requests_per_second": good / max(seconds, 1e-9),
        },
    }


def percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": float(np.mean(known)), **{f"p{share}": float(np.percentile(known, share)) for share in _SHARES}}


def ratio(ours: Sequence[Sequence[Trace]], theirs: Sequence[Sequence[Trace]]) -> dict[str, float]:
    """Our tokens per second over theirs, round by round."""
    return figure(speed(one) / max(speed(other), 1e-9) for one, other in zip(ours, theirs, strict=True))


def flat(curve: Sequence[Mapping[str, float]], share: float, windows: int = 10) -> dict[str, Any] | None:
    """How far memory moves after the first tenth: medians of equal stretches of time, each over the first.

    Args:
        curve: points with `seconds` and `bytes`.
        share: largest change that counts as flat, 0.02 for 2 %.
        windows: stretches.

    Returns:
        None if a stretch holds no point.
    """
    seconds, held = (np.array([point[key] for point in curve], float) for key in ("seconds", "bytes"))
    edges = np.linspace(0.1, 1.0, windows + 1) * seconds.max(initial=0.0)
    edges[-1] = np.inf
    parts = [held[(low <= seconds) & (seconds < high)] for low, high in pairwise(edges)]
    if not all(map(len, parts)):
        return None
    medians = [float(np.median(part)) for part in parts]
    change = max(abs(value / medians[0] - 1) for value in medians)
    return {"windows": medians, "largest_change": change, "allowed": share, "flat": change <= share}
