"""What a model beside an encoder is asked in training: texts, or windows of sounds, that it answers.

Windows are cut out of files at random and joined, so that little speech gives many of them; the same words come back in
other surroundings, and no new ones. They may be varied besides: said faster or slower, under noise.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.audio import RATE, Audio, Samples
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.model.layers.cross_attention import Encoded
from shoal.speech.listening import SECONDS, Features, Listening, Times
from shoal_lab.train.buckets import in_shards

READ = ("whisper", "bart", "mbart", "plbart", "pegasus", "m2m_100")
"""Model types whose decoders are a list of layers that take nothing of each other but states."""
_SHORTEST, _MOST_CUTS = RATE, 4
"""Samples of a cut, and cuts of a window."""
_SPEEDS, _NOISES = (90, 112), (10, 40)
"""Bounds of a varied window: per cent of its speed, which moves its pitch too, and decibels of it over white noise."""
_VARIED = -1
"""In place of a file's number, before the cuts of a varied window: its speed and noise follow."""


@dataclass(frozen=True)
class EncodedSource:
    """A source as it was read.

    Attributes:
        prompt: the decoder's tokens before its answer.
        states: float32 [places, hidden], the encoder's last.
        encoded: what the decoder reads of them.
        rules: logits processors of the answer.
    """

    prompt: list[int]
    states: Tensor
    encoded: Encoded
    rules: list[Any]


class Sources:
    """Reads sources with a model's encoder.

    Args:
        engine: a model with an encoder.
        files: sounds, for a model that hears; none for one that reads.
        language: that is spoken, for models that know several.
        varied: whether `windows` are said faster or slower, and under noise.
        kept: whether a corpus keeps the encoder's states.

    Raises:
        ValueError: there are no sounds for a model that hears, or some for one that reads; a file cannot be read.
        Unsupported: the decoder's layers cannot be read one by one, or its head has a bias.
    """

    def __init__(
        self, engine: Engine, files: Sequence[Path] = (), language: str = "en", varied: bool = False, kept: bool = True
    ) -> None:
        assert engine.encoder is not None
        if engine.family not in READ:
            raise Unsupported(f"training beside the encoder of a model of type {engine.family!r}",
                              "its decoder's layers are not read one by one", f"It is there for {', '.join(READ)}")
        bias = engine.runner.head_bias_of(range(engine.runner.vocab_size))  # type: ignore[attr-defined]
        if bias is not None and bool(bias.any()):
            raise Unsupported(f"training {engine.model_name or 'this model'}", "its LM head has a bias",
                              "Use a model whose final_logits_bias is 0")
        if (engine.encoder.text is None) != bool(files):
            reads = "hears; name sounds by --speech" if not files else "reads text; leave out --speech"
            raise ValueError(f"{engine.model_name or 'the model'} {reads}")
        self._engine, self._encoder, self._files, self._language = engine, engine.encoder, files, language
        self._varied, self.kept = varied, kept

    @cached_property
    def sounds(self) -> list[Samples]:
        """The samples of each file."""
        found = []
        for path in self._files:
            with path.open("rb") as file, Audio(file, path.name) as audio:
                found.append(np.concatenate([*audio.pieces()]))
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """What tells a corpus of these sounds from others."""
        bare = {} if self.kept else {"sources_kept": False}
        if not self._files:
            return bare
        held = b"".join(sound.tobytes() for sound in self.sounds)
        return {"sounds": hashlib.sha256(held).hexdigest()[:16], "files": [path.name for path in self._files],
                "language": self._language, **({"varied": True} if self._varied else {}), **bare}

    def windows(self, count: int, seed: int) -> list[list[int]]:
        """Windows to ask about, each as numbers: file, first sample and samples of each of its cuts.

        Varied ones begin with -1, per cent of their speed, and decibels over noise.
        """
        lengths, dice = [len(sound) for sound in self.sounds], random.Random(seed)
        found = [list(_window(lengths, dice)) for _ in range(count)]
        if not self._varied:
            return found
        return [[_VARIED, dice.randint(*_SPEEDS), dice.randint(*_NOISES), *window] for window in found]

    def ordered(self, asked: Sequence[Sequence[int]], shard: int, seed: int = 0) -> list[Sequence[int]]:
        """Sources in an order in which those of a shard are of similar lengths; windows are filled up to one."""
        if self._encoder.text is None:
            return [*asked]
        return [asked[item] for item in in_shards([len(one) for one in asked], shard, seed)]

    @torch.no_grad()
    def read(self, asked: Sequence[int]) -> EncodedSource:
        """A source: token ids of the encoder, or a window as `windows` gives it."""
        encoder = self._encoder
        given = torch.tensor(asked) if encoder.text is not None else self._features(self._samples(asked))
        states = encoder.module(given[None]).last_hidden_state[0].float()
        name = hashlib.sha256(repr(list(asked)).encode()).hexdigest()
        read = encoder.project(states, name, (*asked,) if encoder.text is not None and encoder.text.quotable else ())
        if encoder.text is not None:
            return EncodedSource([encoder.text.start], states, read, [])
        prompt = self._own.prompt(self._language, "transcribe", timed=True)
        return EncodedSource(prompt, states, read, [Times(self._own, len(prompt))])

    @cached_property
    def _own(self) -> Listening:
        own = Listening.of(self._engine.tokenizer, self._engine.runner.vocab_size)
        if own.languages and self._language not in own.languages:
            raise ValueError(f"--language is {self._language!r}; it must be one of {', '.join(sorted(own.languages))}")
        return own

    @cached_property
    def _features(self) -> Features:
        return Features(self._encoder.place)

    def _samples(self, window: Sequence[int]) -> Samples:
        if window[0] == _VARIED:
            return _changed(self._samples(window[3:]), window[1], window[2], seed=window[4])
        cuts = zip(window[::3], window[1::3], window[2::3], strict=True)
        return np.concatenate([self.sounds[file][first : first + count] for file, first, count in cuts])


