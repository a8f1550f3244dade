"""Momentum: the argmax, unless continuing with it repeats the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.decode.rules.accept import Outcome, Target, TargetStream, descend
from shoal.decode.tree import TokenTree
from shoal_lab.components.signals import probabilities


@dataclass(frozen=True, slots=True)
class Resisting(TargetStream):
    """The text, prompt included, is a walk on a graph whose nodes are tokens; returning to one is resisted.

    A new token is taken as it is. Otherwise the most probable tokens are weighed: each has its probability less `alpha`
    times the resistance of the longest circuit that it would close, and the best one wins. In sampled rows the token is
    sampled, and if it is not new, one is sampled from what the resistance leaves of the most probable ones. Guesses are
    kept as far as they agree with the choice. The graph is read from the text each time, which is cheap beside a
    forward: so rows that are forked, resumed or hold guesses need no copy of it.

    Attributes:
        alpha: weight of the resistance.
        candidates: number of most probable tokens to weigh.
        resistance: of a circuit of 1, 2, ... tokens; longer ones have the last.
    """

    alpha: float
    candidates: int
    resistance: tuple[float, ...]
    exact: bool = False

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """Follow the chosen tokens down the tree."""
        return descend(tree, lambda node: self._choice(target, node))

    def _choice(self, target: Target, node: int) -> int:
        """The token after `node`."""
        argmax, text = target.choice(node), target.history(node)
        if argmax not in text:
            return argmax
        probs = probabilities(target.scores(node)) if target.greedy else target.probs(node)
        best = probs.topk(min(self.candidates, len(probs)))
        left = {token: prob - self.alpha * self._resisted(text, token)
                for token, prob in zip(best.indices.tolist(), best.values.tolist(), strict=True) if prob > 0}
        if target.greedy:
            return max(left, key=left.__getitem__, default=argmax)
        going = [token for token, weight in left.items() if weight > 0]
        if not going:
            return argmax
        weights = probs.new_zeros(len(probs))
        weights[going] = probs.new_tensor([left[token] for token in going])
        return target.draw(weights, node, "momentum")

    def _resisted(self, text: Sequence[int], token: int) -> float:
        length = circuit(text, token, len(self.resistance))
        return self.resistance[length - 1] if length else 0.0


def circuit(text: Sequence[int], token: int, longest: int) -> int:
    """Length of the longest n-gram, up to `longest`, that ends `text` + `token` and occurs in `text`.

    0 if the token is new to the text.
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
