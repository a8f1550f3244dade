"""Auto: guess where it pays on this model and machine, else decode plainly."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.control.payoff import HelperRecord, Payoff
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.depth.skips import Skips
from shoal.draft.adaptive import Adaptive
from shoal.draft.auto import Cautious
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.recipe import Proposer

_HELPED = 8
"""Most guesses of a helper one after another."""
_CALIBRATED = 0.7
"""Chance that a guess of calibrated self-drafting is kept, before it was tried."""
_SMALLER = 0.6, 0.25
"""The same of a draft model, and what its guess costs as a share of a step."""


@dataclass(frozen=True)
class Auto(Method):
    """Guesses tokens ahead where measured times say that it pays, and decodes plainly everywhere else.

    Lossless. While the answer repeats a passage of the prompt or of itself, the passage is guessed to go on; how likely
    that is for a match of so many tokens is learned from all tokens, whether they were guessed or not. Where the text
    gives no guess, a draft model that was named drafts, or the model itself without the sublayers that its calibration
    card says a draft can spare, as long as that gains time. What forwards take is learned while decoding, for every
    number of rows, and kept by the engine.

    Attributes:
        length: most tokens to guess at a time.
        draft: a smaller model with the same tokens: its folder, its Hub id, or a loaded transformers model, which is
            not changed; None for none.
    """

    name: ClassVar[str] = "auto"
    reads: ClassVar[tuple[str, ...]] = ("draft",)

    length: int = 15
    draft: str | object = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1 token. Plain decoding is method 'full'")

    def to_dict(self) -> dict[str, Any]:
        """See `Method.to_dict`; a loaded model has no JSON form."""
        if self.draft is not None and not isinstance(self.draft, str | os.PathLike):
            raise Unsupported(
                f"auto with a loaded {type(self.draft).__name__} as JSON",
                "a loaded model cannot be written down",
                "Name the draft model by its folder or Hub id",
            )
        return super().to_dict()

    def recipe(self, info: ModelInfo) -> Recipe:
        """All layers, and a proposer that all requests of an engine share: what one has learned serves the next."""
        plan = DepthPlan.full(info.num_layers)
        if not info.free:
            return Recipe(plan)
        key = self.name, self.length, self.draft if isinstance(self.draft, str) else id(self.draft)
        if key not in info.memory:
            helper, record = self._helper(info)
            info.memory.setdefault(key, Cautious(Payoff(record), self.length, helper))
        return Recipe(plan, info.memory[key])

    def _helper(self, info: ModelInfo) -> tuple[Proposer | None, HelperRecord]:
        """Who drafts where the text gives no guess, and what to think of it at first."""
        if self.draft is not None and info.companion is not None:
            from shoal.draft.model import ModelProposer
            from shoal.draft.shape import Branching

            engine = info.companion(self.draft)
            shape = Branching((1,) * min(_HELPED, self.length))
            name = engine.model_name or "the draft model"
            return ModelProposer(engine.stack, shape, name), HelperRecord(*_SMALLER, shape.length)
        if info.skips is not None and any(info.skips) and (info.can_split or info.skips[0] == info.skips[1]):
            skips = Skips(*info.skips)
            left = info.num_layers - skips.size / 2 + info.head_layers
            length = min(_HELPED, self.length)
            record = HelperRecord(_CALIBRATED, left / (info.num_layers + info.head_layers), length)
            return Adaptive(skips.plan(info.num_layers), length), record
        return None, HelperRecord()
