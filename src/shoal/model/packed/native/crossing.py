"""What tokens read of sources, in the form of the kernels (`ShoalBatch.crossed`)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence

import torch

from shoal.model.kv.form import KVSizes
from shoal.model.layers.cross_attention import Encoded
from shoal.model.packed.native.batch import address
from shoal.model.packed.native.library import BatchStruct, Own, Piece


class Crossing:
    """The sources of the sequences of a cache, which stay bound from forward to forward.

    Args:
        sizes: per layer, of keys and values.
        dtype: of keys and values.
    """

    def __init__(self, sizes: Sequence[KVSizes], dtype: torch.dtype) -> None:
        self._sizes, self._dtype = sizes, dtype
        self._bound: tuple[int, dict[int, Encoded]] = (0, {})
        self._table: ctypes.Array[Own] = (Own * 0)()
        self._pieces: list[ctypes.Array[Piece]] = []

    def put_into(self, struct: BatchStruct, rows: Sequence[int], sources: Mapping[int, Encoded]) -> None:
        """Let a batch read sources, which it keeps alive.

        Args:
            rows: place of each token's sequence.
            sources: by place, at least those of `rows`.

        Raises:
            ValueError: a source was made for another model.
        """
        if self._bound != (struct.rows, sources):
            self._bind(struct.rows, dict(sources))
        layers, count = len(self._sizes), len(rows)
        running = (ctypes.c_int32 * struct.active_count).from_address(struct.layers)
        numbers = array("i", [layers + number for number in running])
        numbers.extend(sources[row].places - 1 for row in rows)
        numbers.extend([0] * count)
        bits, at = array("Q", [0] * count), numbers.buffer_info()[0]
        crossed = BatchStruct(tokens=count, rows=struct.rows, active_count=struct.active_count)
        crossed.ids, crossed.row, crossed.position = struct.ids, struct.row, struct.position
        crossed.active, crossed.keys, crossed.values = struct.active, struct.keys, struct.values
        crossed.capacity = struct.capacity
        crossed.layers, crossed.base = at, at + 4 * len(running)
        crossed.node, crossed.ancestors = crossed.base + 4 * count, bits.buffer_info()[0]
        crossed.own = ctypes.addressof(self._table)
        crossed.numbers, crossed.memory = numbers, (bits, self._table, self._pieces, self._bound)
        struct.crossed, struct.crossing = ctypes.addressof(crossed), crossed

    def _bind(self, rows: int, sources: dict[int, Encoded]) -> None:
        """Check the sources' tensors once."""
        table, pieces = (Own * (len(self._sizes) * rows))(), []
        for row, source in sources.items():
            if len(source.keys) != len(self._sizes):
                raise ValueError(f"a source was encoded for {len(source.keys)} layers; the model has "
                                 f"{len(self._sizes)}")
            for layer, (heads, size, _) in enumerate(self._sizes):
                shape, piece = (heads, source.places, size), (Piece * 1)()
                sides = (address("a source", side[layer], shape, self._dtype) for side in (source.keys, source.values))
                piece[0].keys, piece[0].values = sides
                piece[0].count = source.places
                own = table[layer * rows + row]
                own.lent, own.piece_count, own.pieces = source.places, 1, ctypes.addressof(piece)
                pieces.append(piece)
        self._bound, self._table, self._pieces = (rows, sources), table, pieces
