"""Sets of sublayers, attention or MLP, that a draft leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.depth.plan import DepthPlan


@dataclass(frozen=True)
class Skips:
    """Sublayers that a draft leaves out: layers whose attention, and layers whose MLP is skipped, ascending."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("attention", "mlp"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))

    @classmethod
    def spread(cls, num_layers: int, count: int) -> Skips:
        """`count` evenly spaced sublayers; the first and the last layer stay whole."""
        inner = sublayers(num_layers)
        count = min(count, len(inner))
        return cls.of(inner[(2 * i + 1) * len(inner) // (2 * count)] for i in range(count))

    @classmethod
    def of(cls, parts: Iterable[tuple[str, int]]) -> Skips:
        """Skips from pairs ("attention" or "mlp", layer)."""
        chosen = list(parts)
        return cls(*(tuple(layer for part, layer in chosen if part == name) for name in ("attention", "mlp")))

    @property
    def size(self) -> int:
        """Number of sublayers left out."""
        return len(self.attention) + len(self.mlp)

    def parts(self) -> frozenset[tuple[str, int]]:
        """Pairs ("attention" or "mlp", layer), as `of` takes them."""
        return frozenset([*(("attention", layer) for layer in self.attention), *(("mlp", layer) for layer in self.mlp)])

    def plan(self, num_layers: int, sources: Sequence[int | None] = ()) -> DepthPlan:
        """The plan that skips them from step 1 on; ValueError if the model lacks one of the layers."""
        return DepthPlan.skipping(num_layers, self.attention, self.mlp).with_readers(sources)


def sublayers(num_layers: int) -> list[tuple[str, int]]:
    """Attention and MLP of every layer but the first and the last, from the bottom up."""
    return [(part, layer) for layer in range(1, num_layers - 1) for part in ("attention", "mlp")]
