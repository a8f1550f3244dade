"""Monitors say what may follow a mark such as a dot in a text, and tokens are masked accordingly.

Monitor-guided decoding (Agrawal et al., arXiv 2306.10763). There the mask applies where a text ends with the mark. Here
it applies to the whole text, so a token that holds the mark, or ends the word and goes on, is bound as well.
"""

from __future__ import annotations

import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from shoal.decode.sampling import Allowed, NotYet
from shoal.errors import LAB_INSTALL, Unsupported
from shoal.methods import plugins

_WORD = rb"[\w\x80-\xff]*"
"""Bytes of a word: those of identifiers, with every character beyond ASCII."""
_ASKED = 256
"""Answers of monitors that are kept, so that a word of several tokens takes one question."""
GROUP = "shoal.monitors"
"""Entry points of monitors that other packages bring, by the language."""


class Monitor(ABC):
    """Says which words may follow a mark, by the text before it. Hashable, and called from any thread.

    Attributes:
        mark: the character after which it is asked: ASCII, and not part of a word.
        seconds: most time of an answer. One that takes longer is an error of the request.
        keeps_time: whether `follows` keeps to `seconds` itself.
    """

    mark: ClassVar[str] = "."
    keeps_time: ClassVar[bool] = False
    seconds: float = 20.0

    def watches(self, text: str) -> bool:
        """Whether to ask it about the text at all. Called for each token that holds the mark, so it must be quick."""
        return True

    @abstractmethod
    def follows(self, text: str) -> Collection[str] | None:
        """The words of which one must follow, given prompt and answer up to a mark; None for anything.

        The answer must depend on the text alone, else drafts do not give what plain decoding does.
        """

    @property
    def text(self) -> str:
        """Its name in records, which tells it from others."""
        return repr(self)


class Continuations(NamedTuple):
    """The words that may follow a mark, and all their beginnings."""

    whole: frozenset[bytes]
    begun: frozenset[bytes]

    def lets(self, name: bytes, ended: bool) -> bool:
        """Whether a text may hold this word, as one that has ended or as one that may go on."""
        return name in (self.whole if ended else self.begun)


class _Answer(Future["Continuations | None"]):
    """What a monitor says; `failed` is when it said nothing instead, in seconds on the monotonic clock."""

    failed = math.inf


