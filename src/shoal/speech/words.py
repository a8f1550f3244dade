"""When each word was spoken: by where the decoder looks as it writes the word.

After OpenAI's whisper/timing.py: the weights of some heads, over the frames of a window, are normalised over tokens and
smoothed, and dynamic time warping finds the likeliest order of frames.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.model.layers.cross_attention import Encoded
from shoal.model.runner import SequenceChunk
from shoal.speech.listening import STEP, Listening

_SMOOTHED = 7
"""Frames of a median."""
_BEFORE, _AFTER = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Marks that belong to the word after them, and to the one before them."""
_UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")
"""Languages that put no spaces between words: each sign stands alone."""
_BROKEN = "\ufffd"
"""What a decoder writes for a part of a sign."""


@dataclass(frozen=True)
class Word:
    """A word that was spoken.

    Attributes:
        start, end: seconds from the beginning of the audio.
        text: the word with the marks beside it, and the space before it.
        probability: the mean one of its tokens.
    """

    start: float
    end: float
    text: str
    probability: float


class _Part(NamedTuple):
    """Text of consecutive tokens, and their number."""

    text: str
    tokens: int


class Aligner:
    """Finds when words were spoken.

    Args:
        engine: of a model of Whisper's kind.
        listening: its special tokens.
    """

    def __init__(self, engine: Engine, listening: Listening) -> None:
        self._engine, self._own = engine, listening

    @cached_property
    def _heads(self) -> dict[int, list[int]]:
        """Heads that follow the sound, by layer: those that the model's files name, else all of the later layers."""
        from transformers import GenerationConfig

        assert self._engine.encoder is not None
        layers, heads = self._engine.runner.num_layers, self._engine.runner.kv_sizes[0][0]
        try:
            named = getattr(GenerationConfig.from_pretrained(self._engine.encoder.place), "alignment_heads", None)
        except OSError:
            named = None
        found: dict[int, list[int]] = {}
        for layer, head in named or [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]:
            found.setdefault(int(layer), []).append(int(head))
        return found

    def align(
        self, source: Encoded, tokens: Sequence[int], language: str | None, task: str, start: float, seconds: float
    ) -> list[tuple[Word, int]]:
        """Words of a window's text, each with the number of its tokens.

        Args:
            source: what the encoder made of the window.
            tokens: of the text alone.
            start, seconds: where the window begins, and its length.
        """
        if not tokens:
            return []
        weights, probabilities = self._listen(source, tokens, language, task, seconds)
        begins = first_frames(weights)
        found, at = list[tuple[Word, int]](), 0
        for text, count in self._split(tokens, language):
            low, high = (round(start + STEP * int(begins[place]), 2) for place in (at, at + count))
            found.append((Word(low, high, text, float(probabilities[at : at + count].mean())), count))
            at += count
        return found

    @torch.no_grad()
    def _listen(
        self, source: Encoded, tokens: Sequence[int], language: str | None, task: str, seconds: float
    ) -> tuple[Tensor, Tensor]:
        """How much each token, and the end, looks at each frame [tokens + 1, frames]; and the tokens' probabilities."""
        engine, runner, prompt = self._engine, self._engine.runner, self._own.prompt(language, task, timed=False)
        frames, seen = max(1, min(source.places, math.ceil(seconds / STEP))), list[Tensor]()
        fed = [*prompt, *tokens, self._own.end]

        def look(layer: int, queries: Tensor) -> None:
            for head in self._heads.get(layer, ()):
                scores = queries[:, head].float() @ source.keys[layer][head, :frames].float().T
                seen.append((scores * runner.score_scale).softmax(-1))

        cache = runner.new_cache(1)
        cache.attach(0, source)
        chunk = SequenceChunk(0, fed, [0] * len(fed), DepthPlan.full(runner.num_layers), wanted=len(fed),
                              cross_hook=look)
        with engine.turn():
            logits = runner.forward([chunk], cache)[len(prompt) - 1 : -2].float()
        own = torch.tensor(list(tokens))[:, None]
        chances = logits[:, : self._own.end].softmax(-1).gather(1, own)[:, 0]
        return smoothed(torch.stack(seen))[len(prompt) - 1 : -1], chances

    def _split(self, tokens: Sequence[int], language: str | None) -> list[_Part]:
        """The words of a text, with their marks."""
        parts = [*self._signs(tokens)]
        if language not in _UNSPACED:
            joined = list[_Part]()
            for part in parts:
                begins = part.text.startswith(" ") or part.text.strip() in string.punctuation
                if joined and not begins:
                    part = _joined(joined.pop(), part)
                joined.append(part)
            parts = joined
        return _with_marks(parts)

    def _signs(self, tokens: Sequence[int]) -> Iterator[_Part]:
        """The shortest parts that are whole signs."""
        held = list[int]()
        for place, token in enumerate(tokens):
            held.append(token)
            text = str(self._engine.tokenizer.decode(held))
            if _BROKEN not in text or place == len(tokens) - 1:
                yield _Part(text, len(held))
                held = []


