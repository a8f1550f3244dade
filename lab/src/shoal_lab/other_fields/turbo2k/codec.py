"""Autoencoders of videos: blocks of pixels to a few channels each, with the blocks around them in view."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_lab.other_fields.turbo2k.videos import lower

_WIDTH = 48
Grid = tuple[int, int, int]
"""Sizes along time, height and width."""


class Codec(nn.Module):
    """Both halves.

    Args:
        block: frames, rows and columns of pixels that one token stands for.
        channels: of a token.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, block: Grid, channels: int) -> None:
        super().__init__()
        self.block, self.channels = block, channels
        self.into = nn.Sequential(nn.Conv3d(1, _WIDTH, block, block), nn.GELU(),
                                  nn.Conv3d(_WIDTH, _WIDTH, 3, padding=1), nn.GELU(), nn.Conv3d(_WIDTH, channels, 1))
        self.out = nn.Sequential(nn.Conv3d(channels, _WIDTH, 3, padding=1), nn.GELU(),
                                 nn.Conv3d(_WIDTH, _WIDTH, 3, padding=1), nn.GELU(),
                                 nn.ConvTranspose3d(_WIDTH, 8, block, block), nn.GELU(), nn.Conv3d(8, 1, 3, padding=1))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("spread", torch.ones(channels))

    @property
    def compression(self) -> float:
        """Pixels for each number of a token."""
        return self.block[0] * self.block[1] * self.block[2] / self.channels

    def grid(self, clips: Tensor) -> Grid:
        """Tokens along each axis of videos [n, 1, frames, height, width].

        Raises:
            ValueError: A side is no multiple of the block's.
        """
        sides = tuple(clips.shape[2:])
        if any(side % part for side, part in zip(sides, self.block, strict=True)):
            raise ValueError(f"videos of {' x '.join(map(str, sides))}; sides must be multiples of the block "
                             f"{' x '.join(map(str, self.block))}")
        first, second, third = (side // part for side, part in zip(sides, self.block, strict=True))
        return first, second, third

    def encode(self, clips: Tensor) -> Tensor:
        """Tokens [n, tokens, channels] of videos, of mean 0 and variance 1 once `settle` was called."""
        self.grid(clips)
        found: Tensor = self.into(clips).flatten(2).transpose(1, 2)
        return (found - self.mean) / self.spread

    def decode(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Videos from tokens on a grid."""
        back = tokens * self.spread + self.mean
        return self.out(as_grid(back, grid))  # type: ignore[no-any-return]

    def loss(self, clips: Tensor) -> Tensor:
        """Mean square error at both resolutions, and a little of the tokens' size; tokens are noised a little."""
        total = torch.tensor(0.0)
        for some in (clips, lower(clips)):
            tokens = self.encode(some)
            told = self.decode(tokens + 0.05 * torch.randn_like(tokens), self.grid(some))
            total = total + F.mse_loss(told, some) + 1e-4 * tokens.square().mean()
        return total

    def settle(self, clips: Tensor) -> None:
        """Take mean and spread of the channels from videos."""
        with torch.inference_mode():
            tokens = self.encode(clips)
            mean, spread = tokens.mean((0, 1)), tokens.std((0, 1))
        self.mean.copy_(mean)
        self.spread.copy_(spread)


def as_grid(tokens: Tensor, grid: Grid) -> Tensor:
    """Tokens [n, tokens, channels] as [n, channels, *grid]."""
    return tokens.transpose(1, 2).unflatten(2, grid)  # type: ignore[no-any-return]


def resized(tokens: Tensor, grid: Grid, other: Grid) -> Tensor:
    """Tokens of a grid at the places of another: averaged where that is coarser, interpolated where it is finer."""
    there = as_grid(tokens, grid)
    first, second, third = (min(pair) for pair in zip(grid, other, strict=True))
    there = F.adaptive_avg_pool3d(there, (first, second, third))
    return F.interpolate(there, other, mode="trilinear", align_corners=False).flatten(2).transpose(1, 2)
