"""A*-decoding: best-first search over the steps of a reasoning."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import override

from shoal.decode.branches.verifier import Verifier, ask, attempt_of, likelihood
from shoal.decode.recipe import Recipe, Search
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.limits import Branches, Positions
from shoal.methods.common.verified import VerifiedMethod
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.branches.search import Branch
    from shoal.decode.recipe import WaitedFor

EdgeCost = Literal["change", "rise", "fall", "one"]
_BUDGET, _MOST = 8, 64
"""Most tokens that a search may decode, by default and at all, as multiples of max_new_tokens."""


@dataclass(frozen=True)
class AStar(VerifiedMethod):
    """Continues the most promising unfinished answer by a step, in several ways, until one is finished.

    A verifier rates an unfinished answer by r in [0, 1]; h = 1 - r is its remaining cost, and g is the sum of its
    steps' costs. The answer with the least g + h continues (the longer one wins ties), and wins when it is finished. A
    step ends at the delimiter. Needs a temperature above 0: greedy steps would all be equal, so a greedy request is
    decoded once. If the budget ends first, the best finished answer wins, or otherwise the best unfinished one, which
    is then decoded to its end outside the budget. Waiting answers beyond `width` drop their KV, and are read again when
    their turn comes.


    Attributes:
        k: continuations of an answer; 1 changes nothing.
        delimiter: text that ends a step.
        step: most tokens of a step, at least 1.
        budget: most tokens that the search may decode, discarded ones included; None for 8 times max_new_tokens, at
            most 64 times.
        width: waiting answers that keep their KV, at least 1.
        edge_cost: cost of a step: "change" is |dh|, with which h never overestimates; "rise" counts increases of h
            only, "fall" decreases only; "one" is 1.
        inner: the method that decodes each answer; None for full depth.
    """

    name: ClassVar[str] = "a_star"
    paper: ClassVar[str] = "arXiv 2505.13672"

    k: Branches = 4
    delimiter: str = "\n\n"
    step: Positions = 64
    budget: Positions | None = None
    width: Branches = 4
    edge_cost: EdgeCost = "change"
    inner: Method | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("k", "step", "width"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} is {getattr(self, option)}; it must be at least 1")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget is {self.budget}; it must be at least 1 token, or None")
        if not self.delimiter:
            raise ValueError("delimiter is ''; it must have at least one character")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The inner method's recipe with the search.

        Raises:
            ValueError: the budget is beyond 64 times max_new_tokens.
            Unsupported: the inner method searches or drafts.
        """
        recipe = Recipe(DepthPlan.full(info.num_layers)) if self.inner is None else self.inner.recipe(info)
        if self.k == 1:
            return recipe
        for part, what in (("search", "searches itself"), ("proposer", "drafts")):
            if self.inner is not None and getattr(recipe, part) is not None:
                raise Unsupported(f"{self.inner.name} as inner of a_star", f"it {what}", "Give another, such as d3")
        budget = _BUDGET * info.max_new_tokens if self.budget is None else self.budget
        if budget > _MOST * info.max_new_tokens:
            raise ValueError(f"budget is {budget}; it must be at most {_MOST * info.max_new_tokens} tokens, "
                             f"{_MOST} times max_new_tokens")
        return replace(recipe, search=BestFirst(self, budget, self.judge()))


@dataclass(frozen=True)
class BestFirst(Search):
    """The search; see `AStar`.

    Attributes:
        method: the method.
        budget: most tokens.
        verifier: rates answers.
    """

    method: AStar
    budget: int
    verifier: Verifier

    @property
    @override
    def timed(self) -> bool:
        return self.verifier is not likelihood

    def most(self, greedy: bool) -> int:
        """Branches: the prompt's own, waiting ones, and those in progress."""
        return 1 if greedy else 1 + self.method.width + self.method.k

    @override
    def run(self, root: Branch) -> Generator[Sequence[WaitedFor], None, Branch]:
        if root.greedy:
            return root
        if root.seq.drafts:
            raise Unsupported("a_star beside drafts", "an answer that is read anew is fed as a whole", "Leave them out")
        return (yield from _Walk(self, root).run())


