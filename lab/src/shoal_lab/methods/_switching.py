"""Shared by methods in which two models write one answer, a token at a time. Imports no torch at first."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Loop, Recipe
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.drafting import PairedMethod

if TYPE_CHECKING:
    from shoal.decode.batch import Batch
    from shoal.decode.sequence import SequenceState
    from shoal.model.runner import ModelRunner, Storing
    from shoal.types import ModelInfo
    from shoal_lab.loops.switching import SwitchingBatch, TurnPolicy


@dataclass(frozen=True, repr=False)
class SwitchingMethod(PairedMethod):
    """A method whose answer is written by two models in turns; neither verifies the other's tokens.

    Attributes:
        inner: the method whose depth plan the engine's own model runs; None for full depth.
        draft_inner: the method whose depth plan the smaller model runs; None for full depth.
    """

    inner: Method | None = field(default=None, kw_only=True)
    draft_inner: Method | None = field(default=None, kw_only=True)

    def own(self, info: ModelInfo) -> Recipe:
        """The recipe of the engine's own model alone."""
        return Recipe(DepthPlan.full(info.num_layers)) if self.inner is None else self.inner.recipe(info)

    def switched(self, info: ModelInfo, policy: TurnPolicy) -> Recipe:
        """The recipe in which the policy chooses the model of each token.

        Raises:
            ValueError: no draft model was named, it cannot be loaded, or its method does more than choose layers.
            Unsupported: its tokens differ, or `inner` sets components that a loop cannot have.
        """
        if info.draft_engine is None:
            return replace(self.own(info), loop=Switching(policy))
        engine = self.draft_engine(info)
        mine = engine.info(info.max_new_tokens)
        recipe = Recipe(DepthPlan.full(mine.num_layers)) if self.draft_inner is None else self.draft_inner.recipe(mine)
        if extra := recipe.beside_plan:
            raise ValueError(
                f"draft_inner of {self.name} is {self.draft_inner}, which fills {extra[0]!r}; give one that only "
                "chooses layers, such as d3"
            )
        name = engine.model_name or "the draft model"
        return replace(self.own(info), loop=Switching(policy, engine.runner, recipe.plan, name))


@dataclass(frozen=True)
class Switching(Loop):
    """A loop in which the policy chooses the model of each token.

    Attributes:
        policy: chooses the model.
        runner: the smaller model; None if there is no engine to load it, as when a method is only described.
        plan: layers of the smaller model.
        name: its name, for messages.
    """

    takes: ClassVar[tuple[str, ...]] = ("plan", "rule", "constraint")

    policy: TurnPolicy
    runner: Any = None
    plan: DepthPlan | None = None
    name: str = ""

    @property
    @override
    def second_runner(self) -> Storing | None:
        found: ModelRunner | None = self.runner
        return found

    @override
    def batch(self) -> Callable[..., Batch]:
        if self.runner is None or self.plan is None:
            raise Unsupported("two models", "there is no engine to load the second", "Use Engine.generate")
        return partial(self.kind(), policy=self.policy, second=self.runner, plan=self.plan)

    def kind(self) -> type[SwitchingBatch]:
        """The class of its batches."""
        from shoal_lab.loops.switching import SwitchingBatch

        return SwitchingBatch

    def check(self, seq: SequenceState) -> None:
        """Refuse a sequence that may grow beyond the smaller model's context."""
        most = None if self.runner is None else self.runner.max_positions
        if most is not None and len(seq.tokens) + seq.stop.room > most:
            raise Unsupported(
                f"a text of up to {len(seq.tokens) + seq.stop.room} tokens with {self.name}",
                f"its context is {most} tokens",
                f"Use a max_new_tokens that keeps prompt and answer within {most}, or switch to another model",
            )


def turn_of(prompt: Sequence[int]) -> str:
    """Purpose of a sequence's draws. By the prompt, or requests of one seed would switch at the same places."""
    return f"turn {zlib.crc32(repr(list(prompt)).encode())}"
