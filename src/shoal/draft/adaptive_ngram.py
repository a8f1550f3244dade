"""Guesses from a table of tri-grams that learns while decoding; trees of the likeliest continuations (ADED)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shoal.decode.tree import TokenTree
from shoal.draft.ngram_search import best_first, monte_carlo
from shoal.draft.per_row import PerRow

if TYPE_CHECKING:
    from shoal.decode.accept import Outcome
    from shoal.decode.row import Row

Search = Literal["best_first", "mcts"]
Counts = Mapping[tuple[int, int], Mapping[int, float]]
"""Weights of the tokens that follow two others."""

FOLLOWERS = 12
"""Tokens remembered per pair, as in the paper."""
CAP = 3.0
"""Largest weight, as in the authors' code: old habits stay forgettable."""


class Trigrams:
    """What follows two tokens, and how likely.

    Args:
        base: weights to begin with, shared and never changed.
        step: weight that one more occurrence adds.
    """

    def __init__(self, base: Counts, step: float) -> None:
        self._base, self._step = base, step
        self._own: dict[tuple[int, int], dict[int, float]] = {}
        self._read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Take in the tri-grams of a growing text, each once."""
        for end in range(max(self._read, 2), len(tokens)):
            self._add((tokens[end - 2], tokens[end - 1]), tokens[end])
        self._read = max(self._read, len(tokens))

    def _add(self, pair: tuple[int, int], token: int) -> None:
        if pair not in self._own:
            self._own[pair] = dict(self._base.get(pair, {}))
        weights = self._own[pair]
        weights[token] = min(CAP, weights.pop(token, 0.0) + self._step)  # the newest stands last
        if len(weights) > FOLLOWERS:
            del weights[min(weights, key=weights.__getitem__)]

    def law(self, pair: tuple[int, int]) -> list[tuple[int, float]]:
        """Tokens and probabilities, the likeliest first, among equals the one seen last; [] for an unknown pair."""
        weights = self._own.get(pair) or self._base.get(pair) or {}
        total = sum(weights.values())
        ranked = sorted(reversed(list(weights.items())), key=lambda item: -item[1])
        return [(token, weight / total) for token, weight in ranked]


@dataclass(frozen=True)
class AdaptiveNGrams:
    """Proposes trees from tri-grams of a corpus, the prompt and the answer (arXiv 2407.12021).

    Attributes:
        base: tri-grams of a corpus.
        search: "best_first" takes the likeliest paths, "mcts" searches as the paper does.
        nodes: most guesses in a tree.
        depth: most guesses one after another.
        step: weight of an occurrence in the row's own text, where the followers of a pair in the corpus sum to 1.
        iterations: of the Monte-Carlo search.
    """

    base: Counts = field(default_factory=dict, repr=False)
    search: Search = "best_first"
    nodes: int = 16
    depth: int = 8
    step: float = 0.2
    iterations: int = 150

    def __post_init__(self) -> None:
        for knob in ("nodes", "depth", "iterations"):
            if getattr(self, knob) < 1:
                raise ValueError(f"{knob} is {getattr(self, knob)}; it must be at least 1")
        if not 0 < self.step <= CAP:
            raise ValueError(f"step is {self.step}; it must be in (0, {CAP:g}]")

    def begin(self, stack: Any, cache: Any) -> TableDrafter:
        """A drafter whose rows have read nothing yet."""
        return TableDrafter(self)


class TableDrafter:
    """See `shoal.decode.recipe.Drafter`."""

    def __init__(self, proposer: AdaptiveNGrams) -> None:
        self._proposer = proposer
        self._tables = PerRow(lambda _: Trigrams(proposer.base, proposer.step))

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per row; the root alone where the last two tokens are new."""
        return [self._tree(row, min(limit, self._proposer.depth)) for row, limit in zip(rows, limits, strict=True)]

    def _tree(self, row: Row, depth: int) -> TokenTree:
        table, proposer = self._tables[row], self._proposer
        table.read(row.tokens)
        if depth < 1 or len(row.tokens) < 2:
            return TokenTree.chain(row.tokens[-1:])
        pair = (row.tokens[-2], row.tokens[-1])
        if proposer.search == "best_first":
            return best_first(table.law, pair, proposer.nodes, depth)
        key = f"{row.seed} {row.number} {row.emitted}"
        return monte_carlo(table.law, pair, proposer.nodes, depth, proposer.iterations, key)

    def observe(self, row: Row, tree: TokenTree, outcome: Outcome) -> None:
        """Nothing to learn here: the table reads the row's tokens, each once."""


def count(tokens: Sequence[int]) -> Counts:
    """The table of a corpus: for each pair its most frequent followers, with their shares."""
    counts: dict[tuple[int, int], dict[int, float]] = {}
    for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False):
        followers = counts.setdefault((first, second), {})
        followers[third] = followers.get(third, 0.0) + 1
    return {pair: _shares(followers) for pair, followers in counts.items()}


def _shares(followers: Mapping[int, float]) -> dict[int, float]:
    total = sum(followers.values())
    best = sorted(followers.items(), key=lambda item: -item[1])[:FOLLOWERS]
    return {token: number / total for token, number in best}
