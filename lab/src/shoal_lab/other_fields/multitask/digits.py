"""Scikit-learn's digits, larger, moved, under strokes that are none and under noise: which digit, and which pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_lab.other_fields.multitask.network import SIDE

_NOISE, _MOVED, _INK = 0.4, 2, 0.35


@dataclass(frozen=True)
class Pictures:
    """Pictures with both answers.

    Attributes:
        seen: [n, 1, 16, 16].
        digits: [n].
        ink: [n, 16, 16], 1 where the digit is.
    """

    seen: Tensor
    digits: Tensor
    ink: Tensor


class Digits:
    """Digits of three parts: 997 to train on, 300 to choose widths by, 500 to test."""

    def __init__(self, seed: int) -> None:
        from sklearn.datasets import load_digits

        kept = load_digits()
        order = np.random.default_rng(seed).permutation(len(kept.target))
        small = torch.tensor(kept.images[order], dtype=torch.float32)[:, None] / 16
        self._drawn = F.interpolate(small, (SIDE, SIDE), mode="bilinear", align_corners=False)[:, 0]
        self._digits = torch.tensor(kept.target[order])
        self._parts = {"train": (0, 997), "choose": (997, 1297), "test": (1297, len(order))}

    def pictures(self, part: str, generator: torch.Generator, n: int | None = None) -> Pictures:
        """All of a part, or n of it drawn at random."""
        first, last = self._parts[part]
        rows = torch.arange(first, last) if n is None else torch.randint(first, last, (n,), generator=generator)
        clean = _moved(self._drawn[rows], generator)
        seen = torch.maximum(clean, 0.8 * _strokes(len(rows), generator))
        seen = seen + _NOISE * torch.randn(seen.shape, generator=generator)
        return Pictures(seen[:, None], self._digits[rows], (clean > _INK).float())


def _moved(drawn: Tensor, generator: torch.Generator) -> Tensor:
    by = torch.randint(-_MOVED, _MOVED + 1, (2, len(drawn), 1), generator=generator)
    rows, columns = ((torch.arange(SIDE) + one) for one in by)
    wide = F.pad(drawn, (_MOVED,) * 4)
    return wide[torch.arange(len(drawn))[:, None, None], (rows + _MOVED)[:, :, None], (columns + _MOVED)[:, None]]


def _strokes(n: int, generator: torch.Generator) -> Tensor:
    """Two straight strokes across each picture, [n, 16, 16]."""
    angle = torch.pi * torch.rand(n, 2, 1, 1, generator=generator)
    offset = SIDE * (torch.rand(n, 2, 1, 1, generator=generator) - 0.5)
    y, x = torch.meshgrid(*[torch.arange(SIDE) - SIDE / 2] * 2, indexing="ij")
    return ((x * angle.cos() + y * angle.sin() - offset).abs() < 0.6).any(1).float()
