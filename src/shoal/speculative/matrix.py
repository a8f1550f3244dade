"""Matrices of trained parts, multiplied as the target multiplies its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from shoal.model.packed import native
from shoal.model.packed.native_stack import NativeStack
from shoal.model.stack import Stack

Product = Callable[[Tensor], Tensor]


class NativeProduct:
    """The product x @ weight.T of float [n, columns] by the kernels, in float32.

    Args:
        held: the matrix.
    """

    def __init__(self, held: native.PackedWeight) -> None:
        self.held = held

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, rows]."""
        x = x.float()
        if len(x) <= native.MAX_TOKENS:
            return native.matmul(x, self.held)
        return torch.cat([native.matmul(part, self.held) for part in x.split(native.MAX_TOKENS)])


def packed(target: Stack, weight: Tensor) -> Product:
    """The product x @ weight.T of float [n, columns] with a matrix [rows, columns], packed once.

    On the native kernels in 8 bits where the target multiplies in 8 bits, and in float32 out; else in the target's
    dtype.
    """
    if isinstance(target, NativeStack):
        kind: native.Kind = "int8" if target.activation_dtype == torch.int8 else _FLOATS[target.dtype]
        return NativeProduct(native.pack(weight.float().contiguous(), kind))
    dtype = torch.float32 if target.dtype == torch.float16 else target.dtype
    plain = weight.to(target.device, dtype)
    return lambda x: linear(x.to(dtype), plain)


_FLOATS: dict[torch.dtype, native.Kind] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
