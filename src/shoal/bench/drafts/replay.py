"""Decode along a recorded text: the model runs and is overruled. Drafts meet real text, real forwards take the time.

For weights that say nothing by themselves, such as a shape's random ones. Only proposers that look at tokens alone can
be judged so: one that asks a model would be asking the random weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.decode.accept import Outcome, Target
from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal.types import ModelInfo

BY_TOKENS = ("aded", "auto", "full", "prompt_lookup")
"""Methods whose guesses depend on the text alone."""


@dataclass(frozen=True)
class Recorded:
    """An acceptance rule that follows a recorded answer and is lossy by nature: the model's opinion is not asked.

    Attributes:
        answer: the row's tokens, as many as are generated.
    """

    answer: tuple[int, ...]
    exact: bool = False

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """Descend while a child carries the recorded token."""
        path = [0]
        while True:
            token = self.answer[target.index(path[-1])]
            child = tree.child(path[-1], token)
            if child is None or target.index(child) >= len(self.answer):
                return Outcome(tuple(path), token)
            path.append(child)


@dataclass(frozen=True)
class Replay(Method):
    """A method held to a recorded answer. Made by the benchmark; not one to choose.

    Attributes:
        inner: the method whose speed is in question.
        answer: tokens to emit.
    """

    name: ClassVar[str] = "replay"

    inner: Method = Full()
    answer: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.name not in BY_TOKENS:
            raise ValueError(
                f"{self.inner.name} cannot be replayed: what it guesses depends on the weights, and a shape's are "
                f"random. Replay one of {', '.join(BY_TOKENS)}, or give a model"
            )

    def recipe(self, info: ModelInfo) -> Recipe:
        """The inner method's recipe under the rule that follows the record."""
        return replace(self.inner.recipe(info), rule=Recorded(self.answer))


def replayed(method: Method, answer: Sequence[int]) -> Replay:
    """`method` along `answer`."""
    return Replay(method, tuple(answer))
