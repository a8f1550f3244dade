"""Steps in which each sequence runs one more token through the same layers as before, one after another in one call.

What the kernels are told is kept from step to step as long as the same sequences run the same layers on the same
storage; only ids and positions are written anew. The model streams through the processor's caches between two steps, so
that whatever Python touches has to come back from memory: a step is the faster, the less it looks at.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from ctypes import Array, c_void_p
from typing import cast

from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer
from shoal.model.layers.cross_attention import Encoded
from shoal.model.lora.adapter import FittedAdapter
from shoal.model.packed import native
from shoal.model.packed.native.library import BatchStruct, StepsStruct
from shoal.model.packed.native.spans import put_spans
from shoal.model.packed.native_states import NativeStates
from shoal.model.packed.shape import Shape
from shoal.model.runner import SequenceChunk, adapters_of, encoded_of, turns_of


class PlainSteps:
    """Runs such steps.

    Args:
        decoder: the model in the library.
        states: of its recurrences; None if it has none.
        attends: of each layer, whether it has attention.
        shape: of the model.
    """

    def __init__(
        self, decoder: native.NativeModel, states: NativeStates | None, attends: Sequence[bool], shape: Shape
    ) -> None:
        self._decoder, self._states, self._shape, self._keeping = decoder, states, shape, shape.keeping
        self._keeps = [shape.source(layer) is None for layer in range(shape.num_layers)]
        self._stores = [attends[layer] and keeps for layer, keeps in enumerate(self._keeps)]
        self._seqs: list[int] = []
        self._layers: tuple[int, ...] = ()
        self._adapters: list[FittedAdapter | None] | None = None
        self._sources: dict[int, Encoded] | None = None
        self._kv: native.KVBinding | None = None
        self._struct: BatchStruct | None = None
        self._table: Array[c_void_p] = (c_void_p * 0)()

    def run(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, most: int,
        bind: Callable[[KVCache], native.KVBinding], ends: Sequence[int] = (),
    ) -> Tensor | list[list[int]] | None:
        """The logits, or argmax tokens [steps][chunks]; None, and nothing changed, if the forward needs more than this.

        Args:
            most: most steps; 0 for one that returns logits.
            bind: gives the addresses of a cache's storage, the same object as long as they hold.
            ends: tokens after which no step follows.
        """
        layers = chunks[0].plan.layers(chunks[0].steps[0])
        for chunk in chunks:
            plan = chunk.plan
            if not chunk.is_step or plan.splits_layers or plan.layers(chunk.steps[0]) != layers:
                return None
        seqs = [chunk.seq for chunk in chunks]
        positions = [cache.positions[seq] for seq in seqs]
        stores = [cache.layers[layer] for layer in layers]
        turns = [turns_of(chunk, cache)[0] for chunk in chunks] if self._shape.axes or any(cache.shifts) else positions
        if not stores or max(turns) >= self._decoder.reach:
            return None
        storing, others, kept, read = stores, list[KVLayer](), stores, stores
        if self._shape.sources:
            for chunk in chunks:
                chunk.plan.check_sources(self._shape.sources)
            kept = [store for layer, store in zip(layers, stores, strict=True) if self._keeps[layer]]
            read = read_stores(self._shape, layers, cache)
        if self._states is not None:
            storing = [store for layer, store in zip(layers, stores, strict=True) if self._stores[layer]]
            others = [store for layer, store in zip(layers, stores, strict=True)
                      if self._keeps[layer] and not self._stores[layer]]
        room = _room(storing, seqs, positions)
        if not room or not _read(others, seqs, positions):
            return None
        kv = bind(cache)
        adapters = adapters_of(chunks, cache) if cache.adapted else None
        sources = {chunk.seq: encoded_of(chunk, cache) for chunk in chunks} if self._shape.crosses else None
        same = seqs == self._seqs and layers == self._layers and sources == self._sources
        if kv is not self._kv or not same or adapters != self._adapters:
            self._struct = self._written(len(seqs), seqs, layers, kv)
            if adapters is not None:
                native.put_adapters(self._struct, cast("list[native.NativeAdapter | None]", adapters))
            if sources is not None:
                self._decoder.crossing.put_into(self._struct, seqs, sources)
            self._seqs, self._layers, self._kv, self._adapters, self._sources = seqs, layers, kv, adapters, sources
        assert self._struct is not None
        self._fill(self._struct, [chunk.tokens[0] for chunk in chunks], positions, turns, read)
        begun = None if self._states is None else self._states.begin_step(self._table, layers, stores, seqs)
        found: Tensor | list[list[int]]
        if most:
            fitting = min(most, room, self._decoder.reach - max(turns))
            found = self._follow(self._most(chunks, layers, fitting), ends)
            done = len(found)
        else:
            found, done = self._decoder.run(self._struct), 1
        for store in kept:
            for seq in seqs:
                store.scratch[seq] = done
        if begun is not None:
            begun.hold()
        if bisect_left(layers, self._keeping) < self._keeping:
            for seq, position in zip(seqs, positions, strict=True):
                cache.mark_shallow(seq, position)
        return found

    def _follow(self, most: int, ends: Sequence[int]) -> list[list[int]]:
        """Run up to so many steps, one after another; their argmax tokens."""
        assert self._struct is not None
        size, stops = len(self._seqs), array("i", ends)
        best = array("i", bytes(4 * most * size))
        steps = StepsStruct(ends=stops.buffer_info()[0], end_count=len(stops), most=most)
        self._decoder.run(self._struct, best, steps=steps)
        return [list(best[at : at + size]) for at in range(0, steps.done * size, size)]

    def _most(self, chunks: Sequence[SequenceChunk], layers: tuple[int, ...], most: int) -> int:
        """How many steps may follow one another: recurrences commit each, and all must run the same layers."""
        same = self._states is None and all(chunk.plan.layers(chunk.steps[0] + most - 1) == layers for chunk in chunks)
        return most if same else 1

    def _written(
        self, count: int, seqs: Sequence[int], layers: Sequence[int], kv: native.KVBinding
    ) -> BatchStruct:
        """The batch with ids, positions and starts of zero."""
        zeros = [0] * count
        batch = native.NativeBatch(zeros, zeros, seqs, zeros, zeros, native.chain_ancestors(range(1)) * count,
                                   range(count), layers, starts=[zeros] * len(layers))
        struct = batch.struct(self._decoder.num_layers, kv)
        self._starts = struct.start
        if self._states is not None:
            self._table = (c_void_p * (2 * count * len(layers)))()
            put_spans(struct, [1] * count, self._table)
        return struct

    def _fill(
        self, struct: BatchStruct, ids: Sequence[int], positions: Sequence[int], turns: Sequence[int],
        stores: Sequence[KVLayer],
    ) -> None:
        """Write what changes from step to step."""
        numbers, count = struct.numbers, len(ids)
        for place, (token, position, turn) in enumerate(zip(ids, positions, turns, strict=True)):
            numbers[place], numbers[count + place], numbers[4 * count + place] = token, turn, position
        starts = [store.starts[seq] for store in stores for seq in self._seqs]
        struct.start = self._starts if any(starts) else None
        if struct.start is not None:
            numbers[-len(starts) :] = array("i", starts)


def read_stores(shape: Shape, layers: Sequence[int], cache: KVCache) -> list[KVLayer]:
    """For some layers, the storage of those whose keys and values they read: others, or themselves."""
    sources = map(shape.source, layers)
    return [cache.layers[layer if source is None else source] for layer, source in zip(layers, sources, strict=True)]


def _room(stores: Sequence[KVLayer], seqs: Sequence[int], positions: Sequence[int]) -> int:
    """For how many more positions each layer has room in its place; 0 if one has not read all of them so far."""
    room = sys.maxsize
    for store in stores:
        if store.extra:
            return 0
        for seq, position in zip(seqs, positions, strict=True):
            if store.lengths[seq] != position or store.scratch[seq] or store.released[seq]:
                return 0
            room = min(room, store.capacity - position + store.starts[seq])
    return max(0, room)


def _read(stores: Sequence[KVLayer], seqs: Sequence[int], positions: Sequence[int]) -> bool:
    """Whether each layer, which stores no keys, has read all positions of each sequence."""
    return not any(store.lengths[seq] != position or store.scratch[seq] or store.released[seq]
                   for store in stores for seq, position in zip(seqs, positions, strict=True))
