"""Jacobi decoding: a block of tokens is guessed at once, and corrected at once until it stays the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Loop, Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.limits import Guesses
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal_lab.loops.jacobi import JacobiBatch

_MOST = 64


@dataclass(frozen=True)
class Jacobi(Method):
    """The next n tokens are decoded at once: each is chosen after what the last step chose for those before it.

    Tokens that come back unchanged are right, and are emitted with the token after them. So each step emits at least
    one token. All tokens are those of the plain loop, sampled ones too. It needs no draft model and no training. It
    pays off if the model chooses the right token after wrong ones. An untrained model seldom does.

    Attributes:
        n: tokens of a block, 1 to 64; 1 is the plain loop.
    """

    name: ClassVar[str] = "jacobi"
    paper: ClassVar[str] = "arXiv 2305.10427"

    n: Guesses = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n <= _MOST:
            raise ValueError(f"n is {self.n}; it must be 1 to {_MOST} tokens, 1 being the plain loop")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a loop of its own."""
        return Recipe(DepthPlan.full(info.num_layers), loop=JacobiLoop(self.n))


@dataclass(frozen=True)
class JacobiLoop(Loop):
    """The loop of `Jacobi`."""

    exact: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("plan", "keep", "store", "select", "constraint")

    n: int

    @property
    def scratch(self) -> int:
        """The block except its last token, which nothing follows."""
        return self.n - 1

    @override
    def batch(self) -> type[JacobiBatch]:
        from shoal_lab.loops.jacobi import JacobiBatch

        return JacobiBatch
