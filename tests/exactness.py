"""What law does a rule give its output: by going through everything that chance can do, and by counting samples.

`outcomes` runs a random procedure once for every way its dice can fall, so the law of what it returns comes out to
rounding, and a rule's own code is what runs. `chi_square` compares counts with a law. Both are judged by controls: a
rule, a draft or a cache that is wrong in a known way must be told apart.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from shoal.decode.rules.accept import Rule
from shoal.decode.tree import TokenTree

T = TypeVar("T")
Words = tuple[int, ...]
Model = Callable[[Words], Tensor]
"""Law [V] of the token after the given ones."""


@dataclass
class Dice:
    """Falls as prescribed, and beyond that on the first side that can come up; notes what else was possible.

    Attributes:
        fixed: the first falls.
        falls, chances: all falls, and how likely each was.
        sides: per fall the sides that were possible.
    """

    fixed: Sequence[int]
    falls: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    sides: list[list[int]] = field(default_factory=list)

    def throw(self, weights: Sequence[float]) -> int:
        """A side with the odds `weights`."""
        possible = [side for side, weight in enumerate(weights) if weight > 1e-15]
        place = len(self.falls)
        side = self.fixed[place] if place < len(self.fixed) else possible[0]
        self.falls.append(side)
        self.sides.append(possible)
        self.chances.append(weights[side] / sum(weights))
        return side


def outcomes(procedure: Callable[[Dice], T]) -> Iterator[tuple[float, T]]:
    """Everything that `procedure` may return, with its probability; the same value may come several times."""
    waiting: list[list[int]] = [[]]
    while waiting:
        dice = Dice(waiting.pop())
        value = procedure(dice)
        chance = 1.0
        for one in dice.chances:
            chance *= one
        yield chance, value
        for place in range(len(dice.fixed), len(dice.falls)):
            others = (side for side in dice.sides[place] if side != dice.falls[place])
            waiting.extend([*dice.falls[:place], side] for side in others)


@dataclass(frozen=True)
class Coin:
    """A uniform number of which only the outcome of a comparison is drawn."""

    dice: Dice
    scale: float = 1.0

    def __mul__(self, factor: float) -> Coin:
        return Coin(self.dice, self.scale * factor)

    def __lt__(self, limit: float) -> bool:
        chance = min(1.0, max(0.0, limit / self.scale))
        return self.dice.throw([1 - chance, chance]) == 1


@dataclass
class TableTarget:
    """A target whose laws come from a table and whose random numbers are dice."""

    tree: TokenTree
    model: Model
    dice: Dice
    greedy: bool = False

    def words(self, node: int) -> Words:
        """Tokens on the path to `node`, without the root's."""
        return tuple(self.tree.tokens[i] for i in self.tree.path(node)[1:])

    def probs(self, node: int) -> Tensor:
        return self.model(self.words(node))

    def scores(self, node: int) -> Tensor:
        return self.probs(node).log()

    def choice(self, node: int) -> int:
        return int(self.probs(node).argmax()) if self.greedy else self.draw(self.probs(node), node, "sample")

    def history(self, node: int) -> list[int]:
        return list(self.words(node))

    def uniform(self, node: int, purpose: str) -> Coin:
        return Coin(self.dice)

    def draw(self, probs: Tensor, node: int, purpose: str) -> int:
        return self.dice.throw(probs.tolist())


Builder = Callable[[Dice], TokenTree]


def drawn_tree(model: Model, branching: Sequence[int], dice: Dice, shown: Model | None = None) -> TokenTree:
    """A tree whose siblings are drawn without replacement from `model`.

    Args:
        branching: children per node of each level.
        shown: the law that the tree says its nodes were drawn from, where it lies.
    """
    tokens, parents, draft_probs, words = [0], [-1], [None], [()]
    level = [0]
    for width in branching:
        below = []
        for node in level:
            probs = model(words[node]).clone()
            for _ in range(min(width, int((probs > 1e-15).sum()))):
                token = dice.throw(probs.tolist())
                probs[token] = 0
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                draft_probs.append((shown or model)(words[node]))
                words.append((*words[node], token))
        level = below
    return TokenTree(tuple(tokens), tuple(parents), tuple(draft_probs))


def walked(rule: Rule, builder: Builder, target: Model) -> Callable[[Dice], Words]:
    """The procedure that drafts, walks and gives the tokens that come out."""

    def procedure(dice: Dice) -> Words:
        tree = builder(dice)
        outcome = rule.walk(tree, TableTarget(tree, target, dice))
        return (*(tree.tokens[node] for node in outcome.path[1:]), outcome.token)

    return procedure


def law_of_words(procedure: Callable[[Dice], Words], target: Model, horizon: int) -> dict[Words, float]:
    """Law of the first `horizon` tokens; what a walk leaves short is continued by plain decoding."""
    probs: dict[Words, float] = defaultdict(float)
    for chance, words in outcomes(procedure):
        for whole, share in plain_law(target, horizon, words[:horizon]).items():
            probs[whole] += chance * share
    return dict(probs)


def plain_law(target: Model, horizon: int, begun: Words = ()) -> dict[Words, float]:
    """Law of the first `horizon` tokens under plain decoding, given the first few."""
    probs = {begun: 1.0}
    for _ in range(horizon - len(begun)):
        probs = {
            (*words, token): chance * share
            for words, chance in probs.items()
            for token, share in enumerate(target(words).tolist())
            if share > 0
        }
    return probs


def distance(left: dict[Words, float], right: dict[Words, float]) -> float:
    """Total variation distance."""
    return sum(abs(left.get(words, 0.0) - right.get(words, 0.0)) for words in {*left, *right}) / 2


def chi_square(samples: Sequence[Words], probs: dict[Words, float], least: float = 5.0) -> float:
    """The probability that a sample of `probs` looks as unlikely as `samples` (Pearson; rare outcomes are pooled)."""
    counts, total = Counter(samples), len(samples)
    if any(probs.get(words, 0.0) == 0 for words in counts):
        return 0.0
    expected, seen = [0.0], [0.0]
    for words, chance in sorted(probs.items(), key=lambda item: -item[1]):
        place = -1 if chance * total >= least else 0
        if place:
            expected.append(chance * total)
            seen.append(counts[words])
        else:
            expected[0] += chance * total
            seen[0] += counts[words]
    if expected[0] < least:
        expected[1], seen[1] = expected[1] + expected[0], seen[1] + seen[0]
        expected, seen = expected[1:], seen[1:]
    statistic = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def random_model(vocabulary: int, horizon: int, seed: int, sharp: float = 1.0, support: int | None = None) -> Model:
    """A table of random laws for every text of up to `horizon` tokens; `support` leaves only that many tokens."""
    generator = torch.Generator().manual_seed(seed)
    table: dict[Words, Tensor] = {}
    for length in range(horizon + 1):
        for words in itertools.product(range(vocabulary), repeat=length):
            logits = sharp * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
            if support is not None:
                logits[torch.randperm(vocabulary, generator=generator)[support:]] = -torch.inf
            table[words] = logits.softmax(0)
    return table.__getitem__
