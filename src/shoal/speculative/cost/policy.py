"""Policies that choose how many tokens to guess by measured costs, and a meter that warns of a loss.

`Goodput` and `Width` limit what any proposer guesses, `CostModel` serves a proposer that guesses only where that pays,
and `Meter` watches a method that always guesses.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shoal.decode.worker import DraftLengthPolicy, StepReport, Worker
from shoal.speculative.cost.budget import SHARE
from shoal.speculative.cost.model import (
    Acceptance,
    DraftCost,
    ForwardTimes,
    LeastSquares,
    LinearLatency,
    best_length,
    best_lengths,
    beyond,
    expected_tokens,
    gain_of,
    load,
)

if TYPE_CHECKING:
    from shoal.decode.rules.accept import Outcome
    from shoal.decode.sequence import SequenceState
    from shoal.decode.tree import TokenTree

MARGIN = 1.08
"""Gain over plain steps above which `CostModel` allows guesses."""
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 4096
"""First and longest pause, in steps, before costs at which no guess paid are measured again."""


_MOST_ASKING = 1.0
"""Most plain steps that finding a guess, or that there is none, may seem to take: the rest is load, or a first call."""


class Backoff:
    """Counts the steps until something that did not pay is tried again: twice as many each time, up to `most`.

    Attributes:
        left: steps that are left; 0 if it is not counting.
    """

    def __init__(self, most: int) -> None:
        self.left, self._next, self._most = 0, 0, most

    def begin(self, first: int) -> None:
        """Start a pause; the first one has `first` steps."""
        self.left = max(self._next, first)
        self._next = min(2 * self.left, self._most)

    def passed(self, first: int = 0) -> bool:
        """Count a step, starting a pause if there is none; return whether it is time to try again."""
        if not self.left:
            self.begin(first)
        self.left -= 1
        return not self.left

    def soon(self, first: int) -> None:
        """Let the next step be the last one of the pause."""
        if not self.left:
            self.begin(first)
        self.left = 1

    def wait(self, steps: int) -> None:
        """Let the pause go on for at least so many steps."""
        self.left = max(self.left, steps)

    def stop(self) -> None:
        """Stop the pause; the next one is twice as long all the same."""
        self.left = 0

    def end(self) -> None:
        """End the pause, since it pays again."""
        self.left = self._next = 0


class Goodput(DraftLengthPolicy):
    """SmartSpec (arXiv 2406.14066): predicted tokens per second for every draft length, and the best of them.

    It measures the forwards of a batch, fits their time online, and estimates the acceptance of each sequence. Then
    each sequence's guesses are limited to what pays. A sequence that stopped guessing tries a single guess now and
    then, ever more rarely while that fails: without attempts the estimate would never recover. The number of guesses
    follows measured times, so it differs between runs. `most` is the most guesses one after another.
    """

    _MEASURED = 3
    """The first steps, of which the last one guesses."""
    _PLANNED = 4
    """Steps between two choices: a choice takes a good part of a small model's forward."""
    _FIRST_PROBE, _RAREST_PROBE = 16, 128

    def __init__(self, most: int = 10) -> None:
        self._most = most
        self._target, self._draft = LinearLatency(), LinearLatency()
        self._states: dict[int, tuple[Acceptance, Backoff]] = {}
        self._steps = self._planned = 0
        self._lengths: list[int] = []

    def limits(self, seqs: Sequence[SequenceState]) -> list[int]:
        """The first steps measure: one plain, one with all guesses."""
        before = list(self._states)
        self._states = {id(seq): self._states.get(id(seq)) or (Acceptance(), Backoff(self._RAREST_PROBE))
                        for seq in seqs}
        self._steps += 1
        if self._steps <= self._MEASURED:
            return [0 if self._steps < self._MEASURED else self._most] * len(seqs)
        if self._planned <= 0 or before != list(self._states):
            rates = [self._states[id(seq)][0].rate for seq in seqs]
            self._lengths = goodput_lengths(rates, self._most, self._target, self._draft)
            # If no sequence is to guess, that holds until a probe has measured something.
            self._planned = self._PLANNED if any(self._lengths) else self._RAREST_PROBE
        self._planned -= 1
        return [self._waking(self._states[id(seq)][1], length) for seq, length in zip(seqs, self._lengths, strict=True)]

    def _waking(self, pause: Backoff, length: int) -> int:
        if length:
            pause.end()
            return length
        return int(pause.passed(self._FIRST_PROBE))

    def observe(self, report: StepReport) -> None:
        """Learn the times of guessing and verifying, and what was kept."""
        if report.prompt:
            return
        self._again(report)
        if self._steps > 1 and report.target_seconds is not None:  # the first step pays for warming up
            self._target.observe(sum(len(tree) for tree in report.trees), report.target_seconds)
        longest = max(tree.depths[-1] for tree in report.trees)
        if longest:
            self._draft.observe(longest, report.draft_seconds)
            if not any(self._lengths):
                self._planned = 0
        for seq, tree, outcome in report.guessed():
            if id(seq) in self._states:
                self._states[id(seq)][0].observe(*kept_of(tree, outcome))

    def _again(self, report: StepReport) -> None:
        """Let the next step measure in place of one that could only prepare guesses."""
        ready = [seq for seq, tree in zip(report.seqs, report.trees, strict=True)
                 if len(tree) == 1 and tree.vectors is not None]
        if ready and self._steps == self._MEASURED:
            self._steps -= 1
        for seq in ready:
            if id(seq) in self._states:
                self._states[id(seq)][1].soon(self._FIRST_PROBE)


