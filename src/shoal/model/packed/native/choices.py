"""How tokens of a forward choose the slots of the KV that they read; see choose.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.model.packed.native.library import ROOM_BESIDE, BatchStruct, ChoiceStruct


@dataclass(frozen=True, slots=True)
class SlotLabels:
    """Some dimensions of the keys of one sequence; the library fills in those of new slots.

    Attributes:
        dims: int32 [running layers, kv_heads, width].
        buffers: per running layer [kv_heads, groups of 16 slots, width, 16] in the dtype of keys, all of one size;
            None for a layer that does not choose by labels.
        known: per running layer, the number of slots whose labels are filled in.
    """

    dims: Tensor
    buffers: Sequence[Tensor | None]
    known: Sequence[int]


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """How one token chooses slots.

    Attributes:
        count: number of slots to choose, per KV head or query head.
        roles: per running layer 0 (reads all), 1 (reads all and chooses), 2 (reads the last choice, or chooses if that
            does not fit) or 3 (chooses by labels); 0 in layers with a window.
        slots: most slots that a layer has of the token's sequence after the forward.
        labels: labels for role 3; None if no layer has it.
        apart: whether each query head has slots of its own; otherwise heads that share a KV head share slots.
    """

    count: int
    roles: bytes
    slots: int
    labels: SlotLabels | None = None
    apart: bool = False


class ChoicesAtWork:
    """Memory for the choices of one batch; it must live as long as the forward.

    Args:
        choices: one per token; None for a token that reads all.
        struct: the batch, which gets a pointer to the choices.
        heads, kv_heads: numbers of heads of the model.

    Raises:
        ValueError: the number of tokens, layers or slots does not fit the batch.
    """

    def __init__(self, choices: Sequence[SlotChoice | None], struct: BatchStruct, heads: int, kv_heads: int) -> None:
        if len(choices) != struct.tokens:
            raise ValueError(f"{len(choices)} tokens choose slots; there are {struct.tokens}, some of them with None")
        self._choices = choices
        self._structs = (ChoiceStruct * len(choices))()
        self._memory = [self._fill(one, to, struct.active_count, heads, kv_heads)
                        for one, to in zip(choices, self._structs, strict=True) if one is not None]
        struct.choices = ctypes.addressof(self._structs)

    def _fill(self, choice: SlotChoice, to: ChoiceStruct, layers: int, heads: int, kv_heads: int) -> tuple[object, ...]:
        if choice.count < 1 or len(choice.roles) != layers:
            raise ValueError(f"{choice.count} slots in {len(choice.roles)} layers are chosen; there must be at least "
                             f"1, in {layers}")
        roles = ctypes.create_string_buffer(choice.roles, layers)
        room = choice.slots + ROOM_BESIDE
        scores = torch.empty(heads, room)
        slots = torch.empty(heads if choice.apart else kv_heads, choice.count, dtype=torch.int32)
        to.roles, to.scores, to.slots = ctypes.addressof(roles), scores.data_ptr(), slots.data_ptr()
        to.count, to.room, to.stored, to.apart = choice.count, room, -1, choice.apart
        return roles, scores, slots, None if choice.labels is None else _label(choice.labels, to, layers)


def _label(labels: SlotLabels, to: ChoiceStruct, layers: int) -> tuple[object, ...]:
    rooms = {16 * buffer.shape[1] for buffer in labels.buffers if buffer is not None}
    sizes = len(labels.dims), len(labels.buffers), len(labels.known)
    if sizes != (layers,) * 3 or len(rooms) > 1 or labels.dims.dtype != torch.int32:
        raise ValueError(f"labels of {sizes} layers with room for {sorted(rooms)} slots; there must be {layers} "
                         "layers, one size of room, and int32 dimensions")
    dims = labels.dims.contiguous()
    buffers = (ctypes.c_void_p * layers)(*(one if one is None else one.data_ptr() for one in labels.buffers))
    known = (ctypes.c_int32 * layers)(*labels.known)
    to.width, to.label_room, to.dims = dims.shape[2], max(rooms, default=0), dims.data_ptr()
    to.labels, to.known = ctypes.addressof(buffers), ctypes.addressof(known)
    return dims, buffers, known, labels
