"""Which forwards run through captured graphs, and in what form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk

QUERIES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens per sequence of the forms; chunks are padded to the next of these."""
MOST_TOKENS = 512
"""Most tokens of a form, all sequences together."""
MOST_GROUPS = 4
"""Most groups that a forward is split into; each reads the weights again."""
_WASTE = 2.0
"""If a form has more than this many times the real tokens, running sequences one after the other is better."""


@dataclass(frozen=True)
class ForwardForm:
    """What is fixed in a captured step.

    Attributes:
        seqs: number of chunks.
        queries: tokens of each chunk, padded.
        every: whether logits of all tokens are wanted; otherwise of each chunk's last token.
    """

    seqs: int
    queries: int
    every: bool

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.seqs * self.queries


@dataclass(frozen=True)
class Fit:
    """The form of a forward, and the layers that all of its tokens run."""

    form: ForwardForm
    layers: tuple[int, ...]


def fits_of(chunks: Sequence[SequenceChunk], cache: KVCache) -> list[tuple[Sequence[int], Fit]] | None:
    """Groups of the chunks, by number, that have a form each; None if the forward must run without graphs.

    Sequences do not see each other, so groups may run in turn: decoding ones, those of another depth, prompts.
    """
    whole = fit_of(chunks, cache)
    if whole is not None:
        return [(range(len(chunks)), whole)]
    if len(chunks) == 1 or not all(map(_is_chain, chunks)):  # a tree in every step must not cost a search for groups
        return None
    groups = _groups(chunks)
    if len(groups) > MOST_GROUPS:
        return None
    fits = [fit_of([chunks[number] for number in numbers], cache) for numbers in groups]
    found = list[tuple[Sequence[int], Fit]]()
    found += [(numbers, fit) for numbers, fit in zip(groups, fits, strict=True) if fit is not None]
    return found if len(found) == len(groups) else None


def _groups(chunks: Sequence[SequenceChunk]) -> list[list[int]]:
    """Groups of chunks that run the same layers, want the same logits and have about the same length; longest first."""
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
    """The form of a forward, or None if it has none.

    The chunks must be chains of about the same length that run the same whole layers, and want logits of all tokens or
    at most of the last one. Earlier tokens must be stored in the cache, unchanged. Any other forward, even a wrong one,
    is left to the path without graphs.
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
    """Tokens per sequence of the form for chunks of these lengths; None if it would be too large or too empty."""
    place = bisect_left(QUERIES, max(counts))
    most = min(MOST_TOKENS, max(len(counts), int(_WASTE * sum(counts))))
    return QUERIES[place] if place < len(QUERIES) and len(counts) * QUERIES[place] <= most else None


def _is_chain(chunk: SequenceChunk) -> bool:
    return chunk.bare and chunk.parents is None


def _layers_of(chunks: Sequence[SequenceChunk]) -> tuple[int, ...] | None:
    """The layers that all tokens run; None if tokens differ, run a single sublayer, or run nothing."""
    sets = {(f.plan.layers(step), f.plan.depth(step)) for f in chunks for step in (f.steps[0], f.steps[-1])}
    layers, depth = next(iter(sets))
    return layers if len(sets) == 1 and depth == len(layers) and layers else None


def _are_plain(layers: Sequence[int], chunks: Sequence[SequenceChunk], cache: KVCache) -> bool:
    """Whether these layers hold all positions before the tokens, in the cache."""
    places = [(chunk.seq, cache.positions[chunk.seq], chunk.fed) for chunk in chunks]
    for layer in layers:
        store = cache.layers[layer]
        if store.extra or (store.keys is None and any(store.encoded)):
            return False
        for seq, position, fed in places:
            if store.lengths[seq] != position or store.scratch[seq] != fed or store.released[seq]:
                return False
    return True


def lacking_room(layers: Sequence[int], chunks: Sequence[SequenceChunk], cache: KVCache) -> list[int]:
    """The layers that need storage, or more of it, before the tokens can be written."""
    places = [(chunk.seq, cache.positions[chunk.seq] + chunk.fed + len(chunk.tokens)) for chunk in chunks]
    lacking = list[int]()
    for layer in layers:
        store = cache.layers[layer]
        if store.keys is None or any(end - store.starts[seq] > store.capacity for seq, end in places):
            lacking.append(layer)
    return lacking
