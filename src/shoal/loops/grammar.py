"""Grammars over canvases: whether some filling of the masks is a text of a context-free grammar.

The masks that are left are known by number, so this is the parsing of Cocke, Younger and Kasami with a mask for any
word: what ends up in a span is the set of symbols that some filling of it can be derived from. Plain Python, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_PIECE = re.compile(r'\s*(?:(?P<name>[A-Za-z_]\w*)|"(?P<text>(?:[^"\\]|\\.)+)"|(?P<bar>\|))')
_LONGEST = 4000
"""Characters of a grammar, whose rules are closed in cubic time."""
MOST = 64
"""Words of a canvas: a word is tried in a time that grows with their cube."""
_ESCAPES = {"n": "\n", "t": "\t"}


@dataclass(frozen=True)
class CanvasGrammar:
    """A grammar in Chomsky's form, over token ids. Symbols are bits.

    Attributes:
        start: the symbol of a whole text.
        leaves: by token id, the symbols that it can be derived from alone.
        pairs: (left, right, symbols that can be derived into one after the other).
    """

    start: int
    leaves: Mapping[int, int] = field(hash=False)
    pairs: tuple[tuple[int, int, int], ...]

    @classmethod
    def read(cls, text: str, encode: Callable[[str], Sequence[int]]) -> CanvasGrammar:
        r"""From lines such as `list ::= name | name "," list`; the first one tells of whole texts.

        Args:
            text: rules; alternatives stand apart by `|`, texts in double quotes, with `\n`, `\"` and `\\` in them.
            encode: the token ids of a text, one at least.

        Raises:
            ValueError: a line is no rule, an alternative is empty, a name has no rule, or the text is too long.
        """
        if len(text) > _LONGEST:
            raise ValueError(f"the grammar has {len(text)} characters; it may have {_LONGEST}")
        rules = [_rule(line) for line in text.splitlines() if line.strip()]
        if not rules:
            raise ValueError("the grammar has no rule; write one such as: answer ::= \"yes\" | \"no\"")
        numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in rules))}
        made = _Normal(numbers, encode)
        for name, alternatives in rules:
            for alternative in alternatives:
                made.add(numbers[name], alternative)
        return cls(1, *made.closed())

    def chart(self, length: int, ends: Collection[int]) -> CanvasChart:
        """For a canvas of that many masks; behind a text come none but the ids of `ends`."""
        return CanvasChart(self, length, ends)


def _rule(line: str) -> tuple[str, list[list[tuple[str, str]]]]:
    """A name, and alternatives of (kind, word)."""
    name, mark, rest = line.partition("::=")
    alternatives: list[list[tuple[str, str]]] = [[]]
    at = 0
    while mark and rest[at:].strip():
        found = _PIECE.match(rest, at)
        if found is None:
            break
        at = found.end()
        if found["bar"]:
            alternatives.append([])
        else:
            word = found["name"] or re.sub(r"\\(.)", lambda one: _ESCAPES.get(one[1], one[1]), found["text"])
            alternatives[-1].append(("name" if found["name"] else "text", word))
    if not mark or rest[at:].strip() or not name.strip().isidentifier() or not all(alternatives):
        raise ValueError(f"{line.strip()!r} is no rule of a grammar; write one such as: pair ::= word \",\" word | word"
                         ", no alternative of which is empty")
    return name.strip(), alternatives


class _Normal:
    """Rules on their way to Chomsky's form; symbols are numbers."""

    def __init__(self, numbers: Mapping[str, int], encode: Callable[[str], Sequence[int]]) -> None:
        self._numbers, self._encode, self._count = numbers, encode, len(numbers)
        self._leaves: dict[int, set[int]] = {}
        self._units: set[tuple[int, int]] = set()
        self._pairs: set[tuple[int, int, int]] = set()

    def add(self, symbol: int, alternative: Sequence[tuple[str, str]]) -> None:
        """One way to derive a symbol."""
        parts: list[int] = []
        for kind, word in alternative:
            if kind == "name" and word not in self._numbers:
                raise ValueError(f"the grammar names {word!r} and has no rule for it")
            parts += [self._numbers[word]] if kind == "name" else [self._leaf(token) for token in self._encode(word)]
        while len(parts) > 2:
            joined = self._new()
            self._pairs.add((parts[-2], parts[-1], joined))
            parts[-2:] = [joined]
        if len(parts) == 2:
            self._pairs.add((parts[0], parts[1], symbol))
        else:
            self._units.add((parts[0], symbol))

    def closed(self) -> tuple[dict[int, int], tuple[tuple[int, int, int], ...]]:
        """Leaves and pairs as bits, with all that single symbols lead up to."""
        up = {symbol: {symbol} for symbol in range(self._count)}
        for _ in range(self._count):
            for low, high in self._units:
                for found in up.values():
                    if low in found:
                        found.add(high)
        bits = {symbol: sum(1 << one for one in found) for symbol, found in up.items()}
        leaves = {token: _union(bits[symbol] for symbol in symbols) for token, symbols in self._leaves.items()}
        return leaves, tuple(sorted((1 << left, 1 << right, bits[symbol]) for left, right, symbol in self._pairs))

    def _leaf(self, token: int) -> int:
        if token not in self._leaves:
            self._leaves[token] = {self._new()}
        return next(iter(self._leaves[token]))

    def _new(self) -> int:
        self._count += 1
        return self._count - 1


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


