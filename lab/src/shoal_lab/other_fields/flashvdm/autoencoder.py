"""A vector-set autoencoder of solids: surface points to a set of vectors, whose decoder answers queries at any point.

After 3DShape2VecSet (arXiv 2301.11445). There the vectors ask from points of the surface; here from learnt places that
begin as a grid, and attention begins local: so that a small flow and minutes of training do. The paper finds local
vectors and rests the selection of keys on them. Noise keeps latents smooth, in place of a divergence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_lab.other_fields._flow import Block

CHANNELS = 8
_OCTAVES, _NOISE = 4, 0.1
_PLACE = 4
"""Parts of a head's queries and keys that hold the place: three of the point, and its square."""


def fourier(points: Tensor) -> Tensor:
    """Features [..., 27] of points [..., 3]."""
    angles = (points[..., None] * torch.pi * 2.0 ** torch.arange(_OCTAVES)).flatten(-2)
    return torch.cat((points, angles.sin(), angles.cos()), dim=-1)


class LocalAttention(nn.Module):
    """Cross-attention between tokens at places, whose logits fall with the squared distance, learnt for each head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head = heads, width // heads
        narrow = width - heads * _PLACE
        self.query, self.key = nn.Linear(width, narrow), nn.Linear(width, narrow)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.fall = nn.Parameter(torch.linspace(1.4, 4.2, heads))

    def asked(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Queries [n, heads, tokens, width of a head] of tokens [n, tokens, width] at places [n, tokens, 3]."""
        fall = self.head**0.5 * self.fall.exp().view(-1, 1, 1)
        there = places[:, None]
        return torch.cat((self._split(self.query(tokens)), 2 * fall * there, (-fall).expand_as(
            there[..., :1].expand(-1, self.heads, -1, -1))), dim=-1)

    def memory(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, likewise."""
        there = places[:, None].expand(-1, self.heads, -1, -1)
        key = torch.cat((self._split(self.key(tokens)), there, there.square().sum(-1, keepdim=True)), dim=-1)
        return key, self._split(self.value(tokens))

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[n, tokens, width]."""
        found = F.scaled_dot_product_attention(query, key, value)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FieldDecoder(nn.Module):
    """Signed distances from a set of vectors; "efficient network design" (4.3): one thin cross-attention and MLP.

    Args:
        side: vectors along each side of the grid that their places begin as.
        width, heads, depth: of the transformer.
    """

    def __init__(self, side: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        axis = torch.linspace(-0.6, 0.6, side)
        self.places = nn.Parameter(torch.cartesian_prod(axis, axis, axis))
        self.into = nn.Linear(CHANNELS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.points = nn.Linear(3 + 6 * _OCTAVES, width)
        self.cross = LocalAttention(width, heads)
        self.out = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 1))

    def memory(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, heads, vectors, width of a head] that the queries attend to, from latents."""
        hidden = self.into(latents) + self.points(fourier(self.places))
        for block in self.blocks:
            hidden = block(hidden)
        return self.cross.memory(F.layer_norm(hidden, hidden.shape[-1:]), self.places.expand(len(latents), -1, -1))

    def ask(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [n, points, width] of points [n, points, 3], and their queries."""
        hidden = self.points(fourier(points))
        return hidden, self.cross.asked(hidden, points)

    def answer(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Distances [n, points] as `solids.learnt` gives them."""
        return self.out(hidden + self.cross.mixed(query, key, value))[..., 0]  # type: ignore[no-any-return]

    def forward(self, latents: Tensor, points: Tensor) -> Tensor:
        """Distances [n, points] at points [n, points, 3]; every query attends to all vectors."""
        return self.answer(*self.ask(points), *self.memory(latents))


class Autoencoder(nn.Module):
    """Both halves; arguments as the decoder has them."""

    def __init__(self, side: int = 4, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(3 + 6 * _OCTAVES, width), nn.GELU(), nn.Linear(width, width))
        self.cross = LocalAttention(width, heads)
        self.block = Block(width, heads)
        self.out = nn.Linear(width, CHANNELS)
        self.decoder = FieldDecoder(side, width, heads, depth)

    def encode(self, surface: Tensor) -> Tensor:
        """Latents [n, vectors, CHANNELS], of unit variance, from surface points [n, points, 3]."""
        places = self.decoder.places.expand(len(surface), -1, -1)
        asked = self.points(fourier(places))
        mixed = self.cross.mixed(self.cross.asked(asked, places), *self.cross.memory(
            self.points(fourier(surface)), surface))
        return F.layer_norm(self.out(self.block(asked + mixed)), (CHANNELS,))

    def loss(self, surface: Tensor, points: Tensor, truth: Tensor) -> Tensor:
        """L1 of the distances."""
        latents = self.encode(surface)
        return F.l1_loss(self.decoder(latents + _NOISE * torch.randn_like(latents), points), truth)
