"""What a decoding step costs, as a sum over the layers that it runs.

    t(step) = overhead + head + sum over executed layers of (layer + kv * positions attended)
    F(p)    = piecewise linear in the prompt's tokens

The idealised runtime of arXiv 2305.02440 with depth and context added. The same form serves seconds (`CostCard`, fitted
to measured steps) and bytes read (`Traffic`); `CostCard.at_roof` turns bytes into the least possible time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from shoal.depth.plan import DepthPlan


@dataclass(frozen=True)
class Observation:
    """A measured step.

    Attributes:
        depth: layers that ran; a lone sublayer counts half.
        attended: positions read from the KV, summed over the layers whose attention ran.
        seconds: how long the step took.
    """

    depth: float
    attended: float
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step reads.

    Attributes:
        layer, head: weights of one layer (their mean) and of the LM head.
        kv: keys and values of one row, at one position, in one layer.
        windows: sliding window per layer, or None.
        layer_weights: number of weights in one layer; each costs a token two operations.
    """

    layer: float
    head: float
    kv: float
    windows: tuple[int | None, ...]
    layer_weights: float = 0.0

    def mean_step(self, plan: DepthPlan, prompt_length: int, new_tokens: int, rows: int = 1) -> float:
        """Mean bytes per decoding step of a generation, token 0 (from the prefill) left out."""
        return CostCard.at_roof(self, 1.0, rows=rows).tpot(plan, prompt_length, new_tokens)


