"""How sure a model is at one position or many, and how unusual that is compared with earlier positions.

Scores are logits [..., V], banned tokens at -inf; entropies and log-likelihoods are in nats. Imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NATS_PER_BIT = math.log(2)


def probabilities(scores: Tensor) -> Tensor:
    """Probabilities [..., V]; half types are computed in float32."""
    return _widened(scores).softmax(-1)


def log_probabilities(scores: Tensor) -> Tensor:
    """Log-probabilities [..., V]; half types are computed in float32."""
    return _widened(scores).log_softmax(-1)


def entropy(scores: Tensor) -> Tensor:
    """Entropy [...] of the softmax of scores [..., V]."""
    probs = probabilities(scores)
    return -probs.xlogy(probs).sum(-1)


def log_likelihood(scores: Tensor, tokens: Tensor) -> Tensor:
    """Log-likelihood [...] of tokens [...], int64."""
    return log_probabilities(scores).gather(-1, tokens[..., None])[..., 0]


def p_value(calibration: Sequence[float], value: float) -> float:
    """Conformal p-value: the share of values, this one included, that are at least as large.

    If the value is exchangeable with the calibration's, it is at most t with a probability of at most t (Vovk,
    Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005).

    Args:
        calibration: ascending.
        value: the new one.
    """
    return (1 + len(calibration) - bisect_left(calibration, value)) / (1 + len(calibration))


class Rolling:
    """The last values of a signal.

    Args:
        size: how many are kept, at least 1.
    """

    def __init__(self, size: int) -> None:
        self._values = deque[float](maxlen=size)

    def push(self, value: float) -> None:
        """Add a value; beyond `size` the oldest is dropped."""
        self._values.append(value)

    @property
    def mean(self) -> float:
        """Of those there are; 0.0 of none."""
        return math.fsum(self._values) / len(self._values) if self._values else 0.0

    def percentile(self, share: float) -> float:
        """The smallest value that at least so large a share, in [0, 1], does not exceed; 0.0 of none."""
        ascending = sorted(self._values)
        return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else 0.0


def _widened(scores: Tensor) -> Tensor:
    return scores if scores.element_size() >= 4 else scores.float()
