"""Continuous batching over one engine: requests join and leave between steps, and none is dropped.

One thread owns the rows. In every turn it lets cancelled rows go, admits waiting ones, and runs a step. In a step all
rows that decode and pieces of prompts share a forward, whatever depth each of them needs. Rows whose recipes have the
same loop share forwards among themselves; each loop has a step in every turn.

Bounds: rows are admitted strictly in the order in which they came, as soon as the policy, `max_rows` and the KV memory
allow it. So a row waits at most until those before it have ended. Each of these takes at most max_new_tokens steps, a
search as many as its budget. Between two tokens of a row that decodes, each loop reads at most `prefill_chunk` prompt
tokens for others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shoal.decode.prefixes import Prefixes
from shoal.decode.sampling import NotYet
from shoal.engine.constraints.forbidden import check_ids
from shoal.engine.engine import Engine
from shoal.engine.memory.amounts import free
from shoal.engine.memory.memory_limit import beside_kv
from shoal.engine.request import Request, prompt_ids
from shoal.engine.scheduling.batching import Batches, Policy, Recipes
from shoal.engine.scheduling.request_handle import Deliver, Item, RequestHandle, ScheduledRow
from shoal.engine.scheduling.worker import WorkerThread
from shoal.errors import Closed, Interrupted, QueueFull, Unsupported
from shoal.methods import make
from shoal.model.kv.room import KVRoom, Need

if TYPE_CHECKING:
    from shoal.decode.batch import Batch
    from shoal.decode.recipe_row import RecipeRow

_CHUNK, _ALONE = 64, 256
"""Tokens of a forward that reads prompts: beside rows that decode, and where no row decodes."""
_DOZE = 0.1
"""Most seconds to sleep where all rows under way wait for answers."""
_GUESSING = 16
"""Nodes of each row for which a step's buffers are planned where memory is limited: those of method auto."""


