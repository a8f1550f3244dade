"""Grammars over canvases: whether some filling of the masks is a text of a context-free grammar.

The number of remaining masks is known, so this is Cocke-Younger-Kasami parsing with a mask for any token: a span holds
the set of symbols from which some filling of it can be derived. All spans that begin at a place are one wide integer,
with a field of bits for each end, so that combinations of two spans are computed for all ends of the second at once.
Plain Python, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_PIECE = re.compile(r'\s*(?:(?P<name>[A-Za-z_]\w*)|"(?P<text>(?:[^"\\]|\\.)*)"|(?P<bar>\|))')
_LONGEST = 4000
"""Most characters of a grammar: the time per token grows with its rules."""
MOST = 256
"""Most tokens of a canvas: the time per token grows with the square of their number."""
_KNOWN = 4_000
"""Pairs of spans whose combination a chart caches."""
_ESCAPES = {"n": "\n", "t": "\t"}


@dataclass(frozen=True)
class CanvasGrammar:
    """A grammar in Chomsky normal form over token ids. Symbols are numbers, 0 for a whole text; sets of them are bits.

    Attributes:
        leaves: by token id, the symbols that derive it alone.
        pairs: (head, left, right): the head derives the others, one after the other.
        up: by symbol, itself and all symbols that derive it alone.
        empty: whether the empty text is in the grammar.
    """

    leaves: Mapping[int, int] = field(hash=False)
    pairs: tuple[tuple[int, int, int], ...]
    up: tuple[int, ...]
    empty: bool

    @classmethod
    def read(cls, text: str, encode: Callable[[str], Sequence[int]]) -> CanvasGrammar:
        r"""Parse lines such as `list ::= name | name "," list`; the first one describes whole texts.

        Args:
            text: rules; alternatives are separated by `|`, texts are in double quotes, with `\n`, `\"` and `\\` in
                them; `""` is the empty text.
            encode: returns the token ids of a text, at least one.

        Raises:
            ValueError: a line is not a rule, an alternative is missing, a name has no rule, or the text is too long.
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
        return cls(*made.closed())

    def chart(self, length: int, ends: Collection[int]) -> CanvasChart:
        """A chart for a canvas of that many masks; a text may only be followed by the ids of `ends`."""
        return CanvasChart(self, length, ends)


def _rule(line: str) -> tuple[str, list[list[tuple[str, str]]]]:
    """A name, and alternatives of (kind, text)."""
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
                         ', no alternative of which is left out; "" is no word')
    return name.strip(), alternatives


class _Normal:
    """Rules on their way to Chomsky normal form."""

    def __init__(self, numbers: Mapping[str, int], encode: Callable[[str], Sequence[int]]) -> None:
        self._numbers, self._encode, self._count = numbers, encode, len(numbers)
        self._own: dict[int, int] = {}
        self._rules: set[tuple[int, ...]] = set()

    def add(self, symbol: int, alternative: Sequence[tuple[str, str]]) -> None:
        """Add an alternative of a symbol."""
        parts: list[int] = []
        for kind, word in alternative:
            if kind == "name" and word not in self._numbers:
                raise ValueError(f"the grammar names {word!r} and has no rule for it")
            parts += [self._numbers[word]] if kind == "name" else map(self._leaf, self._encode(word) if word else ())
        while len(parts) > 2:
            joined = self._new()
            self._rules.add((joined, *parts[-2:]))
            parts[-2:] = [joined]
        self._rules.add((symbol, *parts))

    def closed(self) -> tuple[dict[int, int], tuple[tuple[int, int, int], ...], tuple[int, ...], bool]:
        """Leaves, pairs, closure of single symbols, and whether the empty text is in the grammar."""
        empty: set[int] = set()
        while more := {head for head, *parts in self._rules if empty.issuperset(parts)} - empty:
            empty |= more
        single = {(head, one) for head, *parts in self._rules for at, one in enumerate(parts)
                  if empty.issuperset([*parts[:at], *parts[at + 1 :]])}
        up, before = [1 << symbol for symbol in range(self._count)], list[int]()
        while up != before:
            before = list(up)
            for head, one in single:
                up[one] |= up[head]
        leaves = {token: up[symbol] for token, symbol in self._own.items()}
        pairs = tuple(sorted((rule[0], rule[1], rule[2]) for rule in self._rules if len(rule) == 3))
        return leaves, pairs, tuple(up), 0 in empty

    def _leaf(self, token: int) -> int:
        if token not in self._own:
            self._own[token] = self._new()
        return self._own[token]

    def _new(self) -> int:
        self._count += 1
        return self._count - 1


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


