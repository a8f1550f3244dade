"""SnapKV: of a prompt, the KV that its last tokens attend to stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import NEVER, DepthPlan
from shoal.methods.base import SHOWN_QUERIES, Method, whole_layers
from shoal.methods.common.limits import Most, Positions, Seed
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.row import Row
    from shoal.model.kv.cache import KVCache
    from shoal.model.kv.layer import KVLayer
    from shoal.model.stack import QueryHook, SequenceChunk, Stack


@dataclass(frozen=True)
class SnapKV(Method):
    """Once the prompt is read, each KV head keeps the columns that the prompt's last queries attend to most.

    The last `window` positions stay. Before them a column counts by the attention that those positions pay to it,
    summed over them and over the heads that share the KV head; then each takes the largest count among its
    neighbours, so that what stands together stays together. What is generated stays too. The paper ranks columns for
    each query head, for which their KV head has to be copied; here the heads that share one share its columns. Layers
    with a sliding window keep what that says.

    Attributes:
        budget: positions of the prompt that stay, the window among them; None, or the prompt's length, for all.
        window: positions at the prompt's end that say what matters, and stay.
        pool: neighbours among which the largest count is taken, itself in the middle; 1 for none.
        random: seed by which as many columns are drawn before the window instead, per layer and KV head: the control.
            None for those that are attended to.
    """

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "arXiv 2404.14469"
    needs: ClassVar[tuple[str, ...]] = (SHOWN_QUERIES,)

    budget: Positions | None = 1024
    window: Positions = 32
    pool: Annotated[int, Most(255)] = 7
    random: Seed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 position, or nothing says what matters")
        if self.budget is not None and self.budget <= self.window:
            raise ValueError(f"budget is {self.budget}; it must be larger than window, {self.window}, or None for all")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool is {self.pool}; it must be odd and at least 1, which leaves counts as they are")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a part of the prompt's KV."""
        if self.budget is not None:
            whole_layers(self.name, info)
        return Recipe(DepthPlan.full(info.num_layers), keep=None if self.budget is None else Snap(self))


@dataclass(frozen=True)
class Snap(Keep):
    """The part `keep`; see `SnapKV`."""

    differs: ClassVar[bool] = True
    dense_prompt: ClassVar[bool] = True

    knobs: SnapKV

    @property
    def listens(self) -> int:
        """See `Keep`."""
        return self.knobs.window

    @property
    def untouched(self) -> int:
        """See `Keep`."""
        return self.knobs.budget or 0

    def begin(self, stack: Any, cache: Any) -> Snapper:
        """A keeper."""
        return Snapper(self.knobs, stack, cache)

    def most_columns(self, length: int) -> int:
        """The prompt is there as a whole before columns go."""
        return length


class Snapper(Keeper):
    """See `Snap`. Remembers the last queries of prompts, per layer and with the position of the first of them."""

    def __init__(self, knobs: SnapKV, stack: Stack, cache: KVCache) -> None:
        self._budget, self._knobs, self._stack, self._cache = knobs.budget or 0, knobs, stack, cache
        self._queries: dict[int, tuple[Row, dict[int, list[tuple[int, Tensor]]]]] = {}

    def next_length(self, row: Row, length: int) -> int:
        """The prompt's end, if the prompt is longer than what stays."""
        return row.prompt_length if length < row.prompt_length > self._budget else NEVER

    def query_hooks(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> Sequence[QueryHook | None]:
        """Listens to pieces of prompts that reach into the window."""
        return [None if row.emitted or row.prompt_length <= self._budget else self._listener(row, len(chunk.tokens))
                for row, chunk in zip(rows, chunks, strict=True)]

    def _listener(self, row: Row, size: int) -> QueryHook | None:
        begin, first = self._cache.positions[row.slot], row.prompt_length - self._knobs.window
        if begin + size <= first:
            return None
        owner = row.root or row
        _, known = self._queries.setdefault(id(owner), (owner, {}))

        def note(layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> None:
            if self._stack.windows[layer] is None:
                before = [one for one in known.get(layer, ()) if one[0] < begin]  # a forward that failed is run again
                known[layer] = [*before, (begin, queries[:, max(0, first - begin) :])]

        return note

    def rewrite(self, row: Row, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Keep what the window attends to, and the window."""
        from shoal.model.kv.attended import attended, drawn

        seed = self._knobs.random
        _, known = self._queries[id(row.root or row)]
        for number, layer in layers:
            queries = [piece for _, piece in known[number]]
            keys, _ = layer.read(row.slot, layer.stored(row.slot), queries[0].dtype)
            scale, cap = self._stack.score_scale, self._stack.score_cap
            layer.keep_columns(
                row.slot, attended(queries, keys, scale, cap, self._budget, self._knobs.pool) if seed is None
                else drawn(f"{seed}/{number}", keys, self._knobs.window, self._budget))
        if row.root is None:  # branches of a search read the prompt's last token each for itself
            del self._queries[id(row)]
