"""Groups of neurons of gated MLPs, of which a token runs some in place of the whole: what executors ask of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class ExpertMLPs(Protocol):
    """The MLPs of all layers, in groups."""

    @property
    def native(self) -> bool:
        """Whether the native kernels can run them."""

    def mixed(
        self, x: Tensor, layer: int, opened: Sequence[Opened | None], whole: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Outputs of an MLP for normed inputs [T, hidden], in float32 or wider.

        Args:
            opened: for each input the groups that it runs, of these MLPs or of others; None for the whole MLP.
        """

    def put_into(self, batch: Any, masks: Sequence[Sequence[int]]) -> None:
        """Set the groups that the tokens of a `BatchStruct` run.

        Args:
            batch: the batch; it keeps the arguments alive.
            masks: for each running layer and token, the groups that it runs, bit g for group g; 0 for the whole MLP.
        """


Opened = tuple[ExpertMLPs, int]
"""The groups, and the mask of those that one token runs in one layer."""


@dataclass(frozen=True)
class ExpertChoice:
    """Which groups of the MLPs the tokens of a chunk run.

    Attributes:
        masks: for each token and layer, the groups that it runs, bit g for group g; None for the whole MLPs.
    """

    mlps: ExpertMLPs
    masks: Sequence[Sequence[int] | None]

    def opened(self, layer: int, node: int) -> Opened | None:
        """The groups that token `node` runs in a layer; None for the whole MLP."""
        masks = self.masks[node]
        return None if masks is None else (self.mlps, masks[layer])
