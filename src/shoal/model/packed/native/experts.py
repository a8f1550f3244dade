"""MLPs in groups of neurons, of which each token of a forward runs some: see run_groups() in layer.h."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from shoal.model.packed.native.structs import LANES, BatchStruct, Weight
from shoal.model.packed.native.weights import PackedWeight


class NativeExperts:
    """The groups of all layers, in the library's form.

    Args:
        layers: of each layer its groups, as many in all: gate and up [2 * neurons, hidden], packed with `paired=True`,
            and down [hidden, neurons]; multiples of 16 neurons, and the first matrices of one type.
        hidden: of the model.
        ffn: neurons of its widest layer.

    Attributes:
        count: groups of a layer, at most 32.

    Raises:
        ValueError: a matrix has another shape.
    """

    def __init__(
        self, layers: Sequence[Sequence[tuple[PackedWeight, PackedWeight]]], hidden: int, ffn: int
    ) -> None:
        self._layers, self.count = layers, len(layers[0])
        for number, layer in enumerate(layers):
            sizes = [down.cols for _, down in layer]
            shapes = all((pair.rows, pair.cols, pair.paired) == (2 * down.cols, hidden, True) and down.rows == hidden
                         and not down.paired for pair, down in layer)
            fits = sum(sizes) <= ffn and not any(size % LANES for size in sizes) and len(layer) == self.count <= 32
            if not shapes or not fits or len({pair.kind for pair, _ in layer}) > 1:
                raise ValueError(f"layer {number} has groups of {sizes} neurons; in every layer there must be as many, "
                                 f"at most 32, of multiples of {LANES} and {ffn} together, of models of {hidden}, and "
                                 "of one type of numbers")
        every = [one.struct() for layer in layers for group in layer for one in group]
        self._structs = (Weight * len(every))(*every)

    def put_into(self, struct: BatchStruct, masks: Sequence[Sequence[int]]) -> None:
        """Tell a batch which groups its tokens run.

        Args:
            struct: the batch; it keeps alive what it is told.
            masks: per running layer, of each token the groups that it runs, bit g for group g; 0 for the whole MLP.
        """
        if len(masks) != struct.active_count or any(len(line) != struct.tokens for line in masks):
            raise ValueError(f"masks must be [{struct.active_count} running layers][{struct.tokens} tokens]")
        words = array("I", [mask for line in masks for mask in line])
        struct.experts, struct.groups = ctypes.addressof(self._structs), words.buffer_info()[0]
        struct.expert_count, struct.memory = self.count, (struct.memory, words, self)
