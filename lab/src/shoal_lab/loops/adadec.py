"""AdaDec's step: where the model is unsure, a look at how its likeliest tokens would go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.decode import sampling
from shoal.decode.batch import Batch
from shoal.decode.signals import entropy, log_probabilities
from shoal.model.stack import SequenceChunk

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.decode.rules.accept import Outcome
    from shoal.decode.target import RowTarget
    from shoal_lab.methods.adadec import Pausing

_SHORT = 32
"""Most tokens of a piece below which candidates may hang: with 4 candidates of 8 tokens they are 64 nodes."""


class PausingBatch(Batch):
    """A row whose entropy reaches the threshold pauses: its candidates are continued greedily, as a tree.

    The tree hangs below what the row's forward has left uncommitted. One forward makes a level of it, for all rows that
    pause; the commit that follows forgets it.

    Args:
        how: when to pause, and how far to look.
    """

    def __init__(self, *args: Any, how: Pausing, **options: Any) -> None:
        super().__init__(*args, **options)
        self._how = how

    def judge_all(self, rows: Sequence[tuple[Row, RowTarget, int]]) -> list[Outcome]:
        """As in the plain loop where the model is sure; else the best of the candidates."""
        outcomes = super().judge_all(rows)
        unsure = {place: _Outlook(row, target, fed, self._how.candidates)
                  for place, (row, target, fed) in enumerate(rows)
                  if float(entropy(target.scores(0))) >= self._how.threshold}
        for _ in range(self._how.lookahead):
            self._look(sorted((one for one in unsure.values() if one.alive), key=lambda one: one.row.slot))
        return [replace(outcome, token=unsure[place].best) if place in unsure else outcome
                for place, outcome in enumerate(outcomes)]

    def piece(self, due: int, size: int) -> int:
        """See the base class. A long piece leaves a prompt's last token to a forward of its own.

        The candidates hang below all that a forward has left uncommitted, and trees of more nodes than the kernels can
        name are read at many times the cost.
        """
        return size - 1 if size == due > _SHORT else size

    def _look(self, outlooks: Sequence[_Outlook]) -> None:
        """One token more for every candidate that goes on."""
        if outlooks:
            chunks = [one.level() for one in outlooks]
            logits = self.stack.forward(chunks, self.cache).split([len(chunk.tokens) for chunk in chunks])
            for one, values in zip(outlooks, logits, strict=True):
                one.extend(values)


class _Candidate:
    """A token that may come next, with what would follow it.

    Attributes:
        words: the token and those after it.
        node: of the last one that was fed.
        logs: their log-probabilities (nats).
    """

    def __init__(self, row: Row, node: int, token: int, log: float) -> None:
        self._row, self._stop = row, row.stop.ahead()
        self.node, self.words, self.logs = node, list[int](), list[float]()
        self.say(token, log)

    def say(self, token: int, log: float) -> None:
        """Go on by a token."""
        self.words.append(token)
        self.logs.append(log)
        self._stop.push([token])

    def follow(self, logits: Tensor) -> None:
        """Go on by the likeliest token, given logits [V]; processors are shown no text that may never come."""
        scores = self._row.scores(logits, self.words, processed=False)
        token = sampling.likeliest(scores)
        self.say(token, sampling.logprob(scores, token, 0).logprob)

    @property
    def alive(self) -> bool:
        """Whether no stop rule ends it."""
        return self._stop.finish_reason is None

    @property
    def score(self) -> float:
        """Mean log-probability of its own length."""
        return sum(self.logs) / len(self.logs)


class _Outlook:
    """The candidates of one row that pauses.

    Args:
        row: the row.
        target: what the model says of its next token.
        fed: tokens that its forward has left uncommitted, a chain.
        count: most candidates: tokens that are ruled out are none.
    """

    def __init__(self, row: Row, target: RowTarget, fed: int, count: int) -> None:
        self.row, self._depth = row, fed
        self._parents, self._depths = list(range(-1, fed - 1)), list(range(fed))
        logs, possible = _logs(target)
        best = logs.masked_fill(~possible, -torch.inf).topk(min(count, int(possible.sum())))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        self._candidates = [_Candidate(row, fed - 1, token, log) for token, log in pairs]

    @property
    def alive(self) -> bool:
        """Whether there is anything to go on from."""
        return any(one.alive for one in self._candidates)

    @property
    def best(self) -> int:
        """The candidate of the best score, of equals the likeliest."""
        return max(self._candidates, key=lambda one: one.score).words[0]

    def level(self) -> SequenceChunk:
        """The last tokens of the candidates that go on, each below its own; counts the work."""
        row, first, going = self.row, len(self._parents), self._going()
        for node, one in enumerate(going, start=first):
            self._parents.append(one.node)
            self._depths.append(self._depth)
            one.node = node
        self._depth += 1
        step = row.emitted + len(going[0].words)
        depth = row.recipe.plan.depth(step)
        row.ledger.target_forwards += 1
        row.ledger.decode_layer_tokens += depth * len(going)
        row.ledger.read(depth)
        return SequenceChunk(row.slot, [one.words[-1] for one in going], [step] * len(going), row.recipe.plan,
                             tuple(self._parents), tuple(self._depths), wanted=len(going), fed=first)

    def extend(self, logits: Tensor) -> None:
        """Let the candidates go on by logits [candidates that go on, V]."""
        for one, values in zip(self._going(), logits, strict=True):
            one.follow(values)

    def _going(self) -> list[_Candidate]:
        return [one for one in self._candidates if one.alive]


def _logs(target: RowTarget) -> tuple[Tensor, Tensor]:
    """Log-probabilities [V] of the next token, and which ones the request lets come: bool [V]."""
    scores = target.scores(0)
    return log_probabilities(scores), scores > -torch.inf if target.greedy else target.probs(0) > 0
