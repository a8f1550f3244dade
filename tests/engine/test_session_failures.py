"""Whatever went wrong in a chat, and however its transcript was changed, the next answer is that of a new one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chat_tokenizer import SPECIALS, chat_tokenizer
from drive import Seen, gap
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.session import Session
from shoal.methods.d3 import D3
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.hf import HFRunner
from shoal.model.kv.layer import KVLayer
from turns import by_turns

WORDS = chat_tokenizer()
LETTERS_ONLY = dict.fromkeys(range(len(SPECIALS)), -1e4)
METHODS: tuple[Any, ...] = (
    "full",
    D3(alpha=0.8, core=2),
    D3(alpha=0.7, core=2, start=4),
    D3(alpha=0.8, core=1, order="high_first"),
    PromptLookup(),
)
TEXTS = ("Hi", "Hello there", "Hello then", "and 2+2?", "Hello there, Hello there, Hello", "x" * 40)
SYSTEMS = (None, "Be brief", "Be kind")
NEW = 7


class BrokenError(Exception):
    """What the tests raise inside a turn."""


@dataclass(frozen=True)
class Turn:
    """A question, and in which of the `ENDS` its answer ends; `at` says how far it gets."""

    text: str
    method: int
    end: str
    at: int


@dataclass(frozen=True)
class Cut:
    """The transcript goes back to its first `kept` messages."""

    kept: int


@dataclass(frozen=True)
class Swap:
    """Another transcript: a system prompt or none, then one exchange."""

    system: str | None
    question: str
    answer: str


@contextmanager
def breaking_layers(at: int, error: type[BaseException]) -> Iterator[None]:
    """The write to a layer's KV that is number `at` from now on raises when it is done."""
    calls, write = itertools.count(1), KVLayer.append

    def append(layer: KVLayer, *args: Any) -> tuple[Tensor, Tensor]:
        out = write(layer, *args)
        if next(calls) == at:
            raise error
        return out

    KVLayer.append = append  # type: ignore[method-assign]
    try:
        yield
    finally:
        KVLayer.append = write  # type: ignore[method-assign]


def breaking_logits(at: int) -> Callable[[Tensor, Tensor], Tensor]:
    calls = itertools.count(1)

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        if next(calls) == at:
            raise BrokenError
        return scores

    return process


def whole(chat: Session, turn: Turn) -> None:
    chat.send(turn.text, method=METHODS[turn.method])


def layer_fails(chat: Session, turn: Turn, error: type[BaseException] = BrokenError) -> None:
    with breaking_layers(5 * turn.at, error):
        try:
            chat.send(turn.text, method=METHODS[turn.method])
        except (BrokenError, KeyboardInterrupt):
            return


def interrupted(chat: Session, turn: Turn) -> None:
    layer_fails(chat, turn, KeyboardInterrupt)


def processor_fails(chat: Session, turn: Turn) -> None:
    try:
        chat.send(turn.text, method=METHODS[turn.method], logits_processor=[breaking_logits(turn.at)])
    except BrokenError:
        return


def closed(chat: Session, turn: Turn) -> None:
    with chat.stream(turn.text, method=METHODS[turn.method]) as answer:
        list(itertools.islice(answer, turn.at - 1))


def left(chat: Session, turn: Turn) -> None:
    list(itertools.islice(chat.stream(turn.text, method=METHODS[turn.method]), turn.at - 1))


def refused(chat: Session, turn: Turn) -> None:
    with pytest.raises(ValueError, match="context"):
        chat.send(turn.text * 600, method=METHODS[turn.method])


ENDS: dict[str, Callable[[Session, Turn], None]] = {
    "whole": whole,
    "layer fails": layer_fails,
    "interrupted": interrupted,
    "processor fails": processor_fails,
    "closed": closed,
    "left": left,
    "refused": refused,
}

texts = st.sampled_from(TEXTS)
turns = st.builds(Turn, texts, st.integers(0, len(METHODS) - 1), st.sampled_from(sorted(ENDS)), st.integers(1, NEW + 2))
cuts = st.builds(Cut, st.integers(0, 6))
swaps = st.builds(Swap, st.sampled_from(SYSTEMS), texts, texts)
deeds = st.lists(st.one_of(turns, turns, turns, cuts, swaps), min_size=1, max_size=7)


def do(chat: Session, deed: Turn | Cut | Swap) -> None:
    if isinstance(deed, Turn):
        ENDS[deed.end](chat, deed)
    elif isinstance(deed, Cut):
        chat.messages = chat.messages[: deed.kept]
    else:
        system = [{"role": "system", "content": deed.system}] if deed.system else []
        said = (("user", deed.question), ("assistant", deed.answer))
        chat.messages = [*system, *({"role": role, "content": text} for role, text in said)]


def check(chat: Session, engine: Engine, question: str, method: Any) -> None:
    """The chat's next answer and its logits are those of a session that begins with the same transcript.

    transformers' own norms round float64 to float32: there a last bit that differs may become one of float32.
    """
    close = 1e-5 if isinstance(engine.runner, HFRunner) else 1e-9
    if chat._last is not None:
        chat._last.close()  # as the chat would itself, but before its transcript is copied
    new = engine.session(**chat._options)
    new.messages = list(chat.messages)
    seen = [Seen(), Seen()]
    both = zip((chat, new), seen, strict=True)
    answers = [one.send(question, method=method, logits_processor=[watch]) for one, watch in both]
    assert answers[0].tokens == answers[1].tokens
    assert gap(torch.stack(seen[0].logits), torch.stack(seen[1].logits)) <= close
    assert chat.messages == new.messages


@pytest.mark.slow
@by_turns("family, backend", ["llama", "mistral", "hybrid"], ["hf", "packed"])
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@example(history=[Turn("Hello there", 0, "whole", 1), Cut(0), Turn("x" * 40, 0, "layer fails", 2)], method=0)
@example(history=[Turn("Hello there", 1, "left", 6), Swap(None, "Hello then", "Hi")], method=1)
@given(history=deeds, method=st.integers(0, len(METHODS) - 1))
def test_the_next_answer_is_that_of_a_new_session(
    family: str, backend: Any, history: list[Turn | Cut | Swap], method: int
) -> None:
    engine = engine_for(tiny(family), WORDS, backend=backend)
    chat = engine.session(max_new_tokens=NEW, logit_bias=LETTERS_ONLY)
    for deed in history:
        do(chat, deed)
        assert len(chat._cached) <= chat._cache.positions[0]
    for question in ("Hello there", "so"):
        check(chat, engine, question, METHODS[method])
