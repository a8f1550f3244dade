"""Which rows of a step run which layers. A row is one token that vLLM computes in the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.depth.plan import DepthPlan


@dataclass(frozen=True)
class Span:
    """The rows of one request: successive positions.

    Attributes:
        plan: of the request.
        prompt: tokens of its prompt.
        first: position of its first row in the sequence.
        count: number of rows.
    """

    plan: DepthPlan
    prompt: int
    first: int
    count: int

    @property
    def steps(self) -> NDArray[np.int64]:
        """[count], the step that each row belongs to.

        The last token of a prompt brings token 0, at full depth; the position after it is fed token 0 and brings token
        1. It is so whether a position is new or computed again after a preemption.
        """
        return np.maximum(np.arange(self.first, self.first + self.count) - self.prompt + 1, 0)


@dataclass
class Counts:
    """What ran since the engine was started.

    Attributes:
        forwards, rows: of the model.
        layer_forwards, layer_rows: [L], calls of each layer, and the rows that were not passed through.
    """

    forwards: int
    rows: int
    layer_forwards: list[int]
    layer_rows: list[int]

    @classmethod
    def none(cls, num_layers: int) -> Counts:
        """Nothing yet."""
        return cls(0, 0, [0] * num_layers, [0] * num_layers)

    def add(self, step: StepRows) -> None:
        """Count a step."""
        self.forwards += 1
        self.rows += step.runs.shape[1]
        for layer, rows in enumerate(step.counts):
            self.layer_forwards[layer] += rows > 0
            self.layer_rows[layer] += rows


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one forward.

    Attributes:
        runs: bool [L, rows], whether a row runs a layer.
    """

    runs: NDArray[np.bool_]
    _idle: dict[bytes, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> StepRows:
        """The rows of some requests, one request after another."""
        return cls(np.concatenate([drops(span.plan)[:, None] > span.steps for span in spans], axis=1))

    @cached_property
    def counts(self) -> list[int]:
        """[L], the rows that run each layer."""
        found: list[int] = self.runs.sum(axis=1).tolist()
        return found

    def runs_all(self, layer: int) -> bool:
        """Whether every row runs it."""
        return bool(self.counts[layer] == self.runs.shape[1])

    def key(self, layer: int) -> bytes:
        """Equal for layers that the same rows run."""
        return bytes(self.runs[layer])

    def idle(self, layer: int) -> Tensor:
        """Indices of the rows that are passed through."""
        key = self.key(layer)
        if key not in self._idle:
            self._idle[key] = torch.from_numpy(np.flatnonzero(~self.runs[layer]))
        return self._idle[key]


@lru_cache(maxsize=1024)
def drops(plan: DepthPlan) -> NDArray[np.int64]:
    """[L], the first step that no longer runs each layer, of a plan that drops whole layers."""
    return np.array(plan.attention, dtype=np.int64)