class MarkedTokens:
    """A model's tokens by the words that they begin with, and by the marks that they hold.

    Args:
        texts: the bytes of each token, empty for one that is no text.
        eos: ids that end an answer, and a word.
        mark: see `Monitor`.

    Attributes:
        size: V.
        marked: bytes up to a mark -> the tokens that go on behind it, each with the word there and whether it ends.
    """

    def __init__(self, texts: Sequence[bytes], eos: frozenset[int], mark: str) -> None:
        if len(mark.encode()) != 1 or re.fullmatch(_WORD, mark.encode()):
            raise ValueError(f"a monitor's mark is {mark!r}; it must be one character of ASCII, and none of a word")
        self.size, self._eos = len(texts), eos
        self._texts = [b"" if token in eos else text for token, text in enumerate(texts)]
        self._mark = re.compile(re.escape(mark.encode()) + b"(" + _WORD + b")")
        self._open = re.compile(self._mark.pattern + rb"\Z")
        self._single = {text[0] for text in self._texts if len(text) == 1}
        first: dict[tuple[bytes, bool], list[int]] = defaultdict(list)
        self.marked: dict[bytes, list[tuple[int, bytes, bool]]] = defaultdict(list)
        for token, text in enumerate(self._texts):
            if text or token in eos:
                first[self._first(token)].append(token)
            for head, name, ended in self.allowed(token):
                self.marked[head].append((token, name, ended))
        self._by_first = {key: np.array(tokens) for key, tokens in first.items()}
        self._answers: OrderedDict[tuple[Monitor, str], _Answer] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, monitor: Monitor, text: str) -> Future[Continuations | None]:
        """What a monitor says, None for anything. A new question runs in a thread of its own.

        The last answers are kept. A failure is kept for the monitor's `seconds`, since a forward that fails is tried
        sequence by sequence, and none of them should wait again.
        """
        key = (monitor, text)
        with self._lock:
            answer = self._answers.get(key)
            if answer is None or time.monotonic() - answer.failed > monitor.seconds:
                answer = self._answers[key] = _Answer()
                threading.Thread(target=self._ask, args=(monitor, text, answer), daemon=True).start()
            self._answers.move_to_end(key)
            if len(self._answers) > _ASKED:
                self._answers.popitem(last=False)
            return answer

    def _ask(self, monitor: Monitor, text: str, answer: _Answer) -> None:
        try:
            answer.set_result(self._known(monitor, text))
        except BaseException as error:  # whatever it is, it is the request's, and not this thread's
            answer.failed = time.monotonic()
            answer.set_exception(error)

    def spelled(self, tokens: Sequence[int]) -> bytes:
        """The bytes of tokens, without ends of sequence."""
        return b"".join(map(self._texts.__getitem__, tokens))

    def open(self, text: bytes) -> tuple[bytes, bytes] | None:
        """The text up to its last mark, and the word that has begun behind it; None where no word is open."""
        found = self._open.search(text, text.rfind(b"\n") + 1)
        return None if found is None else (text[: found.start(1)], found[1])

    def goes_on(self, token: int, begun: bytes, allowed: Continuations) -> bool:
        """Whether a token may follow the beginning of a word."""
        name, ended = self._first(token)
        return bool(self._texts[token] or token in self._eos) and allowed.lets(begun + name, ended)

    def following(self, begun: bytes, allowed: Continuations) -> NDArray[np.bool_]:
        """`goes_on` for all tokens, bool [V], looked up by what could follow and not token by token."""
        mask = np.zeros(self.size, bool)
        for name, ended in [*((one, False) for one in allowed.begun), *((one, True) for one in allowed.whole)]:
            if name.startswith(begun) and (tokens := self._by_first.get((name[len(begun) :], ended))) is not None:
                mask[tokens] = True
        return mask

    def allowed(self, token: int) -> Iterator[tuple[bytes, bytes, bool]]:
        """The words behind marks within a token: the bytes before each, the word, and whether it has ended."""
        text = self._texts[token]
        return ((text[: found.start(1)], found[1], found.end() < len(text))
                for found in self._mark.finditer(text) if found.start(1) < len(text))

    def _first(self, token: int) -> tuple[bytes, bool]:
        """The bytes of the word with which a token begins, and whether the word ends in the token."""
        found = re.match(_WORD, self._texts[token])
        name = found[0] if found else b""
        return name, token in self._eos or len(name) < len(self._texts[token])

    def _known(self, monitor: Monitor, text: str) -> Continuations | None:
        """What a monitor says, less the words that the tokens cannot spell byte by byte, which would be dead ends."""
        allowed = [name.encode() for name in asked(monitor, text)]
        whole = frozenset(name for name in allowed if self._single.issuperset(name))
        begun = frozenset(name[:end] for name in whole for end in range(len(name) + 1))
        return Continuations(whole, begun) if whole else None


