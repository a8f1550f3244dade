"""Which exit layer and which draft length bring most, by what each exit would have said (arXiv 2504.05598)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass
class Exit:
    """What is known of one exit layer; old evidence fades by `memory` per look.

    Attributes:
        matches, looks: how often it said what the target said, and of how many tokens that is known. They start as
            one of two, a Beta(1, 1) prior.
        sure, unsure: its confidence where it was right and where it was wrong: (sum, count).
    """

    memory: float = 0.95
    matches: float = 1.0
    looks: float = 2.0
    sure: tuple[float, float] = (0.0, 0.0)
    unsure: tuple[float, float] = (0.0, 0.0)

    def learn(self, hits: Sequence[bool], confidences: Sequence[float]) -> None:
        """Take in a verified block: for each of its tokens, whether the exit was right, and how confident."""
        self.matches = self.memory * self.matches + sum(hits)
        self.looks = self.memory * self.looks + len(hits)
        right = [value for hit, value in zip(hits, confidences, strict=True) if hit]
        wrong = [value for hit, value in zip(hits, confidences, strict=True) if not hit]
        self.sure, self.unsure = self._faded(self.sure, right), self._faded(self.unsure, wrong)

    def _faded(self, old: tuple[float, float], new: Sequence[float]) -> tuple[float, float]:
        return self.memory * old[0] + sum(new), self.memory * old[1] + len(new)

    @property
    def rate(self) -> float:
        """Estimated share of its guesses that the target accepts."""
        return self.matches / self.looks

    @property
    def threshold(self) -> float:
        """Confidence halfway between right and wrong, below which a draft stops; 0 while one of them is unknown."""
        if not self.sure[1] or not self.unsure[1]:
            return 0.0
        return (self.sure[0] / self.sure[1] + self.unsure[0] / self.unsure[1]) / 2


def tokens_per_layer(rate: float, length: int, exit_layer: int, num_layers: int, head: float = 0.0) -> float:
    """Expected tokens of a block over the layers that it takes.

    A block of `length` guesses takes `length` forwards of `exit_layer` layers and one of all layers; where reading
    weights is the bound, that is so whether or not the verification starts from the exit's hidden states. With `head`,
    the cost of the LM head in layers, every forward counts that too; without, this is the paper's TPL.
    """
    tokens = sum(rate**j for j in range(length + 1))
    return tokens / (num_layers + head + length * (exit_layer + head))


def best_block(rates: Mapping[int, float], longest: int, num_layers: int, head: float = 0.0) -> tuple[int, int]:
    """The exit layer and the draft length of most tokens per layer; length 0 where a plain step is best.

    Args:
        rates: acceptance by exit layer (the number of layers that run).
        longest: most guesses.
        num_layers: L.
        head: see `tokens_per_layer`.
    """
    choices = [(exit_layer, length) for length in range(longest + 1) for exit_layer in sorted(rates)]
    return max(choices, key=lambda one: tokens_per_layer(rates[one[0]], one[1], one[0], num_layers, head))
