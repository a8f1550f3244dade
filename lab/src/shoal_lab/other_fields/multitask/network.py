"""A slimmable encoder with two slimmable decoders: a narrower network is a slice of the same weights.

After Slimmable Networks (arXiv 1812.08928), with norms over channels instead of statistics for each width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (0.25, 0.5, 0.75, 1.0)
SIDE = 16
"""Pixels of a picture's side."""
_CHANNELS = 32


@dataclass(frozen=True)
class Widths:
    """A configuration: shares of the channels.

    Attributes:
        encoder: of the shared encoder.
        classes, pixels: of the decoders that name the digit and segment its pixels.

    Raises:
        ValueError: A width is none of `WIDTHS`.
    """

    encoder: float = 1.0
    classes: float = 1.0
    pixels: float = 1.0

    def __post_init__(self) -> None:
        for name, width in vars(self).items():
            if width not in WIDTHS:
                raise ValueError(f"{name} width {width}; it must be one of {', '.join(map(str, WIDTHS))}")

    @property
    def macs(self) -> int:
        """Multiplications that one picture costs, in the convolutions and the linear layer."""
        c, a, b = (int(width * _CHANNELS) for width in (self.encoder, self.classes, self.pixels))
        whole, half, quarter = SIDE**2, SIDE**2 // 4, SIDE**2 // 16
        encoder = 9 * (c // 2 * whole + c // 2 * c * half + c * c * half)
        return encoder + 9 * (c * a + a * a) * quarter + 10 * a + 9 * (c * b + b * b + 4 * b) * half


FULL, LEAST = Widths(), Widths(*[WIDTHS[0]] * 3)
ALL = tuple(Widths(encoder, classes, pixels) for encoder in WIDTHS for classes in WIDTHS for pixels in WIDTHS)


class SlimConv(nn.Conv2d):
    """A 3 x 3 convolution to any number of its first channels, from any number of its first inputs."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride, padding=1)

    def slim(self, x: Tensor, outputs: int) -> Tensor:
        """[n, outputs, height, width] from the channels that there are."""
        assert self.bias is not None
        return F.conv2d(x, self.weight[:outputs, : x.shape[1]], self.bias[:outputs], self.stride, self.padding)


class Network(nn.Module):
    """The encoder and both decoders at full width."""

    def __init__(self) -> None:
        super().__init__()
        c = _CHANNELS
        self.encoder = nn.ModuleList((SlimConv(1, c // 2), SlimConv(c // 2, c, stride=2), SlimConv(c, c)))
        self.classes = nn.ModuleList((SlimConv(c, c, stride=2), SlimConv(c, c)))
        self.named = nn.Linear(c, 10)
        self.pixels = nn.ModuleList((SlimConv(c, c), SlimConv(c, c)))
        self.drawn = SlimConv(c, 4)

    def encode(self, pictures: Tensor, width: float) -> Tensor:
        """Features [n, channels, 8, 8] of pictures [n, 1, 16, 16]."""
        wide = int(width * _CHANNELS)
        first = _layers(self.encoder[:1], pictures, wide // 2)
        return _layers(self.encoder[1:], first, wide)

    def decode(self, features: Tensor, widths: Widths) -> tuple[Tensor, Tensor]:
        """Logits [n, 10] of the digit, and [n, 16, 16] of each pixel's belonging to it."""
        classes, pixels = int(widths.classes * _CHANNELS), int(widths.pixels * _CHANNELS)
        pooled = _layers(self.classes, features, classes).mean((2, 3))
        told = F.linear(pooled, self.named.weight[:, :classes], self.named.bias)
        return told, F.pixel_shuffle(self.drawn.slim(_layers(self.pixels, features, pixels), 4), 2)[:, 0]

    def forward(self, pictures: Tensor, widths: Widths) -> tuple[Tensor, Tensor]:
        """As `decode`, from pictures [n, 1, 16, 16]."""
        return self.decode(self.encode(pictures, widths.encoder), widths)


def _layers(layers: nn.ModuleList, x: Tensor, outputs: int) -> Tensor:
    for layer in layers:
        assert isinstance(layer, SlimConv)
        x = _normed(layer.slim(x, outputs))
    return x


def _normed(x: Tensor) -> Tensor:
    """Scaled by the root of the mean square over channels, then rectified."""
    return F.relu(x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-4))


def task_loss(told: tuple[Tensor, Tensor], digits: Tensor, ink: Tensor) -> Tensor:
    """Cross-entropies of both tasks, weighed to be of one size."""
    return F.cross_entropy(told[0], digits) + 3 * F.binary_cross_entropy_with_logits(told[1], ink)


def together(network: Network, pictures: Tensor, digits: Tensor, ink: Tensor, others: list[Widths],
             invariant: float) -> Tensor:
    """The loss of a step over several configurations: the full one, the least one and some others (sandwich rule).

    Configuration-invariant distillation (section 3): features of a narrower encoder are drawn to the full encoder's,
    here channel by channel to those that the slice shares with it, which is a guess at the paper's form.

    Args:
        network: all of them.
        pictures, digits, ink: [n, 1, 16, 16], [n], [n, 16, 16].
        others: between full and least.
        invariant: weight of the distillation.
    """
    whole = network.encode(pictures, 1.0)
    total = task_loss(network.decode(whole, FULL), digits, ink)
    for widths in (LEAST, *others):
        features = network.encode(pictures, widths.encoder)
        total = total + task_loss(network.decode(features, widths), digits, ink)
        total = total + invariant * unlike(features, whole.detach())
    return total


def unlike(features: Tensor, whole: Tensor) -> Tensor:
    """Mean square between a narrower encoder's features and the same channels of the full one's."""
    return F.mse_loss(features, whole[:, : features.shape[1]])
