"""The short convolution along a sequence that most recurrent mixers begin with: each channel by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Convolution:
    """y_t = sum over j < w of weight_j * x_(t - w + 1 + j), plus a bias. Its state are the last w - 1 inputs.

    Attributes:
        weight: [w, C], the last row for a token's own input; a checkpoint has [C, 1, w].
        bias: [C], or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def state_size(self) -> tuple[int, int]:
        """[w - 1, C], older inputs first."""
        return len(self.weight) - 1, self.weight.shape[1]

    def __call__(self, x: Tensor, window: Tensor) -> Tensor:
        """The output [C] for a token's `x` [C]; `window` takes it up."""
        inputs = torch.cat([window, x[None]])
        window.copy_(inputs[1:])
        out = (inputs * self.weight).sum(0)
        return out if self.bias is None else out + self.bias


def channels_last(weight: Tensor) -> Tensor:
    """The weight of a checkpoint's convolution, [C, 1, w], as [w, C]."""
    return weight[:, 0].t().contiguous()
