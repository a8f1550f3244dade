"""Superposed decoding's step: one forward for all drafts of a sequence, which are fed as one vector."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode import sampling
from shoal.decode.batch import Batch
from shoal.model.runner import SequenceChunk, Start
from shoal.types import Step, TokenLogprob
from shoal_lab.components.signals import log_probabilities
from shoal_lab.loops.ngrams import NGramCounts

if TYPE_CHECKING:
    from shoal.decode.rules.accept import Outcome
    from shoal.decode.running_sequence import RunningSequence
    from shoal.decode.sequence import SequenceState
    from shoal.decode.text.stop import StopState


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are chosen.

    Attributes:
        k, tokens, alpha, sharpen, unseen: as of `shoal_lab.methods.superposed.Superposed`.
        counted: n-grams of a corpus; None for those of each sequence's prompt.
    """

    k: int
    tokens: int
    alpha: float
    sharpen: float
    unseen: float
    counted: NGramCounts | None


class SuperposedBatch(Batch):
    """Sequences read their prompts as in the plain loop, and emit nothing before all their drafts have ended.

    Args:
        how: how drafts are chosen.
    """

    def __init__(self, *args: Any, how: DraftOptions, **options: Any) -> None:
        self._how = how
        self._drafts: dict[int, tuple[RunningSequence, Drafts]] = {}  # keeps the sequence's id taken
        super().__init__(*args, **options)

    def step(self, budget: int, seqs: Sequence[SequenceState] | None = None, most: int | None = None) -> list[Step]:
        """A forward of those that read, and one of those that write; see `Batch.step`."""
        wanted = None if seqs is None else {id(seq) for seq in seqs}
        chosen = [seq for seq in self.seqs if wanted is None or id(seq) in wanted]
        writing = [seq for seq in chosen if id(seq) in self._drafts]
        reading = [seq for seq in chosen if id(seq) not in self._drafts]
        steps = self._write(writing) if writing else []
        return steps + (super().step(budget, reading, most) if reading else [])

    @override
    def settle(self, ended: Any, outcomes: Sequence[Outcome]) -> list[Step]:
        # Nothing is emitted at the end of a prompt: the most probable next tokens begin the drafts.
        steps: list[Step] = []
        for share, target in ended:
            seq, drafts = share.seq, Drafts(self._how, share.seq)
            drafts.extend(target.logits(0))  # what fails here can begin again
            self.commit(seq, range(len(share.chunk.tokens)))
            self._prefixes.keep(self.cache, seq.seq_id, seq.tokens, seq.salt)
            self._drafts[id(seq)] = seq, drafts
            steps += self._end(seq, drafts)
        self.retire()
        return steps

    def _write(self, seqs: Sequence[RunningSequence]) -> list[Step]:
        """One more token for the drafts of each sequence."""
        start = time.perf_counter()
        drafts = [self._drafts[id(seq)][1] for seq in seqs]
        fed = [torch.stack([self._mixed(seq, one)]) for seq, one in zip(seqs, drafts, strict=True)]
        chunks = [one.chunk() for one in drafts]
        logits = self.runner.forward(chunks, self.cache, start=Start(0, torch.stack(fed)))
        steps: list[Step] = []
        for seq, one, values in zip(seqs, drafts, logits, strict=True):
            depth = seq.plan.depth(one.length)
            one.extend(values)
            self.commit(seq, [0])
            seq.ledger.target_forwards += 1
            seq.ledger.decode_layer_tokens += depth
            seq.ledger.read(depth)
            steps += self._end(seq, one)
        self.retire()
        self.clock.count(time.perf_counter() - start, decoding=True)
        return steps

    def _mixed(self, seq: RunningSequence, drafts: Drafts) -> Tensor:
        """The input of the first layer [D]."""
        ids = torch.tensor([one.tokens[-1] for one in drafts.live], device=self.runner.device)
        place = torch.full_like(ids, self.cache.positions[seq.seq_id])
        vectors = self.runner.embed(ids, place)
        return drafts.weights.to(vectors) @ vectors

    def _end(self, seq: RunningSequence, drafts: Drafts) -> list[Step]:
        """Emit the answer when no draft goes on."""
        seq.ledger.branches, seq.ledger.searched = self._how.k, drafts.made
        if drafts.live:
            return []
        best, *others = sorted(drafts.ended, key=lambda one: -one.mean)
        seq.alternatives = tuple((one.text, tuple(one.tokens), one.mean) for one in others)
        return seq.emit(best.tokens, 0, lambda place, _: best.logs[place])

    @override
    def retire(self) -> None:
        # The KV after the prompt is that of no text.
        for seq in self.seqs:
            if seq.finish_reason is not None and self._drafts.pop(id(seq), None) is not None:
                self.cache.truncate(seq.seq_id, seq.prompt_length)
        super().retire()


