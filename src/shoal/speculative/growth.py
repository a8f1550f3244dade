"""How a tree of guesses grows: level after level, for all rows at once. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from shoal.decode.tree import TokenTree


class Growth:
    """A tree under way, its nodes in breadth-first order.

    Args:
        root: node 0, the row's last token.

    Attributes:
        tokens, parents, draft_probs: as in `TokenTree`.
        words: for each node the guesses on the path to it, itself included.
    """

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self.draft_probs: list[Any] = [None]
        self.words: list[tuple[int, ...]] = [()]

    def add(self, token: int, parent: int, probs: Any = None) -> int:
        """A guess after node `parent`, drawn from `probs` [V] (None where it was not drawn); its node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.draft_probs.append(probs)
        self.words.append((*self.words[parent], token))
        return len(self.tokens) - 1

    def tree(self) -> TokenTree:
        """What has grown."""
        drawn = any(probs is not None for probs in self.draft_probs)
        return TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.draft_probs) if drawn else None)


class _Growing(Protocol):
    @property
    def goes_on(self) -> bool:
        """Whether another level is wanted."""
        ...


G = TypeVar("G", bound=_Growing)
Said = TypeVar("Said")


def grow(trees: Sequence[G], forward: Callable[[list[G]], Said], extend: Callable[[list[G], Said], None]) -> None:
    """Give every tree one more level until none goes on.

    Args:
        trees: each says with `goes_on` whether another level is wanted.
        forward: one forward for some of the trees: what the model says after their last level.
        extend: adds a level to these trees, by what was said.
    """
    while alive := [tree for tree in trees if tree.goes_on]:
        extend(alive, forward(alive))
