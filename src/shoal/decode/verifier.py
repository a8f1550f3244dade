"""Verifiers: who says how promising an unfinished answer is. Imports no torch."""

from __future__ import annotations

import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.decode.search import Branch

_LONGEST = 1 << 16
"""Bytes of an endpoint's answer that are read."""


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
        seconds = None if self.seconds == math.inf else self.seconds
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


def verdict(verifier: Verifier, attempt: Attempt, seconds: float) -> float:
    """What a verifier says.

    It runs in a thread of its own, which is left behind where it gives no answer.

    Args:
        verifier: anybody's.
        attempt: what it is shown.
        seconds: how long to wait; infinity for ever.

    Raises:
        NoVerdict: it failed, or its answer is no number in [0, 1].
        NoVerdictInTime: it gave none.
    """
    found: list[object] = []
    failed: list[BaseException] = []

    def say() -> None:
        try:
            found.append(verifier(attempt))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=say, name="shoal-verifier", daemon=True)
    thread.start()
    thread.join(None if seconds == math.inf else seconds)
    if failed:
        raise NoVerdict(f"the verifier failed: {type(failed[0]).__name__}: {failed[0]}") from failed[0]
    if not found:
        raise NoVerdictInTime(f"the verifier gave no answer within {seconds:g} s; use a faster one, or wait longer "
                              "(option patience)")
    value = found[0]
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise NoVerdict(f"the verifier said {value!r}; it must say a number in [0, 1]")
    return float(value)
