"""An autoregressive model of images whose tokens are vectors: a causal transformer and a small diffusion head.

The head gives the law of the next token by ancestral sampling: `steps` Gaussians, each around a mean that it computes
from the one before (DDPM), with variances that it learns (Nichol and Dhariwal 2021, section 3.1), as MAR's does.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
SIDE = 8
PATCH = 2
PLACES = (SIDE // PATCH) ** 2
WIDTH = PATCH * PATCH


@dataclass(frozen=True)
class Size:
    """Sizes of a model.

    Attributes:
        width: Of the transformer's states.
        layers: Of the transformer.
        head: Width of the diffusion head.
        blocks: Residual blocks of the diffusion head.
    """

    width: int
    layers: int
    head: int
    blocks: int


@dataclass(frozen=True)
class Noise:
    """Noise levels, shared by a target and its draft.

    Attributes:
        steps: Denoising steps, at least 2.
        last: Standard deviation of the noise that the last step takes away, in (0, 1). Tokens lie in [-1, 1].
    """

    steps: int = 6
    last: float = 0.2

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError(f"steps={self.steps}: a trajectory has at least 2 denoising steps; give more")
        if not 0 < self.last < 1:
            raise ValueError(f"last={self.last}: the last step's noise lies in (0, 1); give 0.2, say")

    def kept(self) -> Tensor:
        """What is left of the variance of a token after each number of steps, (steps + 1,): 1 first, near 0 last."""
        first, final = 1 - self.last**2, 1e-3
        signal = torch.linspace(math.log(first / (1 - first)), math.log(final / (1 - final)), self.steps)
        return torch.cat([torch.ones(1), torch.sigmoid(signal)])


class DenoisingBlock(nn.Module):
    """A transformer's layer, norms first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 16)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))

    def forward(self, states: Tensor) -> Tensor:
        """States of shape (rows, places, width), each from those up to it."""
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                             for part in self.inward(self.before(states)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.outward(seen.transpose(1, 2).flatten(2))
        found: Tensor = states + self.mlp(self.after(states))
        return found


class ContinuousModel(nn.Module):
    """The transformer and its head."""

    def __init__(self, size: Size, noise: Noise) -> None:
        super().__init__()
        self.noise, width = noise, size.width
        self.first, self.token = nn.Embedding(CLASSES, width), nn.Linear(WIDTH, width)
        self.place = nn.Parameter(0.02 * torch.randn(PLACES, width))
        self.layers = nn.Sequential(*(DenoisingBlock(width) for _ in range(size.layers)), nn.LayerNorm(width))
        self.enter = nn.Linear(WIDTH + width, size.head)
        self.level = nn.Embedding(noise.steps + 1, size.head)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(size.head), nn.Linear(size.head, size.head), nn.SiLU(),
                                                  nn.Linear(size.head, size.head)) for _ in range(size.blocks))
        self.leave = nn.Linear(size.head, 2 * WIDTH)
        kept = noise.kept()
        beta = 1 - kept[1:] / kept[:-1]
        self.kept: Tensor
        self.register_buffer("kept", kept, persistent=False)
        most = beta.log() / 2
        least = (beta * (1 - kept[:-1]) / (1 - kept[1:])).clamp(min=float(beta[0]) / 25).log() / 2
        self.least: Tensor
        self.most: Tensor
        self.register_buffer("least", torch.cat([most[:1], least]), persistent=False)
        self.register_buffer("most", torch.cat([most[:1], most]), persistent=False)

    def conditions(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """What the head is told at each place and one behind: (rows, places + 1, width) of (rows, places, WIDTH)."""
        states = torch.cat([self.first(labels)[:, None], self.token(tokens)], 1)
        at = torch.arange(states.shape[1]).clamp(max=PLACES - 1)
        found: Tensor = self.layers(states + self.place[at])
        return found

    def step(self, noised: Tensor, level: Tensor, condition: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The Gaussian of a token with less noise: its mean, the log of its deviation, and the token guessed.

        Args:
            noised: Tokens of shape (..., WIDTH), with the noise of `level`.
            level: Steps that lie before the clean token, from 1 to `noise.steps`, of shape (...).
            condition: Of shape (..., width).
        """
        states = self.enter(torch.cat([noised, condition], -1)) + self.level(level)
        for block in self.blocks:
            states = states + block(states)
        clean, share = self.leave(states).chunk(2, -1)
        now, then = self.kept[level][..., None], self.kept[level - 1][..., None]
        beta = 1 - now / then
        mean = (then.sqrt() * beta * clean + (now / then).sqrt() * (1 - then) * noised) / (1 - now)
        share = torch.sigmoid(share)
        deviation = share * self.most[level][..., None] + (1 - share) * self.least[level][..., None]
        return mean, deviation, clean

    def noised(self, clean: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Levels drawn for clean tokens, the tokens at these levels, and those with one step less noise."""
        level = torch.randint(1, self.noise.steps + 1, clean.shape[:-1], generator=generator)
        then, now = self.kept[level - 1][..., None], self.kept[level][..., None]
        less = then.sqrt() * clean + (1 - then).sqrt() * torch.randn(clean.shape, generator=generator)
        share = now / then
        return level, share.sqrt() * less + (1 - share).sqrt() * torch.randn(clean.shape, generator=generator), less

    def parameters_held(self) -> int:
        """The number of trained numbers."""
        return sum(one.numel() for one in self.parameters())


def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 digits of scikit-learn as tokens in [-1, 1], (images, PLACES, WIDTH), and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 8 - 1
    return patches(images), torch.tensor(found.target, dtype=torch.long)


def patches(images: Tensor) -> Tensor:
    """Tokens (images, PLACES, WIDTH) of images (images, SIDE, SIDE), row by row."""
    return F.unfold(images[:, None], PATCH, stride=PATCH).transpose(1, 2)


def pictures(tokens: Tensor) -> Tensor:
    """Images of tokens."""
    return F.fold(tokens.transpose(1, 2), (SIDE, SIDE), PATCH, stride=PATCH)[:, 0]


def trained(size: Size, noise: Noise, updates: int, seed: int, teacher: ContinuousModel | None = None,
            kept: Path | None = None) -> ContinuousModel:
    """A model of the digits after some updates of 64 images each.

    Args:
        size: Its sizes.
        noise: Its noise levels.
        updates: Of its weights.
        seed: Of its weights and of what it sees.
        teacher: A model whose guesses of the clean tokens it learns beside the tokens themselves.
        kept: A file to which weights go, and from which they come where they are there with the same settings.
    """
    told = {**asdict(size), **asdict(noise), "updates": updates, "seed": seed, "taught": teacher is not None}
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ContinuousModel(size, noise)
    if kept is not None and kept.exists() and (stored := torch.load(kept, weights_only=True))["told"] == told:
        model.load_state_dict(stored["weights"])
        return model.eval()
    tokens, labels = digits()
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, updates)
    for _ in range(updates):
        chosen = torch.randint(len(tokens), (64,), generator=generator)
        clean = tokens[chosen] + (torch.rand(64, PLACES, WIDTH, generator=generator) - 0.5) / 8
        loss = _loss(model, clean, labels[chosen], teacher, generator)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"told": told, "weights": model.state_dict()}, kept)
    return model.eval()


def _loss(model: ContinuousModel, clean: Tensor, labels: Tensor, teacher: ContinuousModel | None,
          generator: torch.Generator) -> Tensor:
    level, noised, less = model.noised(clean, generator)
    mean, deviation, guess = model.step(noised, level, model.conditions(clean[:, :-1], labels))
    right = clean
    if teacher is not None:
        with torch.no_grad():
            right = teacher.step(noised, level, teacher.conditions(clean[:, :-1], labels))[2]
    # Means are learned from guesses, deviations from likelihoods; neither disturbs the other.
    likelihood = deviation + ((less - mean.detach()) / deviation.exp()).square() / 2
    return F.mse_loss(guess, right) + 0.02 * likelihood.mean()
