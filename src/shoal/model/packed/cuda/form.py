"""Which forwards run through captured steps, and in what form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.model.kv.cache import KVCache
from shoal.model.stack import SequenceChunk

QUERIES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens per row that forms have; chunks are filled up to the next of these."""
MOST_TOKENS = 512
"""Of all rows of a form."""
MOST_GROUPS = 4
"""Forwards that one is split into at most; each reads the weights again."""
_WASTE = 2.0
"""Tokens of a form, over the real ones, from which on the rows are better run one after the other."""


@dataclass(frozen=True)
class ForwardForm:
    """What is baked into a step.

    Attributes:
        rows: number of chunks.
        queries: tokens of each, filled up.
        every: whether all tokens' logits are wanted; otherwise those of each chunk's last.
    """

    rows: int
    queries: int
    every: bool

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.queries


@dataclass(frozen=True)
class Fit:
    """A forward's form, and the layers that all of its tokens run."""

    form: ForwardForm
    layers: tuple[int, ...]


def fits_of(chunks: Sequence[SequenceChunk], cache: KVCache) -> list[tuple[Sequence[int], Fit]] | None:
    """Groups of the chunks, by number, that have a form each, or None where the forward must be run flat.

    Rows do not see each other, so groups may run in turn: rows that decode, rows of another depth, pieces of prompts.
    """
    whole = fit_of(chunks, cache)
    if whole is not None:
        return [(range(len(chunks)), whole)]
    if len(chunks) == 1 or not all(map(_is_chain, chunks)):  # a tree in every step is to cost no search for groups
        return None
    groups = _groups(chunks)
    if len(groups) > MOST_GROUPS:
        return None
    fits = [fit_of([chunks[number] for number in numbers], cache) for numbers in groups]
    found = list[tuple[Sequence[int], Fit]]()
    found += [(numbers, fit) for numbers, fit in zip(groups, fits, strict=True) if fit is not None]
    return found if len(found) == len(groups) else None


def _groups(chunks: Sequence[SequenceChunk]) -> list[list[int]]:
    """Chunks that run the same layers, want logits alike and are of about the same length, the longest first."""
    kinds = [(_layers_of([chunk]) or (), chunk.wanted == len(chunk.tokens), -len(chunk.tokens)) for chunk in chunks]
    groups = list[list[int]]()
    for number in sorted(range(len(chunks)), key=kinds.__getitem__):
        group = [*groups[-1], number] if groups else []
        if group and kinds[group[0]][:2] == kinds[number][:2] and _queries([-kinds[n][2] for n in group]):
            groups[-1] = group
        else:
            groups.append([number])
    return groups


def fit_of(chunks: Sequence[SequenceChunk], cache: KVCache) -> Fit | None:
    """The form of a forward, or None where it has none.

    The chunks are chains of about the same length that run whole layers, the same for all, and want logits of all of
    their tokens or of the last at most. What came before is stored in slots as it was computed, or nothing did.
    Whatever else a forward is, right or wrong, is left to the flat one.
    """
    counts = [len(chunk.tokens) for chunk in chunks]
    queries = _queries(counts)
    if queries is None or not all(map(_is_chain, chunks)):
        return None
    every = all(chunk.wanted == count for chunk, count in zip(chunks, counts, strict=True))
    if not every and any(chunk.wanted > 1 for chunk in chunks):
        return None
    layers = _layers_of(chunks)
    if layers is None or not _are_plain(layers, chunks, cache):
        return None
    return Fit(ForwardForm(len(chunks), queries, every), layers)


def _queries(counts: Sequence[int]) -> int | None:
    """Tokens per row of the form that holds so many of each; None where it would be too large or too empty."""
    place = bisect_left(QUERIES, max(counts))
    most = min(MOST_TOKENS, max(len(counts), int(_WASTE * sum(counts))))
    return QUERIES[place] if place < len(QUERIES) and len(counts) * QUERIES[place] <= most else None


def _is_chain(chunk: SequenceChunk) -> bool:
    plain = chunk.query_hook is None and chunk.vectors is None and chunk.experts is None
    return plain and chunk.parents is None and not chunk.mutual


def _layers_of(chunks: Sequence[SequenceChunk]) -> tuple[int, ...] | None:
    """The layers that all tokens run; None where they differ, or run a sublayer alone, or none."""
    sets = {(f.plan.layers(step), f.plan.depth(step)) for f in chunks for step in (f.steps[0], f.steps[-1])}
    layers, depth = next(iter(sets))
    return layers if len(sets) == 1 and depth == len(layers) and layers else None


def _are_plain(layers: Sequence[int], chunks: Sequence[SequenceChunk], cache: KVCache) -> bool:
    """Whether these layers hold what precedes the tokens, by positions."""
    places = [(chunk.row, cache.positions[chunk.row], chunk.fed) for chunk in chunks]
    for layer in layers:
        store = cache.layers[layer]
        if store.beside or (store.keys is None and any(store.encoded)):
            return False
        for row, position, fed in places:
            if store.lengths[row] != position or store.scratch[row] != fed or store.released[row]:
                return False
    return True


def lacking_room(layers: Sequence[int], chunks: Sequence[SequenceChunk], cache: KVCache) -> list[int]:
    """Which of the layers must be given storage, or more of it, before the tokens can be written."""
    places = [(chunk.row, cache.positions[chunk.row] + chunk.fed + len(chunk.tokens)) for chunk in chunks]
    lacking = list[int]()
    for layer in layers:
        store = cache.layers[layer]
        if store.keys is None or any(end - store.starts[row] > store.capacity for row, end in places):
            lacking.append(layer)
    return lacking