def smoothed(weights: Tensor) -> Tensor:
    """Weights [heads, tokens, frames] relative to those of other tokens, smoothed: the heads' mean [tokens, frames]."""
    spread, mean = torch.std_mean(weights, dim=1, keepdim=True, unbiased=False)
    weights = (weights - mean) / spread.clamp_min(torch.finfo(weights.dtype).tiny)  # 0 where all look alike
    side = _SMOOTHED // 2
    if weights.shape[-1] > side:
        padded = torch.nn.functional.pad(weights, (side, side), mode="reflect")
        weights = padded.unfold(-1, _SMOOTHED, 1).median(-1).values
    return weights.mean(0)


def first_frames(weights: Tensor) -> NDArray[np.int64]:
    """The frame at which each token begins [tokens], on the path of the largest weights [tokens, frames].

    Dynamic time warping: a path goes to the next token, the next frame, or both. Cells of a diagonal are found at once.
    """
    gains = weights.double().numpy()
    tokens, frames = gains.shape
    total = np.full((tokens + 1, frames + 1), -np.inf)
    came = np.zeros((tokens + 1, frames + 1), np.int8)  # 0: from both; 1: from the token before; 2: from the frame
    total[0, 0] = 0
    for diagonal in range(2, tokens + frames + 1):
        i = np.arange(max(1, diagonal - frames), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        steps = np.stack([total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]])
        came[i, j] = steps.argmax(0)
        total[i, j] = gains[i - 1, j - 1] + steps.max(0)
    begins, i, j = np.zeros(tokens, np.int64), tokens, frames
    while i:
        begins[i - 1] = j - 1
        step = came[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return begins


def _joined(first: _Part, second: _Part) -> _Part:
    return _Part(first.text + second.text, first.tokens + second.tokens)


def _with_marks(parts: Sequence[_Part]) -> list[_Part]:
    """Marks joined with the words that they belong to."""
    found = list[_Part]()
    for part in reversed(parts):
        opens = part.text.startswith(" ") and len(part.text.strip()) == 1 and part.text.strip() in _BEFORE
        found.append(_joined(part, found.pop()) if opens and found else part)
    parts, found = found[::-1], []
    for part in parts:
        closes = bool(found) and len(part.text) == 1 and part.text in _AFTER and not found[-1].text.endswith(" ")
        found.append(_joined(found.pop(), part) if closes else part)
    return found


def placed(segments: Sequence[Any], spoken: Sequence[tuple[Word, int]], end: int) -> list[Any]:
    """The segments, each with its words.

    Args:
        segments: `Segment`s, whose tokens below `end` are words.
        spoken: words of all segments, with the numbers of their tokens.
    """
    found, rest, owed = list[Any](), list(spoken), 0
    for segment in segments:
        owed += sum(token < end for token in segment.tokens)
        own = list[Word]()
        while rest and owed > 0:
            word, count = rest.pop(0)
            own.append(word)
            owed -= count
        found.append(replace(segment, spoken=tuple(own)))
    return found
