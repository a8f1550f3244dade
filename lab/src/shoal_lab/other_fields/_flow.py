"""Rectified flow (Liu et al., arXiv 2209.03003) over sets of tokens, by a small transformer (arXiv 2212.09748).

Time 0 is noise and time 1 is data: x_t = (1 - t) noise + t data, and the velocity to be learnt is data - noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Velocity = Callable[[Tensor, Tensor], Tensor]
"""The velocity at tokens [n, tokens, channels] and times [n]."""


class Attention(nn.Module):
    """Attention of tokens [n, tokens, width] to others, or to themselves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def split(self, projected: Tensor) -> Tensor:
        """[n, tokens, width] as [n, heads, tokens, width of a head]."""
        return projected.unflatten(-1, (self.heads, -1)).transpose(-3, -2)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        """[n, tokens, width]."""
        key, value = self.key_value(others).chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(self.split(self.query(tokens)), self.split(key), self.split(value))
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer block; with `timed`, its norms are shifted, scaled and gated by the time (adaLN-Zero)."""

    def __init__(self, width: int, heads: int, timed: bool = False) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.timed = nn.Linear(width, 6 * width) if timed else None
        if self.timed is not None:
            nn.init.zeros_(self.timed.weight)
            nn.init.zeros_(self.timed.bias)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        """[n, tokens, width], with an embedding of the time [n, width]."""
        shift, scale, gate, shift2, scale2, gate2 = (
            (torch.tensor(0.0), torch.tensor(0.0), torch.tensor(1.0)) * 2 if self.timed is None or time is None
            else self.timed(F.silu(time))[:, None].chunk(6, dim=-1))
        inner = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        x = x + gate * self.attention(inner, inner)
        return x + gate2 * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2)  # type: ignore[no-any-return]


class FlowTransformer(nn.Module):
    """Velocity of a flow over tokens.

    Args:
        tokens, channels: shape of what is generated.
        width, depth, heads: of the transformer.
    """

    def __init__(self, tokens: int, channels: int, width: int, depth: int, heads: int = 4) -> None:
        super().__init__()
        self.width = width
        self.into, self.out = nn.Linear(channels, width), nn.Linear(width, channels)
        self.position = nn.Parameter(0.5 * torch.randn(tokens, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads, timed=True) for _ in range(depth))
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def features(self, x: Tensor, time: Tensor, added: Sequence[Tensor] = ()) -> list[Tensor]:
        """[n, tokens, width] after each block; `added` is added before each block, one tensor for each."""
        rates = torch.exp(torch.linspace(0, -math.log(1000), self.width // 2)) * 100
        angles = time[:, None] * rates
        clock = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1))
        hidden, found = self.into(x) + self.position, []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden + added[index] if added else hidden, clock)
            found.append(hidden)
        return found

    def forward(self, x: Tensor, time: Tensor, added: Sequence[Tensor] = ()) -> Tensor:
        """[n, tokens, channels]."""
        return self.velocity(self.features(x, time, added)[-1])

    def velocity(self, last: Tensor) -> Tensor:
        """The velocity from the last block's features."""
        return self.out(F.layer_norm(last, last.shape[-1:]))  # type: ignore[no-any-return]


def flow_loss(velocity: Velocity, data: Tensor) -> Tensor:
    """Mean square of the velocity's error, on data [n, tokens, channels]."""
    x, time, wanted = noised(data)
    return F.mse_loss(velocity(x, time), wanted)


def noised(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A point of each path at a random time, the times [n], and the velocities to be learnt."""
    time, noise = torch.sigmoid(torch.randn(len(data))), torch.randn_like(data)
    return torch.lerp(noise, data, time.view(-1, *[1] * (data.ndim - 1))), time, data - noise


def sample(velocity: Velocity, noise: Tensor, steps: int) -> Tensor:
    """Data from noise by Euler's method.

    Raises:
        ValueError: There is no step.
    """
    if steps < 1:
        raise ValueError(f"steps {steps}; it must be 1 or more")
    x = noise
    with torch.inference_mode():
        for step in range(steps):
            x = x + velocity(x, torch.full((len(x),), step / steps)) / steps
    return x
