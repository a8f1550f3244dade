"""Blocks of every type with random integers and sensible scales, and the inputs that the kernels multiply them by."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.header import GgmlType

_FLOATS = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}
_WITH_MINIMA = (GgmlType.Q4_1, GgmlType.Q5_1, GgmlType.Q4_K, GgmlType.Q5_K)


def random_blocks(type_: GgmlType, rows: int, columns: int, seed: int = 0) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    if type_.is_float:
        values = torch.randn(rows, columns, generator=generator).to(_FLOATS[type_])
        return Blocks(type_, values.view(torch.uint8).view(rows, -1), columns)
    count = rows * columns // type_.values
    raw = torch.randint(0, 256, (count, type_.nbytes), generator=generator, dtype=torch.uint8)
    places = [208 if type_ is GgmlType.Q6_K else 0] + [2] * (type_ in _WITH_MINIMA)
    for place in places:
        scales = (torch.rand(count, 1, generator=generator) * 0.1 + 0.01).half()
        raw[:, place : place + 2] = scales.view(torch.uint8)
    return Blocks(type_, raw.view(rows, -1), columns)


def activations(x: Tensor, type_: GgmlType) -> Tensor:
    """Float64, as the kernels take them: exact, rounded to bfloat16, or int8 with a scale for each 32 or 256.

    Of 256 of which one value stands out, what rounding leaves is rounded again.
    """
    if type_.is_float:
        return x.bfloat16().double() if type_ is GgmlType.BF16 else x.double()
    groups = x.unflatten(1, (-1, 256 if type_.name.endswith("_K") else 32))
    peaks = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(peaks > 0, torch.full_like(peaks, 127).div(peaks), 0.0)  # `127 / peaks` would round twice
    levels = (groups * inverse).round().double()
    if type_.name.endswith("_K"):
        finer = ((groups.double() * inverse.double() - levels).float() * 254).round().double() / 254
        levels = levels + torch.where(stands_out(levels)[..., None], finer, 0.0)
    return (levels * (peaks / 127).double()).flatten(1)


def stands_out(levels: Tensor) -> Tensor:
    """Bool [T, super-blocks]: of the largest of every 16th value, all but one have squares under a sixteenth of its."""
    largest = levels.unflatten(-1, (16, 16)).abs().amax(-2).square().sort(-1).values
    return (largest[..., -1] > 0) & (16 * largest[..., :-1].sum(-1) < largest[..., -1])
