"""A running sequence as the components of a recipe see it: its tokens, how they are chosen, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from shoal.decode import sampling
from shoal.decode.ledger import SequenceLedger
from shoal.decode.rules.accept import Match, Rule
from shoal.decode.sampling import Allowed, LogitsProcessor
from shoal.decode.text.stop import StopState
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVBytes
from shoal.model.layers.cross_attention import Encoded
from shoal.model.layers.pictures import Pictures
from shoal.model.lora.adapter import FittedAdapter
from shoal.types import Alternative, FinishReason, Sampling, Step, TokenLogprob

_MATCH = Match()


@dataclass(slots=True, eq=False)
class SequenceState:
    """State of one sequence, which the loop advances. It equals only itself.

    Attributes:
        number: the sequence's number in its request: keys its random numbers and its results.
        seq_id: the sequence's place in the cache, which changes when other sequences leave.
        tokens: prompt and emitted tokens; the KV of the last one does not exist yet.
        prompt_length: leading tokens that are the prompt.
        stop: decides where the sequence ends, and decodes its text.
        plan: the layers that its tokens run.
        rule: which guesses are kept.
        drafts: whether tokens are guessed ahead.
        cached: prompt tokens whose KV was there already.
        known: prompt tokens that were known, of which fewer may be `cached`, see `shoal.decode.prefixes`.
        marks: lengths of the prompt after which recurrent layers keep a state.
        salt: of the request; what is kept of one salt serves no other.
        adapter: what runs beside the model on its tokens, or None.
        source: what an encoder made of the source that its tokens read, or of pictures in its prompt, or None.
        root: in a search, the sequence of which this one is a branch; else None.
        until: emitted tokens after which a branch rests; None for as many as its stop rules allow.
        held: whether a branch stays in the cache after its end.
        allowed: the mask of the recipe's constraint for this sequence, if there is one.
        forced: how many of the last tokens came without a forward, since no other was allowed.
        again: length up to which tokens of the answer are or were read again, as its `select` asks.
        steps: what was emitted.
        bytes: size of the sequence's KV when it finished.
        error: from rewriting its KV, which is then in an unknown state.
        placed: for a loop that decides tokens in any order, the place, token and step of each, in the order in which
            they were decided; None if not asked for.
        alternatives: text, token ids and score of other answers that were found, best first.
        record: called with raw logits [V] and scores [V] of every chosen token, before stop rules see it; in a block
            also for tokens that a stop rule then cuts off.
    """

    number: int
    seq_id: int
    tokens: list[int]
    prompt_length: int
    stop: StopState
    plan: DepthPlan
    rule: Rule = _MATCH
    drafts: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    processors: Sequence[LogitsProcessor] = ()
    seed: int = 0
    steps: list[Step] = field(default_factory=list)
    ledger: SequenceLedger = field(default_factory=SequenceLedger)
    cached: int = 0
    known: int = 0
    marks: Sequence[int] = ()
    salt: str = ""
    adapter: FittedAdapter | None = None
    source: Encoded | Pictures | None = None
    bytes: KVBytes | None = None
    error: BaseException | None = None
    record: Callable[[Tensor, Tensor], None] | None = None
    root: SequenceState | None = None
    until: int | None = None
    held: bool = False
    allowed: Allowed | None = None
    forced: int = 0
    again: int = 0
    placed: list[tuple[int, int, int]] | None = None
    alternatives: tuple[Alternative, ...] = ()

    @property
    def quotable(self) -> list[int]:
        """Tokens that an answer may quote: those of its source, the prompt's, and its own."""
        return self.tokens if self.source is None or not self.source.ids else [*self.source.ids, *self.tokens]

    @property
    def read(self) -> int:
        """Tokens that were read: those of the source, and the prompt's."""
        return self.prompt_length + (0 if self.source is None else len(self.source.ids))

    @property
    def emitted(self) -> int:
        """Tokens generated so far: the step index of the last token."""
        return len(self.tokens) - self.prompt_length

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None while it runs."""
        return self.stop.finish_reason

    @property
    def room(self) -> int:
        """How many tokens the sequence may emit now; 0 for a resting branch and for a sequence that has ended."""
        stop = self.stop
        if stop.finish_reason is not None:
            return 0
        return stop.room if self.until is None else min(stop.room, max(0, self.until - self.emitted))

    @property
    def leaves(self) -> bool:
        """Whether the sequence has ended and its KV is no longer needed."""
        return self.stop.finish_reason is not None and not self.held

    def emit(
        self, tokens: Sequence[int], guessed: int = 0,
        logprob: Callable[[int, int], TokenLogprob | None] | None = None, depth: float | None = None,
    ) -> list[Step]:
        """Advance the sequence by tokens, as far as its stop rules allow.

        Args:
            tokens: the tokens that follow the last one.
            guessed: how many of them, from the first on, had been guessed.
            logprob: gives the log-probability of a token by its index in `tokens` and its id, if the request wants it.
            depth: layers that each token ran, if not those of the plan.
        """
        first, texts = self.emitted, self.stop.push(tokens)
        kept = tokens[: len(texts)]
        depths = self.plan.depths(range(first, first + len(kept))) if depth is None else [depth] * len(kept)
        wanted = None if self.sampling.logprobs is None else logprob
        known = [None] * len(kept) if wanted is None else [wanted(*one) for one in enumerate(kept)]  # by this history
        steps = [
            Step(self.number, index, token, text, ran, index < first + guessed, log)
            for index, (token, text, ran, log) in enumerate(zip(kept, texts, depths, known, strict=True), start=first)
        ]
        if steps and self.finish_reason is not None:
            steps[-1] = replace(steps[-1], finish_reason=self.finish_reason)
        self.tokens += kept
        self.steps += steps
        return steps

    def certain(self, place: int, token: int) -> TokenLogprob:
        """Of a token to which there was no alternative."""
        return TokenLogprob(token, 0.0, ((token, 0.0),)[: self.sampling.logprobs])

    def note_bytes(self, stored: KVBytes) -> None:
        """Note what the sequence has stored; a searched sequence has stored what all its branches have."""
        self.bytes = stored
        if self.root is not None:
            self.root.bytes = stored if self.root.bytes is None else self.root.bytes + stored

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether the constraint, if any, lets a token follow the sequence's tokens and `path`."""
        return self.allowed is None or self.allowed.lets([*self.tokens[self.prompt_length :], *path], token)

    def scores(self, logits: Tensor, path: Sequence[int] = (), *, processed: bool = True) -> Tensor:
        """`sampling.scores` of logits [V] after the sequence's tokens and `path`, with processors if `processed`."""
        processors = self.processors if processed else ()
        history = [*self.tokens, *path]
        return sampling.scores(logits, history, self.prompt_length, self.sampling, processors, self.allowed)

    def uniform(self, ahead: int, purpose: str) -> float:
        """The number in [0, 1) for `purpose` at the token that comes `ahead` tokens after the next one."""
        return sampling.uniform(self.seed, self.number, self.emitted + ahead, purpose)

    def draft_uniform(self, ahead: int, rank: int = 0, place: int | None = None) -> float:
        """The number that draws a guess, which the rule's `purpose` names."""
        return self.uniform(ahead, self.rule.purpose(rank, place))
