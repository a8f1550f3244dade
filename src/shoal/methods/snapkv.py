"""SnapKV: of a prompt, the KV that its last tokens attend to stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from shoal.methods.base import SHOWN_QUERIES
from shoal.methods.common.eviction import EvictionMethod
from shoal.methods.common.limits import Most, Positions, Seed

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.kv.choice import StoredSlots


@dataclass(frozen=True)
class SnapKV(EvictionMethod):
    """Once the prompt is read, each KV head keeps the slots that the prompt's last queries attend to most.

    The last `window` positions stay. They pay attention to the slots before them; it is summed over the positions
    and over the heads that share a KV head (section 4.1 of the paper). Then each slot takes the largest sum among its
    neighbours, so that what stands together stays together (section 4.2). What is generated stays, too. The paper ranks
    slots for each query head, for which the KV head has to be copied. Here the heads that share a KV head share its
    slots. Layers with a sliding window keep their window.

    Attributes:
        budget: positions of the prompt that stay, the window among them; None, or the prompt's length, for all.
        window: positions at the prompt's end that say what matters, and stay.
        pool: neighbours among which the largest count is taken, itself in the middle; 1 for none.
        random: seed by which as many slots are drawn before the window instead, per layer and KV head: the control.
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

    @property
    def queries(self) -> int:
        """The window's queries say what matters."""
        return self.window

    def score(self, slots: StoredSlots) -> Tensor:
        """The attention that the window pays, or the control's draw."""
        from shoal.model.kv.choice import pooled

        if self.random is not None:
            return slots.drawn(self.random, self.budget or 0, self.window)
        return pooled(slots.attention[:, : -self.window], self.pool)
