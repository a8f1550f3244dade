"""TrimR's step: sequences decode as in the plain loop, except those that wait for a verdict or are being closed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from shoal.decode.batch import Batch
from shoal.decode.branches.verifier import Awaited, NoVerdict
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.runner import SequenceChunk
from shoal.sandbox.template import rendered
from shoal.types import Step
from shoal_lab.loops.thoughts import Question, Thinking, Thoughts, texts

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.rules.accept import Outcome
    from shoal.decode.sequence import SequenceState

_PAUSE = 0.002
"""Seconds to wait for a verdict if no sequence of the batch can go on; other batches of the engine wait as long."""


class ThoughtJudge(Protocol):
    """Answers yes or no to one question per sequence at a time."""

    def ask(self, seq: SequenceState, question: Question) -> None:
        """Start with a sequence's question."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait for an answer, if answers come at any time."""
        ...

    def said(self, seqs: Sequence[SequenceState], budget: int) -> list[tuple[SequenceState, bool]]:
        """Answers so far to these sequences' questions, after work of at most `budget` tokens.

        A sequence for which it fails gets the `error`.
        """
        ...

    def keep(self, seqs: Sequence[SequenceState]) -> None:
        """Forget the questions of all other sequences."""
        ...

    def rollback(self) -> None:
        """Undo the work of a failed step, as in `Batch`."""
        ...


class TrimmingBatch(Batch):
    """Sequences whose thinking is read, judged and closed.

    Args:
        how: what to look for.
        judge: makes the judge.
    """

    def __init__(self, *args: Any, how: Thinking, judge: Callable[[], ThoughtJudge], **options: Any) -> None:
        self._how, self._judge = how, judge()
        super().__init__(*args, **options)
        self._thoughts: dict[int, tuple[SequenceState, Thoughts]] = {}  # keeps the sequence's id taken

    def step(self, budget: int, seqs: Sequence[SequenceState] | None = None, most: int | None = None) -> list[Step]:
        """A step of the sequences that do not wait, and some of the judge's work; see `Batch.step`."""
        wanted = None if seqs is None else {id(seq) for seq in seqs}
        chosen = [seq for seq in self.seqs if wanted is None or id(seq) in wanted]
        self._thoughts = {id(seq): self._thoughts.get(id(seq)) or (seq, self._thoughts_of(seq)) for seq in self.seqs}
        self._judge.keep(self.seqs)
        steps = self._hear([seq for seq in chosen if self._waits(seq)], budget)
        able = [seq for seq in chosen if not self._waits(seq)]
        return steps + super().step(budget, able, most) if able else steps

    def _hear(self, waiting: Sequence[SequenceState], budget: int) -> list[Step]:
        """Continue the sequences whose verdict has come."""
        if not waiting:
            return []
        start, steps = time.perf_counter(), list[Step]()
        if len(waiting) == len(self.seqs):
            self._judge.wait(_PAUSE)
        for seq, yes in self._judge.said(waiting, budget):
            self._thoughts[id(seq)][1].hear(yes)
            steps += self._act(seq)
        self.retire()
        self.clock.draft_seconds += time.perf_counter() - start
        self.clock.count(time.perf_counter() - start, decoding=True)
        return steps

    def _thoughts_of(self, seq: SequenceState) -> Thoughts:
        return Thoughts(self._how, seq.tokens[: seq.prompt_length], seq.emitted + seq.stop.room)

    def _waits(self, seq: SequenceState) -> bool:
        return seq.error is None and isinstance(self._thoughts[id(seq)][1].due, Question)

    @override
    def settle(self, ended: Any, outcomes: Sequence[Outcome]) -> list[Step]:
        steps = super().settle(ended, outcomes)
        for share, _ in ended:
            if share.seq.finish_reason is None:
                steps += self._act(share.seq)
        self.retire()
        return steps

    def _act(self, seq: SequenceState) -> list[Step]:
        """Read the sequence's emitted tokens until something is due; then ask, or close."""
        thoughts = self._thoughts[id(seq)][1]
        while thoughts.due is None and thoughts.read < len(seq.steps):
            thoughts.see(seq.steps[thoughts.read].token)
        if thoughts.due is None:
            return []
        if isinstance(thoughts.due, Question):
            seq.ledger.judged += 1
            try:
                self._judge.ask(seq, thoughts.due)
            except Exception as error:
                seq.error = NoVerdict(f"the judge could not be asked: {type(error).__name__}: {error}")
                seq.error.__cause__ = error
            return []
        steps = seq.emit(self._how.ending(thoughts.due), 0, seq.certain)
        seq.forced += len(steps)  # they come after a token that has not been fed yet
        seq.ledger.put += len(steps)
        thoughts.close(len(steps))
        return steps

    @override
    def rollback(self) -> None:
        super().rollback()
        self._judge.rollback()


