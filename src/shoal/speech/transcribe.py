"""Transcripts: a window of thirty seconds after another, each with what was said before as context.

Radford et al., 2022, arXiv 2212.04356, section 4.5: a window is decoded again, at higher and higher temperatures, while
its text is improbable or repeats itself; it is silent where the model says so and its text is improbable too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.audio import RATE, Samples, Window
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.model.layers.cross_attention import Encoded
from shoal.model.runner import SequenceChunk
from shoal.speech.listening import SECONDS, STEP, Features, Listening, Times
from shoal.speech.words import Aligner, Word, placed

TASKS = ("transcribe", "translate")
FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures of OpenAI's command."""
_SURE = 0.9
"""Above this probability that nobody speaks no text is asked for: noise alone is given confident ones."""
_DOUBT = -0.5
"""The mean log-probability that a text needs where perhaps nobody speaks. OpenAI's command asks for -1, and then writes
"thanks for watching" under noise; words that were spoken hardly ever meet this bound, since the model hears a speaker.
"""
_HOT = 0.5
"""Above this temperature a text is no context for the next window."""


@dataclass(frozen=True)
class Wish:
    """How speech is to be written down.

    Attributes:
        language: its code, such as "en"; None to have it heard.
        task: "transcribe", or "translate" into English.
        timed: whether the model says when words were spoken. It then cuts windows where a sentence ends.
        prompt: words that come before the first window's, such as names that will be heard.
        temperatures: those that a window is decoded at, one after the other, until its text is good.
        most_compressed: above this ratio of a text's bytes to its compressed ones it repeats itself.
        least_likely: below this mean log-probability of its tokens a text is improbable.
        silent: above this probability that nobody speaks, a text is left out unless it is quite probable, and above 0.9
            in any case; 1 leaves out nothing.
        goes_on: whether what was said before is the context of a window.
        method: how the decoder runs, as of `shoal.Engine.generate`.
        word_times: whether it is found when each word was spoken, by one more forward for each window.

    Raises:
        ValueError: one of them is impossible.
    """

    language: str | None = None
    task: str = "transcribe"
    timed: bool = True
    prompt: str = ""
    temperatures: tuple[float, ...] = FALLBACK
    most_compressed: float = 2.4
    least_likely: float = -1.0
    silent: float = 0.6
    goes_on: bool = True
    method: Any = "full"
    word_times: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}; it must be one of {', '.join(TASKS)}")
        if not self.temperatures or not all(0 <= one < math.inf for one in self.temperatures):
            raise ValueError(f"temperatures are {self.temperatures}; they must be one or more numbers >= 0")


@dataclass(frozen=True)
class Segment:
    """Words that were spoken together.

    Attributes:
        start, end: seconds from the beginning of the audio.
        text: what was said.
        tokens: as the model wrote it, timestamps included.
        window: seconds at which its window begins.
        temperature: at which the window was decoded.
        avg_logprob: mean log-probability of the window's tokens.
        compression_ratio: of the window's text.
        no_speech_prob: the model's probability that nobody speaks in the window.
        spoken: its words, each with its time, if that was asked for.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    window: float
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    spoken: tuple[Word, ...] = ()


@dataclass(frozen=True)
class _Heard:
    """A window's answer."""

    tokens: tuple[int, ...]
    text: str
    window: float
    temperature: float
    likely: float
    compressed: float
    silence: float


