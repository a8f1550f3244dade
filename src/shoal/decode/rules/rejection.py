"""Rejection sampling on a token tree: keeps more of a sampled draft than an exact match, equally distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.decode.rules.accept import Match, Outcome, OwnNumbers, Target
from shoal.decode.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

_MATCH = Match()


@dataclass(frozen=True, slots=True)
class Rejection(OwnNumbers):
    """Recursive rejection sampling among siblings that were drawn without replacement.

    At a node with target distribution t, its children come in the order in which they were drawn. A child that was
    drawn from d is kept with probability min(1, t/d) of its token; if it is not, t becomes the normalised positive part
    of t - d, and d for the next sibling is the draft distribution without the tokens drawn before. If no child is kept,
    the token comes from the last t and the walk ends; after the last node of a path it comes from the target's
    distribution. A chain is the classic case (arXiv 2211.17192, 2302.01318), siblings are section 3.2 of 2402.14160.

    The output has the target's distribution, whatever the draft; the samples are not those of plain decoding. A guess
    without a distribution was certain: it is kept with its own probability under t. Two things are the proposer's duty:
    siblings stand in the order of drawing, and whether a node is proposed at all does not depend on its own token.
    Greedy rows are matched exactly.
    """

    exact: bool = True

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """The path of the kept guesses, and the token that follows it.

        Raises:
            ValueError: a draft distribution gives its own token no probability, or siblings repeat a token.
        """
        if target.greedy:
            return _MATCH.walk(tree, target)
        path = [0]
        while True:
            child, token = _descend(tree, target, path[-1])
            if child is None:
                return Outcome(tuple(path), token)
            path.append(child)


def _descend(tree: TokenTree, target: Target, node: int) -> tuple[int | None, int]:
    """The child of `node` that is kept and its token; or None and the token that follows `node` instead."""
    probs, children = target.probs(node), tree.children(node)
    if not children:
        return None, target.draw(probs, node, "sample")
    probs = probs.double()
    for rank, child in enumerate(children):
        token = tree.tokens[child]
        draft = _draft_law(tree, child, [tree.tokens[earlier] for earlier in children[:rank]])
        mine, theirs = _probabilities(probs, draft, token)
        if target.uniform(node, f"accept {rank}") * theirs < mine:
            return child, token
        probs = _residual(probs, draft, token)
    return None, target.draw(probs, node, "residual")


def _draft_law(tree: TokenTree, child: int, drawn: Sequence[int]) -> Tensor | None:
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
