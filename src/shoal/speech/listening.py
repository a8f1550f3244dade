"""What a model of Whisper's kind needs to hear: its special tokens, its features, and its rules.

Radford et al., 2022, arXiv 2212.04356: section 2.3 has the tokens, 4.5 what decides whether a window is heard right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shoal.audio import RATE, Samples
from shoal.errors import Unsupported

SECONDS = 30
"""Length of a window."""
STEP = 0.02
"""Seconds between two timestamps."""
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_MULTILINGUAL = 51865
"""Least vocabulary of the models that know several languages; OpenAI's code tells them so."""
_LATEST = 1.0
"""Seconds at which the first words of a window begin at the latest."""


@dataclass(frozen=True)
class Listening:
    """Numbers of the special tokens of a model's vocabulary.

    Attributes:
        start, previous, silence, untimed, end: tokens that begin an answer, and what was said before; that say that
            nobody speaks, and that no timestamps follow; and that end an answer.
        tasks: by name; empty in models of one language, which have neither of these.
        languages: tokens by the language's code.
    """

    start: int
    previous: int
    silence: int
    untimed: int
    end: int
    tasks: Mapping[str, int]
    languages: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int) -> Listening:
        """Those of a tokenizer; Unsupported if it has none."""
        known = dict(tokenizer.get_added_vocab())
        named = {"start": "<|startoftranscript|>", "previous": "<|startofprev|>", "untimed": "<|notimestamps|>",
                 "end": "<|endoftext|>"}
        absent = [token for token in named.values() if token not in known]
        if absent:
            raise Unsupported("speech with this model", f"its tokenizer lacks {absent[0]}", "Use a Whisper model")
        several = vocabulary >= _MULTILINGUAL
        languages = {found[1]: number for token, number in known.items() if (found := _LANGUAGE.fullmatch(token))}
        return cls(**{name: known[token] for name, token in named.items()},
                   silence=known.get("<|nospeech|>", known.get("<|nocaptions|>", known["<|notimestamps|>"] - 1)),
                   tasks={name: known[f"<|{name}|>"] for name in ("transcribe", "translate")} if several else {},
                   languages=languages if several else {})

    @property
    def first_time(self) -> int:
        """The token of 0 seconds; those of later times follow it."""
        return self.untimed + 1

    def prompt(self, language: str | None, task: str, timed: bool) -> list[int]:
        """The tokens that ask for an answer."""
        asked = [self.start]
        if self.tasks and language is not None:
            asked += [self.languages[language], self.tasks[task]]
        return asked if timed else [*asked, self.untimed]


class Speller:
    """Spells text in the tokens that a model of Whisper's kind has learned.

    As in OpenAI's program, of all neighbours those are joined first whose token has the least number. The merges that
    are published for the models of several languages lack the one of a space and "t", and spell " the" otherwise.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._splits, self._numbers = tokenizer.backend_tokenizer.pre_tokenizer, dict(tokenizer.get_vocab())
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text; special ones are spelled as text."""
        found = list[int]()
        for part, _ in self._splits.pre_tokenize_str(text):
            if part not in self._known:
                self._known[part] = self._spelled(part)
            found += self._known[part]
        return found

    def _spelled(self, part: str) -> list[int]:
        signs = [*part]
        while len(signs) > 1:
            ranks = [self._numbers.get(one + other, math.inf) for one, other in pairwise(signs)]
            if (least := min(ranks)) == math.inf:
                break
            place = ranks.index(least)
            signs[place : place + 2] = [signs[place] + signs[place + 1]]
        return [self._numbers[sign] for sign in signs]


class Features:
    """Log-mel spectrograms of windows, by transformers' extractor.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @cached_property
    def _extractor(self) -> Any:
        from transformers import WhisperFeatureExtractor

        found = WhisperFeatureExtractor.from_pretrained(self._folder)
        if (found.sampling_rate, found.chunk_length) != (RATE, SECONDS):
            what = f"a model of {found.chunk_length} s at {found.sampling_rate} samples per second"
            raise Unsupported(what, f"windows are of {SECONDS} s at {RATE}", "Use a Whisper model")
        return found

    def __call__(self, samples: Samples) -> Tensor:
        """Float32 [bins, frames] of at most `SECONDS`, filled up with silence."""
        found: Tensor = self._extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features[0]
        return found


class Times:
    """Logits processor by which timestamps come in pairs and never go back.

    They follow OpenAI's ApplyTimestampRules (openai/whisper, whisper/decoding.py): words stand between a timestamp that
    begins them and one that ends them; a timestamp is due where all of them together are likelier than any word.

    Args:
        listening: the vocabulary.
        asked: tokens that ask for an answer, from the one that begins it on; what was said before may stand before it.
    """

    def __init__(self, listening: Listening, asked: int) -> None:
        self._own, self._asked = listening, asked

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] after ids [1, n], changed in place."""
        first, end = self._own.first_time, self._own.end
        tokens: list[int] = ids[0].tolist()
        said = tokens[tokens.index(self._own.start) + self._asked :]
        scores[:, self._own.untimed] = -torch.inf
        timed = bool(said) and said[-1] >= first
        ends = timed and len(said) > 1 and said[-2] < first  # then other words may begin at that same time
        if ends:
            scores[:, :end] = -torch.inf
        elif timed:
            scores[:, first:] = -torch.inf
        times = [token for token in said if token >= first]
        if times:
            scores[:, first : times[-1] + (not ends)] = -torch.inf
        if not said:
            scores[:, :first] = -torch.inf
            scores[:, first + round(_LATEST / STEP) + 1 :] = -torch.inf
        if scores[0, first:].float().logsumexp(-1) > scores[0, :first].max():  # log-probabilities are as far apart
            scores[:, :first] = -torch.inf
        return scores