class _Follows:
    """Combines two spans by triples (a, b, symbols): if a is in the first and b in the second, symbols are in both.

    Args:
        triples: the triples.
        ones: a bit for each field of a row.
    """

    def __init__(self, triples: Sequence[tuple[int, int, int]], ones: int) -> None:
        self._triples, self._ones = triples, ones
        self._tables: dict[int, list[tuple[int, int]]] = {}
        self._known: dict[tuple[int, int], int] = {}

    def __call__(self, one: int, row: int) -> int:
        """Combine the symbols of one span with each field of a row of others; returns a row."""
        if not (one and row):
            return 0
        key = one, row
        if key not in self._known:
            if len(self._known) == _KNOWN:
                self._known.clear()
            self._known[key] = _union((row >> bit & self._ones) * symbols for bit, symbols in self._table(one))
        return self._known[key]

    def _table(self, one: int) -> list[tuple[int, int]]:
        if one not in self._tables:
            found: dict[int, int] = {}
            for symbol, bit, symbols in self._triples:
                if one >> symbol & 1:
                    found[bit] = found.get(bit, 0) | symbols
            self._tables[one] = list(found.items())
        return self._tables[one]


class CanvasChart:
    """The possible fillings of a canvas.

    Args:
        grammar: the grammar.
        length: length of the canvas.
        ends: ids that may follow a text.
    """

    def __init__(self, grammar: CanvasGrammar, length: int, ends: Collection[int]) -> None:
        self._grammar, self._length, self._ends = grammar, length, frozenset(ends)
        self._width = len(grammar.up)
        self._field = (1 << self._width) - 1
        down = [_union(1 << low for low, up in enumerate(grammar.up) if up >> one & 1) for one in range(self._width)]
        self._whole = down[0]
        ones, pairs = _union(1 << self._width * last for last in range(length + 1)), grammar.pairs
        self._joined = _Follows([(left, right, grammar.up[head]) for head, left, right in pairs], ones)
        self._before = _Follows([(left, head, down[right]) for head, left, right in pairs], ones)
        self._behind = _Follows([(head, right, down[left]) for head, left, right in pairs], ones)
        self._open = [_union(grammar.leaves.values())] * length
        self._over = [bool(ends)] * length  # whether a place may be after the text
        self._rows = [0] * length
        self._fill(length - 1)

    @property
    def possible(self) -> bool:
        """Whether some filling is a text of the grammar, followed by ends."""
        return any(map(self._is_text, self._lengths()))

    def fits(self, place: int) -> list[int]:
        """Ids that leave a filling possible at an open place.

        The allowed symbols follow from the spans around the place, from the whole text inwards, once for all ids.
        """
        around = self._around(place)
        found = {token for token, symbols in self._grammar.leaves.items() if symbols & around}
        if any(last <= place and self._is_text(last) for last in self._lengths()):
            found |= self._ends
        return sorted(found)

    def put(self, place: int, token: int) -> None:
        """Decide a place."""
        self._open[place] = self._grammar.leaves.get(token, 0)
        self._over[place] = token in self._ends
        self._fill(place)

    def _lengths(self) -> Iterator[int]:
        """Possible lengths of the text."""
        for last in range(self._length, -1, -1):
            yield last
            if last and not self._over[last - 1]:
                return

    def _is_text(self, last: int) -> bool:
        return bool(self._at(self._rows[0], last) & 1) if last else self._grammar.empty

    def _at(self, row: int, place: int) -> int:
        return row >> self._width * place & self._field

    def _fill(self, last: int) -> None:
        """Fill the rows of the places up to that one: field j of row i holds the symbols that derive tokens i..j-1."""
        for first in range(last, -1, -1):
            row = self._open[first] << self._width * (first + 1)
            for middle in range(first + 1, self._length):
                row |= self._joined(self._at(row, middle), self._rows[middle])
            self._rows[first] = row

    def _around(self, place: int) -> int:
        """Symbols of which one must derive a place."""
        rows = list[int]()
        columns = [_union(self._at(self._rows[first], last) << self._width * first for first in range(place + 1, last))
                   for last in range(self._length + 1)]
        for first in range(place + 1):
            row = 0 if first else _union(self._whole << self._width * last for last in self._lengths() if last > place)
            for begin, outer in enumerate(rows):
                row |= self._before(self._at(self._rows[begin], first), outer)
            for last in range(self._length, place + 1, -1):
                row |= self._behind(self._at(row, last), columns[last])
            rows.append(row)
        return self._at(rows[place], place + 1)
