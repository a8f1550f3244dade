"""CentroidKV: similar KV slots near each other are merged into one that counts for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import DepthPlan
from shoal.methods.base import SHOWN_QUERIES, Method, whole_layers
from shoal.methods.common.limits import Most, Positions, Share
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.model.kv.layer import KVLayer


@dataclass(frozen=True)
class CentroidKV(Method):
    """Within chunks, KV slots with similar keys become their mean, with the logarithm of their number as a bias.

    Per layer and KV head, every other slot of a chunk is linked to the most similar one between them, and the
    strongest links are merged; see `components.merging`. The prompt is read in full and merged at its end. The answer
    is merged whenever it has grown by `every` tokens. A merged slot is not merged again. The paper was not available,
    so the sizes of chunk, window and sinks are guesses. A cluster is weighted by its members, which makes merging equal
    slots exact. Keys are averaged as stored, after rotary embedding. Layers with a sliding window are unchanged.

    Attributes:
        removed: share of the slots between sinks and window that is merged away, in [0, 1).
        chunk: slots within which one is merged; divisible by 2, by 4 if more than half is removed, by 8 if more than
            three quarters, and so on.
        window: least number of last positions that stay unmerged.
        sinks: first positions that stay unmerged.
        every: tokens between merges, so up to that many more stay unmerged.
    """

    name: ClassVar[str] = "centroid_kv"
    paper: ClassVar[str] = "arXiv 2506.11418"
    needs: ClassVar[tuple[str, ...]] = (SHOWN_QUERIES,)

    removed: Share = 0.5
    chunk: Annotated[int, Most(1024)] = 32
    window: Positions = 32
    sinks: Positions = 4
    every: Positions = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.removed < 1:
            raise ValueError(f"removed is {self.removed}; it must be in [0, 1), the share of slots that go")
        for option, least in (("chunk", 2), ("window", 1), ("sinks", 0), ("every", 1)):
            if getattr(self, option) < least:
                raise ValueError(f"{option} is {getattr(self, option)}; it must be at least {least}")
        parts = 1
        while parts * (1 - self.removed) < 1:
            parts *= 2
        if self.chunk % parts:
            raise ValueError(f"chunk is {self.chunk}; to remove {self.removed:g} of it, it must be divisible by {parts}"
                             ", since half of the slots can be linked to the other half at a time")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and centroids of the KV."""
        if self.removed:
            whole_layers(self.name, info)
        return Recipe(DepthPlan.full(info.num_layers), keep=Centroids(self) if self.removed else None)


@dataclass(frozen=True)
class Centroids(Keep):
    """Merges KV slots; see `CentroidKV`."""

    differs: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    dense_prompt: ClassVar[bool] = True

    method: CentroidKV

    def begin(self, runner: Any, cache: Any) -> CentroidKeeper:
        """A keeper; earlier merges follow from the text's length."""
        return CentroidKeeper(self.method, runner.dtype)

    def most_slots(self, length: int) -> int:
        """All of them, because the whole prompt is stored before it is merged."""
        return length


class CentroidKeeper(Keeper):
    """Merges the slots of sequences."""

    def __init__(self, method: CentroidKV, dtype: Any) -> None:
        self._method, self._dtype = method, dtype

    def next_length(self, seq: SequenceState, length: int) -> int:
        """The prompt's end, and then every `every` tokens."""
        grown = max(0, length - seq.prompt_length + self._method.every) // self._method.every
        return seq.prompt_length + grown * self._method.every

    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Merge whole chunks that have left the window."""
        from shoal_lab.components.merging import compact

        before, left = self.compacted(seq.prompt_length, layers[0][1].lengths[seq.seq_id] - 1) if layers else (0, 0)
        for _, layer in layers:
            count = self._due(layer.lengths[seq.seq_id], before)
            if count:
                keys, values = layer.read(seq.seq_id, layer.stored(seq.seq_id), self._dtype)
                first, removed = self._method.sinks + left, int(count * self._method.removed)
                parts = compact(keys, values, layer.bias[seq.seq_id], first, count, self._method.chunk, removed)
                layer.rewrite(seq.seq_id, *parts)

    def compacted(self, prompt: int, length: int) -> tuple[int, int]:
        """Number of merged tokens of a text of that length, and of the slots that they became."""
        tokens = slots = 0
        for due in range(prompt, length + 1, self._method.every):
            count = self._due(due, tokens)
            tokens, slots = tokens + count, slots + count - int(count * self._method.removed)
        return tokens, slots

    def _due(self, length: int, merged: int) -> int:
        """Tokens to merge at that length, of which `merged` already are."""
        method = self._method
        return max(0, length - method.window - method.sinks - merged) // method.chunk * method.chunk
