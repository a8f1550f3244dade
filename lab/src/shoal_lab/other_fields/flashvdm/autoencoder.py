"""A vector-set autoencoder of solids: surface points to a set of vectors, whose decoder answers queries at any point.

After 3DShape2VecSet (arXiv 2301.11445). There the vectors ask from points of the surface; here from learnt places that
begin as a grid, so that vectors have an order, and a small flow learns them in minutes. It leaves vectors local, which
the selection of keys rests on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_lab.other_fields._flow import Attention, Block

CHANNELS = 8
_OCTAVES = 4


def fourier(points: Tensor) -> Tensor:
    """Features [..., 27] of points [..., 3]."""
    angles = (points[..., None] * torch.pi * 2.0 ** torch.arange(_OCTAVES)).flatten(-2)
    return torch.cat((points, angles.sin(), angles.cos()), dim=-1)


class FieldDecoder(nn.Module):
    """Signed distances from a set of vectors; "efficient network design" (4.3): one thin cross-attention and MLP."""

    def __init__(self, side: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        axis = torch.linspace(-0.6, 0.6, side)
        self.places = nn.Parameter(torch.cartesian_prod(axis, axis, axis))
        self.into = nn.Linear(CHANNELS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.points = nn.Linear(3 + 6 * _OCTAVES, width)
        self.cross = Attention(width, heads)
        self.out = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 1))

    def memory(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, heads, vectors, width of a head] that the queries attend to, from latents."""
        hidden = self.into(latents) + self.points(fourier(self.places))
        for block in self.blocks:
            hidden = block(hidden)
        key, value = self.cross.key_value(F.layer_norm(hidden, hidden.shape[-1:])).chunk(2, dim=-1)
        return self.cross.split(key), self.cross.split(value)

    def ask(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [n, points, width] of points, and queries [n, heads, points, width of a head]."""
        hidden = self.points(fourier(points))
        return hidden, self.cross.split(self.cross.query(hidden))

    def answer(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Distances [n, points] as `solids.learnt` gives them, from attended values [n, heads, points, ...]."""
        return self.out(hidden + self.cross.out(mixed.transpose(1, 2).flatten(2)))[..., 0]  # type: ignore[no-any-return]

    def forward(self, latents: Tensor, points: Tensor) -> Tensor:
        """Distances [n, points] at points [n, points, 3]; every query attends to all vectors."""
        hidden, query = self.ask(points)
        return self.answer(hidden, F.scaled_dot_product_attention(query, *self.memory(latents)))


class Autoencoder(nn.Module):
    """Both halves.

    Args:
        side: vectors along each side of the grid that their places begin as.
        width, heads, depth: of encoder and decoder.
    """

    def __init__(self, side: int = 4, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(3 + 6 * _OCTAVES, width), nn.GELU(), nn.Linear(width, width))
        self.cross = Attention(width, heads)
        self.block = Block(width, heads)
        self.out = nn.Linear(width, 2 * CHANNELS)
        self.decoder = FieldDecoder(side, width, heads, depth)

    def encode(self, surface: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance [n, vectors, CHANNELS] from surface points [n, points, 3]."""
        asked = self.points(fourier(self.decoder.places)).expand(len(surface), -1, -1)
        hidden = self.block(asked + self.cross(asked, self.points(fourier(surface))))
        mean, spread = self.out(F.layer_norm(hidden, hidden.shape[-1:])).chunk(2, dim=-1)
        return mean, spread.clamp(-8, 2)

    def loss(self, surface: Tensor, points: Tensor, truth: Tensor) -> Tensor:
        """L1 of the distances, and a little of the divergence to a normal distribution."""
        mean, spread = self.encode(surface)
        told = self.decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp(), points)
        return F.l1_loss(told, truth) + 1e-3 * 0.5 * (mean**2 + spread.exp() - spread - 1).mean()
