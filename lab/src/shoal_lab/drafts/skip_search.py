"""Search for the sublayers that a draft can skip: ask for a set, tell its score."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from shoal_lab.drafts.skips import Skips, sublayers

_CANDIDATES = 64
_NOISE = 1e-2
_MOST_SEEN = 256


class SkipSearch:
    """Random search over sets of attention and MLP sublayers, with occasional Bayesian guesses.

    The first and the last layer stay whole. A Bayesian guess is the candidate with the highest expected improvement
    under a Gaussian process whose covariance falls with the number of sublayers in which two sets differ.

    Args:
        num_layers: L.
        start: the first set.
        seed: of the random choices.
        fixed: whether all sets have the size of `start`; otherwise any size is allowed.
        bayes_every: one in this many sets is a Bayesian guess; 0 for none.

    Attributes:
        best, score: the best set so far and its score, -inf before the first.
        tried: number of sets told.
        since: sets told since the best one.
    """

    def __init__(
        self, num_layers: int, start: Skips, seed: int = 0, *, fixed: bool = True, bayes_every: int = 25
    ) -> None:
        self._parts = sublayers(num_layers)
        self._fixed, self._every, self._random = fixed, bayes_every, random.Random(seed)
        self._seen: list[list[bool]] = []
        self._scores: list[float] = []
        self.best, self.score, self.tried, self.since = start, -math.inf, 0, 0

    def ask(self) -> Skips:
        """A set to try; `start` comes first."""
        if not self.tried:
            return self.best
        if self._every and self.tried % self._every == 0:
            return self._guess()
        return self._neighbour() if self._random.random() < 0.5 else self._any()

    def tell(self, skips: Skips, score: float) -> None:
        """Record the score of a set; higher is better."""
        self.tried += 1
        self.since += 1
        self._seen.append(self._bits(skips))
        self._scores.append(score)
        del self._seen[:-_MOST_SEEN], self._scores[:-_MOST_SEEN]
        if score > self.score:
            self.best, self.score, self.since = skips, score, 0

    def _bits(self, skips: Skips) -> list[bool]:
        chosen = skips.parts()
        return [part in chosen for part in self._parts]

    def _any(self) -> Skips:
        size = self.best.size if self._fixed else self._random.randint(0, len(self._parts))
        return Skips.of(self._random.sample(self._parts, min(size, len(self._parts))))

    def _neighbour(self) -> Skips:
        """The best set with one or two sublayers exchanged, or flipped if the size is free."""
        chosen = set(self.best.parts())
        for _ in range(self._random.randint(1, 2)):
            inside, outside = sorted(chosen), [part for part in self._parts if part not in chosen]
            drop = bool(inside) and (self._fixed or self._random.random() < 0.5)
            if drop:
                chosen.remove(self._random.choice(inside))
            if outside and (self._fixed or not drop):
                chosen.add(self._random.choice(outside))
        return Skips.of(chosen)

    def _guess(self) -> Skips:
        makers = [self._any, self._neighbour]
        candidates = [makers[i % 2]() for i in range(_CANDIDATES)]
        bits = torch.tensor([self._bits(one) for one in candidates])
        gain = expected_improvement(torch.tensor(self._seen), self._scores, bits)
        return candidates[int(gain.argmax())]


def expected_improvement(seen: Tensor, scores: list[float], candidates: Tensor) -> Tensor:
    """Expected improvement of each candidate over the best score, in standard deviations of the scores.

    Args:
        seen: bool [n, parts]; `scores` has one number for each.
        candidates: bool [m, parts].

    Returns:
        float64 [m].
    """
    values = torch.tensor(scores, dtype=torch.float64)
    values = (values - values.mean()) / (values.std(correction=0) + 1e-12)
    inner = _covariance(seen, seen) + _NOISE * torch.eye(len(seen), dtype=torch.float64)
    cross = _covariance(candidates, seen)
    factor = torch.linalg.cholesky(inner)
    mean = cross @ torch.cholesky_solve(values[:, None], factor)[:, 0]
    shared = torch.linalg.solve_triangular(factor, cross.T, upper=False).square().sum(0)
    spread = (1 - shared).clamp_min(1e-12).sqrt()
    ahead = (mean - values.max()) / spread
    normal = torch.distributions.Normal(0.0, 1.0)
    gain: Tensor = spread * (ahead * normal.cdf(ahead) + normal.log_prob(ahead).exp())
    return gain


def _covariance(left: Tensor, right: Tensor) -> Tensor:
    differ = (left[:, None] != right[None]).sum(-1, dtype=torch.float64)
    return torch.exp(-differ / max(1.0, left.shape[1] / 4))
