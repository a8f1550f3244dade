"""Momentum: the likeliest token, where going on with it does not repeat what the text has already said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.decode.rules.accept import Outcome, Target, TargetsNumbers, descend
from shoal.decode.signals import probabilities
from shoal.decode.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Resisting(TargetsNumbers):
    """The text, prompt included, is a walk on a graph whose nodes are tokens; going back to one is resisted.

    A token that is new is taken as it is. Where it is not, the likeliest tokens are weighed: each has its probability
    less `alpha` times the resistance of the longest circuit that it would close, and the best one wins. In sampled rows
    the token is drawn, and where it is not new, one is drawn from what the resistance leaves of the likeliest. Guesses
    are kept as far as they are what is chosen anyway. The graph is read off the text each time, in a moment beside a
    forward: so rows that are forked, go on later or hold guesses need no copy of it.

    Attributes:
        alpha: weight of the resistance.
        candidates: how many of the likeliest tokens are weighed.
        resistance: of a circuit of 1, 2, ... tokens; a longer one has the last.
    """

    alpha: float
    candidates: int
    resistance: tuple[float, ...]
    exact: bool = False

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """The guesses that are what would be chosen anyway, and the token after them."""
        return descend(tree, lambda node: self._choice(target, node))

    def _choice(self, target: Target, node: int) -> int:
        """The token after `node`."""
        likeliest, text = target.choice(node), target.history(node)
        if likeliest not in text:
            return likeliest
        probs = probabilities(target.scores(node)) if target.greedy else target.probs(node)
        best = probs.topk(min(self.candidates, len(probs)))
        left = {token: prob - self.alpha * self._resisted(text, token)
                for token, prob in zip(best.indices.tolist(), best.values.tolist(), strict=True) if prob > 0}
        if target.greedy:
            return max(left, key=left.__getitem__, default=likeliest)
        going = [token for token, weight in left.items() if weight > 0]
        if not going:
            return likeliest
        weights = probs.new_zeros(len(probs))
        weights[going] = probs.new_tensor([left[token] for token in going])
        return target.draw(weights, node, "momentum")

    def _resisted(self, text: Sequence[int], token: int) -> float:
        length = circuit(text, token, len(self.resistance))
        return self.resistance[length - 1] if length else 0.0


def circuit(text: Sequence[int], token: int, longest: int) -> int:
    """Tokens of the longest n-gram of `text`, up to `longest`, that `text` with `token` behind it would end in again.

    0 where the token is new to the text.
    """
    found, place, last = 0, -1, len(text) - 1
    while found < longest:
        try:
            place = text.index(token, place + 1)
        except ValueError:
            break
        size = 1
        while size < min(longest, place + 1) and text[place - size] == text[last + 1 - size]:
            size += 1
        found = max(found, size)
    return found
