"""A depth plan: which sublayers every generated token runs.

A plan stores, for every attention and every MLP, the first step that no longer runs it. So plans are nested by
construction: what runs at step i ran at every earlier step, and no executed layer misses a KV entry. Step 0 is the
token that comes from the prefill; it runs everything.

A plan knows step indices, never sequence positions.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shoal.errors import Unsupported

NEVER = sys.maxsize
"""Drop step of a sublayer that every token runs."""


@dataclass(frozen=True)
class DepthPlan:
    """Drop steps of each layer's attention and MLP.

    Attributes:
        attention: for each layer, the first step index at which its attention no longer runs (`NEVER`: always runs).
        mlp: the same for its MLP; equal to `attention` in plans that drop whole layers.
        copies: whether what follows in a chat reads copies where a layer was dropped; see `KVCache.copy_up`.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    copies: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.mlp) or not self.attention:
            raise ValueError("a plan needs one drop step per attention and per MLP of at least one layer, got "
                             f"{len(self.attention)} and {len(self.mlp)}")
        earliest = min(self.attention + self.mlp)
        if earliest < 1:
            raise ValueError(f"a drop step is {earliest}; it must be at least 1, since token 0 comes from the prefill")

    @classmethod
    def full(cls, num_layers: int) -> DepthPlan:
        """The plan in which every token runs every layer."""
        return cls((NEVER,) * num_layers, (NEVER,) * num_layers)

    @classmethod
    def whole_layers(cls, drop_steps: Sequence[int]) -> DepthPlan:
        """A plan that drops a layer's attention and MLP together."""
        return cls(tuple(drop_steps), tuple(drop_steps))

    @classmethod
    def skipping(cls, num_layers: int, attention: Sequence[int], mlp: Sequence[int]) -> DepthPlan:
        """The plan that skips attention and MLP of the named layers from step 1 on; ValueError if one is lacking."""
        wrong = [layer for layer in (*attention, *mlp) if not 0 <= layer < num_layers]
        if wrong:
            raise ValueError(f"sublayers of layers {wrong} are to be skipped; the model has layers 0..{num_layers - 1}")
        return cls(*(tuple(1 if i in gone else NEVER for i in range(num_layers)) for gone in (attention, mlp)))

    @classmethod
    def from_counts(cls, counts: Sequence[int], removal: Sequence[int], num_layers: int) -> DepthPlan:
        """The plan of a budget and a removal order.

        Args:
            counts: number of layers k(i) for steps 0..len-1, non-increasing. Later steps keep the last count.
            removal: flex layers in the order in which they are dropped.
        """
        for step, (before, after) in enumerate(zip(counts, counts[1:], strict=False), start=1):
            if after > before:
                raise Unsupported(f"a budget that grows from {before} to {after} layers at step {step}",
                                  "the added layers would miss the KV of the tokens that skipped them",
                                  "Use a non-increasing budget")
        if counts and num_layers - min(counts) > len(removal):
            raise ValueError(f"the budget asks for {min(counts)} layers, but only {len(removal)} of {num_layers} may "
                             "be dropped")
        drop = [NEVER] * num_layers
        gone = 0
        for step, count in enumerate(counts):
            for layer in removal[gone : num_layers - count]:
                drop[layer] = max(step, 1)
            gone = num_layers - count
        return cls.whole_layers(drop)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.attention)

    @cached_property
    def first_shallow_step(self) -> int:
        """The first step that drops something; `NEVER` for a full plan."""
        return min(self.attention + self.mlp)

    def first_drop(self, layers: int) -> int:
        """The first step that drops something of the first `layers` layers."""
        return min(self.attention[:layers] + self.mlp[:layers], default=NEVER)

    def check_sources(self, sources: Sequence[int | None]) -> None:
        """Refuse, by Unsupported, to drop a layer before one that reads it.

        Args:
            sources: per layer, the one that it reads, or None.
        """
        for layer, source in enumerate(sources):
            if source is not None and self.attention[source] < self.attention[layer]:
                raise Unsupported(f"a depth plan that drops layer {source} at step {self.attention[source]}",
                                  f"layer {layer}, which runs longer, reads what that one computes of each token",
                                  f"Drop layers after {max(one for one in sources if one is not None)} alone")

    def with_readers(self, sources: Sequence[int | None]) -> DepthPlan:
        """The plan in which no layer's attention goes later than that of the one it reads, as `check_sources` asks."""
        if not sources:
            return self
        drops = [drop if source is None else min(drop, self.attention[source])
                 for drop, source in zip(self.attention, sources, strict=True)]
        return DepthPlan(tuple(drops), self.mlp)

    @property
    def is_full(self) -> bool:
        """Whether every token runs everything."""
        return self.first_shallow_step == NEVER

    @cached_property
    def splits_layers(self) -> bool:
        """Whether some layer's attention and MLP are dropped at different steps."""
        return self.attention != self.mlp

    def layers(self, step: int) -> tuple[int, ...]:
        """The layers that run at least one sublayer at `step`, ascending."""
        return self._bands[bisect_right(self._band_starts, step)]

    @cached_property
    def _band_starts(self) -> list[int]:
        return sorted(set(map(max, self.attention, self.mlp)))

    @cached_property
    def _bands(self) -> list[tuple[int, ...]]:
        """The layers that run before each entry of `_band_starts`, and from the last one on."""
        last = list(map(max, self.attention, self.mlp))
        return [tuple(i for i, drop in enumerate(last) if drop > low) for low in (0, *self._band_starts)]

    def dropped(self, step: int) -> tuple[int, ...]:
        """The layers whose attention does not run at `step`, ascending; their KV is no longer read."""
        if step < self.first_shallow_step:
            return ()
        return tuple(layer for layer, drop in enumerate(self.attention) if drop <= step)

    def depth(self, step: int) -> float:
        """Number of layers that run at `step`; a single sublayer counts half."""
        return self.num_layers - bisect_right(self._drops, step) / 2

    def depths(self, steps: Sequence[int]) -> list[float]:
        """Number of layers at each of some steps, ascending."""
        if steps and steps[-1] < self.first_shallow_step:
            return [float(self.num_layers)] * len(steps)
        return [self.depth(step) for step in steps]

    def depth_in(self, layers: float, step: int) -> float:
        """Number of layers that run at `step` out of the first `layers`; a single sublayer counts half.

        Of a number that ends in a half, the last layer's attention is meant.
        """
        attention, mlp = self.attention[: math.ceil(layers)], self.mlp[: math.floor(layers)]
        return sum(drop > step for drop in attention + mlp) / 2

    @cached_property
    def _drops(self) -> list[int]:
        return sorted(self.attention + self.mlp)

    def layer_tokens(self, num_tokens: int) -> float:
        """Layers summed over tokens 0..num_tokens-1, token 0 at L."""
        return sum(min(drop, num_tokens) for drop in self.attention + self.mlp) / 2

    def mean_depth(self, num_tokens: int) -> float:
        """Mean number of layers over tokens 0..num_tokens-1."""
        return self.layer_tokens(num_tokens) / num_tokens
