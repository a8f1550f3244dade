"""Going back in a row for a moment, to run committed tokens again in another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer


@contextmanager
def rewound(cache: KVCache, row: int, length: int) -> Iterator[None]:
    """Within the context the row holds its first `length` positions; afterwards it is restored, without scratch.

    What is fed meanwhile must not be committed. Costs a copy of the positions from `length` on.

    Raises:
        ValueError: a layer no longer stores what the tokens after `length` positions see.
    """
    held, shallow = cache.positions[row], cache.first_shallow(row)
    if not earliest(cache, row) <= length <= held:
        raise ValueError(f"row {row} can go back to {earliest(cache, row)}..{held} positions, not to {length}")
    cut = [layer for layer in _current(cache, row) if held > length]
    saved = [_saved(layer, row, length) for layer in cut]
    cache.positions[row] = length
    for layer in cut:
        layer.lengths[row], layer.scratch[row] = length, 0
    try:
        yield
    finally:
        cache.rollback(row)
        for layer, stores in zip(cut, saved, strict=True):
            layer.lengths[row] = held
            _restore(layer, row, length, stores)
        cache.positions[row] = held
        if shallow < held:
            cache.mark_shallow(row, shallow)


def earliest(cache: KVCache, row: int) -> int:
    """The fewest positions to which a row can go back: a window has moved on, or slots were rewritten, before them."""
    layers = _current(cache, row)
    slid = [layer for layer in layers if layer.window is not None and layer.starts[row]]
    rewritten = [layer.rewritten[row] for layer in layers]
    return max([*rewritten, *(layer.starts[row] + (layer.window or 0) - 1 for layer in slid)], default=0)


def _current(cache: KVCache, row: int) -> list[KVLayer]:
    """The layers that have run all of the row's positions; no others can run."""
    layers = [layer for layer in cache.layers if layer.lengths[row] == cache.positions[row]]
    return [layer for layer in layers if layer.row_tensors(row) and not layer.released[row]]


def _saved(layer: KVLayer, row: int, length: int) -> list[Tensor]:
    columns = slice(length - layer.starts[row], layer.lengths[row] - layer.starts[row])
    return [tensor[:, columns].clone() for tensor in layer.row_tensors(row)]


def _restore(layer: KVLayer, row: int, length: int, saved: list[Tensor]) -> None:
    """Restore a layer; its window may have moved on meanwhile, but never beyond what is restored."""
    first = length - layer.starts[row]
    for tensor, entries in zip(layer.row_tensors(row), saved, strict=True):
        tensor[:, first : first + entries.shape[1]] = entries
