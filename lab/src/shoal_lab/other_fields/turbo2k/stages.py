"""A student whose features follow a teacher's in another space, and a stage guided by features of a lower resolution.

Turbo2K, sections 3.2 and 3.3: distillation between models of different latent spaces aligns features, projected and
brought to one grid, by cosine; the second stage takes features of all levels of the first stage's transformer, with no
decoding and encoding between. Which blocks are paired, and that guides are added before each block, are guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_lab.other_fields._flow import FlowTransformer, noised
from shoal_lab.other_fields.turbo2k.codec import Grid, resized

_LEAST_CLEAN = 0.8
"""The first stage's tokens that guide in training are noised to times from here to 1."""
_CLEAN = 0.95
"""And to this when videos are made: what was made is not quite what was trained on."""


class Student(nn.Module):
    """A smaller flow beside the projection of its features to a teacher's.

    Args:
        flow: the student.
        teacher: in another space of tokens.
        grids: of the student's tokens and the teacher's.
        weight: of the distillation; 0 trains without.
    """

    def __init__(self, flow: FlowTransformer, teacher: FlowTransformer, grids: tuple[Grid, Grid], weight: float
                 ) -> None:
        super().__init__()
        self.flow, self.weight, self.grids = flow, weight, grids
        self.project = nn.Sequential(nn.Linear(flow.width, teacher.width), nn.SiLU(),
                                     nn.Linear(teacher.width, teacher.width))
        self._teacher = (teacher,)  # In a tuple, so that it is none of the weights to train.

    def loss(self, tokens: Tensor, teachers: Tensor) -> Tensor:
        """Of the velocity, and of the features, for the same videos in both spaces at the same times."""
        x, time, velocity = noised(tokens)
        found = self.flow.features(x, time)
        total = F.mse_loss(self.flow.velocity(found[-1]), velocity)
        return total + self.weight * self.unlike(found, teachers, time) if self.weight else total

    def unlike(self, found: Sequence[Tensor], teachers: Tensor, time: Tensor) -> Tensor:
        """One minus the cosine between projected features of a middle block and the teacher's there."""
        teacher, = self._teacher
        with torch.no_grad():
            x = torch.lerp(torch.randn_like(teachers), teachers, time[:, None, None])
            wanted = teacher.features(x, time)[_middle(teacher)]
        there = resized(wanted, self.grids[1], self.grids[0])
        return 1 - F.cosine_similarity(self.project(found[_middle(self.flow)]), there, dim=-1).mean()


def _middle(flow: FlowTransformer) -> int:
    return len(flow.blocks) // 2


class Guided(nn.Module):
    """A flow at high resolution whose blocks see the low resolution's features of the same depth.

    Args:
        high: the flow, with as many blocks as `low`.
        low: of the first stage.
        grids: of the first stage's tokens and of this one's.

    Raises:
        ValueError: The flows have different depths.
    """

    def __init__(self, high: FlowTransformer, low: FlowTransformer, grids: tuple[Grid, Grid]) -> None:
        super().__init__()
        if len(high.blocks) != len(low.blocks):
            raise ValueError(f"{len(high.blocks)} blocks guided by {len(low.blocks)}; both must have as many")
        self.high, self.grids = high, grids
        self.guides = nn.ModuleList(nn.Linear(low.width, high.width) for _ in high.blocks)
        for guide in self.guides:
            assert isinstance(guide, nn.Linear)
            nn.init.zeros_(guide.weight)
            nn.init.zeros_(guide.bias)
        self._low = (low,)

    def seen(self, low_tokens: Tensor, clean: Tensor | None = None) -> list[Tensor]:
        """The guides' input: features [n, tokens, width] of each block, at this stage's places.

        Args:
            low_tokens: of the first stage, [n, tokens, channels].
            clean: times [n] to which they are noised.
        """
        time = torch.full((len(low_tokens),), _CLEAN) if clean is None else clean
        x = torch.lerp(torch.randn_like(low_tokens), low_tokens, time[:, None, None])
        with torch.no_grad():
            found = self._low[0].features(x, time)
        return [resized(F.layer_norm(one, one.shape[-1:]), *self.grids) for one in found]

    def forward(self, x: Tensor, time: Tensor, seen: Sequence[Tensor]) -> Tensor:
        """The velocity [n, tokens, channels]."""
        return self.high(x, time, [guide(one) for guide, one in zip(self.guides, seen, strict=True)])  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor, low_tokens: Tensor) -> Tensor:
        """Of the velocity, for the same videos at both resolutions."""
        x, time, velocity = noised(tokens)
        clean = _LEAST_CLEAN + (1 - _LEAST_CLEAN) * torch.rand(len(tokens))
        return F.mse_loss(self(x, time, self.seen(low_tokens, clean)), velocity)
