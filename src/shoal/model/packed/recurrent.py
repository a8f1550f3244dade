"""Recurrent mixers in a forward of packed layers: from which state each run of tokens starts, and what is kept of it.

Kept are a run's inputs to the recurrence, a few numbers a token, from which the state after any of its tokens is
computed again; see `shoal.model.state.layer`.
"""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor
from typing_extensions import override

from shoal.model.layers.mixer import Memory, Mixer
from shoal.model.runner import SequenceChunk
from shoal.model.state.layer import Run, State, StateLayer


class MixerState(State):
    """The tensors of a recurrence's state; nobody changes them any more."""

    def __init__(self, tensors: Memory) -> None:
        self.tensors = tensors

    @cached_property
    @override
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def run_chunk(
    mixer: Mixer, store: StateLayer, chunk: SequenceChunk, first: int, last: int, inputs: Tensor, like: Tensor
) -> Tensor:
    """Outputs [n, O] of the recurrence for tokens first..last-1 of a chunk; their states are held in scratch.

    Args:
        inputs: [n, I], of these tokens.
        like: a tensor with the dtype and device of states.
    """
    if store.released[chunk.seq]:
        raise RuntimeError(f"a layer whose state was released in sequence {chunk.seq} was asked to run again")
    outputs = []
    for parent, start, end in chunk.runs(first, last):
        begin, own = store.after(chunk.seq, parent), inputs[start - first : end - first]
        state = _begun(mixer, begin, like)
        outputs.append(mixer.recur(own, state))
        again = partial(_again, mixer, begin, own, like)
        store.hold(chunk.seq, Run(chunk.fed + start, chunk.fed + end, MixerState(state), again))
    return torch.cat(outputs)


def _begun(mixer: Mixer, begin: State | None, like: Tensor) -> Memory:
    """Tensors of a state to go on from, which may be changed."""
    if begin is None:
        return mixer.empty(like)
    assert isinstance(begin, MixerState)
    return tuple(tensor.clone() for tensor in begin.tensors)


def _again(mixer: Mixer, begin: State | None, inputs: Tensor, like: Tensor, count: int) -> State:
    """The state after the first `count` tokens of a run."""
    state = _begun(mixer, begin, like)
    mixer.recur(inputs[:count], state)
    return MixerState(state)
