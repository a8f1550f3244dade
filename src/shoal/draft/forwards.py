"""Guesses from forwards of the target's own stack on the target's own KV: what all self-speculation shares.

A draft is a chain, with siblings beside it where the model is in doubt. Every forward takes the last node of every
row that still drafts, after the scratch entries that the forwards before it left; whoever called rolls them back. So
there is no second cache: layers that a draft runs read what the target's own forwards stored and add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.decode import sampling
from shoal.decode.accept import Match
from shoal.decode.lenient import Lenient
from shoal.decode.tree import TokenTree
from shoal.depth.plan import DepthPlan
from shoal.draft.shallow import Widths
from shoal.model.stack import Feed

if TYPE_CHECKING:
    from shoal.decode.accept import Outcome
    from shoal.decode.row import Row
    from shoal.model.kv import KVCache
    from shoal.model.stack import Stack


@dataclass
class Draft:
    """One row's draft under way.

    Attributes:
        row: whose it is; its last token is node 0.
        plan: layers to draft with; node j runs those of step j + 1, so that a schedule restarts with every draft.
        length: most guesses, one after another.
        stop: the guess that the model makes with less confidence than this is the last one.
        widths: candidates per place, by confidence; without any, one.
        nodes: most nodes of the tree.
    """

    row: Row
    plan: DepthPlan
    length: int
    stop: float = 0.0
    widths: Widths = ()
    nodes: int = 32
    chain: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)
    laws: list[Tensor | None] = field(default_factory=list)
    confidence: float = 1.0

    def __post_init__(self) -> None:
        self.chain = [self.row.tokens[-1]]
        self.plan = within(self.plan, self.row.recipe.plan, self.row.emitted)

    @property
    def guesses(self) -> int:
        """How long the chain is already."""
        return len(self.chain) - 1

    @property
    def goes_on(self) -> bool:
        """Whether another guess is wanted."""
        return self.guesses < self.length and self.confidence >= self.stop

    @property
    def wants_confidence(self) -> bool:
        """Whether anything depends on how sure the model is."""
        return self.stop > 0 or bool(self.widths)

    def feed(self) -> Feed:
        """The chain's last node, after the others."""
        return Feed(self.row.slot, self.chain[-1:], [len(self.chain)], self.plan, fed=self.guesses)

    def scores(self, logits: Tensor) -> Tensor:
        """Scores [V] after the chain's last node."""
        row = self.row
        history = [*row.tokens, *self.chain[1:]]
        return sampling.scores(logits, history, row.prompt_length, row.sampling, row.processors)

    def uniform(self) -> float:
        """The number that draws the next guess.

        Where the target's own draw decides, it is the one by which that is drawn: the likelier both are to draw the
        same. Rules that weigh laws against each other need a number of its own.
        """
        purpose = "sample" if isinstance(self.row.rule, Match | Lenient) else "draft"
        return sampling.uniform(self.row.seed, self.row.number, self.row.emitted + self.guesses, purpose)

    def add(self, token: int, scores: Tensor, law: Tensor | None, confidence: float) -> None:
        """The next guess, drawn from `law` (None: the most likely one), with siblings where they are wanted."""
        self.row.ledger.draft_forwards += 1
        self.row.ledger.draft_layer_tokens += self.plan.depth(len(self.chain))
        self.row.ledger.read(self.plan.depth(len(self.chain)))
        self.confidence = confidence
        self.others.append(self._siblings(token, scores))
        self.laws.append(law)
        self.chain.append(token)

    def _siblings(self, token: int, scores: Tensor) -> list[int]:
        spare = self.nodes - 1 - self.length - sum(map(len, self.others))
        count = min(_width(self.widths, self.confidence) - 1, spare)
        if count < 1:
            return []
        best: list[int] = scores.topk(min(count + 1, len(scores))).indices.tolist()
        return [other for other in best if other != token][:count]

    def tree(self) -> TokenTree:
        """The guesses, siblings behind the chain's own node."""
        tokens, parents, last = [self.chain[0]], [-1], 0
        laws: list[Tensor | None] = [None]
        for token, others, law in zip(self.chain[1:], self.others, self.laws, strict=True):
            level = [token, *others]
            last, above = len(tokens), last
            tokens += level
            parents += [above] * len(level)
            laws += [law, *[None] * len(others)]
        drawn = any(law is not None for law in laws)
        return TokenTree(tuple(tokens), tuple(parents), tuple(laws) if drawn else None)


