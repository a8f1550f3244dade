"""Who decodes an evaluation: the engine, or lockstep where the engine has no kernels or the table is not nested."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.eval.layer_table import LayerTable
from shoal.eval.lockstep import Lockstep
from shoal.methods.base import Method
from shoal.model.kv import KVCache
from shoal.model.packed.native_stack import NativeStack
from shoal.model.packed.stack import PackedStack
from shoal.model.stack import Feed
from shoal.types import Stats


@dataclass(frozen=True)
class Contender:
    """A way of decoding that is compared with others.

    Attributes:
        label: its name in tables.
        spec: what it is, as JSON; outcomes are kept under it.
        table: the layers that its target runs.
        method: the method; None for a table that no method makes.
        only_plan: whether the table says all, so that nothing is guessed and no rule is lossy.
    """

    label: str
    spec: dict[str, Any]
    table: LayerTable
    method: Method | None = None
    only_plan: bool = True


def contender(engine: Engine, method: Method, max_new_tokens: int, label: str | None = None) -> Contender:
    """The contender that a method is on this model, for answers of up to that length."""
    recipe: Recipe = engine.recipe(method, max_new_tokens)
    only_plan = recipe.proposer is None and (recipe.rule is None or recipe.rule.exact)
    return Contender(label or method.name, method.to_dict(), LayerTable.of(recipe.plan), method, only_plan)


@dataclass(frozen=True)
class Answered:
    """What a prompt was answered, and the layers summed over its tokens; for a method that guesses, those it read."""

    tokens: list[int]
    layer_tokens: float


class Decoder(Protocol):
    """Answers prompts and scores references, some rows at a time.

    Attributes:
        deadline: `time.monotonic()` after which `answers` gives up with a TimeoutError; None for never.
    """

    deadline: float | None

    def answers(self, prompts: Sequence[Sequence[int]], who: Contender, max_new_tokens: int) -> list[Answered]:
        """Greedy answers."""
        ...

    def losses(
        self, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]], tables: Sequence[LayerTable]
    ) -> list[list[Tensor]]:
        """Negative log-likelihoods in nats: [table][item] -> [tokens]."""
        ...


def decoder_for(engine: Engine) -> Decoder:
    """The quickest decoder for an engine."""
    return LockstepDecoder(engine) if isinstance(engine.stack, PackedStack) else EngineDecoder(engine)


class EngineDecoder:
    """Any model, any method; no tables that are not nested."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.deadline: float | None = None

    def answers(self, prompts: Sequence[Sequence[int]], who: Contender, max_new_tokens: int) -> list[Answered]:
        """See `Decoder`."""
        if who.method is None:
            raise _not_nested(who.label)
        rows = [list(prompt) for prompt in prompts]
        with self.engine.stream(rows, method=who.method, max_new_tokens=max_new_tokens) as stream:
            for _ in stream:
                self.check_time()
            return [Answered(list(r.tokens), self._layers(r.stats)) for r in stream.results]

    def check_time(self) -> None:
        """TimeoutError after the deadline."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeoutError("no time is left for answers")

    def _layers(self, stats: Stats) -> float:
        """The layers of a plain loop that reads as much: the same where nothing is guessed."""
        layers, head = self.engine.stack.num_layers, self.engine.stack.head_layers
        return stats.new_tokens * ((layers + head) / stats.ideal_speedup - head)

    def losses(
        self, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]], tables: Sequence[LayerTable]
    ) -> list[list[Tensor]]:
        """See `Decoder`."""
        return [[self._loss(*pair, table) for pair in zip(prompts, references, strict=True)] for table in tables]

    def _loss(self, prompt: Sequence[int], reference: Sequence[int], table: LayerTable) -> Tensor:
        if table.plan is None:
            raise _not_nested("this table")
        return reference_losses(self.engine, prompt, reference, table.plan)


class LockstepDecoder(EngineDecoder):
    """Packed models; what is no mere plan goes through the engine, and so do plans where its kernels are quicker."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._native = isinstance(engine.stack, NativeStack)

    @cached_property
    def _lockstep(self) -> Lockstep:
        """Made when it is needed, as it unpacks the weights."""
        assert isinstance(self.engine.stack, PackedStack)
        return Lockstep(self.engine.stack)

    def answers(self, prompts: Sequence[Sequence[int]], who: Contender, max_new_tokens: int) -> list[Answered]:
        """See `Decoder`."""
        if not who.only_plan or (self._native and who.method is not None):
            return super().answers(prompts, who, max_new_tokens)
        rows = self._lockstep.generate(
            prompts, who.table, max_new_tokens, self.engine.eos_token_ids, each_step=self.check_time
        )
        return [Answered(tokens, who.table.layer_tokens(len(tokens))) for tokens in rows]

    def losses(
        self, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]], tables: Sequence[LayerTable]
    ) -> list[list[Tensor]]:
        """See `Decoder`."""
        return self._lockstep.losses(prompts, references, tables)


def reference_losses(
    engine: Engine, prompt: Sequence[int], reference: Sequence[int], plan: DepthPlan
) -> Tensor:
    """Negative log-likelihood [tokens] of a reference whose token j is decided at step j of `plan`, in one forward."""
    steps = [0] * len(prompt) + list(range(1, len(reference)))
    feed = Feed(0, [*prompt, *reference[:-1]], steps, plan, wanted=len(reference))
    with torch.no_grad():
        logits = engine.stack.forward([feed], KVCache(engine.stack.windows, rows=1))
    target = torch.tensor(list(reference), device=logits.device)
    return cross_entropy(logits.float(), target, reduction="none").cpu()


def _not_nested(what: str) -> Unsupported:
    return Unsupported(
        f"{what}, which brings layers back", "only packed models run tables that are not nested",
        'Load the model with backend="packed", or leave this control out',
    )
