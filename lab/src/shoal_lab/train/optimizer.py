"""Optimisers of a training, and a checkpoint that is written whole or not at all."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal_lab.train import files


class CheckpointedOptimizer:
    """Muon for a module's matrices and AdamW for the rest, with a checkpoint from which a later run resumes.

    Args:
        module: the module to train.
        matrices: its tensors that Muon trains; empty if torch lacks Muon.
        rates: highest learning rates of Muon and of AdamW.
        betas: of AdamW.
        decay: weight decay.
        clip: largest norm of a step's gradient.
        path: file of the checkpoint.
        key: what identifies the run.
        epsilon: of AdamW.
    """

    def __init__(self, module: nn.Module, matrices: Sequence[Tensor], rates: tuple[float, float],
                 betas: tuple[float, float], decay: float, clip: float, path: Path, key: Mapping[str, Any],
                 epsilon: float = 1e-8) -> None:
        self._module, self._clip, self._path, self._key = module, clip, path, dict(key)
        mine = {id(weight) for weight in matrices}
        others = [weight for weight in module.parameters() if id(weight) not in mine]
        self._optimisers: list[torch.optim.Optimizer] = []
        if matrices:
            self._optimisers.append(torch.optim.Muon(list(matrices), lr=rates[0], weight_decay=decay,
                                                     adjust_lr_fn="match_rms_adamw"))
        if others:
            self._optimisers.append(torch.optim.AdamW(others, lr=rates[1], weight_decay=decay, betas=betas,
                                                      eps=epsilon))

    def step(self, loss: Tensor, number: int, share: float) -> float:
        """Take a step with that share of the highest rates; returns the loss.

        Raises:
            ValueError: the loss is not finite; weights and checkpoint are unchanged.
        """
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._clip)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            held = f"{self._path} holds what was there before; " if self._path.exists() else ""
            raise ValueError(f"the loss is {loss.item()} and its gradient's norm {norm.item()} at step {number}: "
                             f"training has diverged; {held}start anew with a lower --rate")
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = optimiser.defaults["lr"] * share
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return loss.item()

    def save(self, run: Mapping[str, Any]) -> None:
        """Write the checkpoint: progress of the run, weights, optimisers."""
        held = {"key": self._key, "run": dict(run), "weights": self._module.state_dict(),
                "optimisers": [optimiser.state_dict() for optimiser in self._optimisers]}
        made = io.BytesIO()  # Python raises an OSError if the disk is full; torch does not
        torch.save(held, made)
        files.write(self._path, lambda part: part.write_bytes(made.getbuffer()))

    def resume(self) -> dict[str, Any] | None:
        """Load a checkpoint; returns the progress of its run, or None if there is none.

        Raises:
            ValueError: it cannot be read, or is of another run.
        """
        if not self._path.exists():
            return None
        try:
            held: dict[str, Any] = torch.load(self._path, weights_only=True)
        except Exception as error:  # a damaged file fails in many ways
            raise ValueError(f"{self._path} cannot be read ({error}); remove it to start anew") from None
        for name, value in self._key.items():
            if held["key"].get(name) != value:
                raise ValueError(f"{self._path} is of another run: {name} was {held['key'].get(name)!r} and now is "
                                 f"{value!r}. Give another folder, or remove it to start anew")
        self._module.load_state_dict(held["weights"])
        for optimiser, state in zip(self._optimisers, held["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        found: dict[str, Any] = held["run"]
        return found
