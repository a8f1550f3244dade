"""StreamingLLM: of a long text, the first tokens and the last ones stay in the KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.limits import Positions
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.model.kv.layer import KVLayer


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Attention sinks and a window: the KV of the first tokens and of the last ones stays, the rest is given up.

    So memory and time per token do not grow with the text; what stood between is lost. The paper counts positions
    within the KV that is left, to go on beyond the model's context; here tokens keep the positions that they have in
    the text, which ends at the model's context. Columns go every so many tokens at once, since each time all that
    stay are moved. Layers that have a sliding window of their own keep what that says.

    Attributes:
        window: positions at the end of the text that stay, at least; None for all.
        sinks: positions at its beginning that stay.
        every: the rest is given up whenever the text has grown by so many tokens, so up to that many more stay.
    """

    name: ClassVar[str] = "streaming_llm"
    paper: ClassVar[str] = "arXiv 2309.17453"

    window: Positions | None = 1024
    sinks: Positions = 4
    every: Positions = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 token, or None to keep all")
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it must be at least 0")
        if self.every < 1:
            raise ValueError(f"every is {self.every}; it must be at least 1 token")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and two ends of the KV."""
        ends = None if self.window is None else Ends(self.sinks, self.window, self.every)
        return Recipe(DepthPlan.full(info.num_layers), keep=ends)


@dataclass(frozen=True)
class Ends(Keep):
    """Keeps the two ends of a row's KV: see `StreamingLLM`."""

    by_length: ClassVar[bool] = True

    sinks: int
    window: int
    every: int

    def begin(self, stack: Any, cache: Any) -> EndsKeeper:
        """A keeper; it remembers nothing."""
        return EndsKeeper(self)

    def most_columns(self, length: int) -> int:
        """See `Keep`: up to the first time that some go, and between two times."""
        kept = self.sinks + self.window
        due = (kept // self.every + 1) * self.every
        return length if length <= due else max(due, kept + min(self.every, length - due))


class EndsKeeper(Keeper):
    """See `Ends`."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def next_length(self, row: Row, length: int) -> int:
        """The next multiple of `every` at which there is something to give up."""
        ends = self._ends
        first = max(length + 1, ends.sinks + ends.window + 1)
        return -(-first // ends.every) * ends.every

    def rewrite(self, row: Row, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Give up what lies between the ends."""
        for _, layer in layers:
            stored = layer.stored(row.slot)
            if stored > self._ends.sinks + self._ends.window:
                columns = [*range(self._ends.sinks), *range(stored - self._ends.window, stored)]
                layer.keep_columns(row.slot, columns)
