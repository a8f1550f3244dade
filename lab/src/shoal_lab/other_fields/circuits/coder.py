"""An arithmetic coder driven by a circuit's conditionals: a range coder on 64 bits without carries.

Coder and decoder compute the same conditionals to the last bit, so both need one machine, one library and the same
number of images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shoal_lab.other_fields.circuits.circuit import Circuit, Walk

if TYPE_CHECKING:
    from shoal_lab.other_fields.circuits.circuit import Floats, Ints

BITS = 16
"""Of the whole of a pixel's frequencies."""
_BYTES = 8
_TOP = 8 * _BYTES - 8
_WHOLE = (1 << 8 * _BYTES) - 1
_LEAST = 1 << 40
"""A range is cut below this, so that it never grows too narrow for a pixel's frequencies."""


def encode(circuit: Circuit, images: Ints) -> bytes:
    """Images as one stream, pixel by pixel, of each pixel all images."""
    walk, low, wide, out = Walk(circuit, len(images)), 0, _WHOLE, bytearray()
    for node in circuit.tree.order:
        ends = _ends(walk.conditional())
        levels = images[:, node]
        walk.observe(levels)
        for row, level in zip(ends.tolist(), levels.tolist(), strict=True):
            wide //= row[-1]
            low, wide = low + row[level] * wide, wide * (row[level + 1] - row[level])
            while (step := _shift(low, wide)) is not None:
                out.append(low >> _TOP & 255)
                low, wide = (low << 8) & _WHOLE, step << 8
    return bytes(out) + low.to_bytes(_BYTES, "big")


def decode(circuit: Circuit, stream: bytes, images: int) -> Ints:
    """The images of a stream.

    Raises:
        ValueError: The stream is shorter than any that `encode` writes.
    """
    if len(stream) < _BYTES:
        raise ValueError(f"a stream of {len(stream)} bytes: it ends with at least {_BYTES}; give what encode wrote")
    walk, low, wide, at = Walk(circuit, images), 0, _WHOLE, _BYTES
    code = int.from_bytes(stream[:_BYTES], "big")
    found = np.zeros((images, len(circuit.tree.order)), dtype=np.int64)
    for node in circuit.tree.order:
        ends = _ends(walk.conditional())
        for image, row in enumerate(ends):
            wide //= int(row[-1])
            level = min(int(np.searchsorted(row, (code - low) // wide, "right")) - 1, len(row) - 2)
            low, wide = low + int(row[level]) * wide, wide * int(row[level + 1] - row[level])
            while (step := _shift(low, wide)) is not None:
                code = (code << 8 | (stream[at] if at < len(stream) else 0)) & _WHOLE
                low, wide, at = (low << 8) & _WHOLE, step << 8, at + 1
            found[image, node] = level
        walk.observe(found[:, node])
    return found


def _shift(low: int, wide: int) -> int | None:
    """The range from which a byte is taken next, or None while the first byte is not settled."""
    if (low ^ (low + wide)) < 1 << _TOP:
        return wide
    return -low & (_LEAST - 1) if wide < _LEAST else None


def _ends(laws: Floats) -> Ints:
    """Cumulative frequencies, from 0, (images, levels + 1): each level has at least one."""
    counts = 1 + (laws * ((1 << BITS) - laws.shape[1])).astype(np.int64)
    return np.concatenate([np.zeros((len(laws), 1), dtype=np.int64), counts.cumsum(1)], 1)