def goodput_lengths(rates: Sequence[float], most: int, target: LinearLatency, draft: LinearLatency) -> list[int]:
    """The guesses per sequence, 0..most each, with the largest expected tokens per second of the whole batch.

    Drafting costs by the longest sequence, verifying by the sum.
    """
    seqs, plain = len(rates), target.seconds(len(rates))
    best, lengths = gain_of(seqs, plain) if plain else 0.0, [0] * seqs
    for longest in range(1, most + 1):

        def cost(guesses: int, drafting: float = draft.seconds(longest)) -> float:
            return target.seconds(seqs + guesses) + drafting

        chances = [[rate**place for place in range(1, longest + 1)] for rate in rates]
        floor = max(best, gain_of(seqs, cost(0)))  # above `best` only while a plain step seems to take no time
        gain, found = best_lengths(chances, seqs, cost, floor)
        if any(found):
            best, lengths = gain, found
    return lengths


def kept_of(tree: TokenTree, outcome: Outcome) -> tuple[int, int]:
    """The kept guesses of a tree, and the judged ones in a row: one more if a guess was rejected."""
    kept = len(outcome.path) - 1
    return kept, kept + bool(tree.children(outcome.path[-1]))


class Width(DraftLengthPolicy):
    """One block width for the whole batch, found by trial and kept for a while.

    Scylla (arXiv 2505.07858) chooses the width at which arithmetic becomes the limit. Here the measured time stands in
    for the roofline. Every width is tried a few times. The law of acceptance over width, A(k) = a log10(k) + c, smooths
    what each brought, and the median says what each took. It is coarser than `Goodput`, which treats sequences
    separately and adapts with every step. But it is steadier, and a fixed width suits captured graphs.
    """

    _WIDTHS = (2, 4, 8)
    """Nodes of a block, root included; a plain step is always considered. Fewer than three would not fit the law."""
    _TRIALS, _LASTS = 4, 64

    def __init__(self) -> None:
        self._plan = [0, *(width - 1 for width in self._WIDTHS)] * self._TRIALS
        self._waiting = self._plan.copy()
        self._found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._length, self._left = 0, 0

    def limits(self, seqs: Sequence[SequenceState]) -> list[int]:
        """The same limit for all sequences."""
        if self._left:
            self._left -= 1
        elif self._waiting:
            self._length = self._waiting[0]
        else:
            self._length, self._left, self._waiting = self._best(), self._LASTS, self._plan.copy()
            self._found.clear()
        return [self._length] * len(seqs)

    def observe(self, report: StepReport) -> None:
        """Learn the width's tokens and time; a trial that shared its forward with a prompt is repeated."""
        if report.prompt or report.target_seconds is None:
            return
        if self._waiting[:1] == [self._length] and not self._left:
            self._waiting.pop(0)
        tokens = statistics.fmean(len(outcome.path) for outcome in report.outcomes)
        self._found[self._length].append((tokens, report.draft_seconds + report.target_seconds))

    def _best(self) -> int:
        law = LeastSquares()
        for length, found in self._found.items():
            law.add(math.log10(1 + length), statistics.fmean(tokens for tokens, _ in found))
        costs = {length: statistics.median(seconds for _, seconds in found) for length, found in self._found.items()}
        return best_length(costs, lambda length: max(1.0, law.at(math.log10(1 + length))) if length else 1.0)


