"""Memory for KV that the system backs page by page, where something was written.

Attention over several rows wants one tensor, with room for the longest row in each slot. Here the room of the others is
an address range and nothing more: of each head's columns only the pages in use take memory, as in vAttention (arXiv
2405.04437), which does so on GPUs. On Linux and a CPU; elsewhere, and where it is small, all of a tensor takes memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

PAGED = sys.platform == "linux"

SMALL = 1 << 20
"""Bytes below which a tensor comes from the heap, which is warm: every new page costs a microsecond or two."""

_UNRESERVED = 0x4000
"""MAP_NORESERVE, which Python names from 3.13 on: more addresses than there is memory are no mistake here."""

_madvise = ctypes.CDLL(None).madvise if PAGED else None


def is_paged(device: torch.device) -> bool:
    """Whether only what was written takes memory."""
    return PAGED and device.type == "cpu"


def zeros(like: Tensor, *shape: int) -> Tensor:
    """A tensor of zeros in the dtype and on the device of another one; MemoryError where there is no room for it."""
    size = prod(shape) * like.element_size()
    if size < SMALL or not is_paged(like.device):
        return like.new_zeros(shape)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    except OSError as error:
        raise MemoryError(f"can't allocate memory: {size} bytes of KV") from error
    with suppress(OSError):  # a kernel without huge pages knows no advice about them
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # they would hold columns of many heads and rows
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def clear(part: Tensor) -> None:
    """Fill a contiguous part of such a tensor with zeros; in a large one, pages wholly in it give theirs back."""
    if _madvise is None or not is_paged(part.device) or part.untyped_storage().nbytes() < SMALL:
        part.zero_()
        return
    raw = part.view(-1).view(torch.uint8)
    first, size, page = raw.data_ptr(), raw.numel(), mmap.PAGESIZE
    skip, rest = -first % page, (first + size) % page
    whole = size - skip - rest
    if whole > 0:
        _madvise(ctypes.c_void_p(first + skip), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)
    for edge in (raw[:skip], raw[size - rest :]) if whole > 0 else (raw,):
        if edge.any():  # to write zeros to a page that nobody has written to would make it take memory
            edge.zero_()
