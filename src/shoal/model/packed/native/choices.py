"""What tokens of a forward choose: columns of the KV (choose.h), groups of MLP neurons (run_groups() in layer.h)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.model.packed.native.library import LANES, ROOM_BESIDE, BatchStruct, ChoiceStruct, Weight
from shoal.model.packed.native.weights import PackedWeight


@dataclass(frozen=True, slots=True)
class ColumnLabels:
    """Some dimensions of the keys of one row; the library fills in those of new columns.

    Attributes:
        dims: int32 [running layers, kv_heads, width].
        buffers: per running layer [kv_heads, groups of 16 columns, width, 16] in the dtype of keys, all of one size;
            None for a layer that does not choose by labels.
        known: per running layer, the number of columns whose labels are filled in.
    """

    dims: Tensor
    buffers: Sequence[Tensor | None]
    known: Sequence[int]


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """How one token chooses columns.

    Attributes:
        count: number of columns to choose, per KV head or query head.
        roles: per running layer 0 (reads all), 1 (reads all and chooses), 2 (reads the last choice, or chooses if that
            does not fit) or 3 (chooses by labels); 0 in layers with a window.
        columns: most columns that a layer has of the token's row after the forward.
        labels: labels for role 3; None if no layer has it.
        apart: whether each query head has columns of its own; otherwise heads that share a KV head share columns.
    """

    count: int
    roles: bytes
    columns: int
    labels: ColumnLabels | None = None
    apart: bool = False


class ChoicesAtWork:
    """Memory for the choices of one batch; it must live as long as the forward.

    Args:
        choices: one per token; None for a token that reads all.
        struct: the batch, which gets a pointer to the choices.
        heads, kv_heads: numbers of heads of the model.

    Raises:
        ValueError: the number of tokens, layers or columns does not fit the batch.
    """

    def __init__(self, choices: Sequence[ColumnChoice | None], struct: BatchStruct, heads: int, kv_heads: int) -> None:
        if len(choices) != struct.tokens:
            raise ValueError(f"{len(choices)} tokens choose columns; there are {struct.tokens}, some of them with None")
        self._choices = choices
        self._structs = (ChoiceStruct * len(choices))()
        self._memory = [self._fill(one, to, struct.active_count, heads, kv_heads)
                        for one, to in zip(choices, self._structs, strict=True) if one is not None]
        struct.choices = ctypes.addressof(self._structs)

    def _fill(
        self, choice: ColumnChoice, to: ChoiceStruct, layers: int, heads: int, kv_heads: int
    ) -> tuple[object, ...]:
        if choice.count < 1 or len(choice.roles) != layers:
            raise ValueError(f"{choice.count} columns in {len(choice.roles)} layers are chosen; there must be at least "
                             f"1, in {layers}")
        roles = ctypes.create_string_buffer(choice.roles, layers)
        room = choice.columns + ROOM_BESIDE
        scores = torch.empty(heads, room)
        columns = torch.empty(heads if choice.apart else kv_heads, choice.count, dtype=torch.int32)
        to.roles, to.scores, to.columns = ctypes.addressof(roles), scores.data_ptr(), columns.data_ptr()
        to.count, to.room, to.stored, to.apart = choice.count, room, -1, choice.apart
        return roles, scores, columns, None if choice.labels is None else _label(choice.labels, to, layers)


def _label(labels: ColumnLabels, to: ChoiceStruct, layers: int) -> tuple[object, ...]:
    rooms = {16 * buffer.shape[1] for buffer in labels.buffers if buffer is not None}
    sizes = len(labels.dims), len(labels.buffers), len(labels.known)
    if sizes != (layers,) * 3 or len(rooms) > 1 or labels.dims.dtype != torch.int32:
        raise ValueError(f"labels of {sizes} layers with room for {sorted(rooms)} columns; there must be {layers} "
                         "layers, one size of room, and int32 dimensions")
    dims = labels.dims.contiguous()
    buffers = (ctypes.c_void_p * layers)(*(one if one is None else one.data_ptr() for one in labels.buffers))
    known = (ctypes.c_int32 * layers)(*labels.known)
    to.width, to.label_room, to.dims = dims.shape[2], max(rooms, default=0), dims.data_ptr()
    to.labels, to.known = ctypes.addressof(buffers), ctypes.addressof(known)
    return dims, buffers, known, labels


class NativeExperts:
    """The MLP groups of all layers, in the library's form.

    Args:
        layers: for each layer equally many groups: gate and up [2 * neurons, hidden], packed with `paired=True` and all
            of one kind, and down [hidden, neurons]. Neurons are multiples of 16.
        hidden: width of the model.
        ffn: neurons of its widest layer.

    Attributes:
        count: number of groups per layer, at most 32.

    Raises:
        ValueError: a matrix has another shape.
    """

    def __init__(self, layers: Sequence[Sequence[tuple[PackedWeight, PackedWeight]]], hidden: int, ffn: int) -> None:
        self._layers, self.count = layers, len(layers[0])
        for number, layer in enumerate(layers):
            sizes = [down.columns for _, down in layer]
            shapes = all((pair.rows, pair.columns, pair.paired) == (2 * down.columns, hidden, True)
                         and down.rows == hidden and not down.paired for pair, down in layer)
            fits = sum(sizes) <= ffn and not any(size % LANES for size in sizes) and len(layer) == self.count <= 32
            if not shapes or not fits or len({pair.kind for pair, _ in layer}) > 1:
                raise ValueError(f"layer {number} has groups of {sizes} neurons; in every layer there must be as many, "
                                 f"at most 32, of multiples of {LANES} and {ffn} together, of models of {hidden}, and "
                                 "of one type of numbers")
        every = [one.struct() for layer in layers for group in layer for one in group]
        self._structs = (Weight * len(every))(*every)

    def put_into(self, struct: BatchStruct, masks: Sequence[Sequence[int]]) -> None:
        """Set the groups that the tokens of a batch run.

        Args:
            struct: the batch; it keeps the arguments alive.
            masks: for each running layer and token, the groups that it runs, bit g for group g; 0 for the whole MLP.
        """
        if len(masks) != struct.active_count or any(len(line) != struct.tokens for line in masks):
            raise ValueError(f"masks must be [{struct.active_count} running layers][{struct.tokens} tokens]")
        words = array("I", [mask for line in masks for mask in line])
        struct.experts, struct.groups = ctypes.addressof(self._structs), words.buffer_info()[0]
        struct.expert_count, struct.memory = self.count, (struct.memory, words, self)
