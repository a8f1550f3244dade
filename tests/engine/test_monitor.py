"""Monitors: masks against a walk over every token's text, drafts under them, and monitors that fail."""

from __future__ import annotations

import functools
import random
import re
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import shoal
from chat_tokenizer import MARKS_FIRST, chat_tokenizer
from families import tiny
from shared_models import load_tokenizer
from shoal import Monitor, Regex, methods
from shoal.engine.constraints import monitor
from shoal.engine.constraints.monitor import MarkedTokens, Watched
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.d3_spec import D3Spec
from shoal.methods.prompt_lookup import PromptLookup
from toy_tokenizers import tokenizer

EOS = 2
WORDS = {"x": ["ab", "abc", "b", "é"], "b": ["a", "_1"], "ab": ["x"], "": ["b"]}
"""What follows a dot, by the word before it; anything behind other words."""
PIECES = [b"", b"<unk>", b"", *(bytes([byte]) for byte in range(256)), b"x.", b"x.ab", b".ab", b"b.a.x", b"ab", b"abc(",
          b"c.b", b"..", b".", b". ", b").x.b", b"ab\n", b"\xc3\xa9.", b".\xc3", b"bc", b"x.ab.x y", b" x", b"ab."]


@dataclass(frozen=True)
class Table(Monitor):
    """Knows what stands in a table, by the word before the mark; with `rest`, the empty word is every other one."""

    mark: ClassVar[str] = "."
    rest: bool = False

    def follows(self, text: str) -> Collection[str] | None:
        word = re.search(r"\w*\.\Z", text)[0][:-1]  # type: ignore[index]
        return WORDS.get(word, WORDS[""] if self.rest else None)


def slowly(vocabulary: Sequence[bytes], text: bytes, monitor: Monitor) -> list[bool]:
    """The law, token by token: each word behind a mark that a token touches is one that the monitor lets be."""

    def lets(token: int, piece: bytes) -> bool:
        whole, eos = text + piece, token == EOS
        for place in (place for place, byte in enumerate(whole) if byte == ord(monitor.mark)):
            end = next((at for at in range(place + 1, len(whole)) if not _is_word(whole[at])), len(whole))
            words = monitor.follows(whole[: place + 1].decode("utf-8", "replace")) if end >= len(text) else None
            if words is None or not any(word.encode().startswith(text[place + 1 :]) for word in words):
                continue
            said, ended = whole[place + 1 : end], end < len(whole) or eos
            fits = any(said == word.encode() if ended else word.encode().startswith(said) for word in words)
            if not fits or not piece and not eos:
                return False
        return True

    return [lets(token, b"" if token == EOS else piece) for token, piece in enumerate(vocabulary)]


def _is_word(byte: int) -> bool:
    return byte >= 128 or chr(byte).isalnum() or byte == ord("_")


def pieces_of(name: str) -> list[bytes]:
    if name == "pieces":
        return PIECES
    words = load_tokenizer("shoal-reference") if name == "reference" else tokenizer(name)
    made = engine_for(tiny("llama", vocab_size=len(words), layers=2), words)
    made.eos_token_ids = frozenset({EOS})
    return [made.constraints._words.decode_bytes([token]) for token in range(len(words))]


@pytest.mark.parametrize("name", ["pieces", "byte_level", "byte_fallback", "reference"])
def test_masks_are_those_of_a_walk_over_every_token(name: str) -> None:
    pieces, dice, bound = pieces_of(name), random.Random(4), 0
    vocabulary, monitor = MarkedTokens(pieces, frozenset({EOS}), "."), Table()
    spelled = {piece: token for token, piece in enumerate(pieces) if len(piece) == 1}
    for start in (b"", b"x.", b"x.a", b"x.q", b"y.", b"\n b.a", b"x.ab", b"x. ab.", b"b.\xc3", b"x.\xc3"):
        if any(bytes([byte]) not in spelled for byte in start):
            continue
        watched = Watched(monitor, vocabulary, [spelled[bytes([byte])] for byte in start])
        tokens: list[int] = []
        for _ in range(8 if len(pieces) < 1000 else 3):
            text = vocabulary.spelled([*(spelled[bytes([byte])] for byte in start), *tokens])
            wanted = slowly(pieces, text, monitor)
            mask = watched(tokens)
            assert mask.tolist() == wanted, text
            some = dice.sample(range(len(pieces)), 40)
            assert [watched.lets(tokens, token) for token in some] == [wanted[token] for token in some]
            sole = watched.sole(tokens)
            assert sole is None or [token for token, one in enumerate(wanted) if one] == [sole]
            bound += not all(wanted)
            lively = [token for token in mask.nonzero().flatten().tolist() if set(b".xab\xc3") & set(pieces[token])]
            tokens.append(dice.choice(lively or mask.nonzero().flatten().tolist()))
    assert bound > 3


def test_words_that_the_tokens_cannot_spell_are_no_dead_end() -> None:
    few = [b"", b"", b"", b"x", b".", b"a", b"ab", b"b", b"("]
    watched = Watched(Table(), MarkedTokens(few, frozenset({EOS}), "."), [3, 4])
    assert watched([]).nonzero().flatten().tolist() == [5, 6, 7]
    assert watched([6]).nonzero().flatten().tolist() == [EOS, 4, 8]  # neither "abc" nor "é"
    assert Watched(Table(), MarkedTokens(few[:5], frozenset({EOS}), "."), [3, 4])([]).all()


@functools.cache
def engine() -> Engine:
    words = chat_tokenizer(MARKS_FIRST)
    made = engine_for(tiny("llama", layers=2), words)
    made.eos_token_ids = frozenset({EOS})
    return made


