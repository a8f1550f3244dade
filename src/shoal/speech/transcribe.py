"""Transcripts: windows of thirty seconds, each with what was said before as context, or heard by itself.

Radford et al., 2022, arXiv 2212.04356, section 4.5: a window is decoded again, at higher and higher temperatures, while
its text is improbable or repeats itself; it is silent where the model says so and its text is improbable too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.audio import RATE, Samples, Window, quietest
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.model.layers.cross_attention import Encoded
from shoal.model.runner import SequenceChunk
from shoal.speech import drafts
from shoal.speech.listening import SECONDS, STEP, Features, Listening, Speller, Times
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
_LATE = 20 * RATE
"""Samples of a window after which it is cut where it is quietest."""
_GREEDY = 0.0
"""The temperature at which windows are decoded together: drawn tokens depend on a sequence's number."""


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
        apart: whether windows are cut at quiet places, so that each is heard by itself and several at a time.
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
    apart: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}; it must be one of {', '.join(TASKS)}")
        if not self.temperatures or not all(0 <= one < math.inf for one in self.temperatures):
            raise ValueError(f"temperatures are {self.temperatures}; they must be one or more numbers >= 0")
        if self.apart and self.goes_on:
            raise ValueError("apart is True, and so is goes_on; windows that are heard by themselves have no context")


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


@dataclass
class Passage:
    """A window of a sound, from sample `at` on."""

    course: Transcript
    samples: Samples
    at: int

    @property
    def start(self) -> float:
        """Seconds at which it begins."""
        return self.at / RATE

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / RATE


@dataclass
class _Question:
    """A window that somebody speaks in, and what the decoder is asked."""

    piece: Passage
    source: Encoded
    silence: float
    prompt: list[int]
    said: list[int]
    heard: _Heard | None = None


