"""Widths for a budget and preferences between the tasks: a simple rule for the decoders, then the widest encoder.

The rule is the paper's (section 3, search): the preferred task's decoder gets more, and the shared encoder is searched
for what is left. How widths follow from preferences, and that all sizes of decoders are tried, is a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.cli.recommend import Evidence, Lossy, advise
from shoal_lab.other_fields.multitask.network import FULL, LEAST, WIDTHS, Widths


def search(budget: float, classes: float, score: Callable[[Widths], float]) -> Widths:
    """The best of a few configurations that fit a budget.

    Args:
        budget: multiplications for a picture.
        classes: preference for naming the digit, of 1 for both tasks.
        score: of a configuration, by those preferences; called for as many as there are widths, at most.

    Raises:
        ValueError: No configuration is so small, or the preference is no share.
    """
    if not 0 <= classes <= 1:
        raise ValueError(f"preference {classes}; it must be 0..1, the share of the first task")
    if budget < LEAST.macs:
        raise ValueError(f"budget {budget:.0f}; the smallest configuration takes {LEAST.macs} multiplications")
    tried = {found for most in WIDTHS if (found := _widest(budget, classes, most)) is not None}
    return max(sorted(tried, key=lambda widths: widths.macs), key=score)


def _widest(budget: float, classes: float, most: float) -> Widths | None:
    """The widest encoder beside decoders of which the preferred one has `most`; None if none fits."""
    shares = (classes, 1 - classes)
    first, second = (max(width for width in WIDTHS if width <= max(most * share / max(shares), WIDTHS[0]))
                     for share in shares)
    return next((found for encoder in reversed(WIDTHS)
                 if (found := Widths(encoder, first, second)).macs <= budget), None)


def evidence(rows: Mapping[Widths, tuple[float, float]], full: float, n: int) -> Evidence:
    """What was measured of all configurations, as `shoal recommend` reads it.

    Args:
        rows: drop of a configuration's score, and the upper end of its interval.
        full: the full network's score.
        n: pictures.
    """
    return Evidence(lossy=tuple(Lossy("both", "digits", label(widths), FULL.macs / widths.macs,
                                      FULL.macs / widths.macs, full, drop, most, n)
                                for widths, (drop, most) in rows.items()))


def recommended(known: Evidence, budget: float) -> Widths:
    """What `shoal recommend` chooses with the least `--max-drop` at which its choice fits a budget.

    Raises:
        ValueError: No measured configuration fits.
    """
    for most in sorted({max(row.most, 1e-9) for row in known.lossy}):
        chosen = advise(known, "both", most)
        if chosen["method"] != "full" and FULL.macs / chosen["speedup"] <= budget * (1 + 1e-9):
            return Widths(*map(float, chosen["method"].split("/")))
    raise ValueError(f"budget {budget:.0f}; no measured configuration takes so little")


def label(widths: Widths) -> str:
    """A configuration in a word: encoder, decoder of classes, decoder of pixels."""
    return f"{widths.encoder:g}/{widths.classes:g}/{widths.pixels:g}"
