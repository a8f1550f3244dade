"""Searches written down in a test, for the loop and for the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.branches.search import Branch
from shoal.decode.recipe import Recipe, Search
from shoal.methods.base import Method
from shoal.types import ModelInfo

Steps = Generator[Sequence[Branch], None, Branch]


@dataclass(frozen=True)
class Script(Search):
    """A search that is one function."""

    branches: int
    steps: Callable[[Branch], Steps]

    def most(self, greedy: bool) -> int:
        return self.branches

    def run(self, root: Branch) -> Steps:
        return self.steps(root)


@dataclass(frozen=True)
class Given(Method):
    """A method that is one recipe."""

    name: ClassVar[str] = "given"

    made: Recipe

    def recipe(self, info: ModelInfo) -> Recipe:
        return self.made
