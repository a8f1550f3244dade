"""Continuous batching over one engine: requests join and leave between steps, and none is dropped.

One thread owns the sequences. In every turn it drops cancelled sequences, admits waiting ones, and runs a step. In a
step all sequences that decode and pieces of prompts share a forward, whatever depth each of them needs. Sequences whose
recipes have the same loop share forwards among themselves; each loop has a step in every turn.

Bounds: sequences are admitted strictly in the order in which they came, as soon as the policy, `max_seqs` and the KV
memory allow it. So a sequence waits at most until those before it have ended. Each of these takes at most
max_new_tokens steps, a search as many as its budget. Between two tokens of a sequence that decodes, each loop reads at
most `prefill_chunk` prompt tokens for others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar

from shoal.decode.batch import Batch
from shoal.decode.prefixes import Prefixes
from shoal.decode.running_sequence import RunningSequence
from shoal.decode.sampling import NotYet
from shoal.engine.constraints.forbidden import check_ids
from shoal.engine.engine import Engine
from shoal.engine.memory.amounts import free
from shoal.engine.memory.memory_limit import extra_kv
from shoal.engine.request import Request
from shoal.engine.scheduling.batching import Batches, Policy, Recipes
from shoal.engine.scheduling.request_handle import Deliver, Item, RequestHandle, ScheduledSequence
from shoal.engine.scheduling.worker import WorkerThread
from shoal.errors import Closed, Interrupted, QueueFull, Unsupported
from shoal.methods import make
from shoal.model.kv.room import KVRoom, Need

_CHUNK, PROMPTS_ALONE = 64, 256
"""Tokens of a forward that reads prompts: beside sequences that decode, and where no sequence decodes."""
_DOZE = 0.1
"""Most seconds to sleep where all sequences under way wait for answers."""
_GUESSING = 16
"""Nodes of each sequence for which a step's buffers are planned where memory is limited: those of method auto."""


