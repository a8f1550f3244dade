"""Attention within chunks of a text (Llama 4): a window that begins anew at every multiple of its size."""

from __future__ import annotations


class Chunk(int):
    """The size of chunks, in the place of a sliding window, which never sees less than a chunk."""

    __slots__ = ()
