"""The methods that draft with the model's own layers, and a watch over what becomes of their drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from method_matrix import SELF_DRAFTING
from shoal.decode.recipe import Recipe
from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer, StepReport
from shoal.methods.base import Method
from shoal.methods.d3_spec import D3Spec
from shoal.model.runner import HiddenStateHook, SequenceChunk

METHODS: dict[str, Method] = {
    "d3_spec": D3Spec(mean=0.85, core=2),
    "d3_spec, steep": D3Spec(alpha=0.6, core=1, length=7, order="late_middle"),
    "d3_spec, all layers": D3Spec(alpha=1.0, length=4),
    **SELF_DRAFTING,
}
"""Settings under which the six layers of a tiny random model accept something and reject something."""


@dataclass
class Watched(Drafter, Proposer):
    """A proposer that behaves like `inner` and keeps what came of it.

    Attributes:
        met: how often nothing, a part and all of the way to a leaf was accepted.
        trees: everything that was proposed.
        limits: what each proposal was allowed.
        fail_at: number of the proposal after which it raises, its scratch still in the cache.
    """

    inner: Any
    met: Counter[str] = field(default_factory=Counter)
    trees: list[TokenTree] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    fail_at: int | None = None

    def begin(self, runner: Any, cache: Any) -> Watched:
        """It stands in front of the drafter."""
        self._drafter = self.inner.begin(runner, cache)
        return self

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        trees = self._drafter.propose(seqs, limits)
        if self.fail_at is not None and len(self.trees) >= self.fail_at:
            raise RuntimeError("the drafter broke")
        self.trees.extend(trees)
        self.limits.extend(limits)
        return trees

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        return self._drafter.watch(seqs, chunks)

    def observe(self, report: StepReport) -> None:
        for _, tree, outcome in report.guessed():
            last = outcome.path[-1]
            self.met["none" if last == 0 else "some" if tree.children(last) else "all"] += 1
        self._drafter.observe(report)


def watched(recipe: Recipe) -> tuple[Recipe, Watched]:
    """A recipe whose proposer is watched."""
    proposer = Watched(recipe.proposer)
    return replace(recipe, proposer=proposer), proposer
