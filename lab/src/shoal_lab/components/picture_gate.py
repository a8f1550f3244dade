"""A trained gate for pictures: predicts from one layer's inputs which of a picture's tokens later layers need."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from shoal.speculative.draft_head_file import DraftHead

_BLOCKS, _HEADS = 2, 8


class PictureScores(nn.Module):
    """Scores of a picture's tokens: above 0, a token is more probably needed than not.

    A norm, a projection, two blocks of self-attention among the picture's tokens, half of the channels replaced by
    their mean, and a perceptron: the image predictor of Dynamic-LLaVA (arXiv 2412.00876, released code), with the
    difference of its two outputs, for staying and for going, as a single one.

    Args:
        hidden: D of the language model.
        width: of the blocks, a multiple of 8.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.hidden, self.width = hidden, width
        self.enter = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, width), nn.GELU())
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(
            width, _HEADS, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(_BLOCKS))
        self.leave = nn.Sequential(nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, width // 4),
                                   nn.GELU())
        self.last = nn.Linear(width // 4, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Scores [B, n] of states [B, n, D] of whole pictures."""
        x = self.enter(states)
        for block in self.blocks:
            x = block(x)
        own, shared = x.chunk(2, -1)
        scores: Tensor = self.last(self.leave(torch.cat([own, shared.mean(1, keepdim=True).expand_as(shared)], -1)))
        return scores[..., 0]


class PictureGate:
    """The gate of a trained component, in float32.

    Args:
        part: a component from `shoal_lab.pictures.gate`.

    Attributes:
        layer: the layer whose inputs it reads, and the first one that runs fewer tokens.

    Raises:
        ValueError: tensors are missing or have another size than the card says.
    """

    def __init__(self, part: DraftHead) -> None:
        hidden, width, self.layer = part.size("hidden"), part.size("width"), part.size("layer")
        if width % _HEADS:
            raise ValueError(f"the card of the trained part {part.name!r} says that width is {width}; it must be a "
                             f"multiple of {_HEADS}. Train the part anew")
        self._scores = PictureScores(hidden, width)
        self._scores.load_state_dict({name: part.take(name, *one.shape)
                                      for name, one in self._scores.state_dict().items()})
        self._scores.requires_grad_(False).train(False)
        part.check_taken()

    @torch.no_grad()
    def best(self, states: Tensor, keep: float) -> list[int]:
        """The tokens with the largest scores, ascending, of a picture's states [n, D]; see `count_of`."""
        scores = self._scores(states.float().cpu()[None])[0]
        return sorted(scores.sort(descending=True, stable=True).indices[: count_of(len(states), keep)].tolist())


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """States [n, D] of a picture that was read in pieces."""
    return torch.cat([*pieces])


def drawn(size: int, keep: float, seed: str) -> list[int]:
    """As many tokens at random: the control."""
    return sorted(random.Random(seed).sample(range(size), count_of(size, keep)))


def count_of(size: int, keep: float) -> int:
    """How many of a picture's tokens a share is, rounded down as released, but one at least."""
    return max(1, math.floor(keep * size + 1e-9))
