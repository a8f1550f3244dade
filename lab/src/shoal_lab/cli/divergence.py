"""Where two token sequences diverge, and whether that is a tie.

Two correct programs may round differently. If the reference's two best logits are closer than a tolerance, either token
is right, and everything after it may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.5, "int8": 0.5}
"""Default tie tolerance on the top-two margin, in logits, by the type of the computation.

Int8 means activations with a scale per group: 8 bits, as in bfloat16. It moves the logits of a model of 135 million
parameters by 0.18 in the root mean square (lab/reports/real/smollm2-135m-fidelity.json).
"""


@dataclass(frozen=True)
class Divergence:
    """The first difference between a sequence and its reference.

    Attributes:
        at: index of the first generated token that differs; None if all are equal.
        expected: the reference's token there, None past its end.
        found: the other token there, None past its end.
        margin: the reference's top-two margin there, in logits.
        tie: whether that margin is below the tolerance.
    """

    at: int | None = None
    expected: int | None = None
    found: int | None = None
    margin: float | None = None
    tie: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the sequences differ and no tie explains it."""
        return self.at is not None and not self.tie


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; the shorter length for a prefix; None if the sequences are equal."""
    for index, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return index
    return None if len(reference) == len(other) else min(len(reference), len(other))


def diverge(
    reference: Sequence[int], other: Sequence[int], margin: Callable[[Sequence[int]], float], tolerance: float
) -> Divergence:
    """Compare `other` with `reference`; `margin` gives the reference's top-two margin after a prefix of it."""
    at = first_difference(reference, other)
    if at is None:
        return Divergence()
    gap = margin(reference[:at])
    tokens = [row[at] if at < len(row) else None for row in (reference, other)]
    return Divergence(at, tokens[0], tokens[1], gap, gap < tolerance)
