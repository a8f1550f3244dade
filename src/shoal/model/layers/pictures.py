"""Pictures, films or sounds in a prompt: what stands at their tokens in place of embeddings.

Where a picture stands, the prompt holds a token of the model's own, over and over; each is replaced by one state of
what an encoder made of it (Liu et al., 2023, arXiv 2304.08485, section 4.1). A sound is read as such a picture, whose
tokens are turned as text is, and a film as one that lasts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Picture:
    """What an encoder made of one picture, film or sound.

    Attributes:
        states: [tokens, hidden], inputs of the first layer; of a film those of its frames, one after the other.
        name: tells this picture from others; equal pictures have equal names.
        grid: its rows and columns of tokens, by which these are turned; None where they are turned as text is.
        deeper: states [tokens, hidden] that are added to its tokens after each of the first layers.
        token: the id that stands for each state; None for that of pictures.
        times: by which places in the text the tokens of a film's frames are turned, counted from the first, ascending.
        apart: whether text stands between a film's frames.
    """

    states: Tensor
    name: str
    grid: tuple[int, int] | None = None
    deeper: tuple[Tensor, ...] = ()
    token: int | None = None
    times: tuple[int, ...] = (0,)
    apart: bool = False

    @cached_property
    def parts(self) -> list[Picture]:
        """What stands side by side in a prompt: itself, or each frame of a film with text between them."""
        if not self.apart:
            return [self]
        size = len(self.states) // len(self.times)
        return [replace(self, states=self.states[at : at + size], name=f"{self.name} {at}", times=(0,), apart=False,
                        deeper=tuple(one[at : at + size] for one in self.deeper))
                for at in range(0, len(self.states), size)]

    @property
    def nbytes(self) -> int:
        """Bytes of all of its states."""
        return self.states.nbytes + sum(one.nbytes for one in self.deeper)

    @cached_property
    def keys(self) -> list[int]:
        """A negative number for each of its tokens, the same for the same place of equal pictures alone."""
        return [hashed(f"{self.name} {place}") for place in range(len(self.states))]


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of one prompt, in the order in which they stand there.

    Attributes:
        pictures: what each is.
        token: the id that stands for each of their states.
        mutual: whether tokens that stand side by side also see those after them.
        prefix: whether all tokens of the prompt see one another.
        places: positions of all their tokens, ascending; empty until `laid`.
        length: tokens of the prompt; 0 until then.
        ids: tokens that an answer may quote; a picture has none.
        stand_in: the id by which inputs of layers' own know each of their tokens; None for `token`.
    """

    pictures: tuple[Picture, ...]
    token: int
    mutual: bool = False
    places: tuple[int, ...] = ()
    length: int = 0
    ids: tuple[int, ...] = ()
    stand_in: int | None = None
    prefix: bool = False

    @cached_property
    def deeper(self) -> list[Tensor]:
        """What is added after each of the first layers to the tokens of all pictures, [tokens, hidden]."""
        return [torch.cat(parts) for parts in zip(*[one.deeper for one in self.pictures], strict=True)]

    @cached_property
    def turns(self) -> Tensor | None:
        """By which places the prompt's tokens are turned, int64 [3, tokens]: in the text, the row, the column.

        A picture takes as many places in the text as its longer side has tokens, a film as many as it lasts where that
        is more, and text behind it goes on from there (Wang et al., 2024, arXiv 2409.12191, section 2.1; transformers
        from 5.3 on goes on earlier behind long films). None where all are turned by their positions.
        """
        if any(one.grid is None for one in self.pictures):
            return None
        parts, at, begin = list[Tensor](), 0, 0
        starts = [0, *accumulate(len(one.states) for one in self.pictures)]
        for start, one in zip(starts, self.pictures, strict=False):
            rows, columns = one.grid or (0, 0)
            text = torch.arange(begin, begin + self.places[start] - at)
            begin += len(text)
            places, times = torch.arange(rows * columns), torch.tensor(one.times)
            frame = torch.stack([0 * places, places // columns, places % columns]).repeat(1, len(times))
            frame[0] = times.repeat_interleave(len(places))
            parts += [text.expand(3, -1), begin + frame]
            at, begin = self.places[start] + frame.shape[1], begin + max(rows, columns, one.times[-1] + 1)
        return torch.cat([*parts, torch.arange(begin, begin + self.length - at).expand(3, -1)], 1)

    @cached_property
    def drift(self) -> int:
        """By how much the places that turn the answer's tokens differ from their positions."""
        return 0 if self.turns is None else int(self.turns[:, -1].max()) + 1 - self.length

    def turned(self, place: int) -> int:
        """By which place a token of text at a position is turned."""
        return place + self.drift if self.turns is None or place >= self.length else int(self.turns[0, place])

    @cached_property
    def states(self) -> Tensor:
        """The states of all pictures [tokens, hidden]."""
        return torch.cat([one.states for one in self.pictures])

    @cached_property
    def _keys(self) -> list[int]:
        return [key for one in self.pictures for key in one.keys]

    @cached_property
    def _own(self) -> str:
        """A name that no other prompt has."""
        return uuid4().hex

    def laid(self, tokens: Sequence[int]) -> Pictures:
        """These pictures at their places in a prompt.

        Raises:
            ValueError: the prompt has more or fewer of their tokens.
        """
        wanted = [self.token if one.token is None else one.token for one in self.pictures for _ in one.states]
        known = {self.token, *wanted}
        places = tuple(place for place, token in enumerate(tokens) if token in known)
        if [tokens[place] for place in places] != wanted:
            named = " or ".join(map(str, sorted(known)))
            raise ValueError(f"the prompt holds token {named} {len(places)} times for {len(self.pictures)} pictures, "
                             f"films or sounds of {len(wanted)} tokens; it must hold one for each, in their order")
        return replace(self, places=places, length=len(tokens))

    def keyed(self, tokens: Sequence[int]) -> list[int]:
        """The tokens, with numbers of the pictures' own where they stand: equal only for equal pictures."""
        made = list(tokens)
        if self.prefix:  # each depends on all, and in windows nothing keeps what it saw: no prompt is another's prefix
            count = min(self.length, len(made))
            made[:count] = [hashed(f"{self._own} {place}") for place in range(count)]
            return made
        for place, key in zip(self.places, self._keys, strict=True):
            if place < len(made):
                made[place] = key
        return made

    def within(self, first: int, last: int) -> tuple[list[int], range]:
        """Which of positions first..last-1 are theirs, counted from `first`, and which rows of `states` these are."""
        rows = range(bisect_left(self.places, first), bisect_left(self.places, last))
        return [self.places[row] - first for row in rows], rows

    def piece(self, first: int, size: int) -> tuple[int, bool]:
        """How many of `size` tokens from position `first` on a forward reads, and whether they see one another.

        Tokens that see one another share a forward, however many they are.
        """
        if self.prefix and first < self.length:
            return self.length - first, True
        if not self.mutual and self.turns is None:
            return size, False
        low = bisect_left(self.places, first)
        if low == len(self.places) or self.places[low] >= first + size:
            return size, False
        if self.places[low] > first:
            return self.places[low] - first, False
        last = low
        while last < len(self.places) and self.places[last] - last == first - low:
            last += 1
        return (last - low, True) if self.mutual else (min(size, last - low), False)


def hashed(text: str) -> int:
    """A negative number for a text, the same for equal texts alone."""
    return -1 - int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def keys_of(tokens: Sequence[int], source: Any) -> Sequence[int]:
    """The tokens of a text as those of others are compared with them; `source` is what it reads beside them."""
    return source.keyed(tokens) if isinstance(source, Pictures) else tokens
