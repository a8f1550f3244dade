"""Matrices in the blocks of a GGUF file, in plain torch: the fallback of the native kernels, and their oracle."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from shoal.model.gguf.blocks import Blocks

_AT_ONCE = 1 << 21


class Blocked:
    """See `shoal.model.packed.linear.Linear`. Blocks stay as they lie in the file and are dequantised at every use.

    Args:
        blocks: the matrix.
        dtype: of what `lookup` returns.
    """

    def __init__(self, blocks: Blocks, dtype: torch.dtype) -> None:
        self.blocks, self._dtype = blocks, dtype
        self.rows, self.columns, self.nbytes = blocks.rows, blocks.columns, blocks.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`; some rows at a time, so that little is ever dequantised."""
        step = max(1, _AT_ONCE // self.columns)
        parts = (self.blocks.select(slice(first, first + step)) for first in range(0, self.rows, step))
        return torch.cat([linear(x, part.dequantise(x.dtype)) for part in parts], dim=-1)

    def lookup(self, ids: Tensor) -> Tensor:
        """See `Linear`."""
        return self.blocks.select(ids).dequantise(self._dtype)
