"""Which sublayers run at which step, nested or not.

A depth plan is nested, so skipped layers never miss anything. A table that is not nested, such as D3 played backwards
(shallow first, deep later), brings layers back that have not seen some positions. It *propagates*: a layer that is
skipped at a position still makes keys and values there, of the stream that passes by (the state propagation of CALM,
arXiv 2207.07061), and only leaves the stream as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.depth.plan import DepthPlan


@dataclass(frozen=True)
class LayerTable:
    """A plan, or a number of layers per step that may rise.

    Attributes:
        plan: the nested form; None for a table that propagates.
        counts: layers of steps 0, 1, ...; later steps keep the last count.
        removal: the layers that are left out first, in order.
        num_layers: L.
    """

    num_layers: int
    plan: DepthPlan | None = None
    counts: tuple[int, ...] = ()
    removal: tuple[int, ...] = ()

    @classmethod
    def full(cls, num_layers: int) -> LayerTable:
        """Every layer at every step."""
        return cls(num_layers, DepthPlan.full(num_layers))

    @classmethod
    def of(cls, plan: DepthPlan) -> LayerTable:
        """The table of a plan."""
        return cls(plan.num_layers, plan)

    @classmethod
    def rising(cls, counts: Sequence[int], removal: Sequence[int], num_layers: int) -> LayerTable:
        """A table that need not be nested.

        Raises:
            ValueError: a count asks for layers that the order does not let go, or more than there are.
        """
        for step, count in enumerate(counts):
            if not num_layers - len(removal) <= count <= num_layers:
                raise ValueError(
                    f"{count} layers at step {step}; it must be {num_layers - len(removal)}..{num_layers}, since "
                    f"{len(removal)} of {num_layers} layers may be left out"
                )
        if not counts:
            raise ValueError("a table needs the number of layers of at least one step")
        return cls(num_layers, None, tuple(counts), tuple(removal))

    @property
    def propagates(self) -> bool:
        """Whether skipped layers make keys and values of the stream that passes by."""
        return self.plan is None

    def runs(self, layer: int, first_step: int, count: int) -> tuple[list[bool], list[bool]]:
        """Whether attention and MLP of `layer` run at steps first_step..first_step+count-1."""
        steps = range(first_step, first_step + count)
        if self.plan is not None:
            return [s < self.plan.attention[layer] for s in steps], [s < self.plan.mlp[layer] for s in steps]
        whole = [layer not in self.removal[: self.num_layers - self._count(step)] for step in steps]
        return whole, whole

    def depth(self, step: int) -> float:
        """Layers of a step; a lone sublayer counts half."""
        return self._count(step) if self.plan is None else self.plan.depth(step)

    def layer_tokens(self, tokens: int) -> float:
        """Layers summed over the generated tokens 0..tokens-1, token 0 at L."""
        if self.plan is not None:
            return self.plan.mean_depth(tokens) * tokens if tokens else 0.0
        return sum(self.num_layers if step == 0 else self._count(step) for step in range(tokens))

    def _count(self, step: int) -> int:
        return self.counts[min(step, len(self.counts) - 1)]
