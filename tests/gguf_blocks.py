"""Blocks of every type with random integers and sensible scales, and the inputs that the kernels multiply them by."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.types import GgmlType

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
    """Float64, as the kernels take them: exact, rounded to bfloat16, or int8 with a scale for each 32 or 256."""
    if type_.is_float:
        return x.bfloat16().double() if type_ is GgmlType.BF16 else x.double()
    groups = x.unflatten(1, (-1, 256 if type_.name.endswith("_K") else 32))
    peaks = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / peaks)).round().double() * (peaks / 127).double()).flatten(1)
