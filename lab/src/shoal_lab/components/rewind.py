"""Going back in a sequence for a moment, to run committed tokens again in another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer


@contextmanager
def rewound(cache: KVCache, seq: int, length: int) -> Iterator[None]:
    """Within the context the sequence holds its first `length` positions; afterwards it is restored, without scratch.

    What is fed meanwhile must not be committed. Costs a copy of the positions from `length` on.

    Raises:
        ValueError: a layer no longer stores what the tokens after `length` positions see.
    """
    held, shallow = cache.positions[seq], cache.first_shallow(seq)
    if not earliest(cache, seq) <= length <= held:
        raise ValueError(f"sequence {seq} can go back to {earliest(cache, seq)}..{held} positions, not to {length}")
    cut = [layer for layer in _current(cache, seq) if held > length]
    saved = [(layer.lent[seq], _saved(layer, seq, length)) for layer in cut]
    cache.positions[seq] = length
    for layer, (lent, _) in zip(cut, saved, strict=True):
        layer.lengths[seq], layer.scratch[seq] = length, 0
        layer.lend(seq, lent and lent.cut(length))
    try:
        yield
    finally:
        cache.rollback(seq)
        for layer, (lent, stores) in zip(cut, saved, strict=True):
            layer.lengths[seq] = held
            _restore(layer, seq, length, stores)
            layer.lend(seq, lent)
        cache.positions[seq] = held
        if shallow < held:
            cache.mark_shallow(seq, shallow)


def earliest(cache: KVCache, seq: int) -> int:
    """The fewest positions to go back to: before them a window has moved on, slots were rewritten, or a state was."""
    if cache.recurrent:
        return cache.positions[seq]
    layers = _current(cache, seq)
    slid = [layer for layer in layers if layer.window is not None and layer.starts[seq]]
    rewritten = [layer.rewritten[seq] for layer in layers]
    return max([*rewritten, *(layer.starts[seq] + (layer.window or 0) - 1 for layer in slid)], default=0)


def _current(cache: KVCache, seq: int) -> list[KVLayer]:
    """The layers that have run all of the sequence's positions; no others can run."""
    layers = [layer for layer in cache.layers if layer.lengths[seq] == cache.positions[seq]]
    return [layer for layer in layers if layer.seq_tensors(seq) and not layer.released[seq]]


def _saved(layer: KVLayer, seq: int, length: int) -> list[Tensor]:
    slots = slice(length - layer.starts[seq], layer.lengths[seq] - layer.starts[seq])
    return [tensor[:, slots].clone() for tensor in layer.seq_tensors(seq)]


def _restore(layer: KVLayer, seq: int, length: int, saved: list[Tensor]) -> None:
    """Restore a layer; its window may have moved on meanwhile, but never beyond what is restored."""
    first = length - layer.starts[seq]
    for tensor, entries in zip(layer.seq_tensors(seq), saved, strict=True):
        tensor[:, first : first + entries.shape[1]] = entries
