"""The gated short convolution of LFM2 (arXiv 2511.23404, section 2): y_t = C_t * conv(B * x)_t, channel by channel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from shoal.model.layers.convolution import Convolution
from shoal.model.layers.mixer import Memory, Mixer, tokenwise


@dataclass(frozen=True)
class ShortConv(Mixer):
    """A gated convolution; the rows of `into` are B, C, x."""

    conv: Convolution

    @property
    @override
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        return (self.conv.state_size,)

    @override
    def recur(self, inputs: Tensor, state: Memory) -> Tensor:
        (window,) = state
        return tokenwise(lambda one: self._token(one, window), inputs, window.dtype)

    def _token(self, inputs: Tensor, window: Tensor) -> Tensor:
        b, c, x = inputs.chunk(3)
        return c * self.conv(b * x, window)
