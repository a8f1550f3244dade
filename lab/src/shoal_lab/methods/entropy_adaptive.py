"""Entropy-adaptive decoding: a small model writes while it is sure, a large one otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoal.decode.recipe import Recipe
from shoal.methods.common.limits import Number, Positions
from shoal.types import ModelInfo
from shoal_lab.components.signals import NATS_PER_BIT, Rolling, entropy
from shoal_lab.methods._switching import SwitchingMethod

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState


@dataclass(frozen=True, repr=False)
class EntropyAdaptive(SwitchingMethod):
    """The smaller model writes while the mean entropy of the last few tokens is at most tau; the engine's own above.

    The entropy before each token is that of the model whose turn it is, before temperature and truncation. A model that
    takes over reads the other's tokens in one forward; until then it does nothing. Nobody verifies the smaller one's
    tokens. That saves forwards, and costs the difference between the two models.

    Attributes:
        tau: bits; below 0 the engine's own model writes all, at infinity the smaller one.
        window: tokens of the mean, at least 1.
        dwell: least tokens that a model writes before it hands over, at least 1.
        start: who begins: "draft", the smaller model, or "target", the engine's own.
    """

    name: ClassVar[str] = "entropy_adaptive"
    paper: ClassVar[str] = "arXiv 2502.06833"

    tau: Number = 1.0
    window: Positions = 5
    dwell: Positions = 1
    start: Literal["draft", "target"] = "draft"

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isnan(self.tau):
            raise ValueError("tau is nan; it must be a number of bits, below 0 for the engine's own model alone")
        for option in ("window", "dwell"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} is {getattr(self, option)}; it must be at least 1 token")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The engine's own model if it writes all; otherwise a loop of two models."""
        if self.tau < 0:
            return self.own(info)
        begins = self.start == "target" and self.tau < math.inf
        return self.switched(info, ByEntropy(self.tau * NATS_PER_BIT, self.window, self.dwell, begins))


@dataclass(frozen=True)
class ByEntropy:
    """The policy of `EntropyAdaptive`.

    Attributes:
        nats: largest mean with which the small model goes on.
        window, dwell: numbers of tokens.
        large: whether the large model begins.
    """

    nats: float
    window: int
    dwell: int
    large: bool

    def begin(self, seq: SequenceState) -> EntropyTurns:
        """Start with the first model."""
        return EntropyTurns(self)


class EntropyTurns:
    """The turns of one sequence."""

    def __init__(self, policy: ByEntropy) -> None:
        self._policy, self._rolling = policy, Rolling(policy.window)
        self.large, self._written, self._looked = policy.large, 0, False

    def look(self, logits: Tensor) -> bool:
        """One entropy for each token: that of the model that was asked first."""
        if self._looked:
            return False
        self._looked = True
        self._rolling.push(float(entropy(logits)))
        over = self._written >= self._policy.dwell and self.large != (self._rolling.mean > self._policy.nats)
        if over:
            self.large, self._written = not self.large, 0
        return over

    def wrote(self, seq: SequenceState, tokens: Sequence[int]) -> None:
        """Choose the next turn after these tokens."""
        self._written += len(tokens)
        self._looked = False
