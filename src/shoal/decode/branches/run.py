"""A running search: its branches run among the other sequences, and the winner is emitted as if it were alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from shoal.decode import sampling
from shoal.decode.branches.search import Branch, branch_seed
from shoal.errors import Unsupported
from shoal.types import Step

if TYPE_CHECKING:
    from shoal.decode.recipe import Search, WaitedFor
    from shoal.decode.running_sequence import RunningSequence
    from shoal.decode.sequence import SequenceState
    from shoal.model.runner import ModelRunner

log = logging.getLogger(__name__)


class BranchBatch(Protocol):
    """What a search needs of the batch that runs its branches; see `shoal.decode.batch.Batch`."""

    runner: ModelRunner
    searches: list[SearchRun]

    def fork(self, seq: RunningSequence, children: Sequence[RunningSequence]) -> None:
        """Add sequences that continue from the state of `seq`."""

    def due(self, seq: SequenceState) -> int:
        """How many of the sequence's tokens are to be fed."""

    def retire(self) -> None:
        """Remove finished sequences."""


class SearchRun:
    """One sequence's running search.

    Args:
        batch: runs the branches as sequences.
        root: the sequence, which is not in the batch itself.

    Attributes:
        branches: those that were not ended, each with its sequence.

    Raises:
        Unsupported: something observes each token of the sequence.
    """

    def __init__(self, batch: BranchBatch, root: RunningSequence, search: Search) -> None:
        if root.record is not None:
            raise Unsupported("scores and logits of every token with a search", "they would be those of all branches",
                              "Leave output_scores and output_logits out")
        self.batch, self.root = batch, root
        wanted = replace(root.sampling, logprobs=root.sampling.logprobs or 0)
        trunk = replace(root, tokens=list(root.tokens), stop=root.stop.copy(), sampling=wanted, root=root, until=0,
                        held=True, steps=[])
        first = Branch(self, trunk, 0)
        self.branches = {first: trunk}
        self._most, self._made = root.branches, 1
        self._run = search.run(first)
        self._awaited: Sequence[WaitedFor] = [first]
        self._winner: Branch | None = None
        self._error: BaseException | None = None

    def among(self, seqs: set[SequenceState]) -> bool:
        """Whether the sequence or one of its branches is one of these."""
        return self.root in seqs or any(seq in seqs for seq in self.branches.values())

    def go_on(self) -> list[Step]:
        """Run the search while what it waits for is there; return the winner's steps at its end, else nothing."""
        if self._error is not None:
            raise self._error
        try:
            while all(map(self._rests, self._awaited)):
                if self._winner is not None:
                    return self._finish(self._winner)
                self._resume()
        except BaseException as error:
            self._error = error
            raise
        return []

    def doze(self, seconds: float) -> None:
        """Wait at most `seconds` for answers from outside; return at once if the search waits for none."""
        wait([one for one in self._awaited if isinstance(one, Future)], seconds)

    def _resume(self) -> None:
        """Let the search run to its next wait, or to its end."""
        try:
            awaited = next(self._run)
        except StopIteration as end:
            self._check(end.value)
            self._winner, self._awaited = end.value, [end.value]
            end.value.advance()
            return
        if not isinstance(awaited, Sequence):
            raise ValueError(f"a search yielded a {type(awaited).__name__}; yield a list of the branches to wait for")
        for one in awaited:
            if not isinstance(one, Future):
                self._check(one)
        self._awaited = list(awaited)

    def fork(self, branch: Branch, count: int) -> list[Branch]:
        """`count` new branches that go on from where `branch` stands."""
        self._check(branch)
        if count < 0:
            raise ValueError(f"fork was given count={count}; it must be at least 0")
        if len(self.branches) + count > self._most:
            raise ValueError(
                f"{count} more branches beside {len(self.branches)}, and the search announced {self._most} at most; "
                "end some, or announce more"
            )
        seq, made = self.branches[branch], range(self._made, self._made + count)
        children = [replace(seq, tokens=list(seq.tokens), steps=list(seq.steps), stop=seq.stop.copy(), allowed=None,
                            seed=branch_seed(self.root.seed, seq.number, number), until=seq.emitted)
                    for number in made]
        self.batch.fork(seq, children)
        new = [Branch(self, child, number) for child, number in zip(children, made, strict=True)]
        self.branches |= zip(new, children, strict=True)
        self._made = made.stop
        return new

    def force(self, branch: Branch, tokens: Sequence[int]) -> None:
        """Append given tokens to a branch; the next forward feeds them."""
        seq, vocabulary = branch.seq, self.batch.runner.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ValueError(f"force was given token id {wrong}; the model's ids are 0..{vocabulary - 1}")
        if seq.drafts:
            raise Unsupported("force beside drafts", "they expect one new token at a time", "Leave the drafts out")
        forced = seq.emit(tokens)
        seq.until = None if seq.until is None else seq.until + len(forced)

    def end(self, branch: Branch) -> None:
        """Give a branch up."""
        if branch in self.branches:
            del self.branches[branch]
            branch.seq.held, branch.seq.stop.finish_reason = False, "cancelled"
            self.batch.retire()

    def stop(self, left: int = 0) -> None:
        """End the search and keep `left` branches in the cache. Errors that the search raises then are logged."""
        try:
            self._run.close()
        except Exception:  # nobody waits for the search any more, and other sequences go on
            log.exception("a search did not end when it was told to")
        finally:
            self.batch.searches.remove(self)
            for branch in list(self.branches)[left:]:
                self.end(branch)

    def _rests(self, one: WaitedFor) -> bool:
        if isinstance(one, Future):
            return one.done()
        seq = one.seq
        return seq.leaves or (seq.room == 0 and self.batch.due(seq) == 0)

    def _check(self, branch: object) -> None:
        if branch not in self.branches:
            what = f"branch {branch.number}" if isinstance(branch, Branch) else repr(branch)
            raise ValueError(f"{what} is none of the branches under way; fork, await or return one that was not "
                             "ended")

    def _finish(self, winner: Branch) -> list[Step]:
        """Copy the winner into the sequence; only its KV stays in the cache."""
        for branch in [one for one in self.branches if one is not winner]:
            self.end(branch)
        root, seq = self.root, winner.seq
        plain = root.sampling.logprobs is None
        root.tokens[:], root.stop = seq.tokens, seq.stop
        root.steps += [replace(step, logprob=None) for step in seq.steps] if plain else seq.steps
        seq.held, root.ledger.branches = False, self._made
        self.batch.searches.remove(self)
        self.batch.retire()
        return root.steps


def score_forced(seq: SequenceState, first: int, logits: Tensor) -> None:
    """Note the log-probabilities of tokens forced upon a sequence, by logits [fed, V] from position `first` on."""
    wanted = seq.sampling.logprobs or 0
    for place, values in enumerate(logits, start=first + 1):
        index = place - seq.prompt_length
        if 0 <= index < len(seq.steps):
            text = seq.tokens[:place]
            scores = sampling.scores(values, text, seq.prompt_length, seq.sampling, seq.processors, seq.allowed)
            seq.steps[index] = replace(seq.steps[index], logprob=sampling.logprob(scores, seq.tokens[place], wanted))
