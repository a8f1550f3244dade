"""A method with a loop of its own, for tests of what the engine does with loops: it guesses that tokens repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.batch import Batch
from shoal.decode.recipe import Loop, Recipe
from shoal.decode.running_sequence import RunningSequence
from shoal.decode.tree import TokenTree
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.types import ModelInfo


@dataclass(frozen=True)
class Repeating(Method):
    """Tokens of the plain loop, from forwards over blocks of `n` tokens."""

    name: ClassVar[str] = "repeating"

    n: int = 8

    def recipe(self, info: ModelInfo) -> Recipe:
        return Recipe(DepthPlan.full(info.num_layers), loop=RepeatingLoop(self.n))


@dataclass(frozen=True)
class RepeatingLoop(Loop):
    exact: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("plan", "keep", "store", "select", "constraint")

    n: int

    @property
    def scratch(self) -> int:
        return self.n - 1

    def batch(self) -> type[RepeatingBatch]:
        return RepeatingBatch


class RepeatingBatch(Batch):
    def propose(self, seqs: Sequence[RunningSequence]) -> list[TokenTree]:
        sizes = [min(seq.recipe.scratch, self.components.most(seq)) for seq in seqs]
        return [TokenTree.chain(seq.tokens[-1:] * (1 + size)) for seq, size in zip(seqs, sizes, strict=True)]
