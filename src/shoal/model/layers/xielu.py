"""xIELU (arXiv 2411.13010): an activation whose curves above and below 0 have a learned share each (Apertus).

From transformers' module: a x^2 + b x above 0, and c (e^x - 1 - x) + b x below. Numbers nearer to 0 than `eps`, which
is below 0, have the exponential of `eps`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Xielu:
    """The activation of one layer.

    Attributes:
        above, below: a and c.
        slope: b.
        eps: see above.
    """

    above: float
    below: float
    slope: float
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """The activations, in the shape and dtype of `x`."""
        curve = (torch.expm1(x.clamp(max=self.eps)) - x) * self.below
        return torch.where(x > 0, x * x * self.above, curve) + x * self.slope
