"""Windows of a sound: what is context of the next one, what is decoded again, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.audio import RATE, Samples
from shoal.engine.engine import Engine
from shoal.speech.listening import SECONDS
from shoal.speech.transcribe import FALLBACK, Transcriber, Wish
from whispers import tokenizer, tone, whisper, write

KNOWN = tokenizer().get_added_vocab()
START, PREVIOUS, END = (KNOWN[f"<|{name}|>"] for name in ("startoftranscript", "startofprev", "endoftext"))
FIRST, SILENCE = KNOWN["<|0.00|>"], KNOWN["<|nospeech|>"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return shoal.load(write(tmp_path_factory.mktemp("whisper") / "model", whisper(2)))


def sound(seconds: float) -> Iterator[Samples]:
    yield tone(seconds).astype(np.float32) / 32768


class Said:
    """Stands for a model: its answers, one after another, and the prompts and temperatures that it was given."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, answers: Sequence[tuple[list[int], float]],
                 silence: float = 0.0) -> None:
        self.prompts, self.temperatures, self._answers = list[list[int]](), list[float](), iter(answers)
        patch.setattr(engine, "generate", self._generate)
        logits = torch.full((engine.runner.vocab_size,), -1e9)
        logits[[SILENCE, FIRST]] = torch.tensor([silence, 1 - silence]).clamp_min(1e-9).log()
        patch.setattr(Transcriber, "_first_logits", lambda *_: logits)

    def _generate(self, prompt: list[int], **asked: Any) -> Any:
        self.prompts.append(prompt)
        self.temperatures.append(asked["temperature"])
        tokens, likely = next(self._answers)
        logs = [type("Log", (), {"logprob": likely})] * (len(tokens) + 1)
        return type("Result", (), {"tokens": (*tokens, END), "logprobs": logs})


def heard(engine: Engine, seconds: float, **wish: Any) -> list[tuple[float, float, str]]:
    course = Transcriber(engine).begin(sound(seconds), Wish(**wish))
    return [(one.start, one.end, one.text) for one in course.segments()]


def at(seconds: float) -> int:
    return FIRST + round(seconds / 0.02)


def spelled(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def test_a_window_moves_to_the_end_of_its_last_whole_sentence(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(engine, monkeypatch, [
        ([at(0), *spelled(" One."), at(4), at(5), *spelled(" Two."), at(20), at(20), *spelled(" Thr")], 0.0),
        ([at(0), *spelled(" Three."), at(9)], 0.0), ([at(1), *spelled(" Four."), at(3)], 0.0)])
    assert heard(engine, 57.0) == [(0.0, 4.0, " One."), (5.0, 20.0, " Two."), (20.0, 29.0, " Three."),
                                   (51.0, 53.0, " Four.")]
    words = [spelled(" One. Two. Thr"), spelled(" Three.")]
    assert said.prompts == [[START], [PREVIOUS, *words[0], START], [PREVIOUS, *words[0], *words[1], START]]


def test_words_without_times_last_as_long_as_the_window(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    Said(engine, monkeypatch, [([at(0), *spelled(" One")], 0.0), ([at(2), *spelled(" Two")], 0.0)])
    assert heard(engine, 42.0) == [(0.0, 30.0, " One"), (30.0, 32.0, " Two")]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_prompt_and_what_was_said_are_context_unless_nothing_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    said = Said(engine, monkeypatch, [([at(0), *spelled(f" {name}."), at(29)], 0.0) for name in ("A", "B")])
    heard(engine, 45.0, prompt="Ann", goes_on=goes_on)
    after = [PREVIOUS, *spelled(" Ann"), *spelled(" A."), START] if goes_on else [START]
    assert said.prompts == [[PREVIOUS, *spelled(" Ann"), START], after]


def test_context_is_at_most_half_of_what_the_decoder_holds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(engine, monkeypatch, [([at(0), *spelled(" A."), at(9)], 0.0)])
    heard(engine, 10.0, prompt="word " * 100)
    assert len(said.prompts[0]) == 96 // 2 - 1 + 2


def test_a_bad_text_is_decoded_again_hotter_and_is_no_context(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    again = [at(0), *spelled(" ha" * 40), at(9)]
    good, after = [at(0), *spelled(" Good."), at(29)], [at(0), *spelled(" B."), at(3)]
    said = Said(engine, monkeypatch, [([at(0), *spelled(" A."), at(9)], -2.0), *[(again, 0.0)] * 3, (good, -0.1),
                                      (after, 0.0)])
    assert heard(engine, 35.0) == [(0.0, 29.0, " Good."), (30.0, 33.0, " B.")]
    assert said.temperatures == [*FALLBACK[:5], 0.0] and said.prompts[-1] == [START]
    worst = Said(engine, monkeypatch, [([at(0), *spelled(" A."), at(9)], -2.0)] * 2)
    assert heard(engine, 10.0, temperatures=(0.0, 0.4)) == [(0.0, 9.0, " A.")] and worst.temperatures == [0.0, 0.4]


@pytest.mark.parametrize(("silence", "likely", "wish", "kept"), [
    (0.95, 0.0, {}, False), (0.95, 0.0, {"silent": 1.0}, True), (0.7, -0.6, {}, False), (0.7, -0.4, {}, True),
    (0.7, -0.6, {"silent": 0.8}, True), (0.5, -0.9, {}, True)])
def test_where_nobody_speaks_no_text_is_made_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, silence: float, likely: float, wish: dict[str, Any], kept: bool
) -> None:
    said = Said(engine, monkeypatch, [([at(0), *spelled(" Thanks."), at(9)], likely)], silence)
    assert bool(heard(engine, 10.0, temperatures=(0.0,), **wish)) == kept
    assert len(said.prompts) == (silence <= 0.9 or "silent" in wish)


def test_an_hour_holds_no_more_than_a_window(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ([at(0), *spelled(f" {number}."), at(29)] for number in range(1000))
    Said(engine, monkeypatch, ((answer, 0.0) for answer in answers))  # type: ignore[arg-type]
    pieces = (np.zeros(RATE, np.float32) for _ in range(3600))
    course, most = Transcriber(engine).begin(pieces, Wish()), 0
    for count, one in enumerate(course.segments()):
        most = max(most, len(course.window._held))
        assert one.text == f" {count}."
    assert count == 119 and most <= (SECONDS + 1) * RATE and len(course.said) <= 47
    assert course.heard == 3600 * RATE


def test_equal_sounds_give_equal_segments(engine: Engine) -> None:
    transcriber = Transcriber(engine)
    runs = [[*transcriber.begin(sound(2.0), Wish(temperatures=(0.4,))).segments()] for _ in range(2)]
    assert runs[0] == runs[1] and replace(runs[0][0], text="") != runs[0][0]
