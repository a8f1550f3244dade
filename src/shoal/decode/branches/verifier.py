"""Verifiers: who says how promising an unfinished answer is, or what a thought says. Imports no torch."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shoal.decode.branches.search import Branch

_LONGEST = 1 << 16
"""Bytes of an endpoint's answer that are read."""
_FOREVER = 1e6
"""Seconds; no longer wait can be told to a thread or a connection everywhere."""


@dataclass(frozen=True)
class Attempt:
    """What a verifier is shown.

    Attributes:
        prompt: token ids.
        tokens: ids of the answer so far.
        text: of the answer, as far as it is certain; empty without a tokenizer.
        finished: whether the answer has ended.
        likelihood: geometric mean of its tokens' probabilities before temperature and truncation; 1 of none.
        question: the prompt's text, without special tokens; empty without a tokenizer.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finished: bool
    likelihood: float
    question: str = ""


class NoVerdict(ValueError):
    """A verifier failed, or said something that is no verdict."""


class NoVerdictInTime(NoVerdict, TimeoutError):
    """A verifier said nothing."""


Verifier = Callable[[Attempt], float]
"""Says how likely an attempt is right, or will be, in [0, 1]; the same for the same attempt."""


class BoundedVerifier(ABC):
    """A verifier that bounds its own time: it is waited for as long as it takes."""

    @abstractmethod
    def __call__(self, attempt: Attempt) -> float:
        """How likely the attempt is right, in [0, 1]."""


def likelihood(attempt: Attempt) -> float:
    """The model's own opinion."""
    return attempt.likelihood


@dataclass(frozen=True)
class Endpoint:
    """A verifier behind a URL, which is sent an attempt as JSON and answers `{"score": r}`.

    It is sent `prompt` and `answer` as text, `prompt_tokens` and `answer_tokens` as ids, `finished` and `likelihood`.

    Attributes:
        url: http or https.
        seconds: how long the network may be silent.
    """

    url: str
    seconds: float

    def __call__(self, attempt: Attempt) -> float:
        """The score; ValueError where it gives none."""
        body = {"prompt": attempt.question, "answer": attempt.text, "prompt_tokens": attempt.prompt,
                "answer_tokens": attempt.tokens, "finished": attempt.finished, "likelihood": attempt.likelihood}
        asked = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        seconds = self.seconds if self.seconds < _FOREVER else None
        try:
            with urllib.request.urlopen(asked, timeout=seconds) as answer:
                said = answer.read(_LONGEST)
        except urllib.error.HTTPError as error:
            error.close()
            raise ValueError(f"{self.url} answered with status {error.code}") from error
        try:
            score: float = json.loads(said)["score"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{self.url} answered {said[:80]!r}; it must answer {{"score": r}}') from error
        return score


def is_url(spec: object) -> bool:
    """Whether that names a verifier behind a URL."""
    return isinstance(spec, str) and spec.startswith(("http://", "https://"))


def attempt_of(branch: Branch) -> Attempt:
    """What a verifier is shown of a branch."""
    row = branch.row
    return Attempt(tuple(row.tokens[: row.prompt_length]), tuple(branch.tokens), branch.text,
                   branch.finish_reason is not None, min(1.0, math.exp(branch.score)), branch.question)


def ask(verifier: Verifier, attempt: Attempt, seconds: float) -> Future[float]:
    """What a verifier will say, for a search to wait for while other rows go on; see `verdict`."""
    said: Future[float] = Future()
    if verifier is likelihood:
        said.set_result(attempt.likelihood)
        return said

    def settle() -> None:
        try:
            said.set_result(verdict(verifier, attempt, seconds))
        except BaseException as error:
            said.set_exception(error)

    threading.Thread(target=settle, name="shoal-verdict", daemon=True).start()
    return said


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
        self._thread.join(max(0.0, left) if left < _FOREVER else None)
        return not self._thread.is_alive() or time.monotonic() >= self._until

    @property
    def answer(self) -> object:
        """What it said.

        Raises:
            NoVerdict: it failed.
            NoVerdictInTime: it has said nothing.
        """
        if self._failed:
            failed = self._failed[0]
            raise NoVerdict(f"the {self._name} failed: {type(failed).__name__}: {failed}") from failed
        if not self._found:
            raise NoVerdictInTime(f"the {self._name} gave no answer within {self._seconds:g} s; use a faster one, or "
                                  "wait longer (option patience)")
        return self._found[0]


def verdict(verifier: Verifier, attempt: Attempt, seconds: float) -> float:
    """What a verifier says; see `Awaited`.

    Args:
        verifier: anybody's.
        attempt: what it is shown.
        seconds: how long to wait, unless it is a `BoundedVerifier`; infinity for ever.

    Raises:
        NoVerdict: it failed, or its answer is no number in [0, 1].
        NoVerdictInTime: it gave none.
    """
    if verifier is likelihood:
        return attempt.likelihood
    asked = Awaited(verifier, attempt, math.inf if isinstance(verifier, BoundedVerifier) else seconds, "verifier")
    asked.wait()
    value = asked.answer
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise NoVerdict(f"the verifier said {value!r}; it must say a number in [0, 1]")
    return float(value)
