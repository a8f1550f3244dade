"""How much parallel prompt decoding feeds on the machine at hand (arXiv 2405.18628, section 4.3: hardware-awareness).

Trees of several sizes are ready. Of each the tokens per step follow from how often guesses were right; what a forward
of that size takes is measured while decoding. The paper times forwards beforehand. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.speculative.cost.model import ForwardTimes
from shoal_lab.drafts.prompt_tree import PromptTrees, Shares

if TYPE_CHECKING:
    from shoal.decode.worker import StepReport

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60)
"""Sizes that are tried, in guesses and prompt tokens together."""
_WIDEST = 64
"""Most nodes beside the last tokens of all sequences, of which forwards are timed separately."""
_AGAIN = 512
"""Steps after which forwards are timed anew, as loads and contexts change."""


class PromptSizes:
    """Trees of several sizes, and the one that brings most tokens per time. It outlives the batch.

    The first steps of a number of sequences are plain ones, which are timed, too. Then sizes grow step by step, to at
    most twice what was timed, as long as more tokens per time are expected.

    Args:
        trees: smallest first.
        shares: how often each guess was right, by which they were made.
    """

    def __init__(self, trees: Sequence[PromptTrees], shares: Shares) -> None:
        self.trees = tuple(trees)
        self._tokens = [one.tokens_per_step(shares) for one in trees]
        self._times, self._steps = ForwardTimes(), 0

    @classmethod
    def up_to(cls, most: int, shares: Shares, copies: int = 1) -> PromptSizes:
        """The best trees of each size up to `most` nodes, with `copies` prompt tokens for each place."""
        sizes = [size for size in SIZES if copies <= size < most]
        return cls([PromptTrees.best(shares, size, copies) for size in (*sizes, most)], shares)

    def best(self, seqs: int) -> PromptTrees | None:
        """What to feed each of so many sequences; None for a plain step, to time it."""
        if not self._times.known(seqs):
            return None
        room = min(_WIDEST, 2 * self._times.widest(seqs))
        gains = {place: self._tokens[place] / (1 + self._times.added(seqs, seqs * one.most_fed))
                 for place, one in enumerate(self.trees) if seqs * one.most_fed <= room or not place}
        return self.trees[max(gains, key=gains.__getitem__)]

    def observe(self, report: StepReport) -> None:
        """Learn the time of a forward, whichever sequences it had."""
        if report.target_seconds is None or report.prompt:
            return
        self._steps += report.steps
        if self._steps > _AGAIN:
            self._times, self._steps = ForwardTimes(), 0
        fed = sum(len(tree.fed[0]) for tree in report.trees) - len(report.seqs)
        self._times.observe(len(report.seqs), fed, report.target_seconds, report.steps)
