"""The tokens of a forward, their KV cache and how they choose slots of it (see choose.h), in the library's form."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoal.model.kv.blocks import BLOCK
from shoal.model.kv.form import KVSizes
from shoal.model.kv.lent import LentSlots
from shoal.model.packed.native.library import (
    LANES,
    MAX_NODES,
    MAX_TOKENS,
    ROOM_BESIDE,
    BatchStruct,
    ChoiceStruct,
    Own,
    Piece,
)

_STORED = {torch.int8: 2, torch.uint8: 3}
"""STORED_INT8 and STORED_INT4 of kv_blocks.h, by the dtype of the stored numbers."""

_OWN = "what a row has of its own"
_TABLES: WeakKeyDictionary[LentSlots, ctypes.Array[Piece]] = WeakKeyDictionary()
ATTENTION, MLP, STORE = 1, 2, 4
"""Bits of `NativeBatch.active`."""


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """Up to 256 tokens in ascending order of sequences; those of a sequence are consecutive nodes of its tree.

    Nodes before a sequence's first token are already in the cache, in the slots of nodes.

    Attributes:
        ids, positions: id and position of each token.
        rows: place in the cache of each token's sequence.
        nodes: index of each token within its sequence's tree, below 64, or below 256 without ancestors.
        bases: committed positions of each token's sequence; the keys of node j go to slot `base - start + j`.
        ancestors: per token, bit j is set if it sees node j: itself and its path to node 0; 0 for all up to itself.
        wanted: indices of the tokens whose logits are wanted.
        layers: the layers that run, ascending; None for all.
        active: per running layer and token one byte, `ATTENTION | MLP` or less. A token skips the other sublayers and
            stores nothing there, but for `STORE` in the place of `ATTENTION`. None if all tokens run both.
        starts: per running layer and token, the positions of its sequence that are no longer stored; None for none.
    """

    ids: Sequence[int]
    positions: Sequence[int]
    rows: Sequence[int]
    nodes: Sequence[int]
    bases: Sequence[int]
    ancestors: Sequence[int]
    wanted: Sequence[int]
    layers: Sequence[int] | None = None
    active: Sequence[Sequence[int]] | None = None
    starts: Sequence[Sequence[int]] | None = None

    def struct(self, num_layers: int, kv: KVBinding) -> BatchStruct:
        """The batch in the library's form; lengths are checked here, values by the library."""
        layers = range(num_layers) if self.layers is None else self.layers
        self._check_lengths(len(self.ids), len(layers))
        numbers = array("i", self.ids)
        for part in (self.positions, self.rows, self.nodes, self.bases, self.wanted, layers):
            numbers.extend(part)
        for line in self.starts or ():
            numbers.extend(line)
        bits = array("Q", self.ancestors)
        flags = None if self.active is None else array("B", b"".join(map(bytes, self.active)))
        count, at = len(self.ids), numbers.buffer_info()[0]
        struct = BatchStruct(tokens=count, wanted_count=len(self.wanted), active_count=len(layers), rows=kv.rows)
        size = 4 * count
        struct.ids, struct.position, struct.row = at, at + size, at + 2 * size
        struct.node, struct.base, struct.wanted = at + 3 * size, at + 4 * size, at + 5 * size
        struct.layers = struct.wanted + 4 * len(self.wanted)
        struct.start = None if self.starts is None else struct.layers + 4 * len(layers)
        struct.ancestors = bits.buffer_info()[0]
        struct.active = None if flags is None else flags.buffer_info()[0]
        struct.keys, struct.values, struct.capacity = kv.addresses
        struct.own = kv.own_address
        struct.numbers, struct.memory = numbers, (bits, flags, kv)
        return struct

    def _check_lengths(self, count: int, layers: int) -> None:
        if not 1 <= count <= MAX_TOKENS:
            raise ValueError(f"a forward takes 1 to {MAX_TOKENS} tokens, not {count}")
        for name in ("positions", "rows", "nodes", "bases", "ancestors"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {count} tokens")
        for name in ("active", "starts"):
            table = getattr(self, name)
            if table is not None and (len(table) != layers or any(len(line) != count for line in table)):
                raise ValueError(f"{name} must be [{layers} running layers][{count} tokens]")


def chain_ancestors(nodes: range) -> list[int]:
    """The `ancestors` of nodes of a chain."""
    return [0] * len(nodes) if nodes.stop > MAX_NODES else [(2 << node) - 1 for node in nodes]


class KVBinding:
    """The checked KV tensors of all layers, kept alive, and their addresses; make a new one when a tensor is replaced.

    Attributes:
        rows: number of places in every tensor.
        addresses: addresses of the arrays of keys, of values and of capacities.
        own_address: address of the table of what sequences store outside their places; None if there is nothing.
    """

    def __init__(
        self, keys: Sequence[Tensor | None], values: Sequence[Tensor | None], shapes: Sequence[KVSizes],
        dtype: torch.dtype, own: Sequence[Sequence[OwnSlots | None]] | None = None, seqs: int = 0,
    ) -> None:
        layers = len(shapes)
        if len(keys) != layers or len(values) != layers:
            raise ValueError(f"KV of {len(keys)} and {len(values)} layers was given; the model has {layers}")
        rows = {_checked(pair, shape, dtype) for pair, shape in zip(
            zip(keys, values, strict=True), shapes, strict=True)} - {0}
        if not rows and (own is not None or seqs):
            rows = {seqs if own is None else len(own[0])}
        if len(rows) != 1:
            raise ValueError(f"all KV tensors must have the same number of rows, found {sorted(rows) or 'no tensor'}")
        self.rows = rows.pop()
        self._tensors: object = keys, values, own
        places = [[t if t is None else t.data_ptr() for t in tensors]
                  for tensors in (keys, values if all(shape[2] for shape in shapes) else keys)]
        self._arrays: list[ctypes.Array[Any]] = [(ctypes.c_void_p * layers)(*side) for side in places]
        self._arrays.append((ctypes.c_int32 * layers)(*(0 if t is None else t.shape[2] for t in keys)))
        self.addresses = tuple(ctypes.addressof(one) for one in self._arrays)
        self.own_address = None
        if own is not None:
            table = (Own * (layers * self.rows))()
            self._arrays.append(table)
            for place, one in ((layer * self.rows + row, one) for layer, line in enumerate(own)
                               for row, one in enumerate(line) if one is not None):
                shape = shapes[place // self.rows]
                table[place] = one.struct(shape, dtype)
                self._arrays += [] if one.lent is None else [_table(one.lent, shape, dtype)]
            self.own_address = ctypes.addressof(table)

    def unowned(self) -> KVBinding:
        """Stop keeping tensors alive, for a caller that does so itself while it uses the binding."""
        self._tensors = None
        return self


@dataclass(frozen=True, slots=True)
class OwnSlots:
    """What a sequence stores in a layer outside its place in the cache.

    Attributes:
        keys, values: instead of the place, int8 [kv_heads, capacity, head_dim], or uint8 [kv_heads, capacity, blocks,
            16] with two numbers per byte, and the scales of blocks of 32, float16 [kv_heads, capacity, blocks]. Keys
            have at least as many bits as values. None for the place.
        bias: float32 [kv_heads, slots], added to scores; None for nothing.
        older: instead of the place's first slots, bits and numbers of keys, then of values: uint8 [kv_heads, capacity,
            2 bytes per 16 dimensions], and [kv_heads, capacity, numbers] in the place's dtype, the numbers whose bits
            are set. None for the place.
        settled: number of those slots.
        lent: the first slots in memory of others, in pieces of the place's dtype. None for the place.
    """

    keys: Sequence[Tensor] | None = None
    values: Sequence[Tensor] | None = None
    bias: Tensor | None = None
    older: Sequence[Tensor] | None = None
    settled: int = 0
    lent: LentSlots | None = None

    def struct(self, shape: KVSizes, dtype: torch.dtype) -> Own:
        """The library's form, for a cache in `dtype`; ValueError for tensors of wrong dtypes or sizes."""
        struct = Own()
        if self.keys is not None and self.values is not None:
            capacity, blocks = self.keys[0].shape[1], -(-shape[1] // BLOCK)
            kinds = [torch.int8, torch.uint8] if self.keys[0].dtype == torch.int8 else [torch.uint8]
            for side, (name, (whole, scale)) in enumerate((
                    ("key", self.keys), ("value", self.values if shape[2] else self.keys))):
                held = whole.dtype if whole.dtype in kinds else kinds[0]
                line = (blocks, BLOCK // 2) if held == torch.uint8 else (shape[1],)
                setattr(struct, f"{name}s", address(_OWN, whole, (shape[0], capacity, *line), held))
                scales = address(_OWN, scale, (shape[0], capacity, blocks), torch.float16)
                setattr(struct, f"{name}_scales", scales)
                struct.forms[side] = _STORED[held]
            struct.capacity = capacity
        if self.bias is not None:
            struct.bias = address(_OWN, self.bias, (shape[0], None))
            struct.bias_capacity = self.bias.shape[1]
        if self.older is not None:
            self._add_older(struct, shape, dtype, self.older)
        if self.lent is not None:
            table = _table(self.lent, shape, dtype)
            struct.lent, struct.piece_count, struct.pieces = self.lent.slots, len(table), ctypes.addressof(table)
        return struct

    def _add_older(self, struct: Own, shape: KVSizes, dtype: torch.dtype, older: Sequence[Tensor]) -> None:
        heads, capacity, numbers = older[1].shape
        if not 0 <= self.settled <= capacity:
            raise ValueError(f"{self.settled} slots have settled; there is room for {capacity}")
        struct.settled, struct.settled_capacity, struct.numbers = self.settled, capacity, numbers
        sizes = (shape[0], capacity, 2 * -(-shape[1] // LANES)), (shape[0], capacity, numbers)
        for name, (bits, some) in (("key", older[:2]), ("value", older[2:] if shape[2] else older[:2])):
            setattr(struct, f"{name}_bits", address(_OWN, bits, sizes[0], torch.uint8))
            setattr(struct, f"{name}_numbers", address(_OWN, some, sizes[1], dtype))


def _table(lent: LentSlots, shape: KVSizes, dtype: torch.dtype) -> ctypes.Array[Piece]:
    """The pieces of lent slots in the library's form, made once: all are bound anew whenever a sequence comes."""
    known = _TABLES.get(lent)
    if known is not None:
        return known
    table, first = (Piece * len(lent.pieces))(), 0
    for piece, pair in zip(table, lent.pieces, strict=True):
        count = pair[0].shape[1]
        sides = pair if shape[2] else (pair[0], pair[0])
        piece.keys, piece.values = (address("a lent piece", one, (shape[0], count, shape[1]), dtype) for one in sides)
        piece.first, piece.count = first, count
        first += count
    _TABLES[lent] = table
    return table


def address(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype = torch.float32) -> int:
    """The address of a tensor; ValueError if the library would misread it. None in the shape stands for any number."""
    fits = tensor.ndim == len(shape) and all(b in (None, a) for a, b in zip(tensor.shape, shape, strict=True))
    if not fits or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        wanted = f"{dtype} {['any' if size is None else size for size in shape]}"
        raise ValueError(f"{name} is {found}; a contiguous {wanted} on the CPU is needed")
    return tensor.data_ptr()


def _checked(pair: tuple[Tensor | None, Tensor | None], shape: KVSizes, dtype: torch.dtype) -> int:
    """Number of places in a layer's tensors; 0 if it has none."""
    key, value = pair
    if key is None and value is None:
        return 0
    if key is None or value is None:
        raise ValueError(f"one KV tensor of a layer is None; both must be [rows, {shape[0]}, capacity, {shape[1]}]")
    for tensor, dim in ((key, shape[1]), (value, shape[2])):
        address("a KV tensor", tensor, (None, shape[0], None, dim), dtype)
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"keys are {list(key.shape)} and values {list(value.shape)}; they must agree")
    return key.shape[0]


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
    """Memory for the choices of one batch, which lives as long as the forward; ValueError if they do not fit it.

    Args:
        choices: one per token; None for a token that reads all.
        struct: the batch, which gets a pointer to the choices.
        heads, kv_heads: numbers of heads of the model.
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
