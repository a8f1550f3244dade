"""Recurrent mixers in a forward of packed layers: from which state each run of tokens starts, and what is kept of it.

Kept are a run's inputs to the recurrence, a few numbers a token, from which the state after any of its tokens is
computed again; see `shoal.model.state.layer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from shoal.model.layers.mixer import Mixer
from shoal.model.runner import SequenceChunk
from shoal.model.state.layer import Run, State, StateLayer


class MixerState(State):
    """A recurrence's state, which nobody changes any more.

    Args:
        flat: its tensors, one after the other.
        spare: takes the memory over once the state is forgotten; None to give it back.
    """

    def __init__(self, flat: Tensor, spare: Callable[[Tensor], None] | None = None) -> None:
        self.flat, self._spare = flat, spare

    def __del__(self) -> None:
        if self._spare is not None:
            self._spare(self.flat)

    @property
    @override
    def nbytes(self) -> int:
        return self.flat.nbytes


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
        flat = begun(begin, mixer, like)
        outputs.append(mixer.recur(own, mixer.views(flat)))
        again = partial(_again, mixer, begin, own, like)
        store.hold(chunk.seq, Run(chunk.fed + start, chunk.fed + end, MixerState(flat), again))
    return torch.cat(outputs)


def begun(begin: State | None, mixer: Mixer, like: Tensor) -> Tensor:
    """A copy of a state to go on from, its tensors one after the other; zeros before a text's first token."""
    if begin is None:
        return like.new_zeros(sum(map(math.prod, mixer.state_sizes)))
    assert isinstance(begin, MixerState)
    return begin.flat.clone()


def _again(mixer: Mixer, begin: State | None, inputs: Tensor, like: Tensor, count: int) -> State:
    """The state after the first `count` tokens of a run."""
    flat = begun(begin, mixer, like)
    mixer.recur(inputs[:count], mixer.views(flat))
    return MixerState(flat)
