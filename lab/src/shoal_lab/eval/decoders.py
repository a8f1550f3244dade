"""The engine at work on an evaluation: it answers the prompts and scores the references, under any contender's plan."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.scheduling.request_handle import Item
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods.base import Method
from shoal.types import Stats
from shoal_lab.eval import scoring
from shoal_lab.eval.rising import RisingPlan, executor

Plan = DepthPlan | RisingPlan
WORK = ("second_tokens", "switches", "branches", "thrown_away")
"""Counts of `Stats` that an answer's outcome keeps: of two models that write, and of a search."""


@dataclass(frozen=True)
class Candidate:
    """A way of decoding that is compared with others.

    Attributes:
        label: its name in tables.
        spec: what it is, as JSON; outcomes are kept under it.
        plan: the layers that its target runs.
        method: the method; None for a plan that no method makes, one that rises.
        recipe: what the method comes to on the model; None where there is no method.
    """

    label: str
    spec: dict[str, Any]
    plan: Plan
    method: Method | None = None
    recipe: Recipe | None = None

    def check_scored(self, *read: str) -> None:
        """Refuse to measure losses that would be another method's: see `Recipe.check_scored`."""
        if self.recipe is not None:
            self.recipe.check_scored(self.label, *read)


def candidate(engine: Engine, method: Method, max_new_tokens: int, label: str | None = None) -> Candidate:
    """The contender that a method is on this model, for answers of up to that length."""
    recipe = engine.recipe(method, max_new_tokens)
    return Candidate(label or method.name, method.to_dict(), recipe.plan, method, recipe)


@dataclass(frozen=True)
class Answered:
    """What a prompt was answered.

    Attributes:
        tokens: generated ids, the end-of-sequence token included where one came.
        layer_tokens: layers summed over them, of the model that wrote each; for a method that guesses, those it read.
        finish_reason: why it ended; "length" where it was cut off.
        work: what it took beside, as far as it took any: see `WORK`.
    """

    tokens: list[int]
    layer_tokens: float
    finish_reason: str | None = None
    work: Mapping[str, int] = field(default_factory=dict)


class Decoder:
    """Answers prompts and scores references, some rows at a time.

    Args:
        engine: the model.
        rows: answers under way at once; where one ends, the next begins.
        temperature: of the answers; 0 for greedy ones. What is drawn follows from the prompt.

    Attributes:
        deadline: `time.monotonic()` after which `answers` gives up with a TimeoutError; None for never.
    """

    def __init__(self, engine: Engine, rows: int = 64, temperature: float = 0.0) -> None:
        self.engine, self.rows, self.temperature = engine, rows, temperature
        self.deadline: float | None = None
        self._risen: tuple[RisingPlan, Engine] | None = None

    def answers(
        self, prompts: Sequence[Sequence[int]], who: Candidate, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> list[Answered]:
        """Answers in the order of the prompts; see `each_answer`."""
        found = dict(self.each_answer(prompts, who, max_new_tokens, stop))
        return [found[number] for number in range(len(prompts))]

    def each_answer(
        self, prompts: Sequence[Sequence[int]], who: Candidate, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> Iterator[tuple[int, Answered]]:
        """Answers as they end, each with the number of its prompt.

        Prompts join in their order, and what they begin with in common is read once if it was read before they join.

        Args:
            prompts: token ids.
            who: how they are answered.
            max_new_tokens: the longest answer.
            stop: texts that end an answer.

        Raises:
            TimeoutError: after the deadline.
            Unsupported: a plan that rises, on a model that is not packed.
        """
        engine = self._rising(who.plan) if isinstance(who.plan, RisingPlan) else self.engine
        scheduler = Scheduler(engine, max_rows=self.rows, max_waiting=max(len(prompts), 1), start=False)
        done: list[tuple[int, BaseException | None]] = []
        handles = [
            scheduler.submit(list(prompt), deliver=partial(_ending, done, number), method=who.method or "full",
                             max_new_tokens=max_new_tokens, stop=list(stop) or None, **self.drawn(prompt))
            for number, prompt in enumerate(prompts)
        ]
        left = len(handles)
        while left:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise TimeoutError("no time is left for answers")
            scheduler.turn()
            for number, error in done:
                if error is not None:
                    raise error
                (found,) = handles[number].results
                work = {name: count for name in WORK if (count := found.stats.beside.get(name))}
                yield number, Answered(
                    list(found.tokens), self._layers(who, found.stats), found.finish_reason, work
                )
            left -= len(done)
            done.clear()

    def drawn(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Options of a request with that prompt; each has a seed of its own, else all would draw the same numbers."""
        return {"temperature": self.temperature, "seed": zlib.crc32(repr(list(prompt)).encode())}

    def _layers(self, who: Candidate, stats: Stats) -> float:
        """The layers of a plain loop that reads as much: the same where nothing is guessed."""
        if isinstance(who.plan, RisingPlan):
            return who.plan.layer_tokens(stats.new_tokens)
        if "second_tokens" in stats.beside:
            return stats.layer_tokens
        layers, head = self.engine.stack.num_layers, self.engine.stack.head_layers
        return stats.new_tokens * ((layers + head) / stats.ideal_speedup - head)

    def losses(
        self, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]], plans: Sequence[Plan]
    ) -> list[list[Tensor]]:
        """Negative log-likelihoods in nats: [plan][item] -> [tokens]; see `scoring.losses`.

        Raises:
            Unsupported: a plan that rises, on a model that is not packed.
        """
        return scoring.losses(prompts, references, [executor(self.engine.stack, plan) for plan in plans])

    def _rising(self, plan: RisingPlan) -> Engine:
        """An engine whose full depth is the plan; the last one made is kept."""
        if self._risen is None or self._risen[0] != plan:
            engine, (stack, _) = self.engine, executor(self.engine.stack, plan)
            twin = Engine(stack, engine.tokenizer, eos_token_ids=engine.eos_token_ids)
            twin.card = engine.card
            self._risen = plan, twin
        return self._risen[1]


def _ending(done: list[tuple[int, BaseException | None]], number: int, item: Item) -> None:
    """Note that a prompt's answer has ended, or failed."""
    if item is None or isinstance(item, BaseException):
        done.append((number, item))
