"""Blocks of every type with random integers and sensible scales, and the inputs that the kernels multiply them by."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.header import GgmlType

_FLOATS = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}
_SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82),
           "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_M": ()}
"""Where the float16 scales and minima of a block are; at its beginning in the types that are not named."""
MATRICES = (*(kind for kind in GgmlType if kind is not GgmlType.I64),)
"""Types of matrices; whole numbers are those of a list of tokens."""
SUPER = (*(kind for kind in GgmlType if kind.values == 256),)
"""Types with super-blocks."""


def random_blocks(type_: GgmlType, rows: int, columns: int, seed: int = 0) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    if type_.is_plain:
        values = torch.randn(rows, columns, generator=generator).to(_FLOATS[type_])
        return Blocks(type_, values.view(torch.uint8).view(rows, -1), columns)
    count = rows * columns // type_.values
    raw = torch.randint(0, 256, (count, type_.nbytes), generator=generator, dtype=torch.uint8)
    if type_ is GgmlType.MXFP4:
        raw[:, 0] = raw[:, 0] % 5 + 122
    elif type_ is GgmlType.NVFP4:
        raw[:, :4] = raw[:, :4] % 40 + 20
    elif type_ is GgmlType.IQ1_M:  # four bits of the scale are in every second byte
        raw[:, 49:56:2] = raw[:, 49:56:2] & 15 | torch.tensor([0, 0x80, 0xB0, 0x20], dtype=torch.uint8)
    for place in _SCALES.get(type_.name, (0,)):
        scales = (torch.rand(count, 1, generator=generator) * 0.1 + 0.01).half()
        raw[:, place : place + 2] = scales.view(torch.uint8)
    return Blocks(type_, raw.view(rows, -1), columns)


def activations(x: Tensor, type_: GgmlType) -> Tensor:
    """Float64, as the kernels take them: exact, rounded to bfloat16, or int8 with a scale for each 32 or 256.

    Of 256 of which one value stands out, what rounding leaves is rounded again.
    """
    if type_.is_plain:
        return x.bfloat16().double() if type_ is GgmlType.BF16 else x.double()
    if type_ is GgmlType.NVFP4:  # which the kernels hold as float16
        return x.double()
    groups = x.unflatten(1, (-1, 256 if type_ in SUPER else 32))
    peaks = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(peaks > 0, torch.full_like(peaks, 127).div(peaks), 0.0)  # `127 / peaks` would round twice
    levels = (groups * inverse).round().double()
    if type_ in SUPER:
        finer = ((groups.double() * inverse.double() - levels).float() * 254).round().double() / 254
        levels = levels + torch.where(stands_out(levels)[..., None], finer, 0.0)
    return (levels * (peaks / 127).double()).flatten(1)


def stands_out(levels: Tensor) -> Tensor:
    """Bool [T, super-blocks]: of the largest of every 16th value, all but one have squares under a sixteenth of its."""
    largest = levels.unflatten(-1, (16, 16)).abs().amax(-2).square().sort(-1).values
    return (largest[..., -1] > 0) & (16 * largest[..., :-1].sum(-1) < largest[..., -1])