@dataclass(frozen=True)
class CostCard:
    """Seconds of the parts of a step, for a fixed number of rows.

    Attributes:
        layer_seconds: one layer without its attention over the KV.
        head_seconds: final norm, LM head and choice of the token.
        overhead_seconds: what every step costs besides.
        kv_seconds_per_position: attention of all rows over one position, in one layer.
        windows: sliding window per layer, or None.
        prefill: measured (prompt tokens per row, seconds until the first token), ascending.
        rows: rows that a step moves on.
    """

    layer_seconds: float
    head_seconds: float
    overhead_seconds: float
    kv_seconds_per_position: float
    windows: tuple[int | None, ...]
    prefill: tuple[tuple[int, float], ...] = ()
    rows: int = 1

    @classmethod
    def fit(
        cls,
        observations: Sequence[Observation],
        windows: Sequence[int | None],
        head_layers: float,
        prefill: Sequence[tuple[int, float]] = (),
        rows: int = 1,
    ) -> CostCard:
        """Least squares with non-negative coefficients.

        Steps of different depth cannot tell head and overhead apart: the head gets what its bytes cost at a layer's
        speed, the overhead what is left.

        Args:
            observations: steps of at least two depths; of two contexts as well where the KV is to count.
            windows: sliding window per layer, or None.
            head_layers: cost of the LM head in layers, by bytes.
            prefill: see the class; unordered.
            rows: rows that each observed step moved on.

        Raises:
            ValueError: fewer than two different depths.
        """
        if len({o.depth for o in observations}) < 2:
            raise ValueError("all observed steps have the same depth; measure at least two depths")
        features = torch.tensor([[1.0, o.depth, o.attended] for o in observations], dtype=torch.float64)
        seconds = torch.tensor([o.seconds for o in observations], dtype=torch.float64)
        fixed, layer, kv = non_negative_least_squares(features, seconds)
        head = min(fixed, head_layers * layer)
        return cls(layer, head, fixed - head, kv, tuple(windows), tuple(sorted(prefill)), rows)

    @classmethod
    def at_roof(
        cls, traffic: Traffic, bytes_per_second: float, flops_per_second: float | None = None, rows: int = 1
    ) -> CostCard:
        """The least time in which a machine can do it: steps by bytes, prefill by operations if given."""
        layer, head, kv = (part / bytes_per_second for part in (traffic.layer, traffic.head, traffic.kv))
        prefill: tuple[tuple[int, float], ...] = ()
        if flops_per_second is not None:
            operations = 2 * traffic.layer_weights * len(traffic.windows) * rows
            prefill = ((1, operations / flops_per_second),)
        return cls(layer, head, 0.0, kv * rows, traffic.windows, prefill, rows)

    def step_seconds(self, depth: float, attended: float) -> float:
        """A step of `depth` layers that read `attended` positions, summed over them."""
        fixed = self.overhead_seconds + self.head_seconds
        return fixed + depth * self.layer_seconds + attended * self.kv_seconds_per_position

    def prefill_seconds(self, prompt_length: int) -> float:
        """F(p): straight lines between the measured lengths and beyond them; through zero if there is but one.

        Shorter prompts than the shortest of several take as long as that one: they read the same weights.

        Raises:
            ValueError: the card holds no prefill.
        """
        if not self.prefill:
            raise ValueError("the cost card holds no prefill times; measure some prompts, or ask for tpot")
        points = self.prefill if len(self.prefill) > 1 else ((0, 0.0), *self.prefill)
        index = min(max(bisect_left(points, (prompt_length, 0.0)), 1), len(points) - 1)
        (before, low), (after, high) = points[index - 1], points[index]
        return low + (high - low) * max(0, prompt_length - before) / (after - before)

    def predict(self, plan: DepthPlan, prompt_length: int, new_tokens: int) -> float:
        """Seconds of a whole generation: the prefill, which brings token 0, and a step per further token."""
        steps = self._steps_seconds(plan, prompt_length, new_tokens)
        return self.prefill_seconds(prompt_length) + steps

    def tpot(self, plan: DepthPlan, prompt_length: int, new_tokens: int) -> float:
        """Mean seconds per token after the first.

        Raises:
            ValueError: `new_tokens` is below 2.
        """
        if new_tokens < 2:
            raise ValueError(f"new_tokens is {new_tokens}; time per output token needs at least 2")
        return self._steps_seconds(plan, prompt_length, new_tokens) / (new_tokens - 1)

    def _steps_seconds(self, plan: DepthPlan, prompt_length: int, new_tokens: int) -> float:
        steps = ((i, attended(plan, i, prompt_length + i, self.windows)) for i in range(1, new_tokens))
        return sum(self.step_seconds(plan.depth(i), positions) for i, positions in steps)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], windows: Sequence[int | None]) -> CostCard:
        """What `to_dict` gave; further entries, such as the weight format in a report, are left alone."""
        return cls(
            layer_seconds=float(values["layer_seconds"]),
            head_seconds=float(values["head_seconds"]),
            overhead_seconds=float(values["overhead_seconds"]),
            kv_seconds_per_position=float(values["kv_seconds_per_position"]),
            windows=tuple(windows),
            prefill=tuple((int(length), float(seconds)) for length, seconds in values["prefill"]),
            rows=int(values["rows"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "layer_seconds": self.layer_seconds,
            "head_seconds": self.head_seconds,
            "overhead_seconds": self.overhead_seconds,
            "kv_seconds_per_position": self.kv_seconds_per_position,
            "prefill": [list(point) for point in self.prefill],
            "rows": self.rows,
        }


def attended(plan: DepthPlan, step: int, positions: int, windows: Sequence[int | None]) -> int:
    """Positions that a step reads from the KV, summed over the layers whose attention it runs.

    Args:
        plan: which layers run.
        step: step index.
        positions: positions that a layer without a window sees, the token's own included.
        windows: sliding window per layer, or None.
    """
    seen = (positions if window is None else min(window, positions) for window in windows)
    return sum(count for count, drop in zip(seen, plan.attention, strict=True) if step < drop)


def non_negative_least_squares(features: Tensor, targets: Tensor) -> list[float]:
    """Argmin over x >= 0 of |features x - targets|, for a handful of columns: every active set is tried.

    Not scipy's: its import would add 42 MB to the process whose memory a benchmark reports.

    Args:
        features: [n, k] float64.
        targets: [n] float64.
    """
    count = features.shape[1]
    scale = features.norm(dim=0).clamp_min(1e-300)
    best, least = [0.0] * count, float(targets.square().sum())
    for size in range(1, count + 1):
        for columns in combinations(range(count), size):
            chosen = (features / scale)[:, columns]
            solution = torch.linalg.lstsq(chosen, targets[:, None], driver="gelsd").solution[:, 0]
            error = float((chosen @ solution - targets).square().sum())
            if bool((solution >= 0).all()) and error < least:
                best, least = [0.0] * count, error
                for column, value in zip(columns, (solution / scale[list(columns)]).tolist(), strict=True):
                    best[column] = value
    return best
