"""The states of recurrences in one forward: where each span of tokens begins and ends."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Array, c_int32, c_void_p
from dataclasses import dataclass

from torch import Tensor

from shoal.model.packed.native.library import BatchStruct


@dataclass(frozen=True, slots=True)
class Spans:
    """Tokens that follow one another in a text, with the states of each running layer before and after them.

    Attributes:
        sizes: tokens of each span, which follow one another in the batch.
        states: per running layer, and for each span, the state before it and the memory of the state after it, float32
            with a state's tensors one after the other. None before a text's first token, and for both in a layer
            without recurrence and in a span that does not run it.
        inputs: per running layer, gets the recurrence's inputs, float32 [tokens, I rounded up to 16], or None.
    """

    sizes: Sequence[int]
    states: Sequence[Sequence[tuple[Tensor | None, Tensor | None]]]
    inputs: Sequence[Tensor | None]

    def put_into(self, struct: BatchStruct) -> None:
        """Let a batch run with these spans, which it keeps alive."""
        flat = [_at(one) for layer in self.states for pair in layer for one in pair]
        inputs = (c_void_p * len(self.inputs))(*map(_at, self.inputs))
        put_spans(struct, self.sizes, (c_void_p * len(flat))(*flat))
        struct.inputs, struct.recurrent = ctypes.addressof(inputs), (*struct.recurrent, inputs, self)


def put_spans(struct: BatchStruct, sizes: Sequence[int], states: Array[c_void_p]) -> None:
    """Let a batch run with spans of these sizes and these addresses of states, per layer and span before and after."""
    numbers, first = (c_int32 * (2 * len(sizes)))(), 0
    for place, size in enumerate(sizes):
        numbers[2 * place], numbers[2 * place + 1] = first, size
        first += size
    struct.span_count, struct.spans, struct.states = len(sizes), ctypes.addressof(numbers), ctypes.addressof(states)
    struct.recurrent = numbers, states


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
