"""The step of a masked-diffusion model: guesses for all masks from one forward, some of which are kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode import sampling
from shoal.decode.batch import Batch
from shoal.model.runner import SequenceChunk
from shoal.types import Step, TokenLogprob
from shoal_lab.loops.canvas import CanvasOptions, Guess

if TYPE_CHECKING:
    from shoal.decode.running_sequence import RunningSequence
    from shoal.decode.sequence import SequenceState


class DenoisingBatch(Batch):
    """Each sequence has a canvas: its prompt, and as many masks as the answer may have tokens.

    Between steps the cache holds nothing of a sequence, or what `reuse` keeps while a block is filled. The first
    forward over a block sees the whole canvas; "prefix" then keeps the KV before the block, "dual" also the KV after
    it, and later forwards of the block run the rest alone. That is an approximation (Fast-dLLM, arXiv 2505.22618,
    section 3.2), because tokens decided meanwhile would change the hidden states of all others. It is exact in the
    first step of each block, and in a model of one layer, whose KV depends on a place's own token alone.

    Args:
        how: options of a step.
    """

    def __init__(self, *args: Any, how: CanvasOptions, **options: Any) -> None:
        super().__init__(*args, **{**options, "prefixes": None})  # a prefix's KV depends on what follows it
        self._how = how
        self._canvases: dict[int, Canvas] = {}

    @property
    def reading(self) -> list[RunningSequence]:
        """No sequences: a prompt is read together with the masks."""
        return []

    def step(self, budget: int, seqs: Sequence[SequenceState] | None = None, most: int | None = None) -> list[Step]:
        """Decide some tokens of each sequence; those without an earlier mask are emitted. See `Batch.step`."""
        start = time.perf_counter()
        wanted = None if seqs is None else {id(seq) for seq in seqs}
        self._canvases = {id(seq): self._canvases.get(id(seq)) or Canvas(seq, self._how) for seq in self.seqs}
        chosen = [self._canvases[id(seq)] for seq in self.seqs if wanted is None or id(seq) in wanted]
        for group in _within(budget, [canvas for canvas in chosen if canvas.waits]):
            for canvas, logits in zip(group, self._logits(group), strict=True):
                self._decide(canvas, logits)
        steps = [step for canvas in chosen for step in canvas.say()]
        self.clock.count(time.perf_counter() - start, decoding=True)
        self.retire()
        return steps

    def _logits(self, canvases: Sequence[Canvas]) -> Sequence[Tensor]:
        """Logits of each canvas [places, V]: row j is for the j-th place from the block's beginning on."""
        for canvas in canvases:
            if canvas.fresh:
                self.cache.truncate(canvas.seq.seq_id, 0)
        found = self._forward_over(canvases, hidden=False)
        if self._how.guidance:
            for canvas in canvases:
                self.cache.rollback(canvas.seq.seq_id)
            free = self._forward_over(canvases, hidden=True)
            found = [u + (self._how.guidance + 1) * (c - u) for u, c in zip(free, found, strict=True)]
        return found

    def _forward_over(self, canvases: Sequence[Canvas], hidden: bool) -> Sequence[Tensor]:
        """The same from one forward, with masked prompts if they are `hidden`."""
        chunks = [canvas.chunk(self.cache.positions[canvas.seq.seq_id], self._how.reuse, hidden) for canvas in canvases]
        logits: Sequence[Tensor] = self.runner.forward(chunks, self.cache).split([chunk.wanted for chunk in chunks])
        for canvas, chunk in zip(canvases, chunks, strict=True):
            canvas.count(len(chunk.tokens))
        return logits

    def _decide(self, canvas: Canvas, logits: Tensor) -> None:
        """Choose the block's end if it is open, keep some guesses, and the wanted KV."""
        how, begun = self._how, canvas.end is None
        length, left = canvas.length, canvas.length - canvas.start
        ahead = length if how.exit else canvas.end or canvas.start + how.blocks.ahead(length, left)
        guesses = canvas.guesses(logits, ahead, how)
        if begun:
            canvas.begin(how.blocks.choose(guesses, length, left), how)
        self._keep(canvas)
        over = how.exit is not None and how.exit.over(guesses, canvas.steps / how.total(length))
        inside = [guess for guess in guesses if guess.place < (canvas.end or length)]
        canvas.fill(guesses if over else how.commit.choose(inside, canvas.left), logits)

    def _keep(self, canvas: Canvas) -> None:
        """Keep KV in the cache until the block is finished."""
        seq_id = canvas.seq.seq_id
        if not canvas.fresh or self._how.reuse == "none":
            self.cache.rollback(seq_id)
            return
        behind = range(canvas.behind, len(canvas.tokens)) if self._how.reuse == "dual" else ()
        self.cache.commit(seq_id, [*range(canvas.before), *behind])
        canvas.fresh = False

    @override
    def close(self) -> None:
        # No KV of the cache is of use for left-to-right decoding.
        super().close()
        for seq_id in range(self.cache.seqs):
            self.cache.truncate(seq_id, 0)