@dataclass(order=True)
class _Node:
    """A waiting answer; nodes are ordered by priority.

    Attributes:
        f: g + h, see `AStar`.
        shortness: minus its number of steps.
        made: a counter of nodes.
        h: see `AStar`.
        tokens: tokens of the answer.
        finished: whether it has ended.
        branch: holds its KV; None if it was dropped.
    """

    f: float
    shortness: int
    made: int
    h: float = field(compare=False)
    tokens: list[int] = field(compare=False)
    finished: bool = field(compare=False)
    branch: Branch | None = field(compare=False)


class _Walk:
    """A search in progress.

    Args:
        how: the search.
        root: holds the prompt; answers are forks of it.
    """

    def __init__(self, how: BestFirst, root: Branch) -> None:
        self._how, self._method, self._root = how, how.method, root
        self._left, self._made = how.budget, 0
        self._waiting: list[_Node] = []

    def run(self) -> Generator[Sequence[WaitedFor], None, Branch]:
        """Search; returns the winner."""
        yield from self._judge([self._root], None)
        node = heapq.heappop(self._waiting)
        while not node.finished and self._left:
            branch = yield from self._revived(node)
            ways = branch.fork(self._method.k) if branch is self._root else [branch, *branch.fork(self._method.k - 1)]
            yield from self._advance(ways)
            yield from self._judge(ways, node)
            self._give_up()
            node = heapq.heappop(self._waiting)
        best = min([node, *self._waiting], key=lambda one: (not one.finished, one))
        return (yield from self._revived(best))

    def _revived(self, node: _Node) -> Generator[Sequence[WaitedFor], None, Branch]:
        """The node's branch, read again if its KV was dropped."""
        if node.branch is not None:
            return node.branch
        (branch,) = self._root.fork()
        branch.force(node.tokens)
        branch.advance(0)
        yield [branch]
        return branch

    def _advance(self, ways: Sequence[Branch]) -> Generator[Sequence[WaitedFor], None, None]:
        """Advance each by a step, token by token, within the budget."""
        begun = [(way, len(way.tokens), len(way.text)) for way in ways]
        while going := [way for way, tokens, text in begun if not self._over(way, tokens, text)][: self._left]:
            for way in going:
                way.advance(1)
            yield going
            self._left -= len(going)

    def _over(self, way: Branch, tokens: int, text: int) -> bool:
        """Whether the step that began after that many tokens and characters is at its end."""
        ended = way.finish_reason is not None or len(way.tokens) - tokens >= self._method.step
        return ended or self._method.delimiter in way.text[text:].lstrip()

    def _judge(self, ways: Sequence[Branch], parent: _Node | None) -> Generator[Sequence[WaitedFor], None, None]:
        """Let distinct answers wait, once the verifier has rated each."""
        differ: dict[tuple[int, ...], Branch] = {}
        for way in ways:
            if differ.setdefault(tuple(way.tokens), way) is not way:
                way.end()
        said = [ask(self._how.verifier, attempt_of(way), self._method.patience) for way in differ.values()]
        yield said
        for way, score in zip(differ.values(), said, strict=True):
            heapq.heappush(self._waiting, self._node(way, parent, 1 - score.result()))

    def _node(self, branch: Branch, parent: _Node | None, h: float) -> _Node:
        finished = branch.finish_reason is not None
        f = h if parent is None else parent.f + _more(self._method.edge_cost, parent.h, h)
        self._made += 1
        deeper = 0 if parent is None else parent.shortness - 1
        return _Node(f, deeper, self._made, h, branch.tokens, finished, branch)

    def _give_up(self) -> None:
        """Drop the KV of all but the best waiting answers."""
        for node in [one for one in sorted(self._waiting) if one.branch is not None][self._method.width :]:
            assert node.branch is not None
            node.branch.end()
            node.branch = None


def _more(kind: EdgeCost, before: float, after: float) -> float:
    """By how much a step that takes h from `before` to `after` raises g + h.

    A cost equal to the fall of h is not added, so that f keeps every bit and ties stay ties.
    """
    change = after - before
    rise = max(0.0, change)
    return {"change": 2 * rise, "rise": change + rise, "fall": rise, "one": 1 + change}[kind]