class CostModel:
    """Says how many guesses pay, from the `times` of forwards and the record of a `drafter`.

    It outlives the batch, so that later batches begin with what it knows.
    """

    _TRIAL = 3
    """Guesses of a first trial; later trials have up to twice as many as were timed."""
    _LIKELY = 0.5
    """Chance above which a guess that was not made counts towards measuring the costs again."""

    def __init__(self, drafter: DrafterRecord | None = None, times: ForwardTimes | None = None) -> None:
        self.times, self.drafter = times or ForwardTimes(), drafter or DrafterRecord()
        self._declined = Backoff(_LONGEST_PAUSE)

    def lengths(
        self, chances: Sequence[Sequence[float]], seqs: int, room: int, spare: float = math.inf
    ) -> list[int]:
        """The number of guesses for each sequence that has some. The first steps of a new batch size are plain.

        Args:
            chances: for each such sequence, the chance of each next guess to be kept with all before it.
            seqs: of the forward, those without guesses included.
            room: most guesses of all sequences together.
            spare: plain steps that they may take if none is kept.
        """
        if not self.times.known(seqs):
            return [0] * len(chances)
        room = min(room, max(self._TRIAL, seqs, 2 * self.times.widest(seqs)))
        room = affordable(room, spare, partial(self.times.added, seqs))
        if not room:
            return [0] * len(chances)
        lengths = paying_lengths(chances, self.times, room, seqs)
        if any(lengths):
            if self.times.widest(seqs):  # without a measurement this is a trial
                self._declined.end()
        elif max(map(max, filter(None, chances)), default=0.0) > self._LIKELY and self._declined.passed(_FIRST_PAUSE):
            self.times.forget(seqs)
        return lengths

    def helped(self, seqs: int, room: int, spare: float = math.inf) -> int:
        """The number of guesses that a drafter is to make for each sequence; `room` and `spare` are as above."""
        return self.drafter.length(self.times, seqs, room // seqs, spare) if self.times.known(seqs) else 0

    def cost(self, report: StepReport) -> float:
        """Plain steps, of those that share as many to a call as is best, that a step or shared steps took."""
        seqs, guesses = len(report.seqs), sum(map(len, report.trees)) - len(report.seqs)
        step = self.times.step(seqs)
        asking = min(report.draft_seconds / step, _MOST_ASKING * (1 + guesses)) if step else 0.0
        if not guesses:
            return report.steps * self.times.slower(seqs, report.steps) + asking
        if not step:
            return 1.0
        if report.target_seconds is None:  # prompts were read beside them
            added = self.times.added(seqs, guesses)
        else:
            added = beyond(step, guesses, report.target_seconds)
        return self.times.slower(seqs) * (1.0 + added + asking)

    def spare(self, seqs: int, left: float) -> float:
        """What guesses may add to the next step, in usual steps, if it may lose `left` of the best ones."""
        return (1.0 + left) / self.times.slower(seqs) - 1.0

    def observe(self, report: StepReport, helped: int) -> None:
        """Learn from a step in which a drafter made at most `helped` guesses for a sequence."""
        seqs, guesses = len(report.seqs), sum(map(len, report.trees)) - len(report.seqs)
        if report.target_seconds is not None:
            self.times.observe(seqs, guesses, report.target_seconds, report.steps)
        if helped and (step := self.times.step(seqs)):
            self.drafter.took(seqs, helped, report.draft_seconds / step)
            self.drafter.brought(sum(len(outcome.path) for outcome in report.outcomes) / seqs - self.cost(report))
        self.drafter.passed(report.steps - 1)


def paying_lengths(chances: Sequence[Sequence[float]], times: ForwardTimes, room: int, seqs: int) -> list[int]:
    """The guesses per sequence that `best_lengths` finds; none if they do not pay."""
    return best_lengths(chances, seqs, lambda guesses: seqs * (1 + times.added(seqs, guesses)), MARGIN, room)[1]


def affordable(most: int, spare: float, cost: Callable[[int], float]) -> int:
    """The largest number up to `most` whose `cost`, which never falls, is at most `spare`; 0 if none is."""
    return bisect_right(range(1, most + 1), spare, key=cost)


class DrafterRecord:
    """How often a drafter's guesses are kept, what they cost, and when to try the drafter again.

    Args:
        rate: prior chance that a guess is kept.
        cost: of each guess in plain steps, until one was timed.
        most: most guesses one after another.
        awake: steps before its next trial from which on the drafter must see what is decoded.
    """

    _TRIES, _TRIES_MORE, _KNOWN = 4, 2, 16
    """Guesses in a new text before a drafter may be put off, and in one that comes after so many judged turns."""
    _HOPED, _OLD = 4.0, 0.8
    """Plain steps that it is hoped to save in a text, and the weight of that, and of older texts, beside a new one."""
    _SKIPPED = 7
    """Texts between two in which it is tried at once, where trials cost more than the texts that it pays in bring."""
    _SHORTEST_REST = 16
    _READING, _NEW = 0.5, 0.5
    """Plain steps that a drafter takes to read what came before its first guess for a sequence, until it was timed, and
    the weight of a new time."""
    _TRIALS = 0.01
    """Share of the time for trying a bad drafter again, with one guess; it sets the pause, within bounds."""

    def __init__(self, rate: float = 0.5, cost: float = 0.5, most: int = 8, awake: int = 0) -> None:
        self._rate, self._acceptance = rate, Acceptance(prior=rate)
        self._most, self._awake, self._judged, self._tries, self._behind = most, awake, 0, 0, True
        self._costs = defaultdict[int, DraftCost](partial(DraftCost, cost))
        self._pauses = defaultdict[int, Backoff](partial(Backoff, _LONGEST_PAUSE))
        self._reading = defaultdict[int, float](partial(float, self._READING if awake else 0.0))
        self._pause, self._hopeless = Backoff(_LONGEST_PAUSE), dict[int, bool]()
        self._worth, self._brought, self._skipped = self._HOPED, 0.0, 0

    def begin(self) -> None:
        """Begin a new text: try again, unless no text pays or too few do. What is known of others counts half."""
        self._acceptance = Acceptance(prior=(self._acceptance.rate + self._rate) / 2)
        self._tries, self._behind = self._TRIES if self._judged < self._KNOWN else self._TRIES_MORE, True
        if self._brought:
            self._worth = self._OLD * self._worth + (1 - self._OLD) * self._brought
        self._brought = 0.0
        seldom = self._worth < 0 and self._skipped < self._SKIPPED
        self._skipped = self._skipped + 1 if seldom else 0
        if seldom:
            self._tries = 0
            return
        for seqs, pause in self._pauses.items():
            if not self._hopeless.get(seqs):
                pause.stop() if self._worth < 0 else pause.end()

    def length(self, times: ForwardTimes, seqs: int, most: int, spare: float = math.inf) -> int:
        """Guesses per sequence with the most tokens per second, few at first; one now and then if none pays.

        Args:
            times: of the model's forwards.
            seqs: the number of sequences that the drafter would guess for.
            most: guesses per sequence that there is room for.
            spare: plain steps that they may take if none is kept.
        """
        size = load(seqs)
        pause = self._pause = self._pauses[size]
        reading = seqs * self._reading[size] if self._behind else 0.0
        most, room = affordable(most, spare - reading, lambda length: self._added(times, seqs, length)), most
        short = self._trial(times, seqs, pause.left) - spare
        if not pause.left:
            self._hopeless[size] = times.widest(seqs) > 0 and not self._best(1.0, times, seqs, min(room, self._most))
        if room and short > 0 and (pause.left or not most):
            pause.wait(self._awake + math.ceil(short / SHARE))
        if pause.left:
            self._behind = True
            return min(1, most) if pause.passed() else 0
        found = self._best(self._acceptance.rate, times, seqs, min(most, self._most, 1 + self._judged))
        if found:
            pause.end()
            return found
        if self._tries > 0 and not self._hopeless[size]:
            return min(1, most)
        rest = max(self._SHORTEST_REST, math.ceil(self._trial(times, seqs, self._awake) / self._TRIALS))
        pause.begin(_FIRST_PAUSE if self._hopeless[size] else rest)
        return 0

    def _best(self, rate: float, times: ForwardTimes, seqs: int, most: int) -> int:
        """Guesses per sequence, up to `most`, with the most tokens per second at that chance; 0 if none pays."""
        costs = {length: 1 + self._added(times, seqs, length) for length in range(1, most + 1)}
        return best_length(costs, partial(expected_tokens, rate), MARGIN)

    def _added(self, times: ForwardTimes, seqs: int, length: int) -> float:
        """Plain steps that so many guesses per sequence add to one."""
        return self._costs[load(seqs)].of(length) + times.added(seqs, seqs * length)

    def _trial(self, times: ForwardTimes, seqs: int, before: int) -> float:
        """Plain steps that a trial adds, after so many steps, of which it must see the last: they share no call."""
        seen = min(before, self._awake) * (times.slower(seqs, 1) - 1.0)
        return self._added(times, seqs, 1) + seqs * self._reading[load(seqs)] + seen

    @property
    def rest(self) -> int:
        """In how many steps the drafter neither guesses nor sees anything, with the last number of sequences."""
        return max(0, self._pause.left - self._awake)

    def passed(self, steps: int) -> None:
        """Count steps of its rest in which it was not asked."""
        left = self._pause.left
        self._pause.left = max(min(left, 1), left - steps)

    def cost(self, guesses: int) -> float:
        """Plain steps that so many guesses for one sequence take."""
        return self._costs[load(1)].of(guesses)

    def judged(self, kept: int, offered: int) -> None:
        """Learn that `kept` of `offered` successive guesses were right."""
        self._judged += 1
        self._tries -= 1
        self._acceptance.observe(kept, offered)

    def brought(self, steps: float) -> None:
        """Learn how many plain steps its guesses of one turn saved a sequence; negative for a loss."""
        self._brought += steps

    def took(self, seqs: int, guesses: int, share: float) -> None:
        """Learn the time of so many successive guesses in each sequence, as a share of a plain step of the batch.

        What the first guesses of a text or after a pause take longer is reading what came before.
        """
        cost, size = self._costs[load(seqs)], load(seqs)
        if not self._behind:
            cost.took(guesses, share)
        elif self._awake:
            self._reading[size] += self._NEW * (max(share - cost.of(guesses), 0.0) / seqs - self._reading[size])
        self._behind = False


class Meter(Worker):
    """Watches the steps of the method of that name, and tells once if it loses time.

    Steps without a guess, as at the end of a text, show what plain decoding takes. If there are none, a forward over
    the guesses stands for it: that takes longer, so a loss against it is real.
    """

    _STEPS = 64
    """A method is judged each time that many steps have passed."""
    _LOSS = 0.95
    """Gain over plain steps below which a method loses time."""
    _PLAIN = 3
    """Steps without a guess that suffice to know the time of a plain step."""
    _STALL = 3.0
    """Longest that a step may seem, in median steps: the rest is load of other processes."""

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self._name, self._tell, self._told = name, tell, False
        self._begin(0)

    def _begin(self, seqs: int) -> None:
        """Forget the times of batches with another number of sequences, and start again."""
        self._seqs = seqs
        self._plain, self._wide = deque[float](maxlen=self._STEPS), deque[float](maxlen=self._STEPS)
        self._count()

    def _count(self) -> None:
        self._kept, self._guesses, self._seconds = 0, 0, list[float]()

    def observe(self, report: StepReport) -> None:
        """Learn from a step in which only this method decoded."""
        if self._told or report.target_seconds is None:
            return
        if len(report.seqs) != self._seqs:
            self._begin(len(report.seqs))
        guesses = sum(map(len, report.trees)) - self._seqs
        (self._wide if guesses else self._plain).append(report.target_seconds)
        self._guesses += guesses
        self._kept += sum(len(outcome.path) - 1 for outcome in report.outcomes)
        self._seconds.append(report.draft_seconds + report.target_seconds)
        if len(self._seconds) == self._STEPS:
            self._judge()

    def _judge(self) -> None:
        step = statistics.median(self._plain if len(self._plain) >= self._PLAIN else self._wide or self._plain)
        stalled = self._STALL * statistics.median(self._seconds)
        tokens, cost = self._STEPS + self._kept / self._seqs, sum(min(one, stalled) for one in self._seconds) / step
        if self._guesses and tokens / cost < self._LOSS:
            self._told = True
            self._tell(
                f"{self._name} is losing time here: {tokens / cost:.2f}x of plain decoding over {self._STEPS} steps, "
                f"{self._kept / self._guesses:.0%} of its guesses kept. Method auto guesses only where that pays; "
                "method full does not guess"
            )
        self._count()
