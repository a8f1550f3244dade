"""Splits a forward into calls of the kernels, and joins their results.

A call takes up to `LIMIT` tokens; what the kernels do not support runs in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.stack import FromLayer, HiddenStateHook, SequenceChunk

LIMIT = native.MAX_TOKENS
"""Most tokens of one call."""


@dataclass(slots=True)
class KernelCall:
    """Chunks, or pieces of them, that share a call.

    Attributes:
        by_kernels: whether the kernels run it; otherwise plain torch does.
        chunks: chunks in the order of their rows.
        places: for each the number of the whole chunk, and its first token there.
    """

    by_kernels: bool
    chunks: list[SequenceChunk]
    places: list[tuple[int, int]]

    @property
    def tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    def entering(self, hidden: Tensor) -> Tensor:
        """The states [chunks, nodes, D] of these chunks, padded, out of those of all chunks."""
        pieces = zip(self.places, self.chunks, strict=True)
        return pad_sequence([hidden[number, first : first + len(chunk.tokens)] for (number, first), chunk in pieces],
                            batch_first=True)

    def takes(self, chunk: SequenceChunk) -> bool:
        """Whether there is room for another chunk, and its MLP groups are those of the others."""
        return self.tokens + len(chunk.tokens) <= LIMIT and _grouped([*self.chunks, chunk])


class States:
    """Joins the hidden states of several calls for one hook."""

    def __init__(self, num_layers: int, first: int) -> None:
        self._layers = range(first, num_layers + 1)
        self._found: dict[tuple[int, int], dict[int, Tensor]] = {}

    def of(self, call: KernelCall) -> HiddenStateHook:
        """The hook of one call."""

        def hook(layer: int, states: Tensor) -> None:
            for place, chunk, own in zip(call.places, call.chunks, states, strict=True):
                self._found.setdefault(place, {})[layer] = own[: len(chunk.tokens)].clone()

        return FromLayer(self._layers.start, hook)

    def show(self, hook: HiddenStateHook) -> None:
        """Show the joined states [chunks, nodes, D] layer by layer."""
        numbers = sorted({number for number, _ in self._found})
        for layer in self._layers:
            whole = [torch.cat([self._found[place][layer] for place in sorted(self._found) if place[0] == number])
                     for number in numbers]
            hook(layer, pad_sequence(whole, batch_first=True))


def fit_one_call(chunks: Sequence[SequenceChunk], cache: KVCache) -> bool:
    """Whether the kernels run all chunks in one call: the usual case."""
    for chunk in chunks:
        if not _runs_native(chunk, cache):
            return False
    return sum(len(chunk.tokens) for chunk in chunks) <= LIMIT and _grouped(chunks)


def calls_of(chunks: Sequence[SequenceChunk], cache: KVCache) -> list[KernelCall]:
    """The calls that run some chunks: as few as possible by the kernels, and one in plain torch for the rest.

    So the arithmetic of a chunk does not depend on the others.
    """
    by_kernels = [_runs_native(chunk, cache) for chunk in chunks]
    calls, by_torch = list[KernelCall](), KernelCall(False, [], [])
    for number, (whole, known) in enumerate(zip(chunks, by_kernels, strict=True)):
        for first, chunk in _pieces(whole) if known else [(0, whole)]:
            if known and (first or not calls or not calls[-1].takes(chunk)):
                calls.append(KernelCall(True, [], []))
            call = calls[-1] if known else by_torch
            call.chunks.append(chunk)
            call.places.append((number, first))
    return [*calls, by_torch] if by_torch.chunks else calls


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


def _runs_native(chunk: SequenceChunk, cache: KVCache) -> bool:
    """Whether the kernels can run a chunk.

    Its nodes must fit the bits of ancestors and see no later ones, and the row's forms and groups must be supported.
    """
    if chunk.mutual or (chunk.parents is not None and chunk.nodes.stop > native.MAX_NODES):
        return False
    cut = len(chunk.tokens) > LIMIT and not (chunk.vectors is None and chunk.experts is None)
    known = chunk.experts is None or chunk.experts.mlps.native
    return not cut and known and _readable(chunk.row, cache)


def _grouped(chunks: Sequence[SequenceChunk]) -> bool:
    """Whether all chunks that run MLP groups have the same groups."""
    return len({id(chunk.experts.mlps) for chunk in chunks if chunk.experts is not None}) <= 1


def _readable(row: int, cache: KVCache) -> bool:
    """Whether the kernels can read the forms in which a row is stored."""
    if not any(map(attrgetter("beside"), cache.layers)):
        return True
    held = [(store.encoded[row], store.settled[row]) for store in cache.layers if store.beside]
    return all(one is None or one.form.kernel in kernels for pair in held
               for one, kernels in zip(pair, (("int8", "int4"), ("bitmap",)), strict=True))
