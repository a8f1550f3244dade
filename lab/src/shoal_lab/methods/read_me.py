"""Read-ME: a dense model cut into experts, chosen by a router that sees tokens alone, before the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Experts, Worker
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.drafting import made_of
from shoal.methods.common.limits import Layers, Seed
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.model.experts import ExpertChoice, ExpertMLPs
    from shoal.model.kv.cache import KVCache
    from shoal.model.runner import ModelRunner, SequenceChunk
    from shoal_lab.components.router import ExpertRouter


@dataclass(frozen=True)
class ReadME(Method):
    """Every token of an answer runs some groups of the MLPs' neurons, which a small router chooses by the last tokens.

    Neurons that fire together form a group. The most used ones form groups that always run. Prompts run all groups. The
    model's weights are unchanged; in the paper experts are trained further, on a billion tokens. The groups are a copy
    of the MLPs in memory. Component: `shoal train read_me`.

    Attributes:
        part: the folder from `shoal train read_me`; None for the known component of the model.
        experts: groups of each MLP that a token runs, always running ones included; None for all.
        random: seed by which the groups are drawn instead: the control. None for the router's choice.
    """

    name: ClassVar[str] = "read_me"
    paper: ClassVar[str] = "arXiv 2410.19123"
    needs: ClassVar[tuple[str, ...]] = ("a part trained for the model",)
    reads: ClassVar[tuple[str, ...]] = ("part",)

    part: str | None = None
    experts: Layers | None = 6
    random: Seed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts is not None and self.experts < 1:
            raise ValueError(f"experts is {self.experts}; it must be at least 1 group, or None for all")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a part of its MLP.

        Raises:
            ValueError: there is no component, it cannot be read, is of another kind, or has fewer groups.
            Unsupported: it was trained for another model.
        """
        plan = DepthPlan.full(info.num_layers)
        if self.experts is None:
            return Recipe(plan)
        router = self._router(info)
        if router is not None and self.experts == router.groups:
            return Recipe(plan)
        return Recipe(plan, experts=Routed(self, router))

    def _router(self, info: ModelInfo) -> ExpertRouter | None:
        """The router, the same one for all requests; None if all groups run."""
        if info.tensors is None:
            return None
        from shoal_lab.components.router import ExpertRouter

        part, router = made_of(self.name, self.part, info, ExpertRouter)
        if router.layers != info.num_layers:
            raise Unsupported(f"the trained part {part.name!r}", f"it is for {router.layers} layers, and the model has "
                              f"{info.num_layers}", "Train one for this model: shoal train read_me")
        least = max(1, router.shared)
        if self.experts is not None and not least <= self.experts <= router.groups:
            raise ValueError(f"experts is {self.experts}; it must be in [{least}, {router.groups}] for the trained "
                             f"part {part.name!r}, of whose groups {router.shared} always run, or None for all")
        return router


@dataclass(frozen=True)
class Routed(Experts):
    """Chooses groups by the router; see `ReadME`."""

    method: ReadME
    router: ExpertRouter | None

    def bytes_to_come(self, runner: ModelRunner) -> int:
        """Memory that the groups will take; 0 once they are made."""
        return 0 if self.router is None else self.router.bytes_to_come(runner)

    def begin(self, runner: Any, cache: Any) -> RoutedWorker:
        """A worker; the MLPs are cut into groups if they are not yet."""
        assert self.router is not None
        return RoutedWorker(self.method, self.router, self.router.mlps(runner), cache)


class RoutedWorker(Worker):
    """Chooses groups for sequences. A choice depends on the text up to the token alone, so nothing is remembered."""

    def __init__(self, method: ReadME, router: ExpertRouter, mlps: ExpertMLPs, cache: KVCache) -> None:
        self._method, self._router, self._mlps, self._cache = method, router, mlps, cache

    def experts(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> Sequence[ExpertChoice | None]:
        """Groups for the tokens of answers."""
        return [self._choice(seq, chunk) if chunk.steps[-1] else None for seq, chunk in zip(seqs, chunks, strict=True)]

    def _choice(self, seq: SequenceState, chunk: SequenceChunk) -> ExpertChoice:
        from shoal.model.experts import ExpertChoice

        before = seq.tokens[max(0, self._cache.positions[seq.seq_id] - self._router.window) :
                            self._cache.positions[seq.seq_id]]
        masks = [self._masks([*before, *_path(chunk, node)]) if step else None for node, step in enumerate(chunk.steps)]
        return ExpertChoice(self._mlps, masks)

    def _masks(self, tokens: Sequence[int]) -> tuple[int, ...]:
        assert self._method.experts is not None
        return self._router.masks(tokens, self._method.experts, self._method.random)


def _path(chunk: SequenceChunk, node: int) -> list[int]:
    """The tokens of the chunk on the path to one of them, that one last."""
    if chunk.parents is None:
        return list(chunk.tokens[: node + 1])
    path: list[int] = []
    while node >= 0:
        path.insert(0, chunk.tokens[node])
        node = chunk.parents[node]
    return path