class Scheduler:
    """Serves many requests at once; may be used from any thread.

    Args:
        engine: the model.
        max_rows: most rows under way; a row that is searched counts once for each branch that it may have.
        max_waiting: most rows that wait.
        kv_bytes: most bytes of KV; None for what the engine's limit leaves, else half of the memory that is free now.
            Where the engine has a limit, rows also need room in it for their logits.
        prefix_bytes: most bytes of KV that are kept of prompts and answers for later prompts that begin alike. They
            are added to `kv_bytes`. None for a quarter of `kv_bytes`; 0 keeps none.
        prefill_chunk: tokens of a forward that reads prompts; None for what suits the model: at most 64 beside rows
            that decode, and at most 256 where none does.
        policy: when waiting rows may join; None for at once.
        start: whether a thread does the work; else call `turn`.

    Attributes:
        worker: the thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int = 16,
        max_waiting: int = 256,
        kv_bytes: int | None = None,
        prefix_bytes: int | None = None,
        prefill_chunk: int | None = None,
        policy: Policy | None = None,
        start: bool = True,
    ) -> None:
        _check_positive(max_rows=max_rows, max_waiting=max_waiting, prefill_chunk=prefill_chunk, kv_bytes=kv_bytes)
        if engine.ranks.size > 1:
            raise Unsupported(
                f"a scheduler over {engine.ranks.size} processes",
                "requests would join at other ticks in each",
                "Use replicas, or engine.generate with a list of prompts",
            )
        self.engine, self.max_rows, self.max_waiting = engine, max_rows, max_waiting
        if prefix_bytes is not None and prefix_bytes < 0:
            raise ValueError(f"prefix_bytes is {prefix_bytes}; it must be >= 0 (0 keeps nothing)")
        self.prefill_chunk = prefill_chunk or min(_CHUNK, engine.stack.prefill_chunk)
        self._alone = prefill_chunk or min(_ALONE, engine.stack.prefill_chunk)
        if engine.limit is not None:
            left = engine.limit.for_rows(engine, max(self._alone, max_rows * _GUESSING))
            kv_bytes, prefix_bytes = _within(left, kv_bytes, prefix_bytes)
        self.kv_bytes = kv_bytes or (free(engine.stack.device) or 1 << 62) // 2
        self._room = KVRoom(engine.stack, self.kv_bytes, max_rows)
        self.prefixes = Prefixes(self.kv_bytes // 4 if prefix_bytes is None else prefix_bytes)
        self._policy = policy or Policy()
        self._recipes = Recipes(engine)
        self._batches = Batches(engine.stack, self.prefixes)
        self._running: list[ScheduledRow] = []
        self._wake = threading.Condition()
        self._waiting: deque[ScheduledRow] = deque()
        self._unwanted: set[RequestHandle] = set()
        self._closing = False
        self._open: set[ScheduledRow] = set()
        self._moved = False
        self._turn_began: float | None = None
        self.worker = WorkerThread("shoal-scheduler", self._work, self._died)
        if start:
            self.worker.start()

    def submit(
        self, prompt: Any, request: Request | None = None, *, n: int = 1, deliver: Deliver | None = None,
        canvas: bool = False, **options: Any,
    ) -> RequestHandle:
        """Queue a request.

        Args:
            prompt: text or token ids.
            request: the options, if they are checked already.
            n: how many answers, each a row of its own; row i draws its own random numbers.
            deliver: see `RequestHandle`.
            canvas: whether `deliver` is also given each `Placed` word of a loop that writes in no order.
            **options: see `Request`.

        Raises:
            ValueError: an unknown or impossible option or prompt, or `canvas` without `deliver`; Unsupported where it
                could never fit into the KV, or has more branches than `max_rows`.
            QueueFull: too many rows wait.
            Closed: the scheduler takes no more requests.
        """
        request = request or Request.from_options(options)
        _check_positive(n=n)
        if canvas and deliver is None:
            raise ValueError("canvas is True without deliver; who iterates over a handle gets words in order alone")
        stack = self.engine.stack
        check_ids({"logit_bias": request.sampling.logit_bias}, stack.vocab_size)
        ids = prompt_ids(prompt, self.engine.tokenizer, stack.vocab_size, stack.max_positions)
        recipe = self._recipes.of(request.method, request.max_new_tokens)
        handle = RequestHandle(self.engine.info(), self._cancel, deliver)
        rows = self.engine.rows([ids] * n, request, recipe, patient=False)
        for row in rows:
            row.placed = [] if canvas else None
        limited = self.engine.limit is not None
        need = self._need(rows[0], beside_kv(self.engine, rows[0], make(request.method)) if limited else 0)
        handle.entries = [ScheduledRow(row, handle, need) for row in rows]
        self._enqueue(handle.entries)
        return handle

    def branches(self, request: Request) -> int:
        """The most rows that decode side by side for one answer to a request; ValueError as by `submit`."""
        return self._recipes.of(request.method, request.max_new_tokens).branches(request.sampling.greedy)

    @property
    def running(self) -> int:
        """Rows under way, each once however many branches it has."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._waiting)

    @property
    def kv_use(self) -> float:
        """Share of the KV memory that is set apart for rows under way."""
        return self._room.bytes(_needs(list(self._running))) / self.kv_bytes

    @property
    def busy(self) -> float:
        """Seconds that the turn under way has taken so far; 0 between turns."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self, *, drain: bool = True, timeout: float | None = None, last: float | None = None) -> bool:
        """Take no more requests and end.

        Args:
            drain: whether what has been accepted is finished; otherwise it is cancelled.
            timeout: most seconds to wait for that; what is left is then cancelled.
            last: most seconds to wait then for the turn under way; None for as long as it takes.

        Returns:
            Whether everything was finished in time.
        """
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if drain:
            self.worker.join(timeout)
        finished = self.worker.ended
        with self._wake:
            self._unwanted.update(entry.handle for entry in [*self._waiting, *self._running])
            self._wake.notify_all()
        self.worker.join(last)
        return finished

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def _need(self, row: RecipeRow, beside: int = 0) -> Need:
        """What a row needs, `beside` bytes beside its KV among it; Unsupported where there is less."""
        row.check()
        recipe = row.recipe
        keep = None if recipe.keep is None else recipe.keep.most_columns
        need = self._room.need(recipe.plan, row.prompt_length, row.stop.room, recipe.scratch, keep, recipe.store,
                               recipe.second_stack, recipe.second_reads, beside)
        branches = row.branches
        if branches > self.max_rows:
            raise Unsupported(
                f"a search of {branches} branches", f"there is room for {self.max_rows} rows", "Search fewer at a time"
            )
        if self._room.bytes([need] * branches) > self.kv_bytes:
            together = f" in {branches} branches" if branches > 1 else ""
            raise Unsupported(
                f"a prompt of {row.prompt_length} tokens with an answer of up to {row.stop.room}{together}",
                f"its KV can take {self._room.bytes([need] * branches)} bytes, and there are {self.kv_bytes}",
                f"Use a smaller max_new_tokens or a shorter prompt{', or fewer branches' if together else ''}"
                f"{'' if recipe.store else ', or method kv_int8, which is lossy and stores less'}",
            )
        return need

    def _enqueue(self, entries: list[ScheduledRow]) -> None:
        with self._wake:
            if self._closing:
                raise Closed("the scheduler takes no more requests: it is shutting down")
            if len(self._waiting) + len(entries) > self.max_waiting:
                full = f"{len(self._waiting)} rows wait already, of {self.max_waiting} at most"
                raise QueueFull(f"the queue is full: {full}. Try again later")
            self._open.update(entries)
            self._waiting.extend(entries)
            self._wake.notify_all()

    def _cancel(self, handle: RequestHandle) -> None:
        with self._wake:
            self._unwanted.add(handle)
            self._wake.notify_all()

    def turn(self) -> None:
        """One turn: drop cancelled rows, admit waiting ones, run the forwards, hand out tokens."""
        self._turn_began = time.monotonic()
        try:
            with self.engine.turn():
                self._let_go()
                self._admit()
                moved = self._forward()
            self._tell()
        finally:
            self._turn_began = None
        self._moved = True
        if not moved:
            self._doze()

    def _work(self) -> None:
        while self._has_work():
            self.turn()

    def _died(self) -> None:
        """Give up the rows under way, whose state is unknown. Rows that wait are kept, but only once."""
        with self._wake:
            if not self._moved:
                self._waiting.clear()
            lost = self._open.difference(self._waiting)
        self._moved = False
        self._running.clear()
        self.prefixes.clear()
        self._batches = Batches(self.engine.stack, self.prefixes)
        for entry in lost:
            entry.row.stop.finish_reason = "cancelled"
            self._end(entry, Interrupted("decoding was interrupted and begins anew; ask again"))

    def _has_work(self) -> bool:
        """Wait for something to do; False when there will be nothing more."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._running or self._unwanted or self._closing)
            return bool(self._waiting or self._running or not self._closing)

    def _let_go(self) -> None:
        with self._wake:
            unwanted, self._unwanted = self._unwanted, set()
            if not unwanted:
                return
            gone = [entry for entry in self._waiting if entry.handle in unwanted]
            self._waiting = deque(entry for entry in self._waiting if entry.handle not in unwanted)
        for entry in gone:
            entry.row.stop.finish_reason = "cancelled"
            self._end(entry)
        for batch in self._batches:
            leaving = [entry.row for entry in self._of(batch) if entry.handle in unwanted]
            try:
                batch.leave(leaving)
            except Exception as error:
                self._give_up(batch, error)
        self._sweep()

    def _admit(self) -> None:
        admitted: list[ScheduledRow] = []
        with self._wake:
            while self._waiting and self._fits([*self._running, *admitted], self._waiting[0]):
                admitted.append(self._waiting.popleft())
        if admitted:
            self._running += filter(self._seated, admitted)
            self._room.share([(batch.cache, _needs(self._of(batch))) for batch in self._batches])
            for batch in self._batches:
                joining = [entry for entry in self._of(batch) if entry in admitted]
                if joining:
                    self._join(batch, joining)

    def _join(self, batch: Batch, joining: list[ScheduledRow]) -> None:
        """Let rows join. Where that fails, each joins alone, so that only those that cause the failure end."""
        try:
            batch.join([entry.row for entry in joining], [entry.need.columns for entry in joining])
        except Exception as error:
            if len(joining) > 1:
                for entry in joining:
                    self._join(batch, [entry])
            else:
                self._fail(joining[0], error)

    def _fail(self, entry: ScheduledRow, error: Exception) -> None:
        """Mark a row, so that the next sweep ends it with an error."""
        entry.row.stop.finish_reason = entry.row.stop.finish_reason or "cancelled"
        entry.error = entry.error or error

    def _give_up(self, batch: Batch, error: Exception) -> None:
        """Drop a batch whose state is unknown: its rows end with the error, rows of other batches go on."""
        for entry in self._of(batch):
            self._fail(entry, error)
        self._batches.drop(batch)

    def _seated(self, entry: ScheduledRow) -> bool:
        """Whether there is a batch for a row that is to join; the row ends where its loop cannot make one."""
        entry.joined = time.monotonic()
        try:
            self._batches.of(entry.row)
        except Exception as error:
            entry.row.stop.finish_reason = "cancelled"
            self._end(entry, error)
            return False
        return True

    def _of(self, batch: Batch) -> list[ScheduledRow]:
        """The entries under way in a batch."""
        return [entry for entry in self._running if self._batches.of(entry.row) is batch]

    def _fits(self, entries: list[ScheduledRow], new: ScheduledRow) -> bool:
        needs = _needs([*entries, new])
        return (
            len(needs) <= self.max_rows
            and self._policy.admits(self._batches.rows, time.monotonic() - new.arrived)
            and self._room.bytes(needs) <= self.kv_bytes
        )

    def _forward(self) -> bool:
        """Run a step of each loop; False where all rows wait for answers."""
        batches = self._batches
        holds = self._policy.holds(batches.rows) and (any(one.reading for one in batches) or self._more_fit())
        waiting = [entry.row for entry in self._running if entry.waits()]
        for batch in batches:
            try:
                reading = batch.reading
                alone = holds or len(reading) == len(self._running)
                rows = _without(reading if holds else batch.rows, waiting) if waiting else reading if holds else None
                if not waiting or rows:
                    batch.step(self._alone if alone else self.prefill_chunk, rows)
            except NotYet as not_yet:
                self._wait_for(batch, not_yet)
            except Exception:
                self._one_by_one(batch)
        batches.tidy()
        return len(waiting) < len(self._running) or not waiting

    def _wait_for(self, batch: Batch, not_yet: NotYet) -> None:
        """Let a row wait for the answer to which its guesses led; the others go on in the next turn."""
        asking = next((row for row in batch.rows if row.allowed is not_yet.mask), None)
        owner = None if asking is None else asking.root or asking
        entry = next((one for one in self._of(batch) if one.row is owner), None)
        if entry is None:
            self._one_by_one(batch)
        else:
            batch.rollback()
            entry.awaited = not_yet.answer

    def _doze(self) -> None:
        """Sleep until an answer has come, a row is given up, or a new one has come."""
        for entry in self._running:
            if entry.awaited is not None:
                entry.awaited.add_done_callback(self._rouse)
        with self._wake:
            if all(entry.awaited is None or not entry.awaited.done() for entry in self._running):
                self._wake.wait(_DOZE)

    def _rouse(self, _: object) -> None:
        with self._wake:
            self._wake.notify_all()

    def _more_fit(self) -> bool:
        """Whether a row that came while prompts were read may still start with the others."""
        with self._wake:
            return bool(self._waiting) and self._fits(self._running, self._waiting[0])

    def _one_by_one(self, batch: Batch) -> None:
        """Run each row alone after a forward failed, so that only those that cause the failure end."""
        try:
            self._each(batch)
        except Exception as error:
            self._give_up(batch, error)

    def _each(self, batch: Batch) -> None:
        batch.rollback()
        for entry in self._of(batch):
            if entry.row.finish_reason is not None:
                continue
            try:
                if not entry.waits():
                    batch.step(self.prefill_chunk, [entry.row])
            except NotYet as not_yet:
                batch.rollback()
                entry.awaited = not_yet.answer
            except Exception as error:
                batch.rollback()
                batch.leave([entry.row])
                entry.error = error

    def _tell(self) -> None:
        """Hand out what the turn brought."""
        for entry in self._running:
            self._give(entry.handle, entry.hand_out(time.monotonic()))
        self._sweep()

    def _sweep(self) -> None:
        """Let the rows go that have ended."""
        ended = [entry for entry in self._running if entry.row.finish_reason is not None]
        if ended:
            self._running = [entry for entry in self._running if entry.row.finish_reason is None]
            for entry in ended:
                self._end(entry, entry.error)

    def _end(self, entry: ScheduledRow, error: BaseException | None = None) -> None:
        entry.ended = time.monotonic()
        if error is not None:
            self._give(entry.handle, [error])
            self._cancel(entry.handle)
        elif entry.handle.done:
            self._give(entry.handle, [None])
        self._open.discard(entry)

    def _give(self, handle: RequestHandle, items: Iterable[Item]) -> None:
        try:
            for item in items:
                handle.deliver(item)
        except Exception:  # the client has gone
            self._cancel(handle)


def _without(rows: Iterable[RecipeRow], others: Iterable[RecipeRow]) -> list[RecipeRow]:
    """The rows that are neither among the others nor a branch of one."""
    known = set(others)
    return [row for row in rows if row not in known and row.root not in known]


def _needs(entries: Iterable[ScheduledRow]) -> list[Need]:
    return [need for entry in entries for need in entry.needs]


def _within(left: int, kv: int | None, prefix: int | None) -> tuple[int, int]:
    """Bytes of KV and of prefixes within what is left; ValueError where more is asked for."""
    prefix = (left // 5 if kv is None else kv // 4) if prefix is None else prefix
    kv = left - prefix if kv is None else kv
    if kv < 1 or kv + prefix > left:
        raise ValueError(f"kv_bytes is {kv} and prefix_bytes {prefix}; the memory limit leaves {left} for both. Leave "
                         "them out, or use smaller ones")
    return kv, prefix


def _check_positive(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} is {number!r}; it must be a whole number of at least 1")
