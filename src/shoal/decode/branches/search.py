"""Searches: plain Python over branches of one sequence, each of them a sequence of the batch like any other.

A search never asks for a forward. It says how far its branches are to decode and waits; the batch runs them with all
other sequences. The winner is emitted as if the sequence had decoded it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from shoal.decode import sampling
from shoal.types import FinishReason

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState


def branch_seed(seed: int, seq: int, branch: int) -> int:
    """The seed of a branch's draws, from the request's seed, the sequence's number and the branch's number.

    Branch 0 has the request's seed: it draws what the sequence would draw without a search.
    """
    return int(sampling.uniform(seed, seq, branch, "branch") * 2**53) if branch else seed


class BranchOwner(Protocol):
    """What a branch asks of the running search; see `shoal.decode.branches.run.SearchRun`."""

    def fork(self, branch: Branch, count: int) -> list[Branch]:
        """New branches that go on from where `branch` stands."""

    def force(self, branch: Branch, tokens: Sequence[int]) -> None:
        """Append given tokens to a branch."""

    def end(self, branch: Branch) -> None:
        """Give a branch up."""


class Branch:
    """One continuation of a sequence, as a search sees it.

    Attributes:
        number: counts the branches of a search in the order in which they were made.
        seq: the branch as a sequence of the batch; the ledger of the searched sequence counts its work.
    """

    def __init__(self, search: BranchOwner, seq: SequenceState, number: int) -> None:
        self._search, self.seq, self.number = search, seq, number

    def fork(self, count: int = 1) -> list[Branch]:
        """New resting branches that have emitted the same tokens and draw random numbers of their own.

        Raises:
            ValueError: a negative count, more branches than the search has announced, or this branch has ended.
        """
        return self._search.fork(self, count)

    def advance(self, count: int | None = None) -> None:
        """Let the branch emit that many more tokens; None to decode to its end. Returns at once."""
        self.seq.until = None if count is None else self.seq.emitted + count

    def force(self, tokens: Sequence[int]) -> None:
        """Append given tokens. They count as emitted, as far as a stop rule allows, and the next forward feeds them.

        Raises:
            ValueError: an id that the model does not have; Unsupported with a method that drafts.
        """
        self._search.force(self, tokens)

    def end(self) -> None:
        """Give the branch up and free what it stored."""
        self._search.end(self)

    @property
    def score(self) -> float:
        """Mean log-probability (nats) of the emitted tokens; 0.0 while there are none.

        The distribution is taken before temperature and truncation; in transformers' `model.generate` these are
        processors, and it is taken after them. Forced tokens count once they have been fed: after a wait that
        follows `advance`, even by 0 tokens.
        """
        found = [step.logprob.logprob for step in self.seq.steps if step.logprob is not None]
        return sum(found) / len(found) if found else 0.0

    @property
    def tokens(self) -> list[int]:
        """The emitted tokens."""
        return self.seq.tokens[self.seq.prompt_length :]

    @property
    def text(self) -> str:
        """The text of the emitted tokens, as far as it is certain; without a stop string."""
        return "".join(step.text for step in self.seq.steps)

    @property
    def question(self) -> str:
        """The text of the prompt, without special tokens; empty without a tokenizer."""
        return self.seq.stop.text_of(self.seq.tokens[: self.seq.prompt_length])

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the branch ended; None while it runs."""
        return self.seq.finish_reason

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen without a draw: then branches with the same tokens stay alike."""
        return self.seq.sampling.greedy
