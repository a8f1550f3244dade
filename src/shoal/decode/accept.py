"""Acceptance rules: a walk down a token tree that keeps the guesses the target agrees with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.decode.tree import TokenTree


class Target(Protocol):
    """What a rule may ask about the target model's opinion at the nodes of one row's tree."""

    def choice(self, node: int) -> int:
        """The target's own token after `node`: the argmax, or a draw keyed by the emitted index."""
        ...

    def law(self, node: int) -> Tensor:
        """Probabilities [V] of the token after `node`, penalties taken along the node's own path."""
        ...

    def uniform(self, node: int, purpose: str) -> float:
        """A uniform number in [0, 1) that depends on seed, row, emitted index and `purpose` alone."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a walk kept.

    Attributes:
        path: accepted nodes from the root (node 0, always kept) downwards.
        token: the target's token after the last of them; a correction, or the bonus after a full acceptance.
    """

    path: tuple[int, ...]
    token: int


@dataclass(frozen=True, slots=True)
class Match:
    """Descend while a child carries the token that the target chooses itself.

    Greedy decoding: equal to the plain loop token for token. Sampling: the emitted token is always a draw from the
    target's law with the same uniform number as in the plain loop, so the samples are equal for any proposal.
    """

    exact: bool = True

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """See the class."""
        path = [0]
        while True:
            token = target.choice(path[-1])
            child = tree.child(path[-1], token)
            if child is None:
                return Outcome(tuple(path), token)
            path.append(child)
