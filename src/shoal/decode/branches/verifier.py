"""Verifiers, which say how promising an unfinished answer is. Imports no torch."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from shoal.decode.branches.search import Branch

T = TypeVar("T")
_LONGEST = 1 << 16
"""Most bytes that are read of an endpoint's answer."""
_FOREVER = 1e6
"""Seconds: the longest wait that threads and connections take on every platform."""


@dataclass(frozen=True)
class Attempt:
    """An answer as a verifier is shown it.

    Attributes:
        prompt: token ids.
        tokens: ids of the answer so far.
        text: of the answer, as far as it is certain; empty without a tokenizer.
        finished: whether the answer has ended.
        likelihood: geometric mean of its tokens' probabilities before temperature and truncation; 1 without tokens.
        question: the prompt's text, without special tokens; empty without a tokenizer.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finished: bool
    likelihood: float
    question: str = ""


class NoVerdict(ValueError):
    """A verifier failed, or its answer is not a verdict."""


class NoVerdictInTime(NoVerdict, TimeoutError):
    """A verifier did not answer in time."""


Verifier = Callable[[Attempt], float]
"""Says how likely an attempt is, or will be, right, in [0, 1]. It is deterministic."""


class BoundedVerifier(ABC):
    """A verifier that bounds its own time: it is waited for as long as it takes."""

    @abstractmethod
    def __call__(self, attempt: Attempt) -> float:
        """How likely the attempt is right, in [0, 1]."""


def likelihood(attempt: Attempt) -> float:
    """The likelihood under the model itself, as a verifier."""
    return attempt.likelihood


@dataclass(frozen=True)
class Endpoint:
    """A verifier behind a URL, which is sent an attempt as JSON and answers `{"score": r}`.

    It holds `prompt` and `answer` as text, `prompt_tokens` and `answer_tokens` as ids, `finished` and `likelihood`.

    Attributes:
        url: http or https.
        seconds: network timeout.
    """

    url: str
    seconds: float

    def __call__(self, attempt: Attempt) -> float:
        """The score; ValueError if the endpoint gives none."""
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
    """A branch as a verifier is shown it."""
    seq = branch.seq
    return Attempt(tuple(seq.tokens[: seq.prompt_length]), tuple(branch.tokens), branch.text,
                   branch.finish_reason is not None, min(1.0, math.exp(branch.score)), branch.question)


def ask(verifier: Verifier, attempt: Attempt, seconds: float) -> Future[float]:
    """A future of `verdict`, for which a search can wait while other sequences run."""
    if verifier is likelihood:
        said: Future[float] = Future()
        said.set_result(attempt.likelihood)
        return said
    return _begun(lambda: verdict(verifier, attempt, seconds), "verdict")


def _begun(answer: Callable[[], T], name: str) -> Future[T]:
    """What a call in a thread of its own answers; the thread is abandoned if it does not."""
    said: Future[T] = Future()

    def settle() -> None:
        try:
            said.set_result(answer())
        except BaseException as error:
            said.set_exception(error)

    threading.Thread(target=settle, name=f"shoal-{name}", daemon=True).start()
    return said


class Awaited:
    """A call of `whom` with `what` in a thread of its own, waited for up to `seconds`; `name` is for messages."""

    def __init__(self, whom: Callable[[Any], object], what: object, seconds: float, name: str) -> None:
        self._name, self._seconds, self._until = name, seconds, time.monotonic() + seconds
        self._said = _begun(lambda: whom(what), name)

    def wait(self, most: float = math.inf) -> bool:
        """Whether the call has answered or its time is up; waits at most that many seconds to find out."""
        left = min(most, self._until - time.monotonic())
        wait([self._said], max(0.0, left) if left < _FOREVER else None)
        return self._said.done() or time.monotonic() >= self._until

    @property
    def answer(self) -> object:
        """The answer.

        Raises:
            NoVerdict: it failed.
            NoVerdictInTime: it has not answered.
        """
        failed = self._said.exception() if self._said.done() else TimeoutError()
        if isinstance(failed, TimeoutError):  # its own limit may be over a moment before ours
            raise NoVerdictInTime(f"the {self._name} gave no answer within {self._seconds:g} s; use a faster one, or "
                                  "wait longer (option patience)") from failed
        if failed is not None:
            raise NoVerdict(f"the {self._name} failed: {type(failed).__name__}: {failed}") from failed
        return self._said.result()


def verdict(verifier: Verifier, attempt: Attempt, seconds: float) -> float:
    """The verdict of a verifier, called by `Awaited`.

    Args:
        seconds: how long to wait, unless it is a `BoundedVerifier`; infinity waits forever.

    Raises:
        NoVerdict: it failed, or its answer is not a number in [0, 1].
        NoVerdictInTime: it gave no answer.
    """
    if verifier is likelihood:
        return attempt.likelihood
    asked = Awaited(verifier, attempt, math.inf if isinstance(verifier, BoundedVerifier) else seconds, "verifier")
    asked.wait()
    value = asked.answer
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise NoVerdict(f"the verifier said {value!r}; it must say a number in [0, 1]")
    return float(value)