class CanvasChart:
    """What can still become of a canvas.

    Args:
        grammar: the grammar.
        length: of the canvas.
        ends: ids that may stand behind a text.
    """

    def __init__(self, grammar: CanvasGrammar, length: int, ends: Collection[int]) -> None:
        self._grammar, self._length, self._ends = grammar, length, frozenset(ends)
        self._over = [bool(ends)] * length  # whether a place may be behind the text
        self._joined: dict[tuple[int, int], int] = {}
        masks = [0, _union(grammar.leaves.values())]  # what so many masks can be derived from
        for size in range(2, length + 1):
            masks.append(_union(self._join(masks[part], masks[size - part]) for part in range(1, size)))
        self._spans = {(first, last): masks[last - first] for last in range(1, length + 1) for first in range(last)}

    @property
    def possible(self) -> bool:
        """Whether some filling is a text of the grammar, with ends behind it."""
        return self._accepts(self._spans, self._over)

    def words(self) -> list[int]:
        """Every id that may stand anywhere."""
        return sorted({*self._grammar.leaves, *self._ends})

    def lets(self, place: int, token: int) -> bool:
        """Whether it stays possible with a token at a place."""
        return self._accepts(*self._with(place, token))

    def put(self, place: int, token: int) -> None:
        """The place is decided."""
        self._spans, self._over = self._with(place, token)

    def _with(self, place: int, token: int) -> tuple[dict[tuple[int, int], int], list[bool]]:
        spans, over = dict(self._spans), list(self._over)
        spans[place, place + 1] = self._grammar.leaves.get(token, 0)
        over[place] = token in self._ends
        self._fill(spans, place)
        return spans, over

    def _fill(self, spans: dict[tuple[int, int], int], place: int) -> None:
        """Spans that hold the place, short ones first."""
        for size in range(2, self._length + 1):
            for first in range(max(0, place - size + 1), min(place, self._length - size) + 1):
                last = first + size
                parts = ((spans[first, middle], spans[middle, last]) for middle in range(first + 1, last))
                spans[first, last] = _union(self._join(*pair) for pair in parts)

    def _join(self, left: int, right: int) -> int:
        """The symbols of two spans one after the other; few pairs of spans differ, so all are remembered."""
        if not (left and right):
            return 0
        if (left, right) not in self._joined:
            self._joined[left, right] = _union(
                symbols for one, other, symbols in self._grammar.pairs if left & one and right & other)
        return self._joined[left, right]

    def _accepts(self, spans: Mapping[tuple[int, int], int], over: Sequence[bool]) -> bool:
        for length in range(self._length, 0, -1):
            if spans[0, length] & self._grammar.start:
                return True
            if not over[length - 1]:
                return False
        return False