@dataclass
class OneDraft:
    """One draft.

    Attributes:
        tokens: its tokens.
        text: as far as it is certain.
        score: sum of the log-probabilities by which it was chosen.
        stop: its stop rules.
        logs: log-probability of each token by the model; None if nobody wants it.
    """

    tokens: list[int]
    text: str
    score: float
    stop: StopState
    logs: list[TokenLogprob | None]

    @property
    def mean(self) -> float:
        """Score per token."""
        return self.score / max(1, len(self.tokens))

    def followed(self, token: int, score: float, log: TokenLogprob | None) -> OneDraft:
        """The draft with one more token."""
        stop = self.stop.copy()
        text = self.text + "".join(stop.push([token]))
        return OneDraft([*self.tokens, token], text, self.score + score, stop, [*self.logs, log])


class Drafts:
    """The drafts of one sequence.

    Args:
        how: how they are chosen.
        seq: a sequence that has read its prompt.

    Attributes:
        live, ended: drafts that go on, the most probable first, and the others.
        made: number of tokens in all.
    """

    def __init__(self, how: DraftOptions, seq: RunningSequence) -> None:
        self._how, self._seq, self._plan = how, seq, seq.plan
        self._counted = NGramCounts(seq.tokens) if how.counted is None else how.counted
        self.live = [OneDraft([], "", 0.0, seq.stop.copy(), [])]
        self.ended: list[OneDraft] = []
        self.made = 0

    @property
    def length(self) -> int:
        """Tokens of each draft that goes on."""
        return len(self.live[0].tokens)

    @property
    def weights(self) -> Tensor:
        """Weights of the drafts that go on, float64; they sum to 1."""
        return torch.tensor([one.score for one in self.live], dtype=torch.float64).softmax(0)

    def chunk(self) -> SequenceChunk:
        """The chunk for a forward; its token stands for the vector that is fed."""
        return SequenceChunk(self._seq.seq_id, [self.live[0].tokens[-1]], [self.length], self._plan)

    def extend(self, logits: Tensor) -> None:
        """Keep the best continuations of the drafts, given logits [V]; as many as go on, k at first."""
        wanted = self._how.k - len(self.ended)
        found = [(one.score + score, place, token, score, scores) for place, one in enumerate(self.live)
                 for token, score, scores in self._continued(one, logits)]
        if not found:
            raise ValueError(sampling.IMPOSSIBLE)
        found.sort(key=lambda item: -item[0])
        grown = [self.live[place].followed(token, score, self._log(scores, token))
                 for _, place, token, score, scores in found[:wanted]]
        self.made += len(grown)
        self.live = [one for one in grown if one.stop.finish_reason is None]
        self.ended += [one for one in grown if one.stop.finish_reason is not None]

    def _continued(self, draft: OneDraft, logits: Tensor) -> list[tuple[int, float, Tensor]]:
        """Possible next tokens, each with its log-probability and the scores [V] that it comes from."""
        scores, alpha = self._seq.scores(logits, draft.tokens), self._how.alpha
        best = log_probabilities(scores.double() / self._how.sharpen).topk(min(self._how.tokens, len(scores)))
        after = self._counted.after([*self._seq.tokens, *draft.tokens][-5:]) if alpha else {}
        found: list[tuple[int, float, Tensor]] = []
        for token, log in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            seen = math.log(after[token]) if token in after else self._how.unseen
            if log > -math.inf:
                found.append((token, (1 - alpha) * log + alpha * max(seen, self._how.unseen), scores))
        return found

    def _log(self, scores: Tensor, token: int) -> TokenLogprob | None:
        wanted = self._seq.sampling.logprobs
        return None if wanted is None else sampling.logprob(scores, token, wanted)
