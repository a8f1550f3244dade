"""One scheduler in each of the processes that share a model, all in lockstep.

Every process runs the same scheduler on the same requests in the same order: before a turn, process 0 tells the others
which requests came and which were given up. All that follows from these, such as batches, drafts, masks, draws and
kept prefixes, each process finds by itself, since it has the same logits. The other way, to broadcast each forward and
each operation on the cache, would have to send everything that a method may do to a cache or a hidden state.

So nothing may depend on a clock or on the order of threads: requests join in turns, what measures time is refused, and
forwards beside the scheduler are. With each turn process 0 sends a checksum of what it has decoded. A process that has
decoded something else, as other processors could, ends, and a process that ends, ends all.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast
from zlib import crc32

from typing_extensions import override

from shoal.engine.constraints.monitor import Monitor
from shoal.engine.engine import Engine
from shoal.engine.loading.ranks import ControlChannel
from shoal.engine.memory.amounts import free
from shoal.engine.request import Request
from shoal.engine.scheduling.batching import Recipes
from shoal.engine.scheduling.request_handle import Deliver, Item, RequestHandle
from shoal.engine.scheduling.scheduler import PROMPTS_ALONE, Scheduler
from shoal.engine.scheduling.turns import FairTurns
from shoal.errors import Closed, Unsupported
from shoal.model.hf import HFRunner

log = logging.getLogger(__name__)
T = TypeVar("T")
_BEAT = 1.0
"""Seconds after which process 0 speaks to the others where there is nothing to do, so that a dead one is found."""
_NAMED = 2.0
"""Seconds that are left to whoever knows which process has ended to say so."""
_SHARED = "a server in several processes"


class _Parted(BaseException):
    """A forward failed in this process, and the others may be in the midst of theirs. No `Exception`: none goes on."""


class _ToldRequest(NamedTuple):
    """What process 0 tells of a request: its tokens and options, and how many answers it has."""

    ids: list[int]
    request: Request
    n: int
    canvas: bool


@dataclass
class _AskedRequest:
    """A request that process 0 has not told of yet."""

    told: _ToldRequest
    deliver: Deliver | None
    handle: Future[RequestHandle] = field(default_factory=Future)


class LockstepScheduler(Scheduler):
    """A scheduler that does what those of the other processes do; all must be made at the same time.

    Process 0 is asked, from any thread. The others call `follow`.

    Args:
        engine: the slice of this process.
        options: those of `Scheduler`, of which process 0's count; by default `kv_bytes` is what fits into each process.

    Attributes:
        lost: why the processes do not go on; "" while they do.
        when_lost: called once with that, from any thread.
    """

    lockstep: ClassVar[bool] = True

    def __init__(self, engine: Engine, **options: Any) -> None:
        ranks = engine.ranks
        policy = options.get("policy")
        if policy is not None and policy.name == "waves" and policy.patience < float("inf"):
            raise Unsupported(f"patience={policy.patience:g} in {_SHARED}", "each process would measure it by itself",
                              "Leave patience out")
        self._channel, self._leads = ControlChannel(ranks), ranks.rank == 0
        self.lost = ""
        self.when_lost: Callable[[str], None] = lambda reason: None
        self._named = threading.Event()
        self._asked, self._left = list[_AskedRequest](), set[RequestHandle]()
        self._handles, self._count = dict[int, RequestHandle](), 0
        self._aside = Recipes(engine)
        if options.get("kv_bytes") is None:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)) if engine.runner.device.type == "cpu" else 1
            options["kv_bytes"] = (free(engine.runner.device) or 1 << 62) // (2 * local)
        options = {**ranks.agree(options), "kv_bytes": self._channel.least([options["kv_bytes"]])[0]}
        engine.card = ranks.agree(engine.card)
        if ranks.size == 2 and engine.runner.device.type == "cpu" and isinstance(engine.runner, HFRunner):
            engine.runner.weave_in(options.get("prefill_chunk") or PROMPTS_ALONE, ranks.agree)
        engine.ranks = replace(ranks, told=True)
        engine.runner.forward = _or_part(engine.runner.forward)  # type: ignore[method-assign]
        self._turns = _OwnTurns()
        engine.share_turns(self._turns)
        super().__init__(engine, **options, start=self._leads)

    @override
    def branches(self, request: Request) -> int:
        return self._aside.of(request.method, request.max_new_tokens).branches(request.sampling.greedy)

    @override
    def submit(
        self, prompt: Any, request: Request | None = None, *, n: int = 1, deliver: Deliver | None = None,
        canvas: bool = False, **options: Any,
    ) -> RequestHandle:
        request = request or Request.from_options(options)
        if any(isinstance(one, Monitor) for one in request.constraints(1)):
            raise Unsupported(f"a monitor in {_SHARED}", "it answers at another time in each of them",
                              "Use one process, or a schema, an expression or a grammar")
        request, (ids,) = self.engine.read([prompt], request)
        asked = _AskedRequest(_ToldRequest(ids, request, n, canvas), deliver)
        try:
            pickle.dumps(asked.told)
        except Exception as error:
            raise Unsupported(f"this request in {_SHARED}", f"it cannot be sent to the others: {line_of(error)}",
                              "Give options without functions or models of your own") from None
        with self._wake:
            if self._closing:
                raise self._closed()
            self._asked.append(asked)
            self._wake.notify_all()
        return asked.handle.result()

    @override
    def turn(self) -> None:
        """One turn of process 0."""
        with self._wake:
            asked, self._asked = self._asked, []
            if self._closing:
                asked = self._refuse(asked)
            left, self._left = self._left, set()
        gone = [number for number, handle in self._handles.items() if handle in left]
        told = [one.told for one in asked]
        self._channel.tell(self._state(), (told, gone) if told or gone else None)
        self._act(told, gone, asked)

    def follow(self) -> None:
        """Do what process 0 does until it ends.

        Raises:
            ConnectionError: process 0 has ended without a word.
            RuntimeError: this process has decoded something else than process 0.
        """
        while (heard := self._channel.hear()) is not None:
            state, (told, gone) = heard[0], heard[1] or ([], [])
            if state != self._state():
                raise RuntimeError("it has decoded something else than process 0: their processors or libraries "
                                   "differ, or a method decides by more than the tokens")
            self._act(told, gone)

    def lose(self, reason: str) -> None:
        """End, since a process has ended; the first reason counts."""
        with self._wake:
            if self.lost or self._closing and self.worker.ended:
                return
            self.lost, self._closing = reason, True
            self._wake.notify_all()
        self._named.set()
        self.when_lost(reason)

    def _act(self, told: list[_ToldRequest], gone: list[int], asked: list[_AskedRequest] | None = None) -> None:
        """Submit, cancel and run a turn, as all processes do now."""
        self._turns.owner = threading.get_ident()
        self._unwanted.update(self._handles[number] for number in gone)
        delivers = [one.deliver for one in asked] if asked else [_drop] * len(told)
        made = [self._made(one, deliver) for one, deliver in zip(told, delivers, strict=True)]
        agreed = self._channel.least([isinstance(one, RequestHandle) for one in made]) if made else []
        for place, well in enumerate(agreed):
            if well:
                self._count += 1
                self._handles[self._count] = cast("RequestHandle", made[place])
            elif isinstance(handle := made[place], RequestHandle):
                self._unwanted.add(handle)
                made[place] = Unsupported("the request", "another of the processes that share the model refuses it",
                                          "Ask for less, or see that their files are the same")
        for one, outcome in zip(asked or (), made, strict=False):
            if isinstance(outcome, RequestHandle):
                one.handle.set_result(outcome)
            else:
                one.handle.set_exception(outcome)
        super().turn()
        self._handles = {number: handle for number, handle in self._handles.items() if not handle.done}

    def _made(self, told: _ToldRequest, deliver: Deliver | None) -> RequestHandle | Exception:
        """The handle of a request, or why there is none."""
        try:
            return super().submit(told.ids, told.request, n=told.n, canvas=told.canvas, deliver=deliver)
        except Exception as error:
            return error

    def _state(self) -> int:
        """A checksum of what is decoded."""
        seqs = [(len(entry.seq.tokens), entry.seq.tokens[-1]) for entry in self._running]
        return crc32(repr((self._count, self.waiting, seqs)).encode())

    @override
    def _cancel(self, handle: RequestHandle) -> None:
        """Cancel in the next turn, if this is process 0; others hear of it."""
        if self._leads:
            with self._wake:
                self._left.add(handle)
                self._wake.notify_all()

    @property
    @override
    def _refuses(self) -> bool:
        """False: what the others were told is accepted; `submit` refuses the rest."""
        return False

    @override
    def _has_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._running or self._asked or self._left or self._closing,
                                _BEAT)
            return bool(self._waiting or self._running or self._asked or not self._closing) and not self.lost

    @override
    def _work(self) -> None:
        try:
            super()._work()
            if not self.lost:
                self._channel.tell(0, None, last=True)
        except BaseException as error:
            if not isinstance(error, _Parted | RuntimeError):
                log.error("the scheduler died", exc_info=True)
            self._named.wait(_NAMED)
            self.lose(f"process 0 cannot go on, as another one has ended or a forward has failed: {line_of(error)}")
        if self.lost:
            self._moved = False
            self._died()
        with self._wake:
            self._asked = self._refuse(self._asked)

    def _refuse(self, asked: list[_AskedRequest]) -> list[_AskedRequest]:
        """Refuse requests that nobody was told of; returns none."""
        for one in asked:
            one.handle.set_exception(self._closed())
        return []

    def _closed(self) -> Closed:
        return Closed(f"the scheduler takes no more requests: {self.lost or 'it is shutting down'}")


class _OwnTurns(FairTurns):
    """Lets forwards run on the scheduler's thread alone: those of another thread would run in this process only."""

    owner: int | None = None

    @override
    def of(self, own: AbstractContextManager[bool]) -> AbstractContextManager[bool]:
        return _OwnThread(self, own)


class _OwnThread(AbstractContextManager[bool]):
    def __init__(self, turns: _OwnTurns, own: AbstractContextManager[bool]) -> None:
        self._turns, self._own = turns, own

    def __enter__(self) -> bool:
        if threading.get_ident() != self._turns.owner:
            raise Unsupported(f"vectors, rankings or log-probabilities of prompts in {_SHARED}",
                              "the others run what the scheduler decodes, and nothing beside it", "Use one process")
        return self._own.__enter__()

    def __exit__(self, *_: object) -> None:
        self._own.__exit__(None, None, None)


def _drop(item: Item) -> None:
    """Hand a step to nobody: process 0 does."""


def line_of(error: BaseException) -> str:
    """The first line of an error."""
    return str(error).strip().partition("\n")[0]


def _or_part(forward: Callable[..., T]) -> Callable[..., T]:
    """The same forward, whose failure ends the process."""

    def run(*args: Any, **options: Any) -> T:
        try:
            return forward(*args, **options)
        except RuntimeError as error:
            raise _Parted(str(error)) from error

    return run