class Transcriber:
    """Writes down speech with a model of Whisper's kind.

    Args:
        engine: of a model with an encoder of speech.
        draft: of a smaller one, which hears each window first: its words are guessed, whatever its tokens are.

    Raises:
        Unsupported: the model hears nothing.
    """

    def __init__(self, engine: Engine, draft: Transcriber | None = None) -> None:
        if engine.encoder is None or engine.family != "whisper":
            raise Unsupported(f"speech with {engine.model_name or 'this model'}", "it reads text alone",
                              "Use a Whisper model, such as openai/whisper-base")
        self._engine, self._encoder, self._features = engine, engine.encoder, Features(engine.encoder.place)
        self._own = Listening.of(engine.tokenizer, engine.runner.vocab_size)
        self._aligner, self._draft = Aligner(engine, self._own), draft
        most = engine.runner.max_positions
        assert most is not None
        self._most, self._context = most, most // 2 - 1
        self._spelled = Speller(engine.tokenizer)
        self._translation = None if draft is None else drafts.Translation(
            draft._engine.tokenizer, draft._own, engine.tokenizer, self._own)

    @property
    def languages(self) -> Sequence[str]:
        """Codes of the languages that it tells apart; empty where it knows English alone."""
        return sorted(self._own.languages)

    def check(self, wish: Wish, size: int = 1) -> None:
        """Refuse, by ValueError, what the model does not do, or does not do with `size` windows at a time."""
        known = self._own.languages
        if known and wish.language is not None and wish.language not in known:
            raise ValueError(f"language is {wish.language!r}; it must be one of {', '.join(sorted(known))}, or none, "
                             "to have it heard")
        if not known and (wish.task != "transcribe" or wish.language not in (None, "en")):
            asked = wish.task if wish.task != "transcribe" else f"language {wish.language!r}"
            raise ValueError(f"{asked} is asked for; the model writes down English and nothing else. Use a model of "
                             "several languages")
        if size < 1:
            raise ValueError(f"the batch size is {size}; it must be at least 1 window at a time")
        if self._engine.limit is not None and size > 1:
            self._engine.limit.check_weights(f"{size} windows at a time", size * self._encoder.source_bytes)
        if self._draft is not None:
            if (name := make(wish.method).name) != "full":
                raise ValueError(f"method is {name!r} beside a smaller model that drafts; leave one of them out")
            self._draft.check(wish)

    def begin(self, pieces: Iterator[Samples], wish: Wish) -> Transcript:
        """Begin the transcript of a sound; ValueError for what the model does not do."""
        self.check(wish)
        return Transcript(self, Window(pieces), wish, self._spelled(" " + wish.prompt.strip()) if wish.prompt else [])

    def together(
        self, sounds: Iterable[Iterator[Samples]], wish: Wish, size: int
    ) -> Iterator[tuple[int, Transcript, list[Segment]]]:
        """The segments of several sounds, of which at most `size` windows are decoded at a time.

        No word depends on the others. A sound is begun when there is room for it.

        Yields:
            The number of a sound, its transcript, and the segments of its next window, or none once it has ended.
        """
        self.check(wish, size)
        waiting, active = enumerate(sounds), dict[int, Transcript]()
        while True:
            while len(active) < size and (new := next(waiting, None)) is not None:
                active[new[0]] = self.begin(new[1], wish)
            if not active:
                return
            pieces, courses = list[tuple[int, Passage]](), list(active.items())
            for place, (number, course) in enumerate(courses):
                own = course.take((size - len(pieces)) // (len(courses) - place))
                pieces += [(number, piece) for piece in own]
                if not own:
                    del active[number]
                    yield number, course, []
            for (number, piece), found in zip(pieces, self.hear([piece for _, piece in pieces]), strict=True):
                yield number, piece.course, found

    def hear(self, pieces: Sequence[Passage]) -> list[list[Segment]]:
        """The segments of windows, of one wish, that do not depend on each other; their courses move on behind them."""
        asked = [self._listen(piece) for piece in pieces]
        self._answer([one for one in asked if one is not None])
        return [[] if one is None else self._written(one) for one in asked]

    def _listen(self, piece: Passage) -> _Question | None:
        """What the decoder is asked about a window; None, and the course moves on, where nobody speaks."""
        course, wish = piece.course, piece.course.wish
        features = self._features(piece.samples)
        with self._engine.turn():  # as a forward, the encoder takes every core
            source = self._encoder(features)
        first = self._first_logits(source)
        silence = first.softmax(-1)[self._own.silence].item()
        if silence > max(_SURE, wish.silent):
            course.pass_by(piece)
            return None
        if course.language is None and self._own.languages:
            codes = list(self._own.languages)
            course.language = codes[int(first[list(self._own.languages.values())].argmax())]
        said = course.said[-self._context :]
        if wish.apart:
            course.said = []
        before = [self._own.previous, *said] if said else []
        asked = self._own.prompt(course.language, wish.task, wish.timed)
        return _Question(piece, source, silence, [*before, *asked], said)

    def _written(self, asked: _Question) -> list[Segment]:
        """The segments of a window's answer; its course moves on."""
        piece, course, wish, heard = asked.piece, asked.piece.course, asked.piece.course.wish, asked.heard
        assert heard is not None
        start, seconds = piece.start, piece.seconds
        if heard.silence > wish.silent and heard.likely < max(wish.least_likely, _DOUBT):
            course.pass_by(piece)
            return []
        found, moved = [self._segment(heard, heard.tokens, start, start + seconds)], seconds
        if wish.timed:
            found, moved = self._cut(heard, start, seconds, wish.apart)
        if wish.word_times:
            found = self._with_words(found, asked)
        if not wish.apart:
            course.at += round((moved if moved >= STEP else seconds) * RATE)
            said = [*course.said, *(token for token in heard.tokens if token < self._own.end)]
            course.said = said[-self._context :] if wish.goes_on and heard.temperature <= _HOT else []
        return [one for one in found if one.text.strip()]

    def _with_words(self, segments: list[Segment], asked: _Question) -> list[Segment]:
        piece, tokens = asked.piece, [token for one in segments for token in one.tokens if token < self._own.end]
        spoken = self._aligner.align(asked.source, tokens, piece.course.language, piece.course.wish.task, piece.start,
                                     piece.seconds)
        return placed(segments, spoken, self._own.end)

    def _answer(self, asked: Sequence[_Question]) -> None:
        """Each window's answer at the first temperature at which it is good, else that of the last one."""
        if not asked:
            return
        wish, doubtful = asked[0].piece.course.wish, list(asked)
        for temperature in wish.temperatures:
            self._decode(doubtful, wish, temperature)
            doubtful = [one for one in doubtful if not self._good(one, wish)]
            if not doubtful:
                return

    def _good(self, asked: _Question, wish: Wish) -> bool:
        assert asked.heard is not None
        likely = asked.heard.likely >= wish.least_likely or asked.silence > wish.silent  # such ones are improbable
        return likely and asked.heard.compressed <= wish.most_compressed

    def _decode(self, asked: Sequence[_Question], wish: Wish, temperature: float) -> None:
        """Decode windows at a temperature, together where that changes nothing."""
        size = len(self._own.prompt(next(iter(self._own.languages), None), wish.task, wish.timed))
        options: dict[str, Any] = {
            "method": wish.method, "temperature": temperature, "logprobs": 0, "seed": 0,
            "logits_processor": [Times(self._own, size)] if wish.timed else [], "max_new_tokens": self._most // 2}
        if temperature == _GREEDY and self._draft is not None:
            options["method"] = drafts.HeardBefore(proposer=self._guessed(asked, wish))
        if temperature == _GREEDY and len(asked) > 1:
            results = self._engine.generate([one.prompt for one in asked], source=[one.source for one in asked],
                                            **options)
        else:
            results = [self._engine.generate(one.prompt, source=one.source, **options) for one in asked]
        for one, result in zip(asked, results, strict=True):
            one.heard = self._heard(one, result, temperature)

    def _heard(self, asked: _Question, result: Any, temperature: float) -> _Heard:
        tokens = tuple(token for token in result.tokens if token != self._own.end)
        text = self._text(tokens)
        total = sum(one.logprob for one in result.logprobs or ())
        packed = zlib.compress(text.encode())
        return _Heard(tokens, text, asked.piece.start, temperature, total / (len(tokens) + 1),
                      len(text.encode()) / len(packed), asked.silence)

    def _guessed(self, asked: Sequence[_Question], wish: Wish) -> drafts.Following:
        """What the smaller model hears in windows of a language that it knows, in this one's tokens."""
        draft, translation, texts = self._draft, self._translation, dict[str, list[int]]()
        assert draft is not None and translation is not None
        own = draft._own
        known = [one for one in asked if (one.piece.course.language or "en") in (own.languages or ("en",))]
        prompts, sources = list[list[int]](), list[Encoded]()
        for one in known:
            said = translation.smaller(one.said)[-draft._context :] if one.said else []
            begins = [*own.prompt(one.piece.course.language, wish.task, wish.timed), *[own.first_time] * wish.timed]
            prompts.append([*([own.previous, *said] if said else []), *begins])
            features = draft._features(one.piece.samples)
            with draft._engine.turn():
                sources.append(draft._encoder(features))
        answers = drafts.greedy(draft._engine, prompts, sources, draft._most // 2) if known else []
        for one, answer in zip(known, answers, strict=True):
            tokens = [*[own.first_time] * wish.timed, *(token for token in answer if token != own.end)]
            texts[one.source.name] = [*translation.larger(tokens, wish.timed), self._own.end]
        return drafts.Following(texts)

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

    def _cut(self, heard: _Heard, start: float, seconds: float, apart: bool) -> tuple[list[Segment], float]:
        """Segments between timestamps, and how far the window moves: to the end of the last whole sentence.

        Where windows are heard `apart`, the last one need not be whole.
        """
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
        if apart and found and not alone and began < len(tokens):
            low = (tokens[began] - first) * STEP if times[began] else found[-1].end - start
            found.append(self._segment(heard, tokens[began:], start + min(low, seconds), start + seconds))
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
        ended: whether there is none.
    """

    transcriber: Transcriber
    window: Window
    wish: Wish
    said: list[int]
    language: str | None = None
    at: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.language = self.wish.language

    @property
    def heard(self) -> int:
        """Samples that were heard so far."""
        return min(self.at, self.window.known)

    def take(self, most: int = 1) -> list[Passage]:
        """The next windows, at most `most` where they are heard apart, else one; none at the end."""
        found = list[Passage]()
        while len(found) < (most if self.wish.apart else 1) and len(samples := self.window.at(self.at, SECONDS * RATE)):
            if self.wish.apart:
                whole = len(samples) == SECONDS * RATE
                samples = samples[: quietest(samples, _LATE) if whole else len(samples)]
            found.append(Passage(self, samples, self.at))
            self.at += len(samples) * self.wish.apart
        self.ended = not found
        return found

    def pass_by(self, piece: Passage) -> None:
        """Move on behind a window without a text."""
        if not self.wish.apart:
            self.at += len(piece.samples)

    def segments(self) -> Iterator[Segment]:
        """The segments, each as soon as its window is heard."""
        while pieces := self.take():
            for found in self.transcriber.hear(pieces):
                yield from found