class Silent(Monitor):
    def follows(self, text: str) -> None:
        return None


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 5}], ids=["greedy", "sampled"])
def test_what_nothing_is_known_of_is_bit_equal_to_plain_decoding(options: dict[str, Any]) -> None:
    plain, watched = (engine().generate("x.y", max_new_tokens=60, logprobs=3, ignore_eos=True, **options, **more)
                      for more in ({}, {"constraint": Silent()}))
    assert (plain.tokens, plain.logprobs) == (watched.tokens, watched.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [PromptLookup(min_ngram=1), D3Spec()], ids=lambda method: method.name)
def test_drafts_give_what_plain_decoding_does_and_every_word_is_known(method: Any, options: dict[str, Any]) -> None:
    found, prompt = 0, "ab.x x.ab y.b b.a x."
    for seed in range(8):
        given = {"constraint": Table(rest=True), "max_new_tokens": 80, "seed": seed, "logit_bias": {8: 6.0}, **options}
        plain = engine().generate(prompt, **given)
        assert engine().generate(prompt, method=method, **given).tokens == plain.tokens
        whole = prompt + plain.text
        for said in re.finditer(r"\.(\w*)", whole):
            words = WORDS.get(re.search(r"\w*\Z", whole[: said.start()])[0], WORDS[""])  # type: ignore[index]
            assert said[1] in words if said.end() < len(whole) else any(word.startswith(said[1]) for word in words)
            found += said.start() >= len(prompt)
    assert found > 8


class Failing(Monitor):
    """Does what it is told once it is asked."""

    seconds = 0.3

    def __init__(self, does: Any) -> None:
        self.does = does

    def follows(self, text: str) -> Any:
        return self.does()


def _raise() -> None:
    raise KeyError("lost")


WRONG: dict[str, tuple[Any, str]] = {
    "raises": (_raise, "KeyError: 'lost'"),
    "hangs": (functools.partial(threading.Event().wait, 3), "TimeoutError: no answer within 0.3 s"),
    **{f"says {what!r}": (functools.partial(type(what), what), "no collection of words")
       for what in ("abc", (1,), ["a b"], [""], {"a": 1}, 5)},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_monitor_that_fails_is_named_and_no_other_request_is_touched(name: str) -> None:
    does, words = WRONG[name]
    with Scheduler(engine()) as scheduler:
        good = [scheduler.submit("x.", constraint=one, max_new_tokens=20) for one in (None, Table(), Regex("[ab]{9}"))]
        bad = scheduler.submit("x.", constraint=Failing(does), max_new_tokens=20)
        with pytest.raises(Unsupported, match=f"the monitor .*{words}.*leave it out"):
            list(bad)
        for handle, one in zip(good, (None, Table(), Regex("[ab]{9}")), strict=True):
            list(handle)
            assert handle.results[0].tokens == engine().generate("x.", constraint=one, max_new_tokens=20).tokens


def test_a_monitor_that_has_failed_is_asked_again_after_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], list[float]()
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def does() -> list[str]:
        asked.append(clock[0])
        return ["a b"] if clock[0] < 2 else ["ab"]

    failing = Failing(does)
    for clock[0] in (0.0, 0.29, 0.5):
        with Scheduler(engine()) as scheduler, pytest.raises(Unsupported, match="no collection of words"):
            list(scheduler.submit("x.", constraint=failing, max_new_tokens=2))
    clock[0] = 2.0
    assert engine().generate("x.", constraint=failing, max_new_tokens=2).text.startswith("a")
    assert asked == [0.0, 0.5, 2.0], "once for a forward and its rows one by one"


@pytest.mark.parametrize("seconds", [1e10, float("inf")])
def test_a_monitor_may_have_any_time(seconds: float) -> None:
    patient = Failing(lambda: ["ab"])
    patient.seconds = seconds
    assert monitor.asked(patient, "x.") == ["ab"]


def test_members_without_the_lab_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_entries", lambda *_: {})
    monkeypatch.delitem(vars(shoal), "PythonMembers", raising=False)
    with pytest.raises(Unsupported, match="comes with shoal-lab. pip install shoal-lab"):
        monitor.python_members(".")
    with pytest.raises(AttributeError, match="PythonMembers"):
        _ = shoal.PythonMembers


def test_each_row_of_a_batch_has_its_own() -> None:
    given = [Table(), None, Regex("[ab]{3}")]
    results = engine().generate(["x."] * 3, constraint=given, max_new_tokens=12)
    assert [one.tokens for one in results] == [
        engine().generate("x.", constraint=one, max_new_tokens=12).tokens for one in given
    ]
    assert re.match("(ab|abc|b)(?!\\w)", results[0].text)


@pytest.mark.parametrize("mark", ["", "ab", "a", "_", "é"])
def test_marks_are_single_characters_and_no_letters(mark: str) -> None:
    with pytest.raises(ValueError, match="must be one character of ASCII"):
        engine().generate("x", constraint=type("Odd", (Silent,), {"mark": mark})())


def test_another_mark() -> None:
    class Colour(Monitor):
        mark = "="

        def follows(self, text: str) -> Collection[str] | None:
            return ["red", "blue"] if text.endswith("colour=") else None

    for seed in range(4):
        text = engine().generate("colour=", constraint=Colour(), temperature=1.0, seed=seed, max_new_tokens=12).text
        assert re.match(r"(red|blue)(?!\w)", text)


def test_models_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(Unsupported, match="no tokenizer"):
        engine_for(tiny("llama", layers=2, dtype=torch.float32)).generate([5], constraint=Silent())
