"""Several streams of states per token, of which each layer computes on one (AltUp, arXiv 2301.13310).

Before a layer a small map predicts all streams after it from those before it. Then the layer computes on the prediction
of one, and all are corrected by what that one was off. The maps follow from the token: a router reads the stream that
is computed on. How streams begin and end, and what is added to all but the first, is from Gemma 3n's published modules,
and so is what stands beside attention: a residual connection of low rank (LAuReL, arXiv 2411.07501, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from shoal.model.layers.mixer import Matrix

M = TypeVar("M", bound=Matrix, covariant=True)
LEAST = 1e-5
"""Least mean square by which a projected state is scaled."""
HALVED = 2.0**-0.5
"""Factor of the sum of the states after attention and the residual beside it."""


@dataclass(frozen=True)
class Alternating:
    """What a layer does with the streams [n, S, D] of n tokens.

    Attributes:
        router: [S, D], applied to a stream that is normalised and divided by D; the map's inputs are tanh of this.
        norm: [D], weight of that norm.
        predict, correct: [S * S, S] and [S, S], from these inputs to the maps.
        scale: [D], factor of the corrected stream where the layer's own input reads it, or None.
        active: the number of the stream that the layer computes on.
        eps: of the norm.
    """

    router: Tensor
    norm: Tensor
    predict: Tensor
    correct: Tensor
    scale: Tensor | None
    active: int
    eps: float

    def routed(self, x: Tensor) -> Tensor:
        """The maps' inputs [n, S] of states [n, D]."""
        normed = rms_norm(x, self.norm.shape, self.norm, self.eps) / x.shape[-1]
        return torch.tanh(linear(normed, self.router))

    def predicted(self, streams: Tensor) -> Tensor:
        """Streams after the layer, as they are predicted."""
        shares: Tensor = linear(self.routed(streams[:, self.active]), self.predict).unflatten(1, (streams.shape[1], -1))
        return streams + shares @ streams

    def corrected(self, predicted: Tensor, x: Tensor) -> Tensor:
        """Streams after the layer, which made `x` [n, D] of the prediction of the active one."""
        shares = 1 + linear(self.routed(x), self.correct)
        return predicted + shares[:, :, None] * (x - predicted[:, self.active])[:, None]

    def read(self, streams: Tensor) -> Tensor:
        """What the layer's own input reads, [n, D]."""
        x = streams[:, self.active]
        return x if self.scale is None else x * self.scale


@dataclass(frozen=True)
class LowRank(Generic[M]):
    """A residual connection of low rank beside a sublayer, on the sublayer's normed inputs.

    Attributes:
        left, right: [R, D] and [D, R].
        norm: [D], of what they give.
        eps: of the norm.
    """

    left: M
    right: M
    norm: Tensor
    eps: float

    def __call__(self, normed: Tensor, dtype: torch.dtype) -> Tensor:
        """What joins the states, [n, D], in the dtype of the normed inputs; matrices read `dtype`."""
        found = self.right(self.left(normed.to(dtype))).to(normed.dtype)
        return normed + rms_norm(found, self.norm.shape, self.norm, self.eps)


@dataclass(frozen=True)
class Streams(Generic[M]):
    """How streams begin, and how they end.

    Attributes:
        spread: [(S - 1) * D, D], from embeddings to all streams but the first.
        gather: S - 1 matrices [D, D], each applied to one of these at the end.
    """

    spread: M
    gather: tuple[M, ...]

    def begun(self, embedded: Tensor, dtype: torch.dtype) -> Tensor:
        """The first layer's streams [n, S * D], side by side, from embeddings [n, D]."""
        more = self.spread(embedded.to(dtype)).to(embedded.dtype).chunk(len(self.gather), -1)
        return torch.cat(as_large([embedded, *more]), -1)

    def ended(self, streams: Tensor, dtype: torch.dtype) -> Tensor:
        """The final norm's inputs [n, D] from the last layer's streams [n, S * D]."""
        first, *rest = streams.chunk(1 + len(self.gather), -1)
        more = [matrix(one.to(dtype)).to(first.dtype) for matrix, one in zip(self.gather, rest, strict=True)]
        return torch.stack(as_large([first, *more])).mean(0)


def as_large(states: Sequence[Tensor]) -> list[Tensor]:
    """The states [.., D], all but the first scaled to its size."""
    first, *rest = states
    size = first.square().mean(-1, keepdim=True) ** 0.5
    return [first, *(one * size / one.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt() for one in rest)]


def cut_off(gates: Tensor, deviations: float) -> Tensor:
    """Gates [n, neurons] less their mean and so many standard deviations; those below are 0.

    So of normal numbers a known share is left (Gemma 3n's activation sparsity). At least float32 inside.
    """
    wide = gates.to(torch.promote_types(gates.dtype, torch.float32))
    cut = wide.mean(-1, keepdim=True) + wide.std(-1, keepdim=True, unbiased=False) * deviations
    return (wide - cut).relu().to(gates.dtype)
