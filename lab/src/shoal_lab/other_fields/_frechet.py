"""Frechet distance of two sets of features (as FID, arXiv 1706.08500, and FVD, arXiv 1812.01717), with an interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

_GROUPS = 20


def frechet(real: Tensor, made: Tensor) -> float:
    """Distance of the Gaussians fitted to features [n, features]; it falls with n, so compare equal n only.

    Raises:
        ValueError: There are fewer items than features, and no covariance can be told.
    """
    for one in (real, made):
        if len(one) <= one.shape[1]:
            raise ValueError(f"{len(one)} items of {one.shape[1]} features; there must be more items than features")
    a, b = real.double().numpy(), made.double().numpy()
    first, second = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # The root of the product has the trace of the roots of its eigenvalues, which are real and not negative.
    roots = np.sqrt(np.clip(np.linalg.eigvals(first @ second).real, 0, None)).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(first) + np.trace(second) - 2 * roots)


def with_interval(real: Tensor, made: Tensor) -> dict[str, float | int]:
    """The distance with its 95 % interval, by a jackknife over groups of the made items.

    A bootstrap would be wrong here: items drawn twice have less spread, which is a distance of its own.
    """
    whole = frechet(real, made)
    return {"distance": whole, "half": jackknife([frechet(real, part) for part in _without_each(made)]),
            "n": len(made)}


def _without_each(made: Tensor) -> list[Tensor]:
    groups = np.arange(len(made)) % _GROUPS
    return [made[groups != group] for group in range(_GROUPS)]


def jackknife(parts: Sequence[float]) -> float:
    """Half the width of a 95 % interval, from a statistic with each group left out."""
    return float(1.96 * np.sqrt((len(parts) - 1) * np.var(parts)))


def mean_interval(values: Tensor) -> dict[str, float | int]:
    """Mean of values [n], with half of its 95 % interval."""
    return {"mean": float(values.float().mean()), "half": float(1.96 * values.float().std() / len(values) ** 0.5),
            "n": len(values)}
