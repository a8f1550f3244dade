"""Verifiers: who says how promising an unfinished answer is. Imports no torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class Attempt:
    """What a verifier is shown.

    Attributes:
        prompt: token ids.
        tokens: ids of the answer so far.
        text: of the answer, as far as it is certain; empty without a tokenizer.
        finished: whether the answer has ended.
        likelihood: geometric mean of its tokens' probabilities before temperature and truncation; 1 of none.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finished: bool
    likelihood: float


Verifier = Callable[[Attempt], float]
"""Says how likely an attempt is right, or will be, in [0, 1]; the same for the same attempt."""


def likelihood(attempt: Attempt) -> float:
    """The model's own opinion."""
    return attempt.likelihood


def verdict(verifier: Verifier, attempt: Attempt, seconds: float) -> float:
    """What a verifier says.

    It runs in a thread of its own, which is left behind where it gives no answer.

    Args:
        verifier: anybody's.
        attempt: what it is shown.
        seconds: how long to wait; infinity for ever.

    Raises:
        ValueError: it failed, or its answer is no number in [0, 1].
        TimeoutError: it gave none.
    """
    if verifier is likelihood:
        return attempt.likelihood
    found: list[object] = []
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            found.append(verifier(attempt))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=ask, name="shoal-verifier", daemon=True)
    thread.start()
    thread.join(None if seconds == math.inf else seconds)
    if failed:
        raise ValueError(f"the verifier failed: {type(failed[0]).__name__}: {failed[0]}") from failed[0]
    if not found:
        raise TimeoutError(f"the verifier gave no answer within {seconds:g} s; use a faster one, or wait longer "
                           "(option patience)")
    value = found[0]
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"the verifier said {value!r}; it must say a number in [0, 1]")
    return float(value)
