"""What a row has stored, copied out of a cache, and into an empty row of the same or another cache of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer, oldest_seen


@dataclass(frozen=True)
class LayerCopy:
    """Keys and values [heads, positions, head_dim] of one layer, from position `start` on."""

    keys: Tensor
    values: Tensor
    start: int
    window: int | None

    def restorable(self, length: int) -> bool:
        """Whether decoding could go on from `length` positions."""
        return self.start <= oldest_seen(self.window, length) and length <= self.start + self.keys.shape[1]

    @property
    def bytes(self) -> int:
        """Of both tensors."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class RowCopy:
    """A row's first positions, all of which ran every layer."""

    layers: tuple[LayerCopy, ...]
    length: int

    @cached_property
    def bytes(self) -> int:
        """Of all layers."""
        return sum(layer.bytes for layer in self.layers)

    def copied(self) -> RowCopy:
        """The same in memory of its own."""
        layers = (replace(one, keys=one.keys.clone(), values=one.values.clone()) for one in self.layers)
        return RowCopy(tuple(layers), self.length)

    def restorable(self, length: int) -> bool:
        """Whether decoding could go on from `length` positions: a sliding window keeps only the last ones."""
        return length <= self.length and all(layer.restorable(length) for layer in self.layers)


def copy_out(cache: KVCache, row: int) -> RowCopy | None:
    """The positions of a row that ran every layer; None where a layer has given up what a next token would see."""
    seen = look(cache, row)
    return None if seen is None else seen.copied()


def look(cache: KVCache, row: int) -> RowCopy | None:
    """The same before it is copied: it is the cache's memory, and changes with it."""
    length = cache.first_shallow(row)
    if length == 0 or not all(layer.restorable(row, length) for layer in cache.layers):
        return None
    return RowCopy(tuple(_look(layer, row, length) for layer in cache.layers), length)


def _look(layer: KVLayer, row: int, length: int) -> LayerCopy:
    assert layer.keys is not None and layer.values is not None
    start = layer.starts[row]
    keys, values = (store[row, :, : length - start] for store in (layer.keys, layer.values))
    return LayerCopy(keys, values, start, layer.window)


def copy_in(cache: KVCache, row: int, held: RowCopy, length: int) -> None:
    """Let an empty row hold the first `length` positions, which `held.restorable` allows."""
    for layer, copied in zip(cache.layers, held.layers, strict=True):
        _layer_in(layer, row, copied, length)
    cache.positions[row] = length


def _layer_in(layer: KVLayer, row: int, copied: LayerCopy, length: int) -> None:
    count = length - copied.start
    if layer.keys is None:
        layer.allocate(copied.keys, (copied.keys.shape[0], copied.keys.shape[2]), count, copied.values.shape[2])
    layer.lengths[row] = layer.starts[row] = copied.start
    layer.make_room([row], [count])
    assert layer.keys is not None and layer.values is not None
    layer.keys[row, :, :count] = copied.keys[:, :count]
    layer.values[row, :, :count] = copied.values[:, :count]
    layer.lengths[row] = length