class Scheduler:
    """Serves many requests at once; may be used from any thread.

    Args:
        engine: the model.
        max_seqs: most sequences under way; a sequence that is searched counts once for each branch that it may have.
        max_waiting: most sequences that wait.
        kv_bytes: most bytes of KV; None for what the engine's limit leaves, else half of the memory that is free now.
            Where the engine has a limit, sequences also need room in it for their logits.
        prefix_bytes: most bytes of KV that are kept of prompts and answers for later prompts that begin alike. They
            are added to `kv_bytes`. None for a quarter of `kv_bytes`; 0 keeps none.
        prefill_chunk: tokens of a forward that reads prompts; None for what suits the model: at most 64 beside
            sequences that decode, and at most 256 where none does.
        policy: when waiting sequences may join; None for at once.
        start: whether a thread does the work; else call `turn`.

    Attributes:
        worker: the thread.
        lockstep: whether the schedulers of all processes that share the model do the same in every turn.
    """

    lockstep: ClassVar[bool] = False

    def __init__(
        self, engine: Engine, *, max_seqs: int = 16, max_waiting: int = 256, kv_bytes: int | None = None,
        prefix_bytes: int | None = None, prefill_chunk: int | None = None, policy: Policy | None = None,
        start: bool = True,
    ) -> None:
        _check_positive(max_seqs=max_seqs, max_waiting=max_waiting, prefill_chunk=prefill_chunk, kv_bytes=kv_bytes)
        if engine.ranks.size > 1 and not self.lockstep:
            raise Unsupported(f"a scheduler over {engine.ranks.size} processes",
                              "requests would join at other ticks in each",
                              "Use `shoal serve --tensor-parallel`, or engine.generate with a list of prompts")
        self.engine, self.max_seqs, self.max_waiting = engine, max_seqs, max_waiting
        if prefix_bytes is not None and prefix_bytes < 0:
            raise ValueError(f"prefix_bytes is {prefix_bytes}; it must be >= 0 (0 keeps nothing)")
        self.prefill_chunk = prefill_chunk or min(_CHUNK, engine.runner.prefill_chunk)
        self._alone = prefill_chunk or min(PROMPTS_ALONE, engine.runner.prefill_chunk)
        if engine.limit is not None:
            left = engine.limit.for_seqs(engine, max(self._alone, max_seqs * _GUESSING))
            kv_bytes, prefix_bytes = _within(left, kv_bytes, prefix_bytes)
        self.kv_bytes = kv_bytes or (free(engine.runner.device) or 1 << 62) // 2
        self._room = KVRoom(engine.runner, self.kv_bytes, max_seqs)
        self.prefixes = Prefixes(self.kv_bytes // 4 if prefix_bytes is None else prefix_bytes)
        self._policy = policy or Policy()
        self._recipes = Recipes(engine)
        self._batches = Batches(engine.runner, self.prefixes)
        self._running: list[ScheduledSequence] = []
        self._wake = threading.Condition()
        self._waiting: deque[ScheduledSequence] = deque()
        self._unwanted: set[RequestHandle] = set()
        self._closing = self._moved = False
        self._open: set[ScheduledSequence] = set()
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
            n: how many answers, each a sequence of its own; sequence i draws its own random numbers.
            deliver: see `RequestHandle`.
            canvas: whether `deliver` is also given each `Placed` token of a loop that writes in no order.
            **options: see `Request`.

        Raises:
            ValueError: an unknown or impossible option or prompt, or `canvas` without `deliver`; Unsupported where it
                could never fit into the KV, or has more branches than `max_seqs`.
            QueueFull: too many sequences wait.
            Closed: the scheduler takes no more requests.
        """
        request = request or Request.from_options(options)
        _check_positive(n=n)
        if canvas and deliver is None:
            raise ValueError("canvas is True without deliver; who iterates over a handle gets words in order alone")
        runner = self.engine.runner
        check_ids({"logit_bias": request.sampling.logit_bias}, runner.vocab_size)
        request, (ids,) = self.engine.read([prompt], request)
        recipe = self._recipes.of(request.method, request.max_new_tokens)
        handle = RequestHandle(self.engine.info(), self._cancel, deliver)
        seqs = self.engine.seqs([ids] * n, request, recipe, patient=False)
        for seq in seqs:
            seq.placed = [] if canvas else None
        limited = self.engine.limit is not None
        need = self._need(seqs[0], extra_kv(self.engine, seqs[0], make(request.method)) if limited else 0)
        handle.entries = [ScheduledSequence(seq, handle, need) for seq in seqs]
        self._enqueue(handle.entries)
        return handle

    def branches(self, request: Request) -> int:
        """The most sequences that decode side by side for one answer to a request; ValueError as by `submit`."""
        return self._recipes.of(request.method, request.max_new_tokens).branches(request.sampling.greedy)

    @property
    def running(self) -> int:
        """Sequences under way, each once however many branches it has."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def kv_use(self) -> float:
        """Share of the KV memory that is set apart for sequences under way."""
        return self._room.bytes(_needs(list(self._running))) / self.kv_bytes

    @property
    def busy(self) -> float:
        """Seconds that the turn under way has taken so far; 0 between turns."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self, *, drain: bool = True, timeout: float | None = None, last: float | None = None) -> bool:
        """Take no more requests and end; returns whether everything was finished in time.

        Args:
            drain: whether what has been accepted is finished; otherwise it is cancelled.
            timeout: most seconds to wait for that; what is left is then cancelled.
            last: most seconds to wait then for the turn under way; None for as long as it takes.
        """
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if drain:
            self.worker.join(timeout)
        finished = self.worker.ended
        with self._wake:
            for entry in [*self._waiting, *self._running]:
                self._cancel(entry.handle)
        self.worker.join(last)
        return finished

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def _need(self, seq: RunningSequence, extra: int = 0) -> Need:
        """What a sequence needs, `extra` bytes beside its KV among it; Unsupported where there is less."""
        seq.check()
        recipe = seq.recipe
        keep = None if recipe.keep is None else recipe.keep.most_slots
        marks = len(seq.marks) + 1  # and where it parts from other prompts
        need = self._room.need(recipe.plan, seq.prompt_length, seq.stop.room, recipe.scratch, keep, recipe.store,
                               recipe.second_runner, recipe.second_reads,
                               extra + seq.prompt_length * recipe.kept_bytes, marks)
        branches = seq.branches
        if branches > self.max_seqs:
            raise Unsupported(f"a search of {branches} branches", f"there is room for {self.max_seqs} sequences",
                              "Search fewer at a time")
        if (size := self._room.bytes([need] * branches)) > self.kv_bytes:
            together = f" in {branches} branches" if branches > 1 else ""
            raise Unsupported(
                f"a prompt of {seq.prompt_length} tokens with an answer of up to {seq.stop.room}{together}",
                f"its KV can take {size} bytes, and there are {self.kv_bytes}",
                f"Use a smaller max_new_tokens or a shorter prompt{', or fewer branches' if together else ''}"
                f"{'' if recipe.store else ', or method kv_int8, which is lossy and stores less'}",
            )
        return need

    def _enqueue(self, entries: list[ScheduledSequence]) -> None:
        with self._wake:
            if self._refuses:
                raise Closed("the scheduler takes no more requests: it is shutting down")
            if len(self._waiting) + len(entries) > self.max_waiting:
                full = f"{len(self._waiting)} sequences wait already, of {self.max_waiting} at most"
                raise QueueFull(f"the queue is full: {full}. Try again later")
            self._open.update(entries)
            self._waiting.extend(entries)
            self._wake.notify_all()

    @property
    def _refuses(self) -> bool:
        """Whether no more requests are taken."""
        return self._closing

    def _cancel(self, handle: RequestHandle) -> None:
        with self._wake:
            self._unwanted.add(handle)
            self._wake.notify_all()

    def turn(self) -> None:
        """One turn: drop cancelled sequences, admit waiting ones, run the forwards, hand out tokens."""
        self._turn_began = time.monotonic()
        try:
            with self.engine.turn():
                self._drop_cancelled()
                self._admit()
                moved = self._forward()
            self._emit()
        finally:
            self._turn_began = None
        self._moved = True
        if not moved:
            self._sleep()

    def _work(self) -> None:
        while self._has_work():
            self.turn()

    def _died(self) -> None:
        """Give up the sequences under way, whose state is unknown. Sequences that wait are kept, but only once."""
        with self._wake:
            if not self._moved:
                self._waiting.clear()
            lost = self._open.difference(self._waiting)
        self._moved = False
        self._running.clear()
        self.prefixes.clear()
        self._batches = Batches(self.engine.runner, self.prefixes)
        for entry in lost:
            entry.seq.stop.finish_reason = "cancelled"
            self._end(entry, Interrupted("decoding was interrupted and begins anew; ask again"))

    def _has_work(self) -> bool:
        """Wait for something to do; False when there will be nothing more."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._running or self._unwanted or self._closing)
            return bool(self._waiting or self._running or not self._closing)

    def _drop_cancelled(self) -> None:
        with self._wake:
            unwanted, self._unwanted = self._unwanted, set()
            if not unwanted:
                return
            gone = [entry for entry in self._waiting if entry.handle in unwanted]
            self._waiting = deque(entry for entry in self._waiting if entry.handle not in unwanted)
        for entry in gone:
            entry.seq.stop.finish_reason = "cancelled"
            self._end(entry)
        for batch in self._batches:
            leaving = [entry.seq for entry in self._of(batch) if entry.handle in unwanted]
            try:
                batch.leave(leaving)
            except Exception as error:
                self._give_up(batch, error)
        self._finish()

    def _admit(self) -> None:
        admitted: list[ScheduledSequence] = []
        with self._wake:
            while self._waiting and self._fits([*self._running, *admitted], self._waiting[0]):
                admitted.append(self._waiting.popleft())
        if admitted:
            self._running += filter(self._has_batch, admitted)
            self._room.share([(batch.cache, _needs(self._of(batch))) for batch in self._batches])
            for batch in self._batches:
                joining = [entry for entry in self._of(batch) if entry in admitted]
                if joining:
                    self._join(batch, joining)

    def _join(self, batch: Batch, joining: list[ScheduledSequence]) -> None:
        """Let sequences join. Where that fails, each joins alone, so that only those that cause the failure end."""
        try:
            batch.join([entry.seq for entry in joining], [entry.need.slots for entry in joining])
        except Exception as error:
            if len(joining) > 1:
                for entry in joining:
                    self._join(batch, [entry])
            else:
                self._fail(joining[0], error)

    def _fail(self, entry: ScheduledSequence, error: Exception) -> None:
        """Mark a sequence, so that the next `_finish` ends it with an error."""
        entry.seq.stop.finish_reason = entry.seq.stop.finish_reason or "cancelled"
        entry.error = entry.error or error

    def _give_up(self, batch: Batch, error: Exception) -> None:
        """Drop a batch whose state is unknown: its sequences end with the error, sequences of other batches go on."""
        for entry in self._of(batch):
            self._fail(entry, error)
        self._batches.drop(batch)

    def _has_batch(self, entry: ScheduledSequence) -> bool:
        """Whether there is a batch for a sequence that is to join; the sequence ends where its loop cannot make one."""
        entry.joined = time.monotonic()
        try:
            self._batches.of(entry.seq)
        except Exception as error:
            entry.seq.stop.finish_reason = "cancelled"
            self._end(entry, error)
            return False
        return True

    def _of(self, batch: Batch) -> list[ScheduledSequence]:
        """The entries under way in a batch."""
        return [entry for entry in self._running if self._batches.of(entry.seq) is batch]

    def _fits(self, entries: list[ScheduledSequence], new: ScheduledSequence) -> bool:
        needs = _needs([*entries, new])
        return (len(needs) <= self.max_seqs and self._policy.admits(self._batches.seqs, time.monotonic() - new.arrived)
                and self._room.bytes(needs) <= self.kv_bytes)

    def _forward(self) -> bool:
        """Run a step of each loop; False where all sequences wait for answers."""
        batches = self._batches
        holds = self._policy.holds(batches.seqs) and (any(one.reading for one in batches) or self._more_fit())
        waiting = [entry.seq for entry in self._running if entry.waits()]
        for batch in batches:
            try:
                reading = batch.reading
                alone = holds or len(reading) == len(self._running)
                seqs = _without(reading if holds else batch.seqs, waiting) if waiting else reading if holds else None
                if not waiting or seqs:
                    batch.step(self._alone if alone else self.prefill_chunk, seqs)
            except NotYet as not_yet:
                self._wait_for(batch, not_yet)
            except Exception:
                self._one_by_one(batch)
        batches.tidy()
        return len(waiting) < len(self._running) or not waiting

    def _wait_for(self, batch: Batch, not_yet: NotYet) -> None:
        """Let a sequence wait for the answer to which its guesses led; the others go on in the next turn."""
        asking = next((seq for seq in batch.seqs if seq.allowed is not_yet.mask), None)
        owner = None if asking is None else asking.root or asking
        entry = next((one for one in self._of(batch) if one.seq is owner), None)
        if entry is None:
            self._one_by_one(batch)
        else:
            batch.rollback()
            entry.awaited = not_yet.answer

    def _sleep(self) -> None:
        """Sleep until an answer has come, a sequence is given up, or a new one has come."""
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
        """Whether a sequence that came while prompts were read may still start with the others."""
        with self._wake:
            return bool(self._waiting) and self._fits(self._running, self._waiting[0])

    def _one_by_one(self, batch: Batch) -> None:
        """Run each sequence alone after a forward failed, so that only those that cause the failure end."""
        try:
            self._each(batch)
        except Exception as error:
            self._give_up(batch, error)

    def _each(self, batch: Batch) -> None:
        batch.rollback()
        for entry in self._of(batch):
            if entry.seq.finish_reason is not None:
                continue
            try:
                if not entry.waits():
                    batch.step(self.prefill_chunk, [entry.seq])
            except NotYet as not_yet:
                batch.rollback()
                entry.awaited = not_yet.answer
            except Exception as error:
                batch.rollback()
                batch.leave([entry.seq])
                entry.error = error

    def _emit(self) -> None:
        """Hand out what the turn brought."""
        for entry in self._running:
            self._give(entry.handle, entry.hand_out(time.monotonic()))
        self._finish()

    def _finish(self) -> None:
        """Drop the sequences that have ended."""
        ended = [entry for entry in self._running if entry.seq.finish_reason is not None]
        if ended:
            self._running = [entry for entry in self._running if entry.seq.finish_reason is None]
            for entry in ended:
                self._end(entry, entry.error)

    def _end(self, entry: ScheduledSequence, error: BaseException | None = None) -> None:
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


def _without(seqs: Iterable[RunningSequence], others: Iterable[RunningSequence]) -> list[RunningSequence]:
    """The sequences that are neither among the others nor a branch of one."""
    known = set(others)
    return [seq for seq in seqs if seq not in known and seq.root not in known]


def _needs(entries: Iterable[ScheduledSequence]) -> list[Need]:
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
