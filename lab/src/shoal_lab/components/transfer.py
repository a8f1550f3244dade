"""Rejection sampling towards a target that a better-informed draft improves: RAPID's knowledge transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.decode.rules.accept import Match, Outcome, Rule, Target
from shoal.decode.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

LIKELY = 0.1
"""Tokens of at least this share of the draft's highest probability are transferred; from the released code."""
_MATCH = Match()


@dataclass(frozen=True, slots=True)
class Transfer(Rule):
    """Keeps a guess by the target's distribution p after moving it towards the draft's q (arXiv 2502.20330).

    p' is proportional to p * exp(eta * (q - p)) on the tokens that the draft finds probable, and to p elsewhere. A
    guess x is kept with probability min(1, p'(x) / q(x)), otherwise the token is drawn from max(p - p', p - q, 0),
    normalised. So a token's distribution is min(q, p') + (1 - sum min(q, p')) * norm(max(p - p', p - q, 0)): neither p
    nor p', unless eta is 0. After the last kept guess comes a token of the target's own. In greedy rows the
    temperature, by which the paper multiplies eta, is 0: guesses are matched exactly. A guess without a distribution is
    certain.

    Attributes:
        eta: how far p is moved, 0 or more; 0 is `Rejection` on a chain.
    """

    eta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta < float("inf"):
            raise ValueError(f"eta is {self.eta}; it must be 0 (lossless) or more, such as 10")

    @property
    def exact(self) -> bool:
        """Whether the output has the target's distribution."""
        return self.eta == 0

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """Accept a chain of guesses.

        Raises:
            ValueError: the guesses are not a chain.
        """
        if target.greedy:
            return _MATCH.walk(tree, target)
        path = [0]
        while children := tree.children(path[-1]):
            if len(children) > 1:
                raise ValueError(f"{len(children)} guesses for one place; knowledge is transferred along a chain")
            token = self._judged(tree, target, children[0], path[-1])
            if token is not None:
                return Outcome(tuple(path), token)
            path.append(children[0])
        return Outcome(tuple(path), target.draw(target.probs(path[-1]), path[-1], "sample"))

    def _judged(self, tree: TokenTree, target: Target, child: int, node: int) -> int | None:
        """The token in place of `child`, or None if that is kept."""
        probs, token = target.probs(node).double(), tree.tokens[child]
        found = None if tree.draft_probs is None else tree.draft_probs[child]
        draft = probs.new_zeros(probs.shape) if found is None else found.double()
        if found is None:
            draft[token] = 1.0
        better = moved(probs, draft, self.eta)
        if target.uniform(node, "accept 0") * float(draft[token]) < float(better[token]):
            return None
        rest = (probs - better).maximum(probs - draft).clamp(min=0)
        return target.draw(rest if float(rest.sum()) > 0 else probs, node, "residual")


def moved(probs: Tensor, draft: Tensor, eta: float) -> Tensor:
    """The p' of the class, [V], from the distributions [V] of target and draft."""
    likely = draft >= LIKELY * draft.max()
    better = probs * ((eta * (draft - probs)).where(likely, probs.new_zeros(()))).exp()
    return better / better.sum()