class Watched(Allowed):
    """The tokens that may follow what one sequence has generated, under a monitor.

    Args:
        monitor: the monitor to ask.
        vocabulary: the model's tokens, for the monitor's mark.
        prompt: the sequence's.
        patient: whether to wait for answers; else `NotYet` is raised until one has come.
    """

    def __init__(
        self, monitor: Monitor, vocabulary: MarkedTokens, prompt: Sequence[int], patient: bool = True
    ) -> None:
        self._monitor, self._vocabulary, self._prompt = monitor, vocabulary, vocabulary.spelled(prompt)
        self._patient = patient
        self._last: tuple[bytes, Tensor] | None = None

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Bool [V], read-only; Unsupported where the monitor fails."""
        text = self._text(tokens)
        if self._last is None or self._last[0] != text:
            self._last = text, torch.from_numpy(self._mask(text))
        return self._last[1]

    @override
    def awaited(self, tokens: Sequence[int]) -> Future[Any] | None:
        try:
            self(tokens)
        except NotYet as not_yet:
            return not_yet.answer
        except Unsupported:  # the call that needs the mask raises it again
            pass
        return None

    @override
    def lets(self, tokens: Sequence[int], token: int) -> bool:
        text = self._text(tokens)
        opened = self._opened(text)
        if opened is not None and not self._vocabulary.goes_on(token, *opened):
            return False
        # only the marks of this token are asked about
        found = ((self._known(text + head), name, ended) for head, name, ended in self._vocabulary.allowed(token))
        return all(allowed is None or allowed.lets(name, ended) for allowed, name, ended in found)

    @override
    def sole(self, tokens: Sequence[int]) -> int | None:
        try:  # several tokens may follow where no word is open
            return None if self._opened(self._text(tokens)) is None else super().sole(tokens)
        except NotYet:  # the answer is still on its way
            return None

    def _text(self, tokens: Sequence[int]) -> bytes:
        return self._prompt + self._vocabulary.spelled(tokens)

    def _mask(self, text: bytes) -> NDArray[np.bool_]:
        opened = self._opened(text)
        mask = np.ones(self._vocabulary.size, bool) if opened is None else self._vocabulary.following(*opened)
        for head, places in self._vocabulary.marked.items():
            places = [place for place in places if mask[place[0]]]
            if places and (allowed := self._known(text + head)) is not None:
                mask[[token for token, name, ended in places if not allowed.lets(name, ended)]] = False
        return mask

    def _opened(self, text: bytes) -> tuple[bytes, Continuations] | None:
        """The open word: its beginning, and what may come. None where a prompt began it with something else."""
        found = self._vocabulary.open(text)
        allowed = None if found is None else self._known(found[0])
        return None if found is None or allowed is None or found[1] not in allowed.begun else (found[1], allowed)

    def _known(self, text: bytes) -> Continuations | None:
        said = text.decode("utf-8", "replace")
        if not self._monitor.watches(said):
            return None
        answer = self._vocabulary.answer(self._monitor, said)
        if not (self._patient or answer.done()):
            raise NotYet(self, answer)
        return answer.result()


def asked(monitor: Monitor, text: str) -> Collection[str]:
    """The words that may follow a text by a monitor, empty for anything. Waits no longer than its `seconds`.

    Raises:
        Unsupported: it fails, takes longer, or says something other than words.
    """
    said: list[Any] = []
    thread = threading.Thread(target=_ask, args=(monitor, text, said), daemon=True)
    thread.start()
    thread.join(threading.TIMEOUT_MAX if monitor.keeps_time else min(monitor.seconds, threading.TIMEOUT_MAX))
    allowed = said[0] if said else TimeoutError(f"no answer within {monitor.seconds:g} s")
    if isinstance(allowed, BaseException):
        raise _failed(monitor, f"{type(allowed).__name__}: {allowed}") from allowed
    allowed = () if allowed is None else allowed
    is_list = isinstance(allowed, Collection) and not isinstance(allowed, str | bytes | Mapping)
    if not is_list or not all(map(_is_word, allowed)):
        raise _failed(monitor, f"it says {allowed!r:.200}, which is no collection of words")
    return allowed


def _ask(monitor: Monitor, text: str, said: list[Any]) -> None:
    try:
        said.append(monitor.follows(text))
    except BaseException as error:  # whatever it is, it is the request's, and not this thread's
        said.append(error)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and re.fullmatch(_WORD, value.encode("utf-8", "replace")) is not None


def _failed(monitor: Monitor, why: str) -> Unsupported:
    return Unsupported(f"the monitor {monitor.text}", why, "Give it more `seconds`, or leave it out")


def python_members(folder: str = "") -> Monitor:
    """Members of Python objects, those of modules in `folder` too, if it names one; Unsupported without shoal-lab."""
    if (entry := plugins(GROUP).get("python")) is None:
        raise Unsupported("members of Python objects", "what knows them comes with shoal-lab", LAB_INSTALL)
    made: Monitor = entry.load()(folder)
    return made
