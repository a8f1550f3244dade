"""Lenient acceptance: a dial between lossless and lossy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.decode.rules.accept import Outcome, Target, TargetsNumbers
from shoal.decode.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Lenient(TargetsNumbers):
    """Keeps a guess whose log-probability under the target is within `margin` of the best token's.

    Among the children of a node the one that carries the target's own choice comes first, else the most likely one that
    is near enough. Log-probabilities are those of the scores in greedy rows, and of the distribution after temperature
    and truncation in sampled ones. A token that the request rules out (a banned one, or one cut off by top-k and the
    like) is never kept. The token after the last kept guess is the target's own choice.

    Attributes:
        margin: nats, 0 or more. 0 keeps only the target's own choices and is exact; infinity keeps every guess.
    """

    margin: float = 0.0

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise ValueError(f"margin is {self.margin}; it must be 0 nats (an exact match) or more")

    @property
    def exact(self) -> bool:
        """Whether only the target's own choices are kept."""
        return self.margin == 0

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """The path of near enough guesses, and the target's own token after it."""
        path = [0]
        while True:
            node = path[-1]
            choice = target.choice(node)
            child = tree.child(node, choice)
            if child is None and not self.exact:
                child = self._near(tree, target, node)
            if child is None:
                return Outcome(tuple(path), choice)
            path.append(child)

    def _near(self, tree: TokenTree, target: Target, node: int) -> int | None:
        """The most likely child of `node`, if it is near enough."""
        children = tree.children(node)
        if not children:
            return None
        logs = _logs(target, node)
        found: list[float] = logs[[tree.tokens[child] for child in children]].tolist()
        best = max(found)
        near = best > -math.inf and float(logs.max()) - best <= self.margin
        return children[found.index(best)] if near else None


def _logs(target: Target, node: int) -> Tensor:
    """Log-probabilities [V] up to a constant; -inf for what the request rules out."""
    return target.scores(node) if target.greedy else target.probs(node).log()
