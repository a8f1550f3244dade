"""The text half of Dynamic-LLaVA: a trained gate says of every token of an answer whether its KV stays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method, whole_layers
from shoal.methods.common.drafting import made_of
from shoal.methods.common.limits import Number, Positions, Seed
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.model.kv.cache import KVCache
    from shoal.model.kv.layer import KVLayer
    from shoal.model.stack import HiddenStateHook, SequenceChunk, Stack
    from shoal_lab.components.gate import TokenGate


@dataclass(frozen=True)
class DynamicContext(Method):
    """What an answer's tokens leave in the KV, from a layer on, is given up where a small trained gate says so.

    The gate reads the state that enters that layer. A token always sees itself, and what it leaves goes afterwards, by
    so many tokens at once, since columns behind are moved. The prompt stays, as do layers with a sliding window. The
    model itself is not trained; in the paper it is, a little, beside the gate. Part: `shoal train dynamic_context`.

    Attributes:
        part: the folder that `shoal train dynamic_context` wrote; None for the part that is known for the model.
        threshold: tokens go whose score is below; None keeps all.
        every: what goes is given up whenever the answer has grown by so many tokens.
        random: seed by which tokens are drawn instead, as many as stayed when the gate was validated: the control.
            None for those that the gate wants.
    """

    name: ClassVar[str] = "dynamic_context"
    paper: ClassVar[str] = "arXiv 2412.00876"
    needs: ClassVar[tuple[str, ...]] = ("a part trained for the model",)
    reads: ClassVar[tuple[str, ...]] = ("part",)

    part: str | None = None
    threshold: Number | None = 0.0
    every: Positions = 16
    random: Seed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise ValueError(f"every is {self.every}; it must be at least 1 token")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a part of the answer's KV.

        Raises:
            ValueError: there is no part, or it cannot be read, is of another kind, or reads a layer that the model has
                not.
            Unsupported: it was trained for another model, or no layer sees all of the text.
        """
        plan = DepthPlan.full(info.num_layers)
        if self.threshold is None:
            return Recipe(plan)
        whole_layers(self.name, info, queries=False)
        return Recipe(plan, keep=Gated(self, self._gate(info)))

    def _gate(self, info: ModelInfo) -> TokenGate | None:
        """The gate, the same one for all requests; None where nothing is to run."""
        if info.tensors is None:
            return None
        from shoal_lab.components.gate import TokenGate

        part, gate = made_of(self.name, self.part, info, TokenGate)
        if gate.layer >= info.num_layers:
            raise ValueError(f"the trained part {part.name!r} reads layer {gate.layer}; it must be in [1, "
                             f"{info.num_layers - 1}] for this model. Train the part anew")
        return gate


@dataclass(frozen=True)
class Gated(Keep):
    """The part `keep`; see `DynamicContext`."""

    differs: ClassVar[bool] = True
    dense_prompt: ClassVar[bool] = True

    knobs: DynamicContext
    gate: TokenGate | None

    def begin(self, stack: Any, cache: Any) -> GateKeeper:
        """A keeper."""
        assert self.gate is not None
        return GateKeeper(self.knobs, self.gate, stack, cache)

    def most_columns(self, length: int) -> int:
        """All may be wanted."""
        return length


class GateKeeper(Keeper):
    """See `Gated`. A token that the gate has not seen, since the layer it reads was left out, stays."""

    def __init__(self, knobs: DynamicContext, gate: TokenGate, stack: Stack, cache: KVCache) -> None:
        from shoal.speculative.taps import Taps

        self._knobs, self._gate, self._cache = knobs, gate, cache
        self._taps = Taps(stack, cache, gate.layer)

    def watch(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """Sees tokens of answers."""
        return self._taps.watch(rows, chunks) if rows[0].emitted else None

    def fork(self, row: Row, twins: Sequence[Row]) -> None:
        """See `Worker.fork`."""
        self._taps.fork(row, twins)

    def next_length(self, row: Row, length: int) -> int:
        """Whole steps of `every` beyond the prompt."""
        every = self._knobs.every
        return row.prompt_length + (max(0, length - row.prompt_length) // every + 1) * every

    def rewrite(self, row: Row, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Give up what the newest tokens left, where it is not wanted."""
        stays = self._wanted(row)
        for number, layer in layers:
            if number >= self._gate.layer and not all(stays):
                stored = layer.stored(row.slot)
                older = stored - len(stays)
                layer.keep_columns(row.slot, [*range(older), *(older + i for i, stay in enumerate(stays) if stay)])

    def _wanted(self, row: Row) -> list[bool]:
        """Of the newest `every` tokens."""
        every = self._knobs.every
        first = self._cache.positions[row.slot] - every
        seen = self._taps.take(row)
        if self._knobs.random is not None:
            draw = random.Random
            return [draw(f"{self._knobs.random}/{first + i}").random() < self._gate.kept for i in range(every)]
        stays = [True] * every
        if seen is not None:
            for place, score in enumerate(self._gate.scores(seen[1]), seen[0] - first):
                if place >= 0:
                    stays[place] = score >= (self._knobs.threshold or 0.0)
        return stays
