"""Verifiers: who says how promising an unfinished answer is, or what a thought says. Imports no torch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal


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


@dataclass(frozen=True)
class Question:
    """What a judge of thoughts is asked, to which it says True or False.

    Attributes:
        kind: "answers", whether the thought states an answer; "agrees", whether it is the one that `former` states.
        thought: text.
        former: an earlier thought that has stated one; empty where it is not asked about.
    """

    kind: Literal["answers", "agrees"]
    thought: str
    former: str = ""


class Awaited:
    """A question that somebody answers in a thread of its own, which is left behind where it gives no answer.

    Args:
        whom: anybody's callable.
        what: its argument.
        seconds: how long to wait in all; infinity for ever.
        name: of the callable, for messages.
    """

    def __init__(self, whom: Callable[[Any], object], what: object, seconds: float, name: str) -> None:
        self._name, self._seconds = name, seconds
        self._found, self._failed = list[object](), list[BaseException]()
        self._until = time.monotonic() + seconds

        def ask() -> None:
            try:
                self._found.append(whom(what))
            except BaseException as error:
                self._failed.append(error)

        self._thread = threading.Thread(target=ask, name=f"shoal-{name}", daemon=True)
        self._thread.start()

    def wait(self, most: float = math.inf) -> bool:
        """Whether there is nothing more to wait for, after so many seconds at most."""
        left = min(most, self._until - time.monotonic())
        self._thread.join(None if left == math.inf else max(0.0, left))
        return not self._thread.is_alive() or time.monotonic() >= self._until

    @property
    def answer(self) -> object:
        """What it said.

        Raises:
            ValueError: it failed.
            TimeoutError: it has said nothing.
        """
        if self._failed:
            failed = self._failed[0]
            raise ValueError(f"the {self._name} failed: {type(failed).__name__}: {failed}") from failed
        if not self._found:
            raise TimeoutError(f"the {self._name} gave no answer within {self._seconds:g} s; use a faster one, or wait "
                               "longer (option patience)")
        return self._found[0]


def verdict(verifier: Verifier, attempt: Attempt, seconds: float) -> float:
    """What a verifier says; see `Awaited`.

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
    asked = Awaited(verifier, attempt, seconds, "verifier")
    asked.wait()
    value = asked.answer
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"the verifier said {value!r}; it must say a number in [0, 1]")
    return float(value)
