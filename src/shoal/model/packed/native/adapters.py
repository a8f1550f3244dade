"""Adapters in the form of the kernels (adapters.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from shoal.model.lora.adapter import Factors
from shoal.model.lora.packed import SITES, PackedAdapter
from shoal.model.packed.native.library import LANES, AdapterStruct, BatchStruct, LowRankStruct


@dataclass(frozen=True, eq=False)
class NativeAdapter(PackedAdapter):
    """An adapter that the library reads; plain torch reads it too.

    Attributes:
        gated: per layer, whether its MLP has a gate, so that row blocks of gate and up alternate.
        struct: the library's form, with what it points to.
    """

    gated: Sequence[bool]
    struct: AdapterStruct = field(init=False)

    def __post_init__(self) -> None:
        parts = [_part(layer.get(site), gated and site == "gate_up")
                 for layer, gated in zip(self.layers, self.gated, strict=True) for site in SITES]
        table = (LowRankStruct * len(parts))(*(struct for struct, _ in parts))
        struct = AdapterStruct(table, max((one.rank for one, _ in parts), default=0))
        struct.memory = table, [memory for _, memory in parts]
        object.__setattr__(self, "struct", struct)

    @property
    @override
    def nbytes(self) -> int:
        return 2 * super().nbytes


def put_adapters(struct: BatchStruct, adapters: Sequence[NativeAdapter | None]) -> None:
    """Let a batch run with the adapter of each of its tokens, which it keeps alive."""
    if len(adapters) != struct.tokens:
        raise ValueError(f"{len(adapters)} adapters for {struct.tokens} tokens; give one, or None, for each")
    table = (c_void_p * len(adapters))(*(None if one is None else ctypes.addressof(one.struct) for one in adapters))
    struct.adapters, struct.adapted = ctypes.addressof(table), (table, adapters)


def _part(part: Factors | None, paired: bool) -> tuple[LowRankStruct, tuple[Tensor, ...]]:
    """A site's part, and the memory that it points to; `paired`: of two halves, whose row blocks alternate."""
    if part is None:
        return LowRankStruct(), ()
    rank, columns = part.down.shape
    down = pad(part.down, (0, -columns % LANES)).contiguous()
    halves = [_blocks(half) for half in part.up.chunk(2 if paired else 1)]
    up = torch.stack(halves, 1).flatten(0, 1).transpose(1, 2).contiguous()  # [blocks, rank, LANES]
    used = up.ne(0).any(2)
    places = torch.arange(rank)
    first = torch.where(used, places, rank).amin(1)
    last = torch.where(used, places + 1, 0).amax(1)
    spans = torch.stack([torch.minimum(first, last), last], 1).int().contiguous()
    struct = LowRankStruct(down.data_ptr(), up.data_ptr(), spans.data_ptr(), rank, columns)
    return struct, (down, up, spans)


def _blocks(rows: Tensor) -> Tensor:
    """Rows [n, rank] in row blocks [blocks, LANES, rank], with zeros after the last."""
    return pad(rows, (0, 0, 0, -len(rows) % LANES)).view(-1, LANES, rows.shape[1])
