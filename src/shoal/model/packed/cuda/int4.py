"""torch's product with a 4-bit matrix on NVIDIA GPUs, for few tokens; its results are checked at load."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

_INNER_TILES = (8, 4, 2)
_TILE = 16
_TOLERANCE = 0.02

Product = Callable[[Tensor], Tensor]
log = logging.getLogger(__name__)


def int4_product(levels: Tensor, scales: Tensor) -> Product | None:
    """The kernel for a matrix; None, with the reason logged, if torch has none that reproduces it.

    Args:
        levels: int8 [rows, groups, 32], -8..7.
        scales: bfloat16 [rows, groups].
    """
    try:
        product = _packed(levels, scales)
        return product if _agrees(product, levels, scales) else None
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        log.info("no int4 kernel of torch's for this matrix: %s", str(error).splitlines()[0])
        return None


def _packed(levels: Tensor, scales: Tensor) -> Product:
    group = levels.shape[2]
    packed = torch._convert_weight_to_int4pack(nibbles(levels), inner_tiles(levels[0].numel()))
    pairs = torch.stack([scales.t(), torch.zeros_like(scales.t())], dim=-1).contiguous()
    return lambda x: torch._weight_int4pack_mm(x, packed, group, pairs)


def nibbles(levels: Tensor) -> Tensor:
    """Levels -8..7, plus 8, as uint8 [rows, columns / 2]; even columns are the high halves, as the GPU packer wants."""
    raised = (levels.flatten(1) + 8).view(torch.uint8)
    return raised[:, ::2] << 4 | raised[:, 1::2]


def inner_tiles(columns: int) -> int:
    """The packer's innermost tiles along the columns: the most that divide them; RuntimeError if none do."""
    for tiles in _INNER_TILES:
        if columns % (tiles * _TILE) == 0:
            return tiles
    raise RuntimeError(f"{columns} columns are not a multiple of {_INNER_TILES[-1] * _TILE}")


def _agrees(product: Product, levels: Tensor, scales: Tensor) -> bool:
    """Whether the kernel multiplies by the packed matrix; wrong packing would give fluent nonsense."""
    matrix = (levels.float() * scales[..., None].float()).flatten(1)
    draw = torch.Generator(levels.device).manual_seed(0)
    x = torch.randn(2, matrix.shape[1], generator=draw, device=levels.device).bfloat16()
    true = linear(x.float(), matrix)
    error = float((product(x).float() - true).norm() / true.norm())
    if not error <= _TOLERANCE:
        log.warning("a kernel of torch's is off by %.3f; the matrix is dequantised at every use instead", error)
    return error <= _TOLERANCE
