"""ATTS: the large model takes over where what the small one has written is unlikely beside what it mostly writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.signals import p_value
from shoal.methods.common.limits import Most, Positions, Share
from shoal.types import ModelInfo
from shoal_lab.methods._switching import Switching, SwitchingMethod

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.loop import RowBatch
    from shoal.decode.row import Row


@dataclass(frozen=True, repr=False)
class ATTS(SwitchingMethod):
    """The smaller model writes chunks; after one that the engine's own finds unusually unlikely, that one goes on.

    The engine's own model reads a chunk in one forward and takes its mean loss per token. A conformal p-value says how
    often a chunk of the smaller model is at least as bad: at most alpha, and the own model continues the chunk, which
    stands in any case, by `target_tokens`; else the smaller one writes on. So the own model takes over in no more than
    a share alpha of the turns, as far as these are like those that the scores come from. Rows are independent: each
    goes on by itself, and none waits for a ranking. The paper's code cuts at 0.6 of the scores, alpha 0.4, has chunks
    of 500 tokens, and ends after 15 turns, for which there is max_new_tokens here. An answer that ends within a chunk
    is not judged any more.

    Attributes:
        alpha: the largest p-value at which the engine's own model takes over; 0 lets the smaller model write all, 1
            lets both write in turns.
        draft_tokens: of a chunk; 0 lets the engine's own model write all.
        target_tokens: that the engine's own model writes when it takes over, at least 1.
        scores: mean losses (nats per token) of chunks of the smaller model under the engine's own, which
            `shoal calibrate --for atts` makes; needed for an alpha between 0 and 1.
    """

    name: ClassVar[str] = "atts"
    paper: ClassVar[str] = "arXiv 2509.15148"

    alpha: Share = 0.4
    draft_tokens: Positions = 64
    target_tokens: Positions = 64
    scores: Annotated[tuple[float, ...], Most(1)] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must be from 0 (the smaller model alone) to 1")
        for knob, least in (("draft_tokens", 0), ("target_tokens", 1)):
            if getattr(self, knob) < least:
                raise ValueError(f"{knob} is {getattr(self, knob)}; it must be at least {least}")
        if wrong := [score for score in self.scores if not 0 <= score < math.inf]:
            raise ValueError(f"scores hold {wrong[0]}; they are mean losses in nats, at least 0")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The engine's own model where it writes all; else a loop of two models.

        Raises:
            ValueError: there is nothing to compare a chunk with.
        """
        if self.draft_tokens == 0:
            return self.own(info)
        if 0 < self.alpha < 1 and not self.scores and info.draft_engine is not None:
            raise ValueError(f"atts with alpha {self.alpha} has no scores to compare with; let shoal calibrate "
                             "--for atts make them, or take alpha 0 or 1")
        policy = ByChunk(float(self.alpha), self.draft_tokens, self.target_tokens, tuple(sorted(self.scores)))
        recipe = self.switched(info, policy)
        parts = {one.name: getattr(recipe.loop, one.name) for one in fields(Switching)}
        return replace(recipe, loop=JudgedTurns(**parts))


@dataclass(frozen=True)
class JudgedTurns(Switching):
    """The part `loop`; see `Switching`."""

    def batch(self) -> Callable[..., RowBatch]:
        """See `Loop`."""
        super().batch()
        from shoal_lab.loops.atts import JudgingBatch

        return partial(JudgingBatch, how=self)


@dataclass(frozen=True)
class ByChunk:
    """The policy; see `ATTS`.

    Attributes:
        alpha: the largest p-value that makes the large model go on.
        small, large: tokens that each model writes in its turn.
        scores: ascending.
    """

    alpha: float
    small: int
    large: int
    scores: tuple[float, ...]

    def begin(self, row: Row) -> ChunkTurns:
        """See `shoal_lab.loops.switching.TurnPolicy`."""
        return ChunkTurns(self)

    def takes_over(self, score: float) -> bool:
        """Whether the large model continues a chunk of that mean loss."""
        return p_value(self.scores, score) <= self.alpha


class ChunkTurns:
    """See `shoal_lab.loops.switching.Turns`.

    Attributes:
        since: the place in the row's text at which the chunk begins that is to be judged; None where none is.
        losses: of its tokens, by their places, as far as the large model has read them.
    """

    def __init__(self, policy: ByChunk) -> None:
        self._policy, self._written = policy, 0
        self.large = False
        self.since: int | None = None
        self.losses = dict[int, float]()

    def look(self, logits: Tensor) -> bool:
        """The large model has read the chunk: does it go on?"""
        if self.since is None:
            return False
        self.since, score = None, math.fsum(self.losses.values()) / len(self.losses)
        self.large = self._policy.takes_over(score)
        return not self.large

    def wrote(self, row: Row, tokens: Sequence[int]) -> None:
        """See the protocol."""
        self._written += len(tokens)
        if self._written < (self._policy.large if self.large else self._policy.small):
            return
        if self.large or self._policy.alpha > 0:
            self.large = not self.large
        if self.large and self._policy.alpha < 1:
            self.since, self.losses = len(row.tokens) - self._written, {}
        self._written = 0
