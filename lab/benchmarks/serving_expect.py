"""Expected results of a load from cost cards: a simulation of the scheduler's turns.

Cards for several numbers of rows give the cost of a forward, with linear interpolation in between. A layer costs what
it costs with the number of rows that still run it: rows of different ages undo each other's savings, rows in phase do
not. Clients, HTTP and text are free here, so a server should come close to these figures and not beat them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.depth.plan import DepthPlan
from shoal_lab.bench.load.loops import LoadPhase
from shoal_lab.bench.load.prompts import Prompts
from shoal_lab.bench.load.trace import Trace
from shoal_lab.components.cost import CostCard, attended

CHUNK = 256
"""Prompt tokens of one forward, the default of `shoal serve`."""
Point = tuple[float, float]


def in_phase(card: CostCard, plan: DepthPlan, prompt: int, answer: int) -> float:
    """Tokens per second of a closed loop whose rows, as many as the card's, always start together.

    Args:
        card: measured with that many rows.
        plan: plan of every row.
        prompt, answer: tokens of each request.
    """
    return card.rows * answer / card.predict(plan, prompt, answer)


@dataclass
class _Row:
    """A request in progress; `made` counts its tokens."""

    number: int
    due: float
    answer: int
    plan: DepthPlan
    read: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def made(self) -> int:
        return len(self.times)


class Costs:
    """Seconds of forwards of any number of rows.

    Args:
        cards: for different numbers of rows, all of one model.

    Raises:
        ValueError: no cards, or two for the same number of rows.
    """

    def __init__(self, cards: Sequence[CostCard]) -> None:
        self._cards = sorted(cards, key=lambda card: card.rows)
        counts = [card.rows for card in self._cards]
        if not counts or len(set(counts)) < len(counts):
            raise ValueError(f"the cost cards are for {counts} rows; give at least one, each for another number")
        self._layer = self._points(lambda card: card.layer_seconds)
        self._fixed = self._points(lambda card: card.head_seconds + card.overhead_seconds)
        self._kv = self._points(lambda card: card.kv_seconds_per_position / card.rows)
        least: dict[float, float] = {}
        for total, seconds in ((length * card.rows, seconds) for card in cards for length, seconds in card.prefill):
            least[total] = min(seconds, least.get(total, seconds))
        self._prompts = sorted(least.items())

    def _points(self, part: Callable[[CostCard], float]) -> list[Point]:
        return [(card.rows, part(card)) for card in self._cards]

    def prompts(self, tokens: int) -> float:
        """Seconds of a forward over that many prompt tokens, of all rows together."""
        return on_line(self._prompts, tokens)

    def step(self, rows: Sequence[tuple[DepthPlan, int, int]]) -> float:
        """Seconds of a forward over one token of each row.

        Args:
            rows: plan, step index and positions of each, the new token's own included.
        """
        sharing = Counter(layer for plan, step, _ in rows for layer in plan.layers(step))
        windows = self._cards[0].windows
        read = sum(attended(plan, step, positions, windows) for plan, step, positions in rows)
        layers = sum(on_line(self._layer, count) for count in sharing.values())
        return on_line(self._fixed, len(rows)) + layers + read * on_line(self._kv, len(rows))


def on_line(points: Sequence[Point], place: float) -> float:
    """Linear interpolation between points, constant before the first, extrapolated after the last."""
    if len(points) == 1 or place <= points[0][0]:
        return points[0][1]
    index = min(max(bisect_left(points, (place, float("-inf"))), 1), len(points) - 1)
    (before, low), (after, high) = points[index - 1], points[index]
    return low + (high - low) * (place - before) / (after - before)


@dataclass(frozen=True)
class House:
    """A simulated server.

    Attributes:
        costs: costs of its forwards.
        plan: plan of a request, by the number of tokens that it asks for.
        waves: whether requests start together; otherwise they join at once.
        max_seqs: most requests in progress.
        prompt: tokens of every prompt.
        chunk: most prompt tokens of a forward.
    """

    costs: Costs
    plan: Callable[[int], DepthPlan]
    waves: bool
    max_seqs: int
    prompt: int
    chunk: int = CHUNK

    def serve(self, turn: LoadPhase, prompts: Prompts) -> list[Trace]:
        """The clients' traces of a turn, request by request."""
        return _Run(self, turn, prompts).through()


class _Run:
    """One turn of a load; the steps follow `shoal.engine.scheduling.scheduler.Scheduler.turn`."""

    def __init__(self, house: House, turn: LoadPhase, prompts: Prompts) -> None:
        moments = list(turn.arrivals()) if turn.load.rate is not None else [0.0] * (turn.requests or 1)
        self._house, self._at_once, self._now = house, turn.load.concurrency, 0.0
        self._coming = deque(self._row(number, due, prompts[number].new_tokens) for number, due in enumerate(moments))
        self._rows: list[_Row] = []
        self._waiting: deque[_Row] = deque()

    def _row(self, number: int, due: float, answer: int) -> _Row:
        return _Row(number, due, answer, self._house.plan(answer))

    def through(self) -> list[Trace]:
        """Run until all requests have been answered."""
        traces: dict[int, Trace] = {}
        while self._coming or self._waiting or self._rows:
            self._arrive()
            self._admit()
            if not self._rows:
                self._now = self._coming[0].due
                continue
            self._read()
            self._step()
            for row in [row for row in self._rows if row.made == row.answer]:
                self._rows.remove(row)
                traces[row.number] = Trace(row.due, tuple(row.times), self._now, self._house.prompt, row.made)
        return [traces[number] for number in sorted(traces)]

    def _arrive(self) -> None:
        while self._coming and self._is_due(self._coming[0]):
            row = self._coming.popleft()
            if self._at_once is not None:
                row.due = self._now
            self._waiting.append(row)

    def _is_due(self, row: _Row) -> bool:
        if self._at_once is None:
            return row.due <= self._now
        return len(self._rows) + len(self._waiting) < self._at_once

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self._house.max_seqs and not (self._house.waves and self._under_way):
            self._rows.append(self._waiting.popleft())

    @property
    def _under_way(self) -> bool:
        return any(row.made > 1 for row in self._rows)

    def _read(self) -> None:
        """One forward over prompts, the earlier rows' first."""
        left, read = self._house.chunk, list[_Row]()
        for row in self._rows:
            size = min(self._house.prompt - row.read, left)
            if size > 0:
                row.read, left = row.read + size, left - size
                read.append(row)
        if read:
            self._now += self._house.costs.prompts(self._house.chunk - left)
            for row in read:
                if row.read == self._house.prompt:
                    row.times.append(self._now)

    def _step(self) -> None:
        """One forward over the decoding rows; a wave waits for its last prompt."""
        decoding = [row for row in self._rows if 0 < row.made < row.answer]
        reading = any(not row.made for row in self._rows)
        if decoding and not (reading and self._house.waves and not self._under_way):
            steps = [(row.plan, row.made, self._house.prompt + row.made) for row in decoding]
            self._now += self._house.costs.step(steps)
            for row in decoding:
                row.times.append(self._now)
