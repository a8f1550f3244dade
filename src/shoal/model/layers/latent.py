"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with its matrices absorbed into queries and outputs.

A token is stored as one vector: the rotated key r_s that all heads share, and a latent c_s from which each head's
other keys and its values would follow. Per head h, with q_h in a rotated and a plain part,

    score_s = (q_h^rot . r_s + (U_h^T q_h^plain) . c_s) * scale,  o_h = V_h sum over s of softmax(score)_s c_s

since q . (U c) = (U^T q) . c (section 2.1.2). So it is attention with one key head, whose key is [r_s, c_s] and whose
value lies in the same vector. c_s has passed an RMSNorm; queries come from one matrix, or through a latent of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from shoal.model.layers.mixer import Matrix

M = TypeVar("M", bound=Matrix, covariant=True)
EPS = 1e-6
"""Of the norms of latents in transformers' modules, whatever the config says of the others."""


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention.

    Attributes:
        heads: of queries.
        rank, query_rank: dimensions of c, and of the latent of queries; 0 for queries without one.
        rotated, plain: dimensions of a head's query that are, and are not, rotated.
        value: of a head's output.
        gated: whether each head's output is multiplied by the sigmoid of a number.
    """

    heads: int
    rank: int
    query_rank: int
    rotated: int
    plain: int
    value: int
    gated: bool = False

    @property
    def line(self) -> int:
        """Dimensions of what is stored of a token."""
        return self.rotated + self.rank

    @property
    def queries(self) -> int:
        """Dimensions of the queries of all heads."""
        return self.heads * (self.rotated + self.plain)

    @property
    def rows(self) -> int:
        """Rows of the matrices that read the layer's input: queries or their latent, the stored vector, gates."""
        return (self.query_rank or self.queries) + self.line + self.heads * self.gated


@dataclass(frozen=True)
class LatentAttention(Generic[M]):
    """What latent attention does before and after its attention with one key head.

    Attributes:
        sizes: its sizes.
        norm: weight of the norm of c, [rank].
        keys, values: of each head U^T [rank, plain] and V [value, rank].
        query_norm, widen: norm and second matrix of queries that have a latent, the rotated part of a head first.
    """

    sizes: LatentSizes
    norm: Tensor
    keys: tuple[M, ...]
    values: tuple[M, ...]
    query_norm: Tensor | None = None
    widen: M | None = None

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries [n, heads, line], keys [n, 1, line], both not yet rotated, and gates [n, heads, 1] or None.

        Args:
            x: [n, rows], outputs of the matrices that read the layer's input.
        """
        own = self.sizes
        q, key, gate = x.split([own.query_rank or own.queries, own.line, own.heads * own.gated], dim=1)
        if self.widen is not None and self.query_norm is not None:
            q = self.widen(_normed(q, self.query_norm))
        rotated, plain = q.reshape(len(x), own.heads, -1).split([own.rotated, own.plain], dim=2)
        wide = torch.stack([matrix(plain[:, head].contiguous()) for head, matrix in enumerate(self.keys)], 1)
        shared, latent = key.split([own.rotated, own.rank], dim=1)
        key = torch.cat([shared, _normed(latent, self.norm)], dim=1)
        return torch.cat([rotated, wide.to(q.dtype)], dim=2), key[:, None], gate[..., None] if own.gated else None

    def opened(self, mixed: Tensor) -> Tensor:
        """The heads' outputs [n, heads, value] from the weighted sums of stored vectors [n, heads, line]."""
        latent = mixed[..., self.sizes.rotated :]
        return torch.stack([matrix(latent[:, head].contiguous()) for head, matrix in enumerate(self.values)], 1)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x.to(weight.dtype), weight.shape, weight, EPS).to(x.dtype)
