"""Random solids by their exact signed distance, in the cube from -1 to 1: one of four kinds of body, or some united."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TRUNCATED = 0.25
"""Distances are learnt up to this, as a share of it."""


@dataclass(frozen=True)
class Solids:
    """Solids of some bodies each.

    Attributes:
        kind: [n, bodies]; 0 box, 1 ball, 2 torus, 3 cylinder.
        centre, size: [n, bodies, 3].
        turn: [n, bodies], radians around the third axis.
    """

    kind: Tensor
    centre: Tensor
    size: Tensor
    turn: Tensor

    @classmethod
    def random(cls, n: int, generator: torch.Generator, bodies: int = 1) -> Solids:
        """Bodies of half-widths 0.25 to 0.5, within the cube."""
        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator)
        return cls(torch.randint(4, (n, bodies), generator=generator), 0.4 * rand(n, bodies, 3) - 0.2,
                   0.25 + 0.25 * rand(n, bodies, 3), torch.pi * rand(n, bodies))

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, rows: Tensor | slice) -> Solids:
        return Solids(self.kind[rows], self.centre[rows], self.size[rows], self.turn[rows])

    def distance(self, points: Tensor) -> Tensor:
        """Signed distance [n, points], negative inside, of points [n, points, 3]; within a solid a lower bound."""
        at = points[:, None] - self.centre[:, :, None]
        cos, sin = self.turn.cos()[..., None], self.turn.sin()[..., None]
        x, y, z = cos * at[..., 0] + sin * at[..., 1], cos * at[..., 1] - sin * at[..., 0], at[..., 2]
        a, b, c = (self.size[..., axis, None] for axis in range(3))
        flat = _length(x, y)
        bodies = torch.stack((
            _corner(x.abs() - a, y.abs() - b, z.abs() - c), _length(flat, z) - a,
            _length(flat - a, z) - 0.4 * a, _corner(flat - a, z.abs() - b)))
        chosen = bodies.gather(0, self.kind[None, :, :, None].expand(1, *bodies.shape[1:]))[0]
        return chosen.amin(1)

    def surface(self, points: int, generator: torch.Generator) -> Tensor:
        """Points [n, points, 3] on the surfaces: the nearest of random ones, moved along the gradient of distance."""
        near = 1.6 * torch.rand(len(self), 8 * points, 3, generator=generator) - 0.8
        chosen = self.distance(near).abs().topk(points, largest=False).indices
        found = near.gather(1, chosen[..., None].expand(-1, -1, 3))
        for _ in range(2):
            found = found.detach().requires_grad_()
            distance = self.distance(found)
            slope, = torch.autograd.grad(distance.sum(), found)
            found = found - distance.detach()[..., None] * slope
        return found.detach()


def _length(*parts: Tensor) -> Tensor:
    return (sum(part * part for part in parts) + 1e-12).sqrt()  # type: ignore[union-attr]


def _corner(*parts: Tensor) -> Tensor:
    """Distance to what is bounded by planes along the axes, from the signed distances to them."""
    outside = _length(*(part.clamp(min=0) for part in parts))
    return outside + torch.stack(parts).amax(0).clamp(max=0)


def learnt(distance: Tensor) -> Tensor:
    """What the decoder learns to say of a distance: -1 to 1."""
    return (distance / TRUNCATED).clamp(-1, 1)