def run(drafts: Sequence[Draft], stack: Stack, cache: KVCache) -> None:
    """Draft for all rows (ascending slots) at once, until the last one has enough."""
    while under_way := [draft for draft in drafts if draft.goes_on]:
        _extend(under_way, stack.forward([draft.feed() for draft in under_way], cache))


@torch.no_grad()
def _extend(drafts: Sequence[Draft], logits: Tensor) -> None:
    """A guess for each draft from the logits [drafts, V] after its last node."""
    scores = torch.stack([draft.scores(line) for draft, line in zip(drafts, logits, strict=True)])
    laws = [None if d.row.sampling.greedy else sampling.law_of(s, d.row.sampling) for d, s in _pairs(drafts, scores)]
    tokens: list[int] = sampling.greedy(scores).tolist()
    drawn = [(i, law) for i, law in enumerate(laws) if law is not None]
    if drawn:
        numbers = [drafts[i].uniform() for i, _ in drawn]
        for (i, _), token in zip(drawn, sampling.draws(torch.stack([law for _, law in drawn]), numbers), strict=True):
            tokens[i] = token
    sure = confidences(scores) if any(draft.wants_confidence for draft in drafts) else [1.0] * len(drafts)
    for draft, token, line, law, confidence in zip(drafts, tokens, scores, laws, sure, strict=True):
        draft.add(token, line, law, confidence)


def _pairs(drafts: Sequence[Draft], scores: Tensor) -> zip[tuple[Draft, Tensor]]:
    return zip(drafts, scores, strict=True)


def confidences(scores: Tensor) -> list[float]:
    """Probability of the most likely token under each line of scores [N, V], before temperature and truncation."""
    values = scores if scores.dtype == torch.float64 else scores.float()
    result: list[float] = (values.amax(-1) - values.logsumexp(-1)).exp().tolist()
    return result


def _width(widths: Widths, confidence: float) -> int:
    return next((width for limit, width in widths if confidence <= limit), 1)


def within(plan: DepthPlan, target: DepthPlan, step: int) -> DepthPlan:
    """`plan` without what the target no longer runs at `step`: layers that left out tokens have no KV to draft on."""
    if step < target.first_shallow_step:
        return plan
    gone = [tuple(drop <= step for drop in drops) for drops in (target.attention, target.mlp)]
    return _without(plan, *gone)


@lru_cache(maxsize=256)
def _without(plan: DepthPlan, attention: tuple[bool, ...], mlp: tuple[bool, ...]) -> DepthPlan:
    def cut(drops: tuple[int, ...], gone: tuple[bool, ...]) -> tuple[int, ...]:
        return tuple(1 if lost else drop for drop, lost in zip(drops, gone, strict=True))

    return DepthPlan(cut(plan.attention, attention), cut(plan.mlp, mlp))


class ShallowDrafter:
    """See `shoal.decode.recipe.Drafter`. Subclasses choose each row's draft anew."""

    def __init__(self, proposer: Any, stack: Stack, cache: KVCache) -> None:
        self.proposer, self.stack, self.cache = proposer, stack, cache

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """One forward per guess, for all rows that still draft."""
        drafts = [self.draft(row, limit) for row, limit in zip(rows, limits, strict=True)]
        run(drafts, self.stack, self.cache)
        return [draft.tree() for draft in drafts]

    def draft(self, row: Row, limit: int) -> Draft:
        """What to draft for a row, of at most `limit` guesses."""
        one = self.proposer
        return Draft(row, one.plan, min(one.length, limit), one.stop, one.widths)

    def observe(self, row: Row, tree: TokenTree, outcome: Outcome) -> None:
        """Nothing to learn."""
