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
from shoal.model.runner import SequenceChunk
from shoal_lab.components.signals import entropy, log_probabilities

if TYPE_CHECKING:
    from shoal.decode.rules.accept import Outcome
    from shoal.decode.running_sequence import RunningSequence
    from shoal.decode.target import SequenceTarget

_SHORT = 32
"""Most tokens of a piece below which candidates may hang: 4 candidates of 8 tokens make 64 nodes with it."""


class PausingBatch(Batch):
    """A sequence whose entropy reaches the threshold pauses: its candidates are continued greedily, as a tree.

    The tree hangs below the uncommitted tokens of the sequence's forward. One forward makes a level of it, for all
    pausing sequences; the following commit drops it.

    Args:
        threshold: entropy at which to pause.
        candidates: most candidates.
        lookahead: most tokens of a continuation.
    """

    def __init__(self, *args: Any, threshold: float, candidates: int, lookahead: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._threshold, self._candidates, self._lookahead = threshold, candidates, lookahead

    def judge_all(self, seqs: Sequence[tuple[RunningSequence, SequenceTarget, int]]) -> list[Outcome]:
        """Choose as in the plain loop if the model is sure; otherwise the best candidate."""
        outcomes = super().judge_all(seqs)
        unsure = {place: _Outlook(seq, target, fed, self._candidates)
                  for place, (seq, target, fed) in enumerate(seqs)
                  if float(entropy(target.scores(0))) >= self._threshold}
        for _ in range(self._lookahead):
            self._look(sorted((one for one in unsure.values() if one.alive), key=lambda one: one.seq.seq_id))
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
            logits = self.runner.forward(chunks, self.cache).split([len(chunk.tokens) for chunk in chunks])
            for one, values in zip(outlooks, logits, strict=True):
                one.extend(values)


class _Candidate:
    """A possible next token, with its continuation.

    Attributes:
        tokens: the token and its continuation.
        node: node of the last token that was fed.
        logs: their log-probabilities (nats).
    """

    def __init__(self, seq: RunningSequence, node: int, token: int, log: float) -> None:
        self._seq, self._stop = seq, seq.stop.ahead()
        self.node, self.tokens, self.logs = node, list[int](), list[float]()
        self.say(token, log)

    def say(self, token: int, log: float) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.logs.append(log)
        self._stop.push([token])

    def follow(self, logits: Tensor) -> None:
        """Append the argmax of logits [V]; processors do not see text that may never come."""
        scores = self._seq.scores(logits, self.tokens, processed=False)
        token = sampling.argmax(scores)
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
    """The candidates of one pausing sequence.

    Args:
        seq: the sequence.
        target: the model's output for its next token.
        fed: uncommitted tokens of its forward, a chain.
        count: most candidates; ruled out tokens are no candidates.
    """

    def __init__(self, seq: RunningSequence, target: SequenceTarget, fed: int, count: int) -> None:
        self.seq, self._depth = seq, fed
        self._parents, self._depths = list(range(-1, fed - 1)), list(range(fed))
        logs, possible = _logs(target)
        best = logs.masked_fill(~possible, -torch.inf).topk(min(count, int(possible.sum())))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        self._candidates = [_Candidate(seq, fed - 1, token, log) for token, log in pairs]

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
        seq, first, going = self.seq, len(self._parents), self._going()
        for node, one in enumerate(going, start=first):
            self._parents.append(one.node)
            self._depths.append(self._depth)
            one.node = node
        self._depth += 1
        step = seq.emitted + len(going[0].tokens)
        depth = seq.plan.depth(step)
        seq.ledger.target_forwards += 1
        seq.ledger.decode_layer_tokens += depth * len(going)
        seq.ledger.read(depth)
        return SequenceChunk(seq.seq_id, [one.tokens[-1] for one in going], [step] * len(going), seq.plan,
                             tuple(self._parents), tuple(self._depths), wanted=len(going), fed=first)

    def extend(self, logits: Tensor) -> None:
        """Continue the candidates by logits [candidates that go on, V]."""
        for one, values in zip(self._going(), logits, strict=True):
            one.follow(values)

    def _going(self) -> list[_Candidate]:
        return [one for one in self._candidates if one.alive]


def _logs(target: SequenceTarget) -> tuple[Tensor, Tensor]:
    """Log-probabilities [V] of the next token, and the tokens that the request allows: bool [V]."""
    scores = target.scores(0)
    return log_probabilities(scores), scores > -torch.inf if target.greedy else target.probs(0) > 0
