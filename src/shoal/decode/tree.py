"""Candidate continuations of one sequence: a token tree whose node 0 is the sequence's last emitted token (the root).

The root is not in the KV yet; it is fed together with the guesses, so a fully accepted draft still yields the
model's own next token. A tree with the root alone is the plain decoding step, a chain the usual draft.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class TokenTree:
    """Nodes in breadth-first order.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent; -1 for the root. Siblings stand in the order in which they were drawn.
        draft_probs: for each node the draft distribution [V] that it was drawn from; None where it was not drawn.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_probs: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents) or self.parents[0] != -1:
            raise ValueError("a token tree needs a root (parent -1) and one parent per node")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node or parent < self.parents[node - 1]:
                raise ValueError(f"node {node} has parent {parent}: nodes must stand in breadth-first order")
        if self.draft_probs is not None and len(self.draft_probs) != len(self.tokens):
            raise ValueError(f"{len(self.draft_probs)} draft distributions for {len(self.tokens)} nodes")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """A chain: the root `tokens[0]`, then one guess after another; nothing else needs checking."""
        if not tokens:
            raise ValueError("a token tree needs a root")
        tree, depths = object.__new__(cls), tuple(range(len(tokens)))
        tree.__dict__.update(tokens=tuple(tokens), parents=(-1, *depths[:-1]), draft_probs=None, is_chain=True,
                             depths=depths)
        return tree

    @classmethod
    def root(cls, token: int) -> TokenTree:
        """The last token alone, of plain decoding."""
        return cls.chain((token,))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; non-decreasing."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def vectors(self) -> Any:
        """[n, D], inputs of the first layer that are fed after the nodes in place of tokens; None for no such ones.

        They are never kept, and no node attends to them.
        """
        return None

    @property
    def fed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parents and depths of the nodes and then of the vectors, which are numbered on."""
        return self.parents, self.depths

    def cut(self, depth: int) -> TokenTree:
        """The nodes at most `depth` away from the root."""
        if self.depths[-1] <= depth or len(self.tokens) == 1:
            return self
        return self.first(max(1, bisect_right(self.depths, depth)))

    def within(self, most: int | None) -> TokenTree:
        """The first nodes, at most that many; None for all."""
        return self if most is None else self.first(most)

    def first(self, size: int) -> TokenTree:
        """The first `size` nodes, if there are more."""
        if size >= len(self):
            return self
        if self.is_chain and self.draft_probs is None:
            return TokenTree.chain(self.tokens[:size])
        return TokenTree(self.tokens[:size], self.parents[:size], self.draft_probs and self.draft_probs[:size])

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`."""
        return next((index for index in self.children(node) if self.tokens[index] == token), None)

    def children(self, node: int) -> tuple[int, ...]:
        """Children of `node` in sibling order."""
        return tuple(index for index, parent in enumerate(self.parents) if parent == node)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))
