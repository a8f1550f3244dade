"""Memory in huge pages: weights stream about a third faster out of them than out of pages of 4 KiB."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shoal.model.packed.native.library import require

_HUGE = 1 << 21
_LINE = 64


class Memory(Protocol):
    """Where packed matrices go."""

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], aligned to a cache line."""
        ...


class Arena:
    """Hands out pieces of large slabs, one after the other; a slab is freed with the last tensor on it.

    Args:
        slab: bytes of a slab, and the most that is set aside and never used; larger requests get their own.
            0 gives every request memory of its own.
    """

    def __init__(self, slab: int = 64 << 20) -> None:
        self._slab = slab
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], aligned to a cache line, uninitialised."""
        padded = -(-nbytes // _LINE) * _LINE
        if padded > self._rest.numel():
            if padded >= self._slab:
                return _huge(padded)[:nbytes]
            self._rest = _huge(self._slab)
        piece, self._rest = self._rest[:nbytes], self._rest[padded:]
        return piece


def _huge(nbytes: int) -> Tensor:
    """Memory that begins on a huge page, if it is large enough to have any."""
    if nbytes < _HUGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = torch.empty(nbytes + _HUGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % _HUGE :][:nbytes]
    require().shoal_advise(memory.data_ptr(), nbytes)
    return memory
