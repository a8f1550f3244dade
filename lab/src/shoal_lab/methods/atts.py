"""ATTS: the large model takes over if a chunk of the small one is improbable compared with its usual chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.methods.common.limits import Most, Positions, Share
from shoal.types import ModelInfo
from shoal_lab.components.signals import p_value
from shoal_lab.methods._switching import Switching, SwitchingMethod

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState
    from shoal_lab.loops.atts import JudgingBatch


@dataclass(frozen=True, repr=False)
class ATTS(SwitchingMethod):
    """The smaller model writes chunks; after an unusually improbable one, the engine's own model continues.

    The engine's own model reads a chunk in one forward and takes its mean loss per token. A conformal p-value is the
    frequency with which a chunk of the smaller model is at least as bad: if it is at most alpha, the own model
    continues the chunk, which stands in any case, by `target_tokens`; otherwise the smaller one writes on. So the own
    model takes over in at most a share alpha of the turns, as far as these are like those of the scores. Sequences are
    independent: none waits for a ranking. The paper's many chains with a vote are `shoal_lab.components.vote.voted`.
    The paper's code cuts at 0.6 of the scores (alpha 0.4), has chunks of 500 tokens, and ends after 15 turns, instead
    of max_new_tokens. An answer that ends within a chunk is not judged any more.

    Attributes:
        alpha: largest p-value at which the engine's own model takes over; with 0 the smaller model writes all, with 1
            both take turns.
        draft_tokens: tokens of a chunk; with 0 the engine's own model writes all.
        target_tokens: tokens that the engine's own model writes when it takes over, at least 1.
        scores: mean losses (nats per token) of chunks of the smaller model under the engine's own, from `shoal
            calibrate --for atts`; needed for an alpha between 0 and 1, unless `online`.
        online: join to the scores those of the answer's own earlier chunks, so that it needs no calibration, and what
            counts as unusual is what is so in this answer. An answer's first chunks are then never taken over: p is at
            least 1 / (1 + the number of scores).
    """

    name: ClassVar[str] = "atts"
    paper: ClassVar[str] = "arXiv 2509.15148"

    alpha: Share = 0.4
    draft_tokens: Positions = 64
    target_tokens: Positions = 64
    scores: Annotated[tuple[float, ...], Most(1)] = ()
    online: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must be from 0 (the smaller model alone) to 1")
        for option, least in (("draft_tokens", 0), ("target_tokens", 1)):
            if getattr(self, option) < least:
                raise ValueError(f"{option} is {getattr(self, option)}; it must be at least {least}")
        if wrong := [score for score in self.scores if not 0 <= score < math.inf]:
            raise ValueError(f"scores hold {wrong[0]}; they are mean losses in nats, at least 0")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The engine's own model if it writes all; otherwise a loop of two models.

        Raises:
            ValueError: there is nothing to compare a chunk with.
        """
        if self.draft_tokens == 0:
            return self.own(info)
        if 0 < self.alpha < 1 and not (self.scores or self.online) and info.draft_engine is not None:
            raise ValueError(f"atts with alpha {self.alpha} has no scores to compare with; let shoal calibrate "
                             "--for atts make them, set online, or take alpha 0 or 1")
        policy = ByChunk(float(self.alpha), self.draft_tokens, self.target_tokens, tuple(sorted(self.scores)),
                         self.online)
        recipe = self.switched(info, policy)
        parts = {one.name: getattr(recipe.loop, one.name) for one in fields(Switching)}
        return replace(recipe, loop=ChunkJudging(**parts))


@dataclass(frozen=True)
class ChunkJudging(Switching):
    """A loop of two models with judged chunks."""

    @override
    def kind(self) -> type[JudgingBatch]:
        from shoal_lab.loops.atts import JudgingBatch

        return JudgingBatch


@dataclass(frozen=True)
class ByChunk:
    """The policy of `ATTS`.

    Attributes:
        alpha: largest p-value at which the large model continues.
        small, large: tokens that each model writes in its turn.
        scores: ascending scores.
        online: whether those of a sequence's own chunks join them.
    """

    alpha: float
    small: int
    large: int
    scores: tuple[float, ...]
    online: bool = False

    def begin(self, seq: SequenceState) -> ChunkTurns:
        """Start with the small model's first chunk."""
        return ChunkTurns(self)

    def takes_over(self, score: float, own: Sequence[float] = ()) -> bool:
        """Whether the large model continues a chunk of that mean loss, after chunks of a sequence with `own` ones."""
        return p_value(sorted([*self.scores, *own]) if self.online else self.scores, score) <= self.alpha


class ChunkTurns:
    """The turns of one sequence; see `shoal_lab.loops.atts.JudgedTurns`."""

    def __init__(self, policy: ByChunk) -> None:
        self._policy, self._written = policy, 0
        self.large = False
        self.since: int | None = None
        self.losses = dict[int, float]()
        self.following: tuple[int, Tensor] | None = None
        self._own: list[float] = []

    def look(self, logits: Tensor) -> bool:
        """Whether the large model, which has read the chunk, continues it."""
        if self.since is None:
            return False
        self.since, score = None, math.fsum(self.losses.values()) / len(self.losses)
        self.large = self._policy.takes_over(score, self._own)
        self._own.append(score)
        return not self.large

    def wrote(self, seq: SequenceState, tokens: Sequence[int]) -> None:
        """Choose the next turn after these tokens."""
        self._written += len(tokens)
        if self._written < (self._policy.large if self.large else self._policy.small):
            return
        if self.large or self._policy.alpha > 0:
            self.large = not self.large
        if self.large and self._policy.alpha < 1:
            self.since, self.losses = len(seq.tokens) - self._written, {}
        self._written = 0
