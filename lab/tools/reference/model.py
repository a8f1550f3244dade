"""A Llama whose layers are stacked in one tensor per kind, so that an optimizer can treat them all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LayerFunction = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the model; `hidden` must be `heads` times an even head size."""

    layers: int = 24
    hidden: int = 160
    ffn: int = 432
    heads: int = 5
    vocab: int = 2048
    context: int = 512
    eps: float = 1e-6
    theta: float = 10_000.0


def rotary(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding, [length, head size] each, float32."""
    half = shape.hidden // shape.heads // 2
    frequency = shape.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [batch, heads, length, head size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, calculated in float32, in x's dtype again."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [batch, heads, length, head size].

    Written out, because the backward pass of the fused kernel is slow on a CPU.
    """
    length = q.shape[-2]
    future = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    return ((q * q.shape[-1] ** -0.5) @ k.mT + future).softmax(-1) @ v


def layer(
    x: Tensor,
    qkv: Tensor,
    o: Tensor,
    up: Tensor,
    down: Tensor,
    norms: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    eps: float,
) -> Tensor:
    """One decoder layer on the residual stream x [batch, length, hidden]; matrices are [out, in]."""
    batch, length, hidden = x.shape
    h = F.linear(norm(x, norms[0], eps).to(qkv.dtype), qkv).view(batch, length, 3, heads, hidden // heads)
    q, k, v = h.permute(2, 0, 3, 1, 4).unbind(0)
    a = attend(turn(q, cos, sin), turn(k, cos, sin), v)
    x = x + F.linear(a.transpose(1, 2).reshape(batch, length, hidden), o)
    gate, value = F.linear(norm(x, norms[1], eps).to(up.dtype), up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * value, down)


class Model(nn.Module):
    """Decoder with tied embeddings; `qkv` is [layers, 3 * hidden, hidden], and so on."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        draw = torch.Generator().manual_seed(seed)
        layers, hidden, ffn = shape.layers, shape.hidden, shape.ffn

        def matrix(*size: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, generator=draw) * scale * size[-1] ** -0.5)

        self.embed = nn.Parameter(torch.randn(shape.vocab, hidden, generator=draw) * 0.02)
        self.qkv = matrix(layers, 3 * hidden, hidden)
        self.o = matrix(layers, hidden, hidden, scale=(2 * layers) ** -0.5)
        self.up = matrix(layers, 2 * ffn, hidden)
        self.down = matrix(layers, hidden, ffn, scale=(2 * layers) ** -0.5)
        self.norms = nn.Parameter(torch.ones(layers, 2, hidden))
        self.final = nn.Parameter(torch.ones(hidden))
        self.layer: LayerFunction = layer

    def hidden_states(self, ids: Tensor, dtype: torch.dtype, run: list[bool] | None = None) -> list[Tensor]:
        """The hidden states after each layer: `layers` tensors [batch, length, hidden]. `run` False skips a layer."""
        shape = self.shape
        cos, sin = (part.to(dtype) for part in rotary(shape, ids.shape[1]))
        x = F.embedding(ids, self.embed).to(dtype)
        stacks = [stack.to(dtype).unbind(0) for stack in (self.qkv, self.o, self.up, self.down)]
        states = []
        for index, (matrices, norms) in enumerate(zip(zip(*stacks, strict=True), self.norms.unbind(0), strict=True)):
            if run is None or run[index]:
                x = self.layer(x, *matrices, norms, cos, sin, shape.heads, shape.eps)
            states.append(x)
        return states

    def logits(self, x: Tensor) -> Tensor:
        """Scores [..., vocab] of the next token in x's dtype, after the last norm."""
        return F.linear(norm(x, self.final, self.shape.eps), self.embed.to(x.dtype))
