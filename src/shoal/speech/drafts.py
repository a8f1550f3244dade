"""Guesses of what is said, by a smaller model that hears it first: it goes through text, so tokens may differ.

The smaller model writes a whole window down, which is spelled in the larger one's tokens; that follows it as far as it
agrees, and finds its place again where it does not. Universal assisted generation (Hugging Face, 2024) goes through
text likewise, a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar

import torch

from shoal.decode.recipe import Recipe
from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.engine.engine import Engine
from shoal.engine.request import Request
from shoal.engine.scheduling.stream import Stream
from shoal.methods.common.drafting import DraftingMethod
from shoal.model.layers.cross_attention import Encoded
from shoal.speculative.per_sequence import TextDrafter
from shoal.speech.listening import Listening, Speller
from shoal.types import ModelInfo

_LONGEST, _SHORTEST = 16, 4
"""Guesses at a time: as many as in the last forward, twofold, where it kept all of them; else the shortest."""


class Followed:
    """A text that an answer follows more or less, and the place in it that the answer has come to.

    The place is where the text's beginning is nearest to the answer, by edits of tokens (Levenshtein, 1966); of several
    the last one, as for tokens that replace others.

    Args:
        text: its tokens.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self._text, self._edits, self._read = text, [*range(len(text) + 1)], 0
        self._guessed, self._length = list[int](), _LONGEST

    def next(self, answer: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow an answer, which has grown since the last call."""
        new = answer[self._read :]
        for token in new:
            self._see(token)
        self._read = len(answer)
        if self._guessed:
            kept = [*new[: len(self._guessed)]] == self._guessed
            self._length = min(2 * self._length, _LONGEST) if kept else _SHORTEST
        place = min(range(len(self._edits)), key=lambda at: (self._edits[at], -at))
        self._guessed = [*self._text[place : place + min(self._length, most)]]
        return self._guessed

    def _see(self, token: int) -> None:
        """The edits from each beginning of the text to the answer, one token longer."""
        before, self._edits[0] = self._edits[0], self._edits[0] + 1
        for at, own in enumerate(self._text, start=1):
            best = min(self._edits[at] + 1, self._edits[at - 1] + 1, before + (own != token))
            before, self._edits[at] = self._edits[at], best


@dataclass(frozen=True, eq=False)
class Following(Proposer):
    """Guesses that each answer follows a text about its source.

    Attributes:
        texts: tokens, by the name of the source.
    """

    texts: Mapping[str, Sequence[int]]

    def begin(self, runner: object, cache: object) -> Drafter:
        """A drafter that has seen no sequence yet."""
        return TextDrafter(self._followed, self._chain)

    def _followed(self, seq: SequenceState) -> Followed:
        assert isinstance(seq.source, Encoded)
        return Followed(self.texts.get(seq.source.name, ()))

    def _chain(self, seq: SequenceState, text: Followed, limit: int) -> TokenTree:
        return TokenTree.chain([seq.tokens[-1], *text.next(seq.tokens[seq.prompt_length :], limit)])


@dataclass(frozen=True, repr=False, eq=False)
class HeardBefore(DraftingMethod):
    """A smaller model has heard each source, and its words are guessed.

    Attributes:
        proposer: what it heard.
    """

    name: ClassVar[str] = "heard_before"

    proposer: object = field(default=None)

    def recipe(self, info: ModelInfo) -> Recipe:
        """The words, confirmed by the target."""
        assert isinstance(self.proposer, Following)
        return self.verified(self.proposer, info)


class Translation:
    """A smaller model's tokens as another one's, and the reverse: times by their numbers, all else through text.

    Args:
        small, large: the tokenizers.
        own, wanted: their special tokens.
    """

    def __init__(self, small: Any, own: Listening, large: Any, wanted: Listening) -> None:
        self._small, self._own, self._large, self._wanted = small, own, large, wanted
        self._spelled = Speller(small), Speller(large)

    def larger(self, tokens: Sequence[int], timed: bool) -> list[int]:
        """The smaller one's answer in the larger one's tokens; times are left out unless they are `timed`."""
        found, moved = list[int](), self._wanted.first_time - self._own.first_time
        for is_time, group in groupby(tokens, lambda token: token >= self._own.first_time):
            if is_time:
                found += [token + moved for token in group if timed]
            else:
                found += self._spelled[1](self._small.decode([token for token in group if token < self._own.end]))
        return found

    def smaller(self, tokens: Sequence[int]) -> list[int]:
        """The larger one's text in the smaller one's tokens."""
        return self._spelled[0](self._large.decode([token for token in tokens if token < self._wanted.end]))


@torch.no_grad()
def greedy(engine: Engine, prompts: Sequence[list[int]], sources: Sequence[Encoded], most: int) -> list[list[int]]:
    """Answers of at most `most` tokens without rules or log-probabilities, which guesses do without."""
    seqs = engine.seqs(prompts, Request(max_new_tokens=most, source=tuple(sources)))
    for seq in seqs:
        seq.processors = ()
    for _ in Stream(engine, seqs, engine.cache_for(seqs, most)):
        pass
    return [seq.tokens[seq.prompt_length :] for seq in seqs]