class CallableJudge(ThoughtJudge):
    """A judge in Python; each question runs in its own thread.

    Args:
        whom: the callable.
        patience: time limit of a question in seconds.
    """

    def __init__(self, whom: Any, patience: float) -> None:
        self._whom, self._patience = whom, patience
        self._asked: dict[int, Awaited] = {}

    @override
    def ask(self, seq: SequenceState, question: Question) -> None:
        self._asked[id(seq)] = Awaited(self._whom, question, self._patience, "judge")

    @override
    def wait(self, seconds: float) -> None:
        for asked in list(self._asked.values())[:1]:
            asked.wait(seconds)

    @override
    def said(self, seqs: Sequence[SequenceState], budget: int) -> list[tuple[SequenceState, bool]]:
        found: list[tuple[SequenceState, bool]] = []
        for seq in seqs:
            if self._asked[id(seq)].wait(0):
                try:
                    found.append((seq, _truth(self._asked.pop(id(seq)).answer)))
                except (ValueError, TimeoutError) as error:
                    seq.error = error
        return found

    @override
    def keep(self, seqs: Sequence[SequenceState]) -> None:
        alive = {id(seq) for seq in seqs}
        self._asked = {key: one for key, one in self._asked.items() if key in alive}

    @override
    def rollback(self) -> None:
        pass  # there is nothing to undo


class ModelJudge(ThoughtJudge):
    """A judging model: it reads all questions together, within the budget of a step.

    Args:
        engine: the judge's engine.
        own: the tokenizer of the thinking model, for a judge without one.
        most: most tokens of a question; longer thoughts lose their beginning.

    Raises:
        Unsupported: its tokens do not distinguish yes from no.
    """

    def __init__(self, engine: Any, own: Any, most: int) -> None:
        self._most = min(most, (engine.runner.max_positions or most + 1) - 1)
        self._runner, self._tokenizer = engine.runner, engine.tokenizer or own
        self._plan, self._cache = DepthPlan.full(engine.runner.num_layers), engine.runner.new_cache(0)
        self._cached: list[tuple[SequenceState, list[int]]] = []
        yes, no = (self._begins(word) for word in ("yes", "no"))
        self._yes, self._no = sorted(yes - no), sorted(no - yes)
        if not (self._yes and self._no):
            raise Unsupported(f"{engine.model_name or 'this model'} as a judge", "its tokens do not tell yes from no",
                              "Use another model, or a callable")

    @override
    def ask(self, seq: SequenceState, question: Question) -> None:
        prompt = self._prompt(question)
        self._cache.extend(1)
        self._cached.append((seq, prompt))

    @override
    def wait(self, seconds: float) -> None:
        pass  # its work is done in steps

    @override
    def said(self, seqs: Sequence[SequenceState], budget: int) -> list[tuple[SequenceState, bool]]:
        fed: list[tuple[SequenceState, SequenceChunk]] = []
        wanted = {id(seq) for seq in seqs}
        for seq_id, (seq, tokens) in enumerate(self._cached):
            first = self._cache.positions[seq_id]
            piece = tokens[first : first + budget] if id(seq) in wanted else []
            if piece:
                ends = first + len(piece) == len(tokens)
                fed.append((seq, SequenceChunk(seq_id, piece, [0] * len(piece), self._plan, wanted=int(ends))))
                budget -= len(piece)
        if not fed:
            return []
        logits = iter(self._runner.forward([chunk for _, chunk in fed], self._cache))
        for seq, chunk in fed:
            self._cache.commit(chunk.seq, range(len(chunk.tokens)))
            seq.ledger.second_layer_tokens += len(chunk.tokens) * self._runner.num_layers
        found = [(seq, self._verdict(next(logits))) for seq, chunk in fed if chunk.wanted]
        self._leave({id(seq) for seq, _ in found})
        return found

    @override
    def keep(self, seqs: Sequence[SequenceState]) -> None:
        self._leave({id(seq) for seq, _ in self._cached} - {id(seq) for seq in seqs})

    @override
    def rollback(self) -> None:
        for seq_id in range(self._cache.seqs):
            self._cache.rollback(seq_id)

    def _leave(self, gone: set[int]) -> None:
        """Drop questions."""
        if gone:
            stay = [seq_id for seq_id, (seq, _) in enumerate(self._cached) if id(seq) not in gone]
            self._cached = [self._cached[former] for former in self._cache.select(stay)]

    def _verdict(self, logits: Tensor) -> bool:
        """Whether yes, in all its spellings, is more probable than no."""
        return bool(logits[self._yes].logsumexp(0) > logits[self._no].logsumexp(0))

    def _begins(self, word: str) -> set[int]:
        """First tokens of a word's spellings."""
        spelled = (self._tokenizer(f"{space}{one}", add_special_tokens=False)["input_ids"]
                   for one in (word, word.capitalize()) for space in ("", " "))
        return {ids[0] for ids in spelled}

    def _prompt(self, question: Question) -> list[int]:
        """Token ids; of too long thoughts only the last part."""
        thought, former = question.thought, question.former
        while len(ids := self._ids(question.kind, thought, former)) > self._most and thought + former:
            thought, former = (one[max(1, len(one) // 4) :] for one in (thought, former))
        return ids

    def _ids(self, kind: str, thought: str, former: str) -> list[int]:
        said = texts()[kind].replace("{former}", former).replace("{thought}", thought)
        if not getattr(self._tokenizer, "chat_template", None):
            return list(self._tokenizer(f"{said}\n\n")["input_ids"])
        text = rendered(self._tokenizer, [{"role": "user", "content": said}], add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"the judge said {value!r:.200}; it must say True or False")
    return value
