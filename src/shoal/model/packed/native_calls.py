"""Splits a forward into calls of the kernels, and joins their results.

A call takes up to `LIMIT` tokens; what the kernels do not support runs in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer
from shoal.model.packed import native
from shoal.model.runner import HiddenStateHook, OfLayers, SequenceChunk, Start, pictures_in

LIMIT = native.MAX_TOKENS
"""Most tokens of one call."""


@dataclass(slots=True)
class KernelCall:
    """Chunks, or pieces of them, that share a call.

    Attributes:
        by_kernels: whether the kernels run it; otherwise plain torch does.
        chunks: chunks in the order of their sequences.
        places: for each the number of the whole chunk, and its first token there.
    """

    by_kernels: bool
    chunks: list[SequenceChunk]
    places: list[tuple[int, int]]

    def entering(self, start: Start) -> Start:
        """Where these chunks begin, out of where all chunks do."""
        beside = None if start.beside is None else self._own(start.beside)
        return replace(start, hidden=self._own(start.hidden), beside=beside)

    def _own(self, hidden: Tensor) -> Tensor:
        """The states [chunks, nodes, D] of these chunks, padded, out of those of all chunks."""
        pieces = zip(self.places, self.chunks, strict=True)
        return pad_sequence([hidden[number, first : first + len(chunk.tokens)] for (number, first), chunk in pieces],
                            batch_first=True)


class States:
    """Joins the hidden states of several calls for one hook."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._found: dict[tuple[int, int], dict[int, Tensor]] = {}

    def of(self, call: KernelCall) -> HiddenStateHook:
        """The hook of one call."""

        def hook(layer: int, states: Tensor) -> None:
            for place, chunk, own in zip(call.places, call.chunks, states, strict=True):
                self._found.setdefault(place, {})[layer] = own[: len(chunk.tokens)].clone()

        return OfLayers(self._layers, hook)

    def show(self, hook: HiddenStateHook) -> None:
        """Show the joined states [chunks, nodes, D] layer by layer."""
        numbers = sorted({number for number, _ in self._found})
        for layer in self._layers:
            whole = [torch.cat([self._found[place][layer] for place in sorted(self._found) if place[0] == number])
                     for number in numbers]
            hook(layer, pad_sequence(whole, batch_first=True))


def calls_of(chunks: Sequence[SequenceChunk], cache: KVCache) -> list[KernelCall]:
    """The calls that run some chunks: as few as possible by the kernels, and one in plain torch for the rest.

    So the arithmetic of a chunk does not depend on the others. Empty if one call of the kernels runs all as they are.
    """
    extra = [store for store in cache.layers if store.extra]
    by_kernels = [_runs_native(chunk, extra) for chunk in chunks]
    apart = [False] * len(chunks)
    if any(cache.encoded):
        apart = [turned_apart(chunk, cache) for chunk in chunks]
        by_kernels = [known and not _deepened(chunk, cache) for known, chunk in zip(by_kernels, chunks, strict=True)]
    if all(by_kernels) and _fit_together(chunks) and (len(chunks) == 1 or not any(apart)):
        return []
    calls, by_torch, closed = list[KernelCall](), KernelCall(False, [], []), True
    for number, (whole, known, alone) in enumerate(zip(chunks, by_kernels, apart, strict=True)):
        for first, chunk in _pieces(whole) if known else [(0, whole)]:
            if known and (first or alone or closed or not _fit_together([*calls[-1].chunks, chunk])):
                calls.append(KernelCall(True, [], []))
            closed = alone if known else closed
            call = calls[-1] if known else by_torch
            call.chunks.append(chunk)
            call.places.append((number, first))
    return [*calls, by_torch] if by_torch.chunks else calls


def _fit_together(chunks: Sequence[SequenceChunk]) -> bool:
    """Whether a call takes so many tokens, and all chunks that run MLP groups have the same groups."""
    groups = {id(chunk.experts.mlps) for chunk in chunks if chunk.experts is not None}
    return len(groups) <= 1 and sum(len(chunk.tokens) for chunk in chunks) <= LIMIT


def _pieces(chunk: SequenceChunk) -> list[tuple[int, SequenceChunk]]:
    """A chain of more tokens than a call takes, in pieces, each with its first token."""
    if len(chunk.tokens) <= LIMIT:
        return [(0, chunk)]
    size, found = len(chunk.tokens), list[tuple[int, SequenceChunk]]()
    for first in range(0, size, LIMIT):
        last = min(first + LIMIT, size)
        found.append((first, replace(
            chunk, tokens=chunk.tokens[first:last], steps=chunk.steps[first:last], fed=chunk.fed + first,
            wanted=max(0, last - max(first, size - chunk.wanted)),
        )))
    return found


def _runs_native(chunk: SequenceChunk, extra: Sequence[KVLayer]) -> bool:
    """Whether the kernels can run a chunk; `extra` are layers in which a sequence stores anything outside its place.

    Its nodes must fit the bits of ancestors and see no later ones. The sequence's forms and groups must be supported.
    """
    if chunk.parents is not None and chunk.nodes.stop > native.MAX_NODES:
        return False
    if not chunk.bare:
        cut = len(chunk.tokens) > LIMIT and not (chunk.vectors is None and chunk.experts is None)
        if chunk.mutual or chunk.cross_hook is not None or cut:
            return False
        if not (chunk.experts is None or chunk.experts.mlps.native):
            return False
    return all(_readable(store, chunk.seq) for store in extra)


def turned_apart(chunk: SequenceChunk, cache: KVCache) -> bool:
    """Whether a chunk has tokens of pictures that are turned by rows and columns, which take tables of their own."""
    seen = pictures_in(chunk, cache)
    return seen is not None and seen.pictures.turns is not None


def _deepened(chunk: SequenceChunk, cache: KVCache) -> bool:
    """Whether a chunk has tokens of pictures to which something is added after the first layers."""
    seen = pictures_in(chunk, cache)
    return seen is not None and bool(seen.pictures.deeper)


def _readable(store: KVLayer, seq: int) -> bool:
    """Whether the kernels can read the forms in which a layer stores a sequence."""
    own, older = store.encoded[seq], store.settled[seq]
    return (own is None or own.form.kernel in ("int8", "int4")) and (older is None or older.form.kernel == "bitmap")
