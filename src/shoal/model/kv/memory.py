"""KV memory that the operating system backs page by page, as it is written.

Attention over several sequences needs one tensor, with room for the longest sequence in each place. The unused room of
shorter sequences is only an address range: of each head's slots only the pages in use take memory, as in vAttention
(arXiv 2405.04437) on GPUs. This works on CPUs under Linux; elsewhere, and for small tensors, all memory is taken.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

PAGED = sys.platform == "linux"

SMALL = 1 << 20
"""Tensors below this many bytes come from the heap, since every new page costs a microsecond or two."""

_UNRESERVED = 0x4000
"""MAP_NORESERVE (in Python's mmap from 3.13 on): reserving more addresses than there is memory is intended."""

_madvise = ctypes.CDLL(None).madvise if PAGED else None


def is_paged(device: torch.device) -> bool:
    """Whether memory is taken only as it is written."""
    return PAGED and device.type == "cpu"


_TOGETHER = 1 << 17
"""Copies of a sequence's slots below this many bytes come from the heap."""
_LINE = 64


def together(like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the shapes and dtypes of others and any content, in memory that is taken and given back as a whole.

    Many small tensors on the heap would leave holes there, into which what comes later seldom fits.
    """
    sizes = [-(-one.nbytes // _LINE) * _LINE for one in like]
    if not like or sum(sizes) < _TOGETHER or not is_paged(like[0].device):
        return [one.new_empty(one.shape) for one in like]
    parts = zeros(like[0].new_empty(0, dtype=torch.uint8), sum(sizes), small=0).split(sizes)
    return [part[: one.nbytes].view(one.dtype).view(one.shape) for part, one in zip(parts, like, strict=True)]


def zeros(like: Tensor, *shape: int, small: int | None = None) -> Tensor:
    """A tensor of zeros in the dtype and on the device of `like`; MemoryError if there is no room for it.

    Below `small` bytes, by default `SMALL`, it comes from the heap.
    """
    size = prod(shape) * like.element_size()
    if size < (SMALL if small is None else small) or not is_paged(like.device):
        return like.new_zeros(shape)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    except OSError as error:
        raise MemoryError(f"can't allocate memory: {size} bytes of KV") from error
    with suppress(OSError):  # kernels without huge pages refuse the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would span slots of many heads and sequences
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def clear(part: Tensor) -> None:
    """Zero a contiguous part of a tensor; in a paged tensor, pages wholly inside give their memory back."""
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
        if edge.any():  # writing zeros to an untouched page would make it take memory
            edge.zero_()
