"""What recurrent mixers have in common: a projection, a recurrence, and a matrix after it.

A mixer is the part of a layer in which tokens see each other. The recurrence alone does so, through a state whose size
does not grow; it is what kernels replace. It computes the tokens one after another, each by itself and in one order
of arithmetic, in the dtype of the state. So a prompt may be cut anywhere and a guess gets the bits of plain decoding,
as far as the matrices give a row the same bits among others and alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Matrix = Callable[[Tensor], Tensor]
"""Maps x [n, columns] to [n, rows]: plain or packed weights, with their bias if they have one."""

Memory = tuple[Tensor, ...]
"""The tensors of a state. A recurrence rewrites them."""


@dataclass(frozen=True)
class Mixer(ABC):
    """A recurrent mixer.

    Attributes:
        into: the projection; the order of its rows is that of the recurrence's inputs.
        out: the matrix after the recurrence.
    """

    into: Matrix
    out: Matrix

    @property
    @abstractmethod
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the state's tensors."""

    @property
    def memory(self) -> int:
        """How many of the last outputs of a token are for other layers to read, and not for the matrix after it."""
        return 0

    @abstractmethod
    def recur(self, inputs: Tensor, state: Memory) -> Tensor:
        """Run the recurrence.

        Args:
            inputs: [n, I], of tokens of one sequence that follow one another.
            state: the state before them, which becomes the state after them.

        Returns:
            [n, O], in the dtype of the state.
        """

    def project(self, x: Tensor) -> Tensor:
        """The recurrence's inputs [n, I] for tokens `x` [n, D] of any sequences."""
        return self.into(x)

    def step(self, x: Tensor, state: Memory) -> Tensor:
        """Outputs [n, D] of tokens `x` [n, D] of one sequence; `state` becomes the state after them."""
        return self.out(self.recur(self.project(x), state).to(x.dtype))

    def empty(self, like: Tensor) -> Memory:
        """The state before the first token, in the dtype and on the device of `like`."""
        return self.views(like.new_zeros(sum(map(math.prod, self.state_sizes))))

    def views(self, flat: Tensor) -> Memory:
        """The tensors of a state that stand one after the other in `flat`."""
        sizes = self.state_sizes
        parts = flat.split([math.prod(size) for size in sizes])
        return tuple(part.view(size) for part, size in zip(parts, sizes, strict=True))


def tokenwise(token: Callable[[Tensor], Tensor], inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Outputs [n, O] of `token`, called with the inputs [I] of one token after the other.

    torch computes the last elements of a tensor by other functions than those before them; so an element must stand at
    the same place whatever the number of tokens.
    """
    return torch.stack([token(one) for one in inputs.to(dtype)])
