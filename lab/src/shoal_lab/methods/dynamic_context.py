"""The text half of Dynamic-LLaVA: a trained gate decides of every token of an answer whether its KV stays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method, check_layer, whole_layers
from shoal.methods.common.drafting import made_of
from shoal.methods.common.limits import Number, Positions, Seed
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.model.kv.cache import KVCache
    from shoal.model.kv.layer import KVLayer
    from shoal.model.runner import HiddenStateHook, ModelRunner, SequenceChunk
    from shoal_lab.components.gate import TokenGate


@dataclass(frozen=True)
class DynamicContext(Method):
    """The KV of an answer's tokens, from a layer on, is evicted where a small trained gate says so.

    The gate reads that layer's inputs. A token always sees itself. Its KV goes afterwards, by `every` tokens at once,
    since later slots are moved. The prompt stays, and so do layers with a sliding window. The model itself is not
    trained; in the paper it is, a little, with the gate. Component: `shoal train dynamic_context`.

    Attributes:
        part: the folder from `shoal train dynamic_context`; None for the known component of the model.
        threshold: tokens with a lower score go; None keeps all.
        every: tokens between evictions.
        random: seed by which tokens are drawn instead, as many as stayed in validation: the control. None for the
            gate's choice.
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
            ValueError: there is no component, or it cannot be read, or it is not one for this method and model.
            Unsupported: it was trained for another model, or no layer sees the whole text.
        """
        if self.threshold is not None:
            whole_layers(self.name, info, queries=False)
        keep = None if self.threshold is None else Gated(self, self._gate(info))
        return Recipe(DepthPlan.full(info.num_layers), keep=keep)

    def _gate(self, info: ModelInfo) -> TokenGate | None:
        """The gate, the same one for all requests; None if nothing is evicted."""
        if info.tensors is None:
            return None
        from shoal_lab.components.gate import TokenGate

        part, gate = made_of(self.name, self.part, info, TokenGate)
        check_layer(f"the layer that the trained part {part.name!r} reads", gate.layer, info)
        return gate


@dataclass(frozen=True)
class Gated(Keep):
    """Evicts by a gate; see `DynamicContext`."""

    differs: ClassVar[bool] = True
    dense_prompt: ClassVar[bool] = True

    method: DynamicContext
    gate: TokenGate | None

    def begin(self, runner: Any, cache: Any) -> GateKeeper:
        """A keeper."""
        assert self.gate is not None
        return GateKeeper(self.method, self.gate, runner, cache)

    def most_slots(self, length: int) -> int:
        """All of them, which the gate may keep."""
        return length


class GateKeeper(Keeper):
    """Evicts tokens of sequences. A token that the gate has not seen, because its layer was skipped, stays."""

    def __init__(self, method: DynamicContext, gate: TokenGate, runner: ModelRunner, cache: KVCache) -> None:
        from shoal.speculative.hidden_states import HiddenStates

        self._method, self._gate, self._cache = method, gate, cache
        self._hidden = HiddenStates(runner, cache, (gate.layer,))

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """Read tokens of answers."""
        return self._hidden.watch(seqs, chunks) if seqs[0].emitted else None

    @override
    def fork(self, seq: SequenceState, children: Sequence[SequenceState]) -> None:
        self._hidden.fork(seq, children)

    def next_length(self, seq: SequenceState, length: int) -> int:
        """Whole steps of `every` after the prompt."""
        every = self._method.every
        return seq.prompt_length + (max(0, length - seq.prompt_length) // every + 1) * every

    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Evict those of the newest tokens that are not wanted."""
        stays = self._wanted(seq)
        for number, layer in layers:
            if number >= self._gate.layer and not all(stays):
                stored = layer.stored(seq.seq_id)
                older = stored - len(stays)
                layer.keep_slots(seq.seq_id, [*range(older), *(older + i for i, stay in enumerate(stays) if stay)])

    def _wanted(self, seq: SequenceState) -> list[bool]:
        """Which of the newest `every` tokens are kept."""
        every = self._method.every
        first = self._cache.positions[seq.seq_id] - every
        seen = self._hidden.take(seq)
        if self._method.random is not None:
            draw = random.Random
            return [draw(f"{self._method.random}/{first + i}").random() < self._gate.kept for i in range(every)]
        stays = [True] * every
        if seen is not None:
            for place, score in enumerate(self._gate.scores(seen[1]), seen[0] - first):
                if place >= 0:
                    stays[place] = score >= (self._method.threshold or 0.0)
        return stays
