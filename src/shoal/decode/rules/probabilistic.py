"""Rules that weigh probabilities: rejection sampling is exact, lenient and typical acceptance are lossy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from shoal.decode.rules.accept import Match, Outcome, Rule, Target, TargetStream, follow
from shoal.decode.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

_MATCH = Match()


@dataclass(frozen=True, slots=True)
class Rejection(Rule):
    """Recursive rejection sampling among siblings that were drawn without replacement.

    At a node with target distribution t, its children come in the order in which they were drawn. A child that was
    drawn from d is kept with probability min(1, t/d) of its token; if it is not, t becomes the normalised positive part
    of t - d, and d for the next sibling is the draft distribution without the tokens drawn before. If no child is kept,
    the token comes from the last t and the walk ends; after the last node of a path it comes from the target's
    distribution. A chain is the classic case (arXiv 2211.17192, 2302.01318), siblings are section 3.2 of 2402.14160.

    The output has the target's distribution, whatever the draft; the samples are not those of plain decoding. A guess
    without a distribution was certain: it is kept with its own probability under t. Two things are the proposer's duty:
    siblings stand in the order of drawing, and whether a node is proposed at all does not depend on its own token.
    Greedy sequences are matched exactly.
    """

    exact: bool = True

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """The path of the kept guesses, and the token that follows it.

        Raises:
            ValueError: a draft distribution gives its own token no probability, or siblings repeat a token.
        """
        if target.greedy:
            return _MATCH.walk(tree, target)
        return follow(lambda node: _descend(tree, target, node))


def _descend(tree: TokenTree, target: Target, node: int) -> tuple[int | None, int]:
    """The child of `node` that is kept and its token; or None and the token that follows `node` instead."""
    probs, children = target.probs(node), tree.children(node)
    if not children:
        return None, target.draw(probs, node, "sample")
    probs = probs.double()
    for rank, child in enumerate(children):
        token = tree.tokens[child]
        draft = _draft_distribution(tree, child, [tree.tokens[earlier] for earlier in children[:rank]])
        mine, theirs = _probabilities(probs, draft, token)
        if target.uniform(node, f"accept {rank}") * theirs < mine:
            return child, token
        probs = _residual(probs, draft, token)
    return None, target.draw(probs, node, "residual")


def _draft_distribution(tree: TokenTree, child: int, drawn: Sequence[int]) -> Tensor | None:
    """What `child` was drawn from [V] once its earlier siblings were gone; None if the guess was certain."""
    probs: Any = None if tree.draft_probs is None else tree.draft_probs[child]
    if probs is None:
        return None
    rest: Tensor = probs.double()
    if drawn:
        rest = rest.clone()
        rest[list(drawn)] = 0
    total = rest.sum()
    return rest / total.where(total > 0, total.new_ones(()))


def _probabilities(probs: Tensor, draft: Tensor | None, token: int) -> tuple[float, float]:
    """Of `token` under the target's distribution and under the draft's."""
    if draft is None:
        return float(probs[token]), 1.0
    mine, theirs = probs[token].item(), draft[token].item()
    if theirs <= 0:
        raise ValueError(
            f"token {token} was drafted, but the distribution that came with it gives it no probability: a proposer "
            "must hand over the distribution that it drew from, and draw siblings without replacement"
        )
    return mine, theirs


def _residual(probs: Tensor, draft: Tensor | None, token: int) -> Tensor:
    """The distribution after a rejection; `probs` itself where rounding leaves nothing over."""
    if draft is None:
        rest = probs.clone()
        rest[token] = 0
    else:
        rest = (probs - draft).clamp(min=0)
    total = float(rest.sum())
    return rest / total if total > 0 else probs


@dataclass(frozen=True, slots=True)
class Lenient(TargetStream):
    """Keeps a guess whose log-probability under the target is within `margin` of the best token's.

    Among the children of a node the one that carries the target's own choice comes first, else the most likely one that
    is near enough. Log-probabilities are those of the scores in greedy sequences, and of the distribution after
    temperature and truncation in sampled ones. A token that the request rules out (a banned one, or one cut off by
    top-k and the like) is never kept. The token after the last kept guess is the target's own choice.

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

        def step(node: int) -> tuple[int | None, int]:
            choice = target.choice(node)
            child = tree.child(node, choice)
            return self._near(tree, target, node) if child is None and not self.exact else child, choice

        return follow(step)

    def _near(self, tree: TokenTree, target: Target, node: int) -> int | None:
        """The most likely child of `node`, if it is near enough."""
        children = tree.children(node)
        if not children:
            return None
        logs = target.scores(node) if target.greedy else target.probs(node).log()  # -inf for what is ruled out
        found: list[float] = logs[[tree.tokens[child] for child in children]].tolist()
        best = max(found)
        near = best > -math.inf and float(logs.max()) - best <= self.margin
        return children[found.index(best)] if near else None


@dataclass(frozen=True, slots=True)
class Typical(Rule):
    """A guess x is kept if p(x) > min(epsilon, sqrt(epsilon) * exp(-H(p))), p the target's, H its entropy.

    The longest path of such guesses is taken, the first in drawing order among equals, then the target's own token.
    The formula is arXiv 2401.10774, section 3.3.1, with its delta at the suggested sqrt(epsilon); the threshold is
    that of truncation sampling (arXiv 2210.15191). The output follows the draft where the target is unsure, so it
    has no distribution of its own. Greedy sequences are matched exactly.

    Attributes:
        epsilon: in (0, 1]; the larger, the fewer guesses are kept.
    """

    epsilon: float = 0.09
    exact: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}; it must be in (0, 1], 0.09 in the paper")

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """The longest path of plausible guesses, and the target's own token after it."""
        if target.greedy:
            return _MATCH.walk(tree, target)
        kept = [0]
        for node in range(1, len(tree)):
            if tree.parents[node] in kept and self._plausible(tree, target, node):
                kept.append(node)
        last = max(kept, key=lambda node: (tree.depths[node], -node))
        return Outcome(tree.path(last), target.choice(last))

    @override
    def purpose(self, rank: int, place: int | None) -> str:
        """In a tree the number that an exact match would use: guesses then come closer to the target's draws."""
        return Rule.purpose(self, rank, place) if place is None else _MATCH.purpose(rank, place)

    def _plausible(self, tree: TokenTree, target: Target, node: int) -> bool:
        probs = target.probs(tree.parents[node])
        threshold = min(self.epsilon, math.sqrt(self.epsilon) * math.exp(float(probs.xlogy(probs).sum(-1))))
        return float(probs[tree.tokens[node]]) > threshold
