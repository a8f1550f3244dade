"""Time of answers decoded alone; candidates take turns, so that changes of the machine's speed affect all alike."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tqdm import tqdm

from shoal_lab.eval.decoders import Candidate, Decoder
from shoal_lab.eval.items import Sample
from shoal_lab.eval.paired import median_interval


def alone(
    decoder: Decoder, samples: Sequence[Sample], candidates: Sequence[Candidate], max_new_tokens: int,
    progress: bool | None = None,
) -> list[dict[str, Any] | None]:
    """Seconds per answer and per token of each candidate at batch 1, by the engine's own loop.

    Args:
        decoder: holds the model and the sampling options.
        samples: a few, of different lengths. The first is also used to warm up.
        candidates: the full model first; the others are compared with it answer by answer.
        max_new_tokens: the longest answer.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.

    Returns:
        The figures of each candidate, or None if the engine cannot run it as a method.
    """
    seconds: list[list[float]] = [[] for _ in candidates]
    paces: list[list[float]] = [[] for _ in candidates]
    hidden = None if progress is None else not progress
    for number, sample in enumerate(tqdm([samples[0], *samples], desc="alone", disable=hidden)):
        for who in _rotated(list(range(len(candidates))), number):
            method = candidates[who].method
            if method is None:
                continue
            options = {"max_new_tokens": max_new_tokens, **decoder.drawn(sample.prompt)}
            stats = decoder.engine.generate(list(sample.prompt), method=method, **options).stats
            if number > 0:
                seconds[who].append(stats.seconds)
                paces[who].append(stats.decode_seconds / max(stats.new_tokens - 1, 1))
    return [_figures(own, pace, paces[0]) if own else None for own, pace in zip(seconds, paces, strict=True)]


def _rotated(order: list[int], by: int) -> list[int]:
    cut = by % len(order)
    return order[cut:] + order[:cut]


def _figures(seconds: list[float], paces: list[float], base: list[float]) -> dict[str, Any]:
    ratios = [full / pace for full, pace in zip(base, paces, strict=True) if pace > 0]
    interval = median_interval(ratios)
    return {
        "items": len(seconds),
        "seconds_per_answer": sum(seconds) / len(seconds),
        "seconds_per_token": median(paces),
        "realised_speedup": median(ratios) if ratios else None,
        "realised_interval": interval[:2] if interval else None,
    }