class Canvas:
    """A sequence's text with its masks. Places count from the answer's beginning.

    Args:
        seq: a sequence that has emitted nothing.
        how: options, with the mask token and the grammar.

    Attributes:
        tokens: prompt and answer.
        length: length of the answer.
        start, end: the current block; its end is None until the first forward has set it.
        left: remaining steps of the block.
        steps: steps done.
        fresh: whether the next forward runs the whole canvas.
    """

    def __init__(self, seq: RunningSequence, how: CanvasOptions) -> None:
        assert how.masked is not None
        self.seq, self._model, self.length = seq, how.masked, seq.stop.room
        self.tokens = [*seq.tokens, *[self._model.mask_token_id] * self.length]
        self._chart = None if how.grammar is None else how.grammar.chart(self.length, seq.stop.ends)
        self._masks = set(range(self.length))
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._logs: dict[int, TokenLogprob] = {}
        self.start, self.left, self.steps, self._forwards = 0, 0, 0, 0
        self.end: int | None = None
        self.fresh = True

    @property
    def waits(self) -> bool:
        """Whether any place is open."""
        return bool(self._masks)

    @property
    def before(self) -> int:
        """Tokens of the text whose outputs are not for places of the block."""
        return self.seq.prompt_length + self.start - self._model.shift

    @property
    def behind(self) -> int:
        """The first token of the text after the block."""
        assert self.end is not None
        return self.seq.prompt_length + self.end

    def chunk(self, base: int, reuse: str, hidden: bool) -> SequenceChunk:
        """What is fed: everything, or what the cache lacks, where `base` is the number of slots that it holds.

        Args:
            base, reuse: what is kept of the text.
            hidden: whether masks replace the prompt.
        """
        first = 0 if self.fresh else self.before
        last = len(self.tokens) if self.fresh or reuse == "prefix" else self.behind
        tokens, prompt = self.tokens[first:last], self.seq.prompt_length
        if hidden:
            tokens[: max(0, prompt - first)] = [self._model.mask_token_id] * max(0, prompt - first)
        depths = None if base == first else range(first - base, last - base)
        return SequenceChunk(self.seq.seq_id, tokens, [0] * len(tokens), self.seq.plan, depths=depths,
                             wanted=last - self.before, mutual=True)

    def guesses(self, logits: Tensor, ahead: int, how: CanvasOptions) -> list[Guess]:
        """Guesses for the masks before place `ahead`, from logits [places from the block's beginning on, V]."""
        places = sorted(place for place in self._masks if place < min(ahead, self.start + len(logits)))
        scores = self._scores(logits[[place - self.start for place in places]])
        uniform = partial(self._uniform, places)
        if self.seq.sampling.greedy:
            tokens = sampling.greedy(scores)
        else:
            tokens = sampling.draws(sampling.probs_of(scores, self.seq.sampling), uniform("sample"))
        logs = scores.log_softmax(-1)
        own = logs.gather(-1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].exp().tolist()
        best = scores.topk(2, -1).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        ranks = own if how.remasking == "confidence" else uniform("remask") if how.remasking == "random" else (
            _ranks(logs, how.remasking))
        return [Guess(*values) for values in zip(places, tokens, own, ranks, gaps, strict=True)]

    def _scores(self, logits: Tensor) -> Tensor:
        """Logits [n, V] with the request's bias, with mask tokens excluded."""
        scores = sampling.biased(logits, self.seq.sampling)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32), copy=True)
        scores[:, self._model.mask_token_id] = -torch.inf
        return scores

    def _uniform(self, places: Sequence[int], purpose: str) -> list[float]:
        """A random number for each place in this step."""
        return [sampling.uniform(self.seq.seed, self.seq.number, self.steps << 32 | place, purpose) for place in places]

    def begin(self, size: int, how: CanvasOptions) -> None:
        """Set the number of tokens of the block."""
        self.end = self.start + size
        self.left = how.share(self.start, self.end, self.length)

    def fill(self, guesses: Sequence[Guess], logits: Tensor) -> None:
        """Replace masks by guesses, and go on to the next block if this one is finished."""
        for guess in guesses:
            told = logits[guess.place - self.start]
            token = self._allowed(guess, told)
            self._masks.remove(guess.place)
            self.tokens[self.seq.prompt_length + guess.place] = token
            if self.seq.placed is not None:
                self.seq.placed.append((guess.place, token, self.steps))
            self._note(guess.place, token, told)
        self.steps, self.left = self.steps + 1, max(1, self.left - 1)
        ready = min(self._masks, default=self.length)
        if self.end is not None and ready >= self.end:
            self.start, self.end, self.fresh = ready, None, True

    def _allowed(self, guess: Guess, logits: Tensor) -> int:
        """The guess, or the sequence's choice among the tokens that the grammar allows there, by logits [V]."""
        chart, token = self._chart, guess.token
        if chart is None:
            return token
        if token not in (fits := chart.fits(guess.place)):
            scores = self._scores(logits[None])[0]
            rest = torch.full_like(scores, -torch.inf)
            rest[fits] = scores[fits]
            u = self._uniform([guess.place], "again")[0]
            token = sampling.argmax(rest) if self.seq.sampling.greedy else sampling.draw(
                sampling.probs_of(rest, self.seq.sampling), u)
        chart.put(guess.place, token)
        return token

    def _note(self, place: int, token: int, logits: Tensor) -> None:
        """Record log-probabilities and scores for those who want them when the token is emitted."""
        wanted = self.seq.sampling.logprobs
        if wanted is None and self.seq.record is None:
            return
        scores = self._scores(logits[None])[0]
        if wanted is not None:
            self._logs[place] = sampling.logprob(scores, token, wanted)
        if self.seq.record is not None:
            self._seen[place] = logits, scores

    def count(self, fed: int) -> None:
        """Count the work of a forward."""
        ledger, layers = self.seq.ledger, self.seq.plan.num_layers
        ledger.target_forwards += 1
        ledger.decode_layer_tokens += layers * fed
        if self._forwards:
            ledger.read(layers)
        self._forwards += 1

    def say(self) -> list[Step]:
        """Emit tokens without an earlier mask, which are final. The sequence may end there."""
        first, last = self.seq.emitted, min(self._masks, default=self.length)
        if self.seq.record is not None:
            for at in range(first, last):
                self.seq.record(*self._seen[at])
        tokens = self.tokens[self.seq.prompt_length :][first:last]
        return self.seq.emit(tokens, 0, lambda offset, token: self._logs.get(first + offset))


def _ranks(logs: Tensor, remasking: str) -> list[float]:
    """Margin of the argmax over the second token, or minus the entropy, from log-probabilities [n, V]."""
    if remasking == "margin":
        best = logs.topk(2, -1).values.exp()
        found: list[float] = (best[:, 0] - best[:, 1]).tolist()
    else:
        found = (logs.exp() * logs.clamp_min(torch.finfo(logs.dtype).min)).sum(-1).tolist()
    return found


def _within(budget: int, canvases: Sequence[Canvas]) -> Iterator[list[Canvas]]:
    """Canvases that share a forward: as many as fit into `budget` tokens, and at least one."""
    group: list[Canvas] = []
    for canvas in canvases:
        if group and sum(len(one.tokens) for one in (*group, canvas)) > budget:
            yield group
            group = []
        group.append(canvas)
    if group:
        yield group
