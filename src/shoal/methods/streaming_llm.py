"""StreamingLLM: of a long text, the first tokens and the last ones stay in the KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import override

from shoal.methods.common.eviction import EvictionMethod
from shoal.methods.common.limits import Positions

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.kv.choice import StoredSlots


@dataclass(frozen=True)
class StreamingLLM(EvictionMethod):
    """Attention sinks and a window: the KV of the first tokens and of the last ones stays, the rest is given up.

    So memory and time per token do not grow with the text, and what stood between is lost. The paper counts positions
    within the KV that is left (section 3.2), as `positions="slots"` does: keys that stay are turned back to the places
    of those that go, and an answer may go on beyond the context that the model was trained on; a prompt must fit it. By
    default tokens keep the positions that they have in the text, and the text ends at the model's context. Slots go
    every so many tokens at once, since all that stay are moved each time; with `every=1` the places are the paper's at
    each token. Layers with a sliding window keep their window.

    Attributes:
        window: positions at the end of the text that stay, at least; None for all.
        sinks: positions at its beginning that stay.
        every: the rest is given up whenever the text has grown by so many tokens, so up to that many more stay.
        positions: "text", or "slots", which answers longer than the context need.
    """

    name: ClassVar[str] = "streaming_llm"
    paper: ClassVar[str] = "arXiv 2309.17453"
    differs: ClassVar[bool] = False

    window: Positions | None = 1024
    sinks: Positions = 4
    every: Positions = 64
    positions: Literal["text", "slots"] = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 token, or None to keep all")
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it must be at least 0")
        if self.every < 1:
            raise ValueError(f"every is {self.every}; it must be at least 1 token")

    @property
    def budget(self) -> int | None:
        """Both ends stay."""
        return None if self.window is None else self.sinks + self.window

    def score(self, slots: StoredSlots) -> Tensor:
        """Nothing between the ends stays, so scores do not matter."""
        return slots.places

    @property
    @override
    def turns(self) -> bool:
        return self.positions == "slots" and not self.neutral
