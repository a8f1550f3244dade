"""States of recurrent layers in a forward of the kernels: where each begins, where it goes, and what is kept of it.

A state is written to other memory than it was read from, so that the committed one stays. Memory of forgotten states
is used again: new memory costs more than what the kernels do with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ctypes import Array, c_void_p
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer
from shoal.model.packed.native.recurrence import NativeRecurrence
from shoal.model.packed.native.spans import Spans
from shoal.model.packed.recurrent import MixerState
from shoal.model.runner import SequenceChunk
from shoal.model.state.layer import Run, State, StateLayer


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens first..last-1 of chunk number `chunk`; `parent` is the node before them."""

    chunk: int
    first: int
    last: int
    parent: int


@dataclass(frozen=True, slots=True)
class _LayerRun:
    """What one layer runs: of each chunk its first `counts` tokens. `kept` gets the recurrence's inputs."""

    recurrence: NativeRecurrence
    store: StateLayer
    chunks: Sequence[SequenceChunk]
    counts: Sequence[int]
    kept: Tensor | None


class SpareMemory:
    """Float32 memory of equal sizes, of which as much is kept as the last forward took."""

    def __init__(self) -> None:
        self._spare: dict[int, list[Tensor]] = {}
        self._taken = 0

    def begin(self) -> None:
        """A forward begins."""
        self._taken = 0

    def take(self, floats: int) -> Tensor:
        """float32 [floats], uninitialised."""
        spare = self._spare.setdefault(floats, [])
        self._taken += 1
        return spare.pop() if spare else torch.empty(floats)

    def give(self, memory: Tensor) -> None:
        """Memory that nobody reads any more."""
        spare = self._spare[memory.numel()]
        if len(spare) < self._taken:
            spare.append(memory)


class NativeStates:
    """The states of a model's recurrences in forwards of the kernels.

    Args:
        recurrences: by layer.
    """

    def __init__(self, recurrences: Mapping[int, NativeRecurrence]) -> None:
        self._recurrences, self._memory = recurrences, SpareMemory()

    def begin(
        self, chunks: Sequence[SequenceChunk], layers: Sequence[int], counts: Sequence[Sequence[int]], cache: KVCache
    ) -> tuple[Spans, BegunStates]:
        """The spans of a forward for the kernels, and the states that it computes.

        Args:
            layers: the running ones.
            counts: per chunk and running layer, the number of its first tokens that run it.
        """
        self._memory.begin()
        cut, begun = [span for number, chunk in enumerate(chunks) for span in _spans(number, chunk)], BegunStates()
        tokens, several = sum(len(chunk.tokens) for chunk in chunks), any(span.last - span.first > 1 for span in cut)
        states: list[Sequence[tuple[Tensor | None, Tensor | None]]] = []
        inputs: list[Tensor | None] = []
        for entry, layer in enumerate(layers):
            recurrence, store, kept = self._recurrences.get(layer), cache.layers[layer], None
            if recurrence is None:
                states.append([(None, None)] * len(cut))
            else:
                assert isinstance(store, StateLayer)
                kept = torch.empty(tokens, recurrence.input_line) if several else None
                run = _LayerRun(recurrence, store, chunks, [own[entry] for own in counts], kept)
                states.append([*self._layer(run, cut, begun)])
            inputs.append(kept)
        return Spans([span.last - span.first for span in cut], states, inputs), begun

    def _layer(
        self, run: _LayerRun, cut: Sequence[_Span], begun: BegunStates
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """The states before and after each span in one layer."""
        known: dict[tuple[int, int], MixerState] = {}  # of this forward, by chunk and last node
        token, store = 0, run.store
        for span in cut:
            chunk, count = run.chunks[span.chunk], min(run.counts[span.chunk], span.last) - span.first
            if count > 0:
                found = known.get((span.chunk, span.parent)) or store.after(chunk.seq, span.parent)
                assert found is None or isinstance(found, MixerState)
                state = MixerState(self._memory.take(run.recurrence.floats), self._memory.give)
                own = None if run.kept is None else run.kept[token : token + count]
                first = chunk.fed + span.first
                again = partial(_again, run.recurrence, found, own)
                known[span.chunk, first + count - 1] = state
                begun.append((store, chunk.seq, Run(first, first + count, state, again)))
                yield None if found is None else found.flat, state.flat
            else:
                yield None, None
            token += span.last - span.first

    def begin_step(
        self, table: Array[c_void_p], layers: Sequence[int], stores: Sequence[KVLayer], seqs: Sequence[int]
    ) -> BegunStates:
        """The states of a forward in which each sequence runs one token through all these layers.

        Args:
            table: gets the addresses of the states before and after, per layer and sequence.
        """
        self._memory.begin()
        begun, place = BegunStates(), 0
        for layer, store in zip(layers, stores, strict=True):
            recurrence = self._recurrences.get(layer)
            if recurrence is None:
                place += 2 * len(seqs)
                continue
            assert isinstance(store, StateLayer)
            for seq in seqs:
                before = store.states[seq]
                assert before is None or isinstance(before, MixerState)
                state = MixerState(self._memory.take(recurrence.floats), self._memory.give)
                table[place] = None if before is None else before.flat.data_ptr()
                table[place + 1] = state.flat.data_ptr()
                begun.append((store, seq, Run(0, 1, state, _nothing_between)))
                place += 2
        return begun


class BegunStates(list[tuple[StateLayer, int, Run]]):
    """States that a forward computes, by layer and sequence."""

    def hold(self) -> None:
        """Keep them, after the forward."""
        for store, seq, run in self:
            store.hold(seq, run)


def _nothing_between(count: int) -> State:
    raise AssertionError(f"a run of one node has no state after {count} of them")


def _spans(number: int, chunk: SequenceChunk) -> Iterator[_Span]:
    """A chunk's tokens in spans that begin at states which are known then: no span begins in the middle of another."""
    runs = [*chunk.runs(0, len(chunk.tokens))]
    ends = {parent - chunk.fed + 1 for parent, _, _ in runs}
    for parent, first, last in runs:
        cuts = [first, *(place for place in range(first + 1, last) if place in ends), last]
        for start, end in zip(cuts, cuts[1:], strict=False):
            yield _Span(number, start, end, parent if start == first else chunk.fed + start - 1)


def _again(recurrence: NativeRecurrence, begin: State | None, inputs: Tensor | None, count: int) -> State:
    """The state after the first `count` tokens of a span."""
    assert inputs is not None and (begin is None or isinstance(begin, MixerState))
    flat = torch.zeros(recurrence.floats) if begin is None else begin.flat.clone()
    recurrence.recur(inputs[:count], flat)
    return MixerState(flat)
