"""Training of small modules, kept in a folder so that a study that was stopped goes on."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal_lab.other_fields import Options

_WARM, _LEAST_RATE = 0.05, 0.02
"""Share of the steps in which the rate rises, and the last rate as a share of the highest."""
_PIECE = 20.0
"""Seconds between checkpoints."""


@dataclass(frozen=True)
class Fit:
    """Settings of a training.

    Attributes:
        steps: of AdamW, with a rising and then a cosine rate.
        rate: the highest.
        average: decay of an average of the weights, which is what is kept at the end; 0 keeps the last ones.
    """

    steps: int
    rate: float = 2e-3
    average: float = 0.0


def trained(options: Options, name: str, module: nn.Module, fit: Fit, loss: Callable[[int], Tensor],
            target: nn.Module | None = None) -> float:
    """Train a module in place, or go on from what an earlier run with the same settings kept.

    Args:
        options: names the folder and the seed.
        name: of this module among those kept.
        module: left in evaluation mode.
        fit: how.
        loss: of one step, by its number.
        target: a copy of the module that follows it, as `fit.average` says, for losses that ask it.

    Returns:
        Seconds that its training took.

    Raises:
        ValueError: What was kept under this name belongs to other settings.
    """
    shapes = [f"{key} {tuple(value.shape)}" for key, value in module.state_dict().items()]
    setting = {"fit": repr(fit), "seed": options.seed, "weights": shapes}
    path = options.work / f"{name}.pt" if options.work else None
    found = torch.load(path, weights_only=True) if path and path.exists() else {"setting": setting, "step": 0}
    if found["setting"] != setting:
        raise ValueError(f"--work {options.work}: {name}.pt was trained with other settings or another seed; remove "
                         "it, or name another folder")
    run = _Run(module, fit, target or copy.deepcopy(module), found)
    while run.step < fit.steps:
        run.some(loss)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"setting": setting, **run.state()}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
    if fit.average:
        module.load_state_dict(run.averaged.state_dict())
    module.eval()
    return run.seconds


class _Run:
    """A training and all that the rest of it depends on."""

    def __init__(self, module: nn.Module, fit: Fit, averaged: nn.Module, found: Mapping[str, Any]) -> None:
        self.module, self.fit, self.averaged = module, fit, averaged
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=fit.rate, weight_decay=0.0)
        self.step, self.seconds = int(found["step"]), float(found.get("seconds", 0))
        if self.step:
            module.load_state_dict(found["module"])
            averaged.load_state_dict(found["averaged"])
            self.optimizer.load_state_dict(found["optimizer"])
            torch.set_rng_state(found["random"])

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"step": self.step, "seconds": self.seconds, "module": self.module.state_dict(),
                "averaged": self.averaged.state_dict(), "optimizer": self.optimizer.state_dict(),
                "random": torch.get_rng_state()}

    def some(self, loss: Callable[[int], Tensor]) -> None:
        """The steps of half a minute."""
        self.module.train()
        started, before = time.perf_counter(), self.seconds
        while self.step < self.fit.steps and self.seconds - before < _PIECE:
            for group in self.optimizer.param_groups:
                group["lr"] = self.fit.rate * _share(self.step, self.fit.steps)
            self.optimizer.zero_grad()
            loss(self.step).backward()
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self._follow(min(self.fit.average, (1 + self.step) / (10 + self.step)))
            self.step += 1
            self.seconds = before + time.perf_counter() - started

    def _follow(self, decay: float) -> None:
        now = self.module.state_dict()
        for key, value in self.averaged.state_dict().items():
            value.lerp_(now[key], 1 - decay)


def _share(step: int, steps: int) -> float:
    done = (step + 1) / steps
    return min(done / _WARM, _LEAST_RATE + (1 - _LEAST_RATE) * (0.5 + 0.5 * math.cos(math.pi * done)))
