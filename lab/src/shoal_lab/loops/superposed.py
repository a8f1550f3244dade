"""Superposed decoding's step: one forward for all drafts of a row, which are fed as one vector."""

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
from shoal.model.stack import SequenceChunk, Start
from shoal.types import Step, TokenLogprob
from shoal_lab.components.signals import log_probabilities
from shoal_lab.loops.ngrams import NGramCounts

if TYPE_CHECKING:
    from shoal.decode.recipe_row import RecipeRow
    from shoal.decode.row import Row
    from shoal.decode.rules.accept import Outcome
    from shoal.decode.text.stop import StopState


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are chosen.

    Attributes:
        k, tokens, alpha, sharpen, unseen: as of `shoal_lab.methods.superposed.Superposed`.
        counted: n-grams of a corpus; None for those of each row's prompt.
    """

    k: int
    tokens: int
    alpha: float
    sharpen: float
    unseen: float
    counted: NGramCounts | None


class SuperposedBatch(Batch):
    """Rows read their prompts as in the plain loop, and emit nothing before all their drafts have ended.

    Args:
        how: how drafts are chosen.
    """

    def __init__(self, *args: Any, how: DraftOptions, **options: Any) -> None:
        self._how = how
        self._drafts: dict[int, tuple[RecipeRow, Drafts]] = {}  # with the row, so that no other one gets its id
        super().__init__(*args, **options)

    def step(self, budget: int, rows: Sequence[Row] | None = None, most: int | None = None) -> list[Step]:
        """A forward of those that read, and one of those that write; see `Batch.step`."""
        wanted = None if rows is None else {id(row) for row in rows}
        chosen = [row for row in self.rows if wanted is None or id(row) in wanted]
        writing = [row for row in chosen if id(row) in self._drafts]
        reading = [row for row in chosen if id(row) not in self._drafts]
        steps = self._write(writing) if writing else []
        return steps + (super().step(budget, reading, most) if reading else [])

    @override
    def settle(self, ended: Any, outcomes: Sequence[Outcome]) -> list[Step]:
        # Nothing is emitted at the end of a prompt: the most probable next tokens begin the drafts.
        steps: list[Step] = []
        for share, target in ended:
            row, drafts = share.row, Drafts(self._how, share.row)
            drafts.extend(target.logits(0))  # what fails here can begin again
            self.commit(row, range(len(share.chunk.tokens)))
            self._prefixes.keep(self.cache, row.slot, row.tokens)
            self._drafts[id(row)] = row, drafts
            steps += self._end(row, drafts)
        self.retire()
        return steps

    def _write(self, rows: Sequence[RecipeRow]) -> list[Step]:
        """One more token for the drafts of each row."""
        start = time.perf_counter()
        drafts = [self._drafts[id(row)][1] for row in rows]
        fed = [torch.stack([self._mixed(row, one)]) for row, one in zip(rows, drafts, strict=True)]
        chunks = [one.chunk() for one in drafts]
        logits = self.stack.forward(chunks, self.cache, start=Start(0, torch.stack(fed)))
        steps: list[Step] = []
        for row, one, values in zip(rows, drafts, logits, strict=True):
            depth = row.plan.depth(one.length)
            one.extend(values)
            self.commit(row, [0])
            row.ledger.target_forwards += 1
            row.ledger.decode_layer_tokens += depth
            row.ledger.read(depth)
            steps += self._end(row, one)
        self.retire()
        self.clock.count(time.perf_counter() - start, decoding=True)
        return steps

    def _mixed(self, row: RecipeRow, drafts: Drafts) -> Tensor:
        """The input of the first layer [D]."""
        ids = torch.tensor([one.tokens[-1] for one in drafts.live], device=self.stack.device)
        place = torch.full_like(ids, self.cache.positions[row.slot])
        vectors = self.stack.embed(ids, place)
        return drafts.weights.to(vectors) @ vectors

    def _end(self, row: RecipeRow, drafts: Drafts) -> list[Step]:
        """Emit the answer when no draft goes on."""
        row.ledger.branches, row.ledger.searched = self._how.k, drafts.made
        if drafts.live:
            return []
        best, *others = sorted(drafts.ended, key=lambda one: -one.mean)
        row.alternatives = tuple((one.text, tuple(one.tokens), one.mean) for one in others)
        return row.emit(best.tokens, 0, lambda place, _: best.logs[place])

    @override
    def retire(self) -> None:
        # The KV after the prompt is that of no text.
        for row in self.rows:
            if row.finish_reason is not None and self._drafts.pop(id(row), None) is not None:
                self.cache.truncate(row.slot, row.prompt_length)
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
    """The drafts of one row.

    Args:
        how: how they are chosen.
        row: a row that has read its prompt.

    Attributes:
        live, ended: drafts that go on, the most probable first, and the others.
        made: number of tokens in all.
    """

    def __init__(self, how: DraftOptions, row: RecipeRow) -> None:
        self._how, self._row, self._plan = how, row, row.plan
        self._counted = NGramCounts(row.tokens) if how.counted is None else how.counted
        self.live = [OneDraft([], "", 0.0, row.stop.copy(), [])]
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
        return SequenceChunk(self._row.slot, [self.live[0].tokens[-1]], [self.length], self._plan)

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
        scores, alpha = self._row.scores(logits, draft.tokens), self._how.alpha
        best = log_probabilities(scores.double() / self._how.sharpen).topk(min(self._how.tokens, len(scores)))
        after = self._counted.after([*self._row.tokens, *draft.tokens][-5:]) if alpha else {}
        found: list[tuple[int, float, Tensor]] = []
        for token, log in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            seen = math.log(after[token]) if token in after else self._how.unseen
            if log > -math.inf:
                found.append((token, (1 - alpha) * log + alpha * max(seen, self._how.unseen), scores))
        return found

    def _log(self, scores: Tensor, token: int) -> TokenLogprob | None:
        wanted = self._row.sampling.logprobs
        return None if wanted is None else sampling.logprob(scores, token, wanted)
