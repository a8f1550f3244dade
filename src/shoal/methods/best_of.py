"""Best of n: the answer is the one of several samples that the model itself, or a verifier, finds best."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from shoal.decode.branches.verifier import Verifier, ask, attempt_of, likelihood
from shoal.decode.recipe import Recipe, Search
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.limits import Branches
from shoal.methods.common.verified import VerifiedMethod
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.branches.search import Branch
    from shoal.decode.recipe import WaitedFor


@dataclass(frozen=True)
class BestOf(VerifiedMethod):
    """n samples are decoded side by side; the one with the best mean log-probability per token is the answer.

    It needs a temperature above 0. Greedy samples would all be alike, so a greedy request is decoded once. The prompt
    is read once. Log-probabilities are the model's before temperature and truncation. In transformers' `model.generate`
    these two are processors, and enter the comparison. A verifier may decide instead; of two samples that it finds
    equally good, the likelier one wins. The answer comes as a whole at the end of all. The statistics count all work.

    Attributes:
        n: samples; 1 changes nothing.
        inner: the method by which each sample is decoded; None for full depth.
    """

    name: ClassVar[str] = "best_of"

    n: Branches = 4
    inner: Method | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 1:
            raise ValueError(f"n is {self.n}; it must be at least 1, the number of samples")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The inner method's recipe with the search put in; Unsupported if that searches as well."""
        recipe = Recipe(DepthPlan.full(info.num_layers)) if self.inner is None else self.inner.recipe(info)
        if self.n == 1:
            return recipe
        if self.inner is not None and recipe.search is not None:
            what = f"{self.inner.name} as inner of {self.name}"
            raise Unsupported(what, "it searches itself", "Give another, such as d3")
        return replace(recipe, search=Favourite(self.n, self.judge(), self.patience))


@dataclass(frozen=True)
class Favourite(Search):
    """Decodes all samples to their ends. Of two that are equally good and likely, the earlier one wins."""

    samples: int
    verifier: Verifier = likelihood
    patience: float = 30.0

    @property
    @override
    def timed(self) -> bool:
        return self.verifier is not likelihood

    @override
    def most(self, greedy: bool) -> int:
        return 1 if greedy else self.samples  # greedy samples are all alike

    def run(self, root: Branch) -> Generator[Sequence[WaitedFor], None, Branch]:
        """Sample, and give up a sample as soon as it is beaten."""
        samples = [root, *root.fork(self.most(root.greedy) - 1)]
        for sample in samples:
            sample.advance()
        left: list[tuple[Branch, Future[float]]] = []
        for sample in samples:
            yield [sample]
            left.append((sample, ask(self.verifier, attempt_of(sample), self.patience)))
            if all(said.done() for _, said in left):
                left = [_best(left)]
        yield [said for _, said in left]
        return _best(left)[0]


def _best(judged: Sequence[tuple[Branch, Future[float]]]) -> tuple[Branch, Future[float]]:
    """The sample of the best verdict; the others are given up."""
    best = max(judged, key=lambda one: (one[1].result(), one[0].score))
    for sample, _ in judged:
        if sample is not best[0]:
            sample.end()
    return best
