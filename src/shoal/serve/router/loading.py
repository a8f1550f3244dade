"""Loads the models of a server into its process, and takes them out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakSet

from fastapi import Request, Response

from shoal.engine.engine import Engine
from shoal.engine.memory.footprint import standing
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.turns import FairTurns
from shoal.methods import make
from shoal.serve.app import LAST_TURN, ModelRoutes, ailment, model_routes
from shoal.serve.errors import LOG
from shoal.serve.facts import ModelFacts
from shoal.serve.metrics import Metrics
from shoal.serve.router.budget import MemoryBudget, held_bytes
from shoal.serve.router.listing import Listed, stamp
from shoal.serve.settings import Settings

T = TypeVar("T")
_CALM = 0.95
"""Part of what is left that a model takes, as others may take some before its scheduler looks again."""


@dataclass(frozen=True)
class Making:
    """How models are made; called from threads.

    Attributes:
        size: the least bytes that a model takes, by its files; 0 where that is unknown.
        facts: what its files say of it; ValueError says why they cannot be read.
        engine: loads a model; ValueError says why that cannot be.
        scheduler: makes what decodes requests, with so many bytes for keys and values, and for those of earlier
            prompts; None leaves both to it.
        kv: bytes that the operator gives each model for both; None for none.
        max_seqs: most sequences that a model decodes at once.
    """

    size: Callable[[Listed], int]
    facts: Callable[[Listed], ModelFacts]
    engine: Callable[[Listed], Engine]
    scheduler: Callable[[Engine, int | None, int | None], Scheduler]
    kv: int | None = None
    max_seqs: int = 16

    @property
    def chunk(self) -> int:
        """Most tokens of a forward."""
        return max(256, self.max_seqs * 16)


class ModelInMemory:
    """A model in memory. FastAPI keeps the functions of its routes, so these must not hold one.

    Attributes:
        nbytes: what it takes, and may come to take.
        own: of that, what it takes without keys and values.
    """

    def __init__(
        self, engine: Engine, settings: Settings, making: Making, budget: MemoryBudget, metrics: dict[str, Metrics],
        made: WeakSet[Scheduler],
    ) -> None:
        self.engine, self._settings, self._making, self._all, self._made = engine, settings, making, metrics, made
        self.scheduler: Scheduler | None = None
        self._routes: ModelRoutes | None = None
        self.own, self._kv = held_bytes(engine), making.kv
        if budget.limit is not None:
            self.own, share = budget.shares(engine, make(settings.method), making.max_seqs, making.chunk)
            self._kv = making.kv or share
        self.nbytes = self.own + (self._kv or 0)

    def start(self) -> None:
        """Get ready for requests, and go on counting where an earlier time in memory ended."""
        kv, name = self._kv, self._settings.model_name
        if kv is not None and self.engine.limit is not None:  # by the true sizes of what is beside it
            left = self.engine.limit.for_seqs(self.engine, self._making.chunk)
            kv = min(kv, int(left * _CALM))
        if self._making.kv is not None:  # divided as the operator says
            kv = None
        parts = (None, None) if kv is None else (kv - kv // 5, kv // 5)
        scheduler = self.scheduler = self._making.scheduler(self.engine, *parts)
        self._made.add(scheduler)
        metrics = self._all.get(name)
        if metrics is None:
            metrics = self._all[name] = Metrics(name, scheduler, self.engine.runner.num_layers, process=False)
        metrics.watch(scheduler)
        self._routes = model_routes(scheduler, self._settings, metrics)

    async def answer(self, request: Request) -> Response:
        """The response to a request that names the model."""
        assert self._routes is not None
        return await self._routes.answer(request)

    @property
    def on_gpu(self) -> bool:
        """Whether its weights lie on a GPU."""
        return self.engine.runner.device.type != "cpu"

    @property
    def ill(self) -> str | None:
        """What is wrong with it, in words; None if requests are worked on."""
        return None if self.scheduler is None else ailment(self.scheduler, self._settings)

    def close(self, seconds: float) -> bool:
        """Finish what is under way within so many seconds, and end; False where a step does not end."""
        if self.scheduler is None:
            return True
        self.scheduler.close(timeout=seconds, last=LAST_TURN)
        self._all[self._settings.model_name].watch(None)
        if not self.scheduler.worker.ended:
            LOG.error("a step of %s does not end:\n%s", self._settings.model_name, self.scheduler.worker.stack())
        return self.scheduler.worker.ended


class ModelLoader:
    """Loads models within a budget.

    Attributes:
        budget: the memory of all.
        metrics: of each model that was ever loaded, by name.
    """

    def __init__(self, settings: Settings, making: Making, budget: MemoryBudget) -> None:
        self.budget, self._settings, self._making = budget, settings, making
        self._turns = FairTurns()
        self.metrics = dict[str, Metrics]()
        self._alone, self._made = True, WeakSet[Scheduler]()
        self._sizes, self._facts = dict[str, tuple[Any, int]](), dict[str, tuple[Any, ModelFacts]]()

    @property
    def schedulers(self) -> list[Scheduler]:
        """Those that have not ended."""
        return [one for one in self._made if not one.worker.ended]

    def least(self, listed: Listed) -> int:
        """The least that a model takes, by its files; 0 where that is unknown."""
        return _read_once(self._sizes, listed, self._making.size)

    def facts(self, listed: Listed) -> ModelFacts:
        """What a model's files say of it; ValueError says why they cannot be read."""
        return _read_once(self._facts, listed, self._making.facts)

    def known(self, listed: Listed) -> ModelFacts | None:
        """The same where it has been read before, or the model been loaded."""
        return self._facts.get(listed.name, (None, None))[1]

    def check(self, listed: Listed, size: int) -> None:
        """OutOfMemory for a model of that size that would not fit alone."""
        self.budget.check(f"the model {listed.name!r}", size)

    def fits(self, held: Iterable[int], size: int) -> bool:
        """Whether a model of that size fits beside others of those sizes."""
        return self.budget.fits(held, size)

    def load(self, listed: Listed) -> ModelInMemory:
        """Load a model; ValueError says why that cannot be."""
        method = self._settings.method if listed.method is None else listed.method
        adapters = tuple(one.name for one in listed.adapters)
        settings = replace(self._settings, model_name=listed.name, adapters=adapters, method=method)
        engine = self._making.engine(listed)
        engine.share_turns(self._turns)
        _read_once(self._facts, listed, lambda _: ModelFacts.of_engine(engine))
        held = ModelInMemory(engine, settings, self._making, self.budget, self.metrics, self._made)
        if self._alone:
            self.budget.base = max(self.budget.base, standing() - held.own)
        return held

    def settle(self, held: Sequence[int]) -> None:
        """Give back what a model has left, or what loading has; models of those sizes are in memory."""
        now = standing()
        self._alone = not held
        if not held:  # what is left belongs to none
            self.budget.base = now


def _read_once(kept: dict[str, tuple[Any, T]], listed: Listed, read: Callable[[Listed], T]) -> T:
    """What is read of a model's files, once for each state of them: clients ask often, and headers are long."""
    now = stamp(listed)
    before, found = kept.get(listed.name, (None, None))
    if not found or before != now:
        found = read(listed)
        kept[listed.name] = now, found
    return found
