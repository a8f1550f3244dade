"""AdaDec's step: where the model is unsure, look how its most probable tokens would continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode import sampling
from shoal.decode.batch import Batch
from shoal.model.stack import SequenceChunk
from shoal_lab.components.signals import entropy, log_probabilities

if TYPE_CHECKING:
    from shoal.decode.recipe_row import RecipeRow
    from shoal.decode.rules.accept import Outcome
    from shoal.decode.target import RowTarget

_SHORT = 32
"""Most tokens of a piece below which candidates may hang: 4 candidates of 8 tokens make 64 nodes with it."""


class PausingBatch(Batch):
    """A row whose entropy reaches the threshold pauses: its candidates are continued greedily, as a tree.

    The tree hangs below the uncommitted tokens of the row's forward. One forward makes a level of it, for all pausing
    rows; the following commit drops it.

    Args:
        threshold: entropy at which to pause.
        candidates: most candidates.
        lookahead: most tokens of a continuation.
    """

    def __init__(self, *args: Any, threshold: float, candidates: int, lookahead: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._threshold, self._candidates, self._lookahead = threshold, candidates, lookahead

    def judge_all(self, rows: Sequence[tuple[RecipeRow, RowTarget, int]]) -> list[Outcome]:
        """Choose as in the plain loop if the model is sure; otherwise the best candidate."""
        outcomes = super().judge_all(rows)
        unsure = {place: _Outlook(row, target, fed, self._candidates)
                  for place, (row, target, fed) in enumerate(rows)
                  if float(entropy(target.scores(0))) >= self._threshold}
        for _ in range(self._lookahead):
            self._look(sorted((one for one in unsure.values() if one.alive), key=lambda one: one.row.slot))
        return [replace(outcome, token=unsure[place].best) if place in unsure else outcome
                for place, outcome in enumerate(outcomes)]

    @override
    def piece(self, due: int, size: int) -> int:
        # A long piece leaves a prompt's last token to its own forward. The candidates hang below all uncommitted tokens
        # of a forward, and trees larger than the kernels' limit are read at many times the cost.
        return size - 1 if size == due > _SHORT else size

    def _look(self, outlooks: Sequence[_Outlook]) -> None:
        """One more token for every candidate that goes on."""
        if outlooks:
            chunks = [one.level() for one in outlooks]
            logits = self.stack.forward(chunks, self.cache).split([len(chunk.tokens) for chunk in chunks])
            for one, values in zip(outlooks, logits, strict=True):
                one.extend(values)


class _Candidate:
    """A possible next token, with its continuation.

    Attributes:
        tokens: the token and its continuation.
        node: node of the last token that was fed.
        logs: their log-probabilities (nats).
    """

    def __init__(self, row: RecipeRow, node: int, token: int, log: float) -> None:
        self._row, self._stop = row, row.stop.ahead()
        self.node, self.tokens, self.logs = node, list[int](), list[float]()
        self.say(token, log)

    def say(self, token: int, log: float) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.logs.append(log)
        self._stop.push([token])

    def follow(self, logits: Tensor) -> None:
        """Append the argmax of logits [V]; processors do not see text that may never come."""
        scores = self._row.scores(logits, self.tokens, processed=False)
        token = sampling.likeliest(scores)
        self.say(token, sampling.logprob(scores, token, 0).logprob)

    @property
    def alive(self) -> bool:
        """Whether no stop rule ends it."""
        return self._stop.finish_reason is None

    @property
    def score(self) -> float:
        """Mean log-probability over its own length."""
        return sum(self.logs) / len(self.logs)


class _Outlook:
    """The candidates of one pausing row.

    Args:
        row: the row.
        target: the model's output for its next token.
        fed: uncommitted tokens of its forward, a chain.
        count: most candidates; ruled out tokens are no candidates.
    """

    def __init__(self, row: RecipeRow, target: RowTarget, fed: int, count: int) -> None:
        self.row, self._depth = row, fed
        self._parents, self._depths = list(range(-1, fed - 1)), list(range(fed))
        logs, possible = _logs(target)
        best = logs.masked_fill(~possible, -torch.inf).topk(min(count, int(possible.sum())))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        self._candidates = [_Candidate(row, fed - 1, token, log) for token, log in pairs]

    @property
    def alive(self) -> bool:
        """Whether any candidate goes on."""
        return any(one.alive for one in self._candidates)

    @property
    def best(self) -> int:
        """The candidate with the best score; the most probable one wins ties."""
        return max(self._candidates, key=lambda one: one.score).tokens[0]

    def level(self) -> SequenceChunk:
        """The last tokens of the candidates that go on, each below its own path; counts the work."""
        row, first, going = self.row, len(self._parents), self._going()
        for node, one in enumerate(going, start=first):
            self._parents.append(one.node)
            self._depths.append(self._depth)
            one.node = node
        self._depth += 1
        step = row.emitted + len(going[0].tokens)
        depth = row.plan.depth(step)
        row.ledger.target_forwards += 1
        row.ledger.decode_layer_tokens += depth * len(going)
        row.ledger.read(depth)
        return SequenceChunk(row.slot, [one.tokens[-1] for one in going], [step] * len(going), row.plan,
                             tuple(self._parents), tuple(self._depths), wanted=len(going), fed=first)

    def extend(self, logits: Tensor) -> None:
        """Continue the candidates by logits [candidates that go on, V]."""
        for one, values in zip(self._going(), logits, strict=True):
            one.follow(values)

    def _going(self) -> list[_Candidate]:
        return [one for one in self._candidates if one.alive]


def _logs(target: RowTarget) -> tuple[Tensor, Tensor]:
    """Log-probabilities [V] of the next token, and the tokens that the request allows: bool [V]."""
    scores = target.scores(0)
    return log_probabilities(scores), scores > -torch.inf if target.greedy else target.probs(0) > 0