class Transcriber:
    """Writes down speech with a model of Whisper's kind.

    Args:
        engine: of a model with an encoder of speech.

    Raises:
        Unsupported: the model hears nothing.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.encoder is None or engine.family != "whisper":
            raise Unsupported(f"speech with {engine.model_name or 'this model'}", "it reads text alone",
                              "Use a Whisper model, such as openai/whisper-base")
        self._engine, self._encoder, self._features = engine, engine.encoder, Features(engine.encoder.place)
        self._own = Listening.of(engine.tokenizer, engine.runner.vocab_size)
        self._aligner = Aligner(engine, self._own)
        most = engine.runner.max_positions
        assert most is not None
        self._most, self._context = most, most // 2 - 1

    @property
    def languages(self) -> Sequence[str]:
        """Codes of the languages that it tells apart; empty where it knows English alone."""
        return sorted(self._own.languages)

    def check(self, wish: Wish) -> None:
        """Refuse, by ValueError, what the model does not do."""
        known = self._own.languages
        if known and wish.language is not None and wish.language not in known:
            raise ValueError(f"language is {wish.language!r}; it must be one of {', '.join(sorted(known))}, or none, "
                             "to have it heard")
        if not known and (wish.task != "transcribe" or wish.language not in (None, "en")):
            asked = wish.task if wish.task != "transcribe" else f"language {wish.language!r}"
            raise ValueError(f"{asked} is asked for; the model writes down English and nothing else. Use a model of "
                             "several languages")

    def begin(self, pieces: Iterator[Samples], wish: Wish) -> Transcript:
        """Begin the transcript of a sound; ValueError for what the model does not do."""
        self.check(wish)
        said = self._engine.tokenizer.encode(" " + wish.prompt.strip(), add_special_tokens=False) if wish.prompt else []
        return Transcript(self, Window(pieces), wish, said)

    def hear(self, samples: Samples, course: Transcript) -> list[Segment]:
        """The segments of a window; the course moves on behind them."""
        wish = course.wish
        start, seconds = course.at / RATE, len(samples) / RATE
        features = self._features(samples)
        with self._engine.turn():  # as a forward, the encoder takes every core
            source = self._encoder(features)
        first = self._first_logits(source)
        silence = first.softmax(-1)[self._own.silence].item()
        if silence > max(_SURE, wish.silent):
            course.at += len(samples)
            return []
        heard = self._hear(source, course, first, silence)
        if heard.silence > wish.silent and heard.likely < max(wish.least_likely, _DOUBT):
            course.at += len(samples)
            return []
        found, moved = [self._segment(heard, heard.tokens, start, start + seconds)], seconds
        if wish.timed:
            found, moved = self._cut(heard, start, seconds)
        if wish.word_times:
            found = self._with_words(found, source, course, seconds)
        course.at += round((moved if moved >= STEP else seconds) * RATE)
        said = [*course.said, *(token for token in heard.tokens if token < self._own.first_time)]
        course.said = said[-self._context :] if wish.goes_on and heard.temperature <= _HOT else []
        return [one for one in found if one.text.strip()]

    def _with_words(
        self, segments: list[Segment], source: Encoded, course: Transcript, seconds: float
    ) -> list[Segment]:
        tokens = [token for one in segments for token in one.tokens if token < self._own.end]
        spoken = self._aligner.align(source, tokens, course.language, course.wish.task, course.at / RATE, seconds)
        return placed(segments, spoken, self._own.end)

    def _hear(self, source: Encoded, course: Transcript, first: Tensor, silence: float) -> _Heard:
        """The window's answer at the first temperature at which it is good, else that of the last one."""
        wish = course.wish
        if course.language is None and self._own.languages:
            codes = list(self._own.languages)
            course.language = codes[int(first[list(self._own.languages.values())].argmax())]
        before = [self._own.previous, *course.said[-self._context :]] if course.said else []
        prompt = [*before, *self._own.prompt(course.language, wish.task, wish.timed)]
        for temperature in wish.temperatures:
            heard = self._decode(source, prompt, course, temperature, silence)
            likely = heard.likely >= wish.least_likely or silence > wish.silent  # a silent window is improbable
            if likely and heard.compressed <= wish.most_compressed:
                break
        return heard

    def _decode(
        self, source: Encoded, prompt: list[int], course: Transcript, temperature: float, silence: float
    ) -> _Heard:
        wish = course.wish
        rules = [Times(self._own, len(prompt))] if wish.timed else []
        result = self._engine.generate(
            prompt, source=source, method=wish.method, temperature=temperature, logprobs=0, seed=0,
            logits_processor=rules, max_new_tokens=min(self._most // 2, self._most - len(prompt)))
        tokens = tuple(token for token in result.tokens if token != self._own.end)
        text = self._text(tokens)
        total = sum(one.logprob for one in result.logprobs or ())
        packed = zlib.compress(text.encode())
        return _Heard(tokens, text, course.at / RATE, temperature, total / (len(tokens) + 1),
                      len(text.encode()) / len(packed), silence)

    @torch.no_grad()
    def _first_logits(self, source: Encoded) -> Tensor:
        """Logits [V] of what follows the beginning of an answer: a language, or that nobody speaks."""
        engine, runner = self._engine, self._engine.runner
        cache, plan = runner.new_cache(1), DepthPlan.full(runner.num_layers)
        cache.attach(0, source)
        with engine.turn():
            return runner.forward([SequenceChunk(0, [self._own.start], [0], plan)], cache)[0].float()

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._engine.tokenizer.decode([token for token in tokens if token < self._own.end]))

    def _cut(self, heard: _Heard, start: float, seconds: float) -> tuple[list[Segment], float]:
        """Segments between timestamps, and how far the window moves: to the end of the last whole sentence."""
        tokens, first = list(heard.tokens), self._own.first_time
        times = [token >= first for token in tokens]
        pairs = [place for place in range(1, len(tokens)) if times[place - 1] and times[place]]
        alone = len(times) > 1 and times[-1] and not times[-2]
        found, began = list[Segment](), 0
        for end in [*pairs, *([len(tokens)] if alone else [])]:
            part = tokens[began:end]
            if part and times[began] and times[end - 1]:
                low, high = ((token - first) * STEP for token in (part[0], part[-1]))
                found.append(self._segment(heard, part, start + low, start + high))
            began = end
        if found and not alone and pairs:
            return found, min(seconds, (tokens[pairs[-1] - 1] - first) * STEP)
        if not found:
            last = [token for token, time in zip(tokens, times, strict=True) if time]
            until = (last[-1] - first) * STEP if last and last[-1] > first else seconds
            found.append(self._segment(heard, tokens, start, start + min(until, seconds)))
        return found, seconds

    def _segment(self, heard: _Heard, tokens: Sequence[int], start: float, end: float) -> Segment:
        return Segment(round(start, 2), round(end, 2), self._text(tokens), tuple(tokens), heard.window,
                       heard.temperature, heard.likely, heard.compressed, heard.silence)


@dataclass
class Transcript:
    """A transcript in the making.

    Attributes:
        wish: how it is written.
        said: tokens before those of the next window, as far as they are its context.
        language: its code, once it is known.
        at: the sample at which the next window begins.
    """

    transcriber: Transcriber
    window: Window
    wish: Wish
    said: list[int]
    language: str | None = None
    at: int = 0

    def __post_init__(self) -> None:
        self.language = self.wish.language

    @property
    def heard(self) -> int:
        """Samples that were heard so far."""
        return min(self.at, self.window.known)

    def segments(self) -> Iterator[Segment]:
        """The segments, each as soon as its window is heard."""
        while len(samples := self.window.at(self.at, SECONDS * RATE)):
            yield from self.transcriber.hear(samples, self)
