"""Acceptance rules: a walk down a token tree that keeps the guesses the target agrees with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from shoal.decode.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor


class Target(Protocol):
    """What a rule may ask about the target model's opinion at the nodes of one sequence's tree."""

    @property
    def greedy(self) -> bool:
        """Whether the sequence takes the most likely token instead of drawing one."""

    def choice(self, node: int) -> int:
        """The target's own token after `node`: the argmax, or a draw keyed by the emitted index."""

    def scores(self, node: int) -> Tensor:
        """Logits [V] after bias, penalties, processors and mask, taken along the node's own path."""

    def probs(self, node: int) -> Tensor:
        """Probabilities [V] of the token after `node`: what temperature and truncation make of the scores."""

    def index(self, node: int) -> int:
        """How many tokens the sequence has emitted when the token after `node` comes."""

    def history(self, node: int) -> list[int]:
        """Every token before the one that comes after `node`: the prompt, what was emitted, the path to the node."""

    def uniform(self, node: int, purpose: str) -> float:
        """A uniform number in [0, 1) that depends on seed, sequence, emitted index and `purpose` alone."""

    def draw(self, probs: Tensor, node: int, purpose: str) -> int:
        """A token after `node` by inverse CDF from `probs` [V], which need not sum to 1, by `uniform`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a walk kept.

    Attributes:
        path: accepted nodes from the root (node 0, always kept) downwards.
        token: the target's token after the last of them; a correction, or the bonus after a full acceptance.
    """

    path: tuple[int, ...]
    token: int


class Rule(Protocol):
    """Decides which drafted tokens are kept. A rule derives from it."""

    @property
    def exact(self) -> bool:
        """Whether the output equals the target's, token for token if greedy and in distribution if sampled."""

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """The accepted path through `tree` and the token that follows it."""

    def purpose(self, rank: int, place: int | None) -> str:
        """What the uniform number is for by which a draft draws a guess; it names the number in `sampling.uniform`.

        A rule that weighs distributions needs numbers that the target does not use: these.

        Args:
            rank: of the guess among its siblings, in the order of drawing.
            place: of its parent among the nodes of one depth; None in a chain.
        """
        return "draft" if place is None else f"draft {place}.{rank}"


class TargetStream(Rule):
    """A rule that compares draws: a draft takes the target's own number first.

    Where both distributions agree, so do both draws. Right only for such rules, and if no part hangs on another's draw.
    """

    __slots__ = ()

    @override
    def purpose(self, rank: int, place: int | None) -> str:
        return "sample" if rank == 0 else f"draft {rank}"


@dataclass(frozen=True, slots=True)
class Match(TargetStream):
    """Descend while a child carries the token that the target chooses itself.

    Greedy decoding: equal to the plain loop token for token. Sampling: the emitted token is always a draw from the
    target's distribution with the same uniform number as in the plain loop, so the samples are equal for any proposal.
    """

    exact: bool = True

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """The path of the guesses that the target chooses itself."""
        return descend(tree, target.choice)


def descend(tree: TokenTree, choice: Callable[[int], int]) -> Outcome:
    """Down the guesses that are what is chosen after the node before them."""
    if tree.is_chain:
        for node, guess in enumerate(tree.tokens[1:]):
            if (token := choice(node)) != guess:
                return Outcome((*range(node + 1),), token)
        return Outcome((*range(len(tree)),), choice(len(tree) - 1))

    def step(node: int) -> tuple[int | None, int]:
        token = choice(node)
        return tree.child(node, token), token

    return follow(step)


def follow(step: Callable[[int], tuple[int | None, int]]) -> Outcome:
    """Down from the root, by what `step` gives for a node: its child that is kept, if any, and the token after it."""
    path = [0]
    while True:
        child, token = step(path[-1])
        if child is None:
            return Outcome(tuple(path), token)
        path.append(child)
