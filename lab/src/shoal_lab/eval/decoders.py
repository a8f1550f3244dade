"""Decodes for an evaluation: answers prompts and scores references under any candidate's plan."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from shoal.decode.recipe import BY_PROMPT, Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.scheduling.request_handle import Item
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.types import Stats
from shoal_lab.eval import scoring
from shoal_lab.eval.rising import RisingPlan, executor

Plan = DepthPlan | RisingPlan
_UNSCORED = (BY_PROMPT, "keep", "store", "select", "experts", "search", "constraint")
"""Components beside the plan that change a token's probability or which token is taken; exact drafting does not."""
WORK = ("second_tokens", "switches", "branches", "thrown_away")
"""Counts of `Stats` that an outcome keeps: of methods with two models, and of searches."""


@dataclass(frozen=True)
class Candidate:
    """A decoding method that is compared with others.

    Attributes:
        label: its name in tables.
        spec: its JSON; outcomes are kept under it.
        plan: the layers that the target runs.
        method: the method; None for a plan that rises, which no method makes.
        recipe: the method's recipe for the model; None without a method.
    """

    label: str
    spec: dict[str, Any]
    plan: Plan
    method: Method | None = None
    recipe: Recipe | None = None

    def check_scored(self, *read: str) -> None:
        """Refuse losses that would be another method's; see `check_scored`."""
        if self.recipe is not None:
            check_scored(self.recipe, self.label, *read)


def check_scored(recipe: Recipe, name: str, *read: str) -> None:
    """Refuse to score given texts if their likelihood depends on more than the plan.

    Args:
        recipe: the method's.
        name: whose recipe this is, for the error.
        read: further components that the caller takes into account.

    Raises:
        Unsupported: a component alters the KV or the MLPs, or searches, or is a loop that is not exact.
    """
    lossy = ("loop",) if recipe.loop is not None and not recipe.loop.exact else ()
    others = [part for part in recipe.beside_plan if part in (*_UNSCORED, *lossy) and part not in read]
    if others:
        raise Unsupported(
            f"a loss or log-likelihood under {name}", f"given texts are scored by the plan alone, without its "
            f"{' and '.join(others)}", "Measure answers instead (shoal eval --measure answers, or tasks that "
            "generate)",
        )


def candidate(engine: Engine, method: Method, max_new_tokens: int, label: str | None = None) -> Candidate:
    """A method as a candidate on this model, for answers of up to that length."""
    recipe = engine.recipe(method, max_new_tokens)
    return Candidate(label or method.name, method.to_dict(), recipe.plan, method, recipe)


@dataclass(frozen=True)
class Answered:
    """The answer to a prompt.

    Attributes:
        tokens: generated ids, with the end-of-sequence token if there is one.
        layer_tokens: layers summed over the tokens, of the model that wrote each; for a drafting method, of those read.
        finish_reason: why it ended; "length" if it was cut off.
        work: its counts of `WORK` that are not zero.
    """

    tokens: list[int]
    layer_tokens: float
    finish_reason: str | None = None
    work: Mapping[str, int] = field(default_factory=dict)


class Decoder:
    """Answers prompts and scores references, some rows at a time.

    Args:
        engine: the model.
        rows: answers in progress at once; when one ends, the next begins.
        temperature: of the answers; 0 for greedy ones. Draws depend on the prompt only.

    Attributes:
        deadline: `time.monotonic()` after which `answers` raises a TimeoutError; None for never.
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
        """Answers as they end, each with the index of its prompt.

        Prompts join in order. A common prefix is read once, if it was read before the next prompt joins.

        Args:
            prompts: token ids.
            who: the candidate that answers.
            max_new_tokens: the longest answer.
            stop: texts that end an answer.

        Raises:
            TimeoutError: after the deadline.
            Unsupported: a rising plan on a model that is not packed.
        """
        engine = self._rising(who.plan) if isinstance(who.plan, RisingPlan) else self.engine
        scheduler = Scheduler(engine, max_seqs=self.rows, max_waiting=max(len(prompts), 1), start=False)
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
                work = {name: count for name in WORK if (count := found.stats.extra.get(name))}
                yield number, Answered(
                    list(found.tokens), self._layers(who, found.stats), found.finish_reason, work
                )
            left -= len(done)
            done.clear()

    def drawn(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Options of a request with that prompt. Each has its own seed, or all would draw the same numbers."""
        return {"temperature": self.temperature, "seed": zlib.crc32(repr(list(prompt)).encode())}

    def _layers(self, who: Candidate, stats: Stats) -> float:
        """Layers that a plain loop runs for as many tokens; the same unless the method drafts."""
        if isinstance(who.plan, RisingPlan):
            return who.plan.layer_tokens(stats.new_tokens)
        if "second_tokens" in stats.extra:
            return stats.layer_tokens
        layers, head = self.engine.runner.num_layers, self.engine.runner.head_layers
        return stats.new_tokens * ((layers + head) / stats.ideal_speedup - head)

    def losses(
        self, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]], plans: Sequence[Plan]
    ) -> list[list[Tensor]]:
        """Negative log-likelihoods in nats: [plan][item] -> [tokens]; see `scoring.losses`.

        Raises:
            Unsupported: a rising plan on a model that is not packed.
        """
        return scoring.losses(prompts, references, [executor(self.engine.runner, plan) for plan in plans])

    def _rising(self, plan: RisingPlan) -> Engine:
        """An engine whose full depth is the plan; the last one is kept."""
        if self._risen is None or self._risen[0] != plan:
            engine, (runner, _) = self.engine, executor(self.engine.runner, plan)
            risen = Engine(runner, engine.tokenizer, eos_token_ids=engine.eos_token_ids)
            risen.card = engine.card
            self._risen = plan, risen
        return self._risen[1]


def _ending(done: list[tuple[int, BaseException | None]], number: int, item: Item) -> None:
    """Record that a prompt's answer has ended, or failed."""
    if item is None or isinstance(item, BaseException):
        done.append((number, item))
