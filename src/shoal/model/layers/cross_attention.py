"""Attention to what an encoder made of a source (Vaswani et al., 2017, arXiv 1706.03762, section 3.2.3).

Keys and values are projected once, from the encoder's last states; every token of the text reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
Multiply = Callable[[Tensor, Any], Tensor]
M = TypeVar("M", bound=Map)


@dataclass(frozen=True, eq=False)
class Encoded:
    """What an encoder made of one source, as the layers of a decoder read it. Several texts may share it.

    Attributes:
        keys, values: per layer [kv_heads, places, head_dim], contiguous, in the dtype of the cache.
        name: tells this source from others; equal sources have equal names.
        ids: its tokens, where the decoder has the same ones; else empty.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    name: str
    ids: tuple[int, ...] = ()

    @property
    def places(self) -> int:
        """How many states the encoder gave."""
        return self.keys[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(one.nbytes for side in (self.keys, self.values) for one in side)


@dataclass(frozen=True, eq=False)
class CrossAttention(Generic[M]):
    """The weights of a layer's attention to a source.

    Attributes:
        norm, norm_bias: [hidden], of the inputs of `query`, or None; the bias is that of a LayerNorm, else None.
        query, out: matrices of the text, and their biases or None.
        keys, values: matrices of the encoder's states, and their biases or None.
        sum_norm, sum_norm_bias: [hidden], of a LayerNorm of the states, once this has added to them, or None.
        out_norm: [hidden], of what this adds to them, or None.
    """

    norm: Tensor | None
    query: M
    out: M
    keys: M
    values: M
    norm_bias: Tensor | None = None
    query_bias: Tensor | None = None
    out_bias: Tensor | None = None
    keys_bias: Tensor | None = None
    values_bias: Tensor | None = None
    sum_norm: Tensor | None = None
    sum_norm_bias: Tensor | None = None
    out_norm: Tensor | None = None

    def project(self, states: Tensor, head_dim: int, multiply: Multiply) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, places, head_dim] of an encoder's states [places, hidden]."""
        sides = (self.keys, self.keys_bias), (self.values, self.values_bias)
        keys, values = (_biased(multiply(states, matrix), bias).unflatten(1, (-1, head_dim)).transpose(0, 1)
                        for matrix, bias in sides)
        return keys, values


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


def _called(states: Tensor, matrix: Map) -> Tensor:
    return matrix(states)


def encoded(
    layers: list[CrossAttention[M]], states: Tensor, head_dim: int, dtype: torch.dtype, name: str,
    ids: tuple[int, ...] = (), multiply: Multiply = _called,
) -> Encoded:
    """What the layers of a decoder read of an encoder's states [places, hidden], in `dtype`.

    `multiply` maps states and a matrix of a layer to their product.
    """
    sides = [layer.project(states.to(dtype), head_dim, multiply) for layer in layers]
    keys, values = zip(*((keys.to(dtype).contiguous(), values.to(dtype).contiguous()) for keys, values in sides),
                       strict=True)
    return Encoded(keys, values, name, ids)
