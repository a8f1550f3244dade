"""In what form a row's keys and values lie in memory, where that is not the one in which the model computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Form(Protocol):
    """How one layer stores keys and values: column by column, so that columns can be dropped and overwritten.

    Attributes:
        kernel: the name under which the native kernels read the form themselves; None if they do not know it.
    """

    kernel: str | None

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Keys or values [heads, columns, head_dim] as any number of tensors [heads, columns, ...]."""
        ...

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """[heads, columns, head_dim] of float32."""
        ...


class Store(Protocol):
    """The part `store` of a recipe: the form of each layer. Immutable."""

    def form(self, layer: int) -> Form | None:
        """How that layer stores a row; None for as it is."""
        ...
