"""Inputs of layers' own: a few numbers per token and layer, beside the residual stream (Gemma 3n, Gemma 4).

They follow from the token and from its embedding before the first layer runs, so what precedes a token changes none of
them. From the models' published modules ("per-layer embeddings").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from shoal.model.layers.mixer import Matrix


class Table(Protocol):
    """A matrix whose rows are looked up, too.

    Attributes:
        rows: their number.
    """

    rows: int

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [n, columns] to [n, rows]."""

    def lookup(self, ids: Tensor) -> Tensor:
        """The rows [n, columns] of ids [n]."""


T = TypeVar("T", bound=Table, covariant=True)
M = TypeVar("M", bound=Matrix, covariant=True)
MIX = 2.0**-0.5
"""Factor of the sum of both parts."""


@dataclass(frozen=True)
class LayerInputs(Generic[T]):
    """Makes the inputs of all layers.

    Attributes:
        table: [tokens, layers * size], a row per token; the others, which stand for images and sound, have row 0.
        project: [layers * size, hidden], applied to embeddings.
        norm: [size], of what the projection gives each layer.
        eps: of the norm.
    """

    table: T
    project: T
    norm: Tensor
    eps: float

    def __call__(self, ids: Tensor, embedded: Tensor, dtype: torch.dtype) -> Tensor:
        """Inputs [n, layers, size] for ids [n] and scaled embeddings [n, hidden], in the embeddings' dtype.

        Args:
            dtype: of the inputs of matrices.
        """
        size, hidden = len(self.norm), embedded.shape[1]
        projected = self.project(embedded.to(dtype)).to(embedded.dtype).unflatten(1, (-1, size)) * hidden**-0.5
        rows = self.table.lookup(ids.where(ids < self.table.rows, 0)).to(embedded.dtype)
        of_token = rows.unflatten(1, (-1, size)) * size**0.5
        found: Tensor = (rms_norm(projected, (size,), self.norm, self.eps) + of_token) * MIX
        return found


@dataclass(frozen=True)
class LayerInput(Generic[M]):
    """What a layer makes of its own input.

    Attributes:
        gate: [size, hidden], applied to states.
        out: [hidden, size].
        norm: [hidden], of what is added to the states.
        eps: of the norm.
        activation: of the gate.
    """

    gate: M
    out: M
    norm: Tensor
    eps: float
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, own: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to states [n, hidden], from the layer's inputs [n, size] of the same tokens."""
        opened = self.activation(self.gate(x.to(dtype))).to(x.dtype) * own
        return rms_norm(self.out(opened.to(dtype)).to(x.dtype), self.norm.shape, self.norm, self.eps)
