"""Videos of two shapes that move straight and bounce off the borders, drawn by formulas at any resolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FRAMES, HIGH, LOW = 8, 24, 12
"""Frames of a video, and pixels of a side in the second stage and in the first."""
_COMPONENTS = 16


def videos(n: int, generator: torch.Generator) -> Tensor:
    """[n, 1, FRAMES, HIGH, HIGH], 0 to 1: a disc and a square, of random sizes, shades, places and velocities."""
    def rand(*shape: int) -> Tensor:
        return torch.rand(n, 2, *shape, generator=generator)

    radius = 0.12 + 0.1 * rand(1, 1, 1)
    angle, speed = 2 * torch.pi * rand(1), 0.03 + 0.07 * rand(1, 1)
    velocity = speed * torch.stack((angle.cos(), angle.sin()), dim=2)
    way = 0.6 * rand(2, 1) + velocity * torch.arange(FRAMES)
    lane = 0.2 + 0.6 * (1 - (way / 0.6 % 2 - 1).abs())
    y, x = torch.meshgrid(*[(torch.arange(HIGH) + 0.5) / HIGH] * 2, indexing="ij")
    dy, dx = y - lane[:, :, 0, :, None, None], x - lane[:, :, 1, :, None, None]
    away = torch.stack(((dy**2 + dx**2).sqrt()[:, 0], torch.maximum(dy.abs(), dx.abs())[:, 1]), dim=1)
    drawn = torch.sigmoid((radius - away) * HIGH * 2) * (0.5 + 0.5 * rand(1, 1, 1))
    return drawn.amax(1, keepdim=True)


def lower(clips: Tensor) -> Tensor:
    """The same videos at half the resolution."""
    return F.avg_pool3d(clips, (1, 2, 2))


class Features:
    """Fixed features of videos: a random, untrained convolution net, and the principal components of real videos."""

    def __init__(self, real: Tensor) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._net = nn.Sequential(nn.Conv3d(1, 16, 3, (1, 2, 2)), nn.ReLU(), nn.Conv3d(16, 32, 3, (1, 2, 2)),
                                      nn.ReLU(), nn.AdaptiveAvgPool3d((4, 3, 3)), nn.Flatten())
        raw = self._raw(real)
        self._mean, self._spread = raw.mean(0), raw.std(0) + 1e-3 * raw.std()
        scaled = (raw - self._mean) / self._spread
        self._basis = torch.linalg.svd(scaled, full_matrices=False)[2][:_COMPONENTS].T

    def __call__(self, clips: Tensor) -> Tensor:
        """[n, 16], of variance 1 on average over real videos."""
        found = (self._raw(clips) - self._mean) / self._spread @ self._basis
        return torch.as_tensor(found / self._basis.shape[0] ** 0.5)

    def _raw(self, clips: Tensor) -> Tensor:
        with torch.inference_mode():
            return torch.cat([self._net(part) for part in clips.split(64)])
