"""Candidate continuations of one row: a token tree whose node 0 is the row's last emitted token (the root).

The root is not in the KV yet; it is fed together with the guesses, so a fully accepted draft still yields the
model's own next token. A tree with the root alone is the plain decoding step, a chain the usual draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class TokenTree:
    """Nodes in breadth-first order.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent; -1 for the root. Siblings stand in the order in which they were drawn.
        draft_probs: for each node the draft distribution [V] that it was drawn from, or None where the guess was
            deterministic.
        asides: parents of the vectors that are fed after the nodes, in place of tokens, and never kept. A parent is a
            node or an earlier aside; asides are numbered on after the nodes. No node attends to one.
        vectors: [asides, D], the inputs of the first layer for the asides; None if there are none.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_probs: tuple[Any, ...] | None = None
    asides: tuple[int, ...] = ()
    vectors: Any = None

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents) or self.parents[0] != -1:
            raise ValueError("a token tree needs a root (parent -1) and one parent per node")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node or parent < self.parents[node - 1]:
                raise ValueError(f"node {node} has parent {parent}: nodes must stand in breadth-first order")
        if self.draft_probs is not None and len(self.draft_probs) != len(self.tokens):
            raise ValueError(f"{len(self.draft_probs)} draft distributions for {len(self.tokens)} nodes")
        if len(self.asides) != (0 if self.vectors is None else len(self.vectors)):
            raise ValueError(f"there are {len(self.asides)} asides; each needs a vector, and there is none without")
        for place, parent in enumerate(self.asides, start=len(self.tokens)):
            if not 0 <= parent < place:
                raise ValueError(f"aside {place} has parent {parent}: it must be a node or an aside before it")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """A chain: the root `tokens[0]`, then one guess after another."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

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

    @cached_property
    def fed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parents and depths of nodes and asides together."""
        depths = list(self.depths)
        for parent in self.asides:
            depths.append(depths[parent] + 1)
        return (*self.parents, *self.asides), tuple(depths)

    def cut(self, depth: int) -> TokenTree:
        """The nodes at most `depth` away from the root, each with its asides."""
        if len(self.tokens) == 1:
            return self
        return self._first(max(1, sum(d <= depth for d in self.depths)))

    def within(self, most: int | None) -> TokenTree:
        """The first nodes, as many as fit with their asides into `most`; None for all."""
        if most is None or len(self) + len(self.asides) <= most:
            return self
        found = self._first(min(len(self), most))
        while len(found) + len(found.asides) > most and len(found) > 1:
            found = found._first(len(found) - 1)
        return found

    def _first(self, size: int) -> TokenTree:
        """The first `size` nodes, each with its asides."""
        if size == len(self):
            return self
        left = TokenTree(self.tokens[:size], self.parents[:size], self.draft_probs and self.draft_probs[:size])
        return left if self.vectors is None else left.with_asides(*self._asides_of(size))

    def _asides_of(self, size: int) -> tuple[list[int], Any]:
        """Parents and vectors of the asides that belong to the first `size` nodes, renumbered for these."""
        places, kept = {node: node for node in range(size)}, list[int]()
        for place, parent in enumerate(self.asides):
            if parent in places:
                places[len(self) + place] = size + len(kept)
                kept.append(place)
        return [places[self.asides[place]] for place in kept], self.vectors[kept]

    def with_asides(self, parents: Sequence[int], vectors: Any) -> TokenTree:
        """The same nodes with these asides instead; there may be none."""
        return replace(self, asides=tuple(parents), vectors=vectors if parents else None)

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`."""
        for index in self.children(node):
            if self.tokens[index] == token:
                return index
        return None

    def children(self, node: int) -> tuple[int, ...]:
        """Children of `node` in sibling order."""
        return tuple(index for index, parent in enumerate(self.parents) if parent == node)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))