def _window(lengths: Sequence[int], dice: random.Random) -> Iterator[int]:
    """Cuts of files drawn anew, the last one so long that the window is full at most."""
    room = SECONDS * RATE
    for _ in range(dice.randint(1, _MOST_CUTS)):
        file = dice.randrange(len(lengths))
        least = min(_SHORTEST, lengths[file])
        count = min(room, lengths[file] if dice.random() < 0.5 else dice.randint(least, lengths[file]))
        if count < least:
            return
        yield from (file, dice.randint(0, lengths[file] - count), count)
        room -= count


def spoken(engine: Engine, often: Collection[int], most: int) -> list[int]:
    """Tokens of transcripts, at most so many beside others that are frequent: times, then words by their numbers.

    A minute of speech says few words; byte-pair encoding numbers tokens as it learned them, frequent ones first.
    """
    own = Listening.of(engine.tokenizer, engine.runner.vocab_size)
    every = [*range(own.first_time, engine.runner.vocab_size), *range(own.end)]
    return [token for token in every if token not in often][: max(0, most - len(often))]


def _changed(heard: Samples, speed: int, above: int, seed: int) -> Samples:
    """Samples at a speed in per cent, of a window at most, under white noise so many decibels below them."""
    places = np.arange(0, len(heard) - 1, speed / 100)[: SECONDS * RATE]
    moved = np.interp(places, np.arange(len(heard)), heard)
    noise = np.random.default_rng(seed).standard_normal(len(moved)) * 10 ** (-above / 20)
    found: Samples = (moved + noise * np.sqrt((moved**2).mean())).astype(np.float32)
    return found


def plain(engine: Engine, dtype: torch.dtype) -> Any:
    """The model as transformers' model."""
    import transformers

    assert engine.encoder is not None
    kind = transformers.AutoModelForSeq2SeqLM if engine.encoder.text else transformers.AutoModelForSpeechSeq2Seq
    return kind.from_pretrained(engine.encoder.place, dtype=dtype).eval()
