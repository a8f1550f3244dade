"""A second, smaller model that guesses ahead, with a KV cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.decode.tree import TokenTree
from shoal.depth.plan import DepthPlan
from shoal.draft.choose import Guesses, Place, choose, followed, independent
from shoal.draft.shape import Leaf, Shape
from shoal.errors import Unsupported
from shoal.model.kv import KVCache
from shoal.model.stack import Feed, Stack

if TYPE_CHECKING:
    from shoal.decode.accept import Outcome
    from shoal.decode.row import Row


@dataclass(frozen=True)
class ModelProposer:
    """Draws a tree of guesses from a second model with the same tokens.

    Attributes:
        stack: the second model.
        shape: how the tree grows.
        follow: whether a sampled draft draws with the target's own uniform numbers, which suits a rule that compares
            draws; a rejection rule needs numbers of the draft's own.
        name: of the model, for messages.
        head: instead of the model's whole head, hidden states [N, D] to logits of the tokens `ids`.
        ids: the only tokens that are drafted, where `head` is given.
    """

    stack: Stack
    shape: Shape
    follow: bool = True
    name: str = "the draft model"
    head: Callable[[Tensor], Tensor] | None = None
    ids: tuple[int, ...] = ()

    def begin(self, stack: Any, cache: Any) -> ModelDrafter:
        """A drafter with an empty cache of its own."""
        return ModelDrafter(self, stack.vocab_size)


@dataclass
class _Growth:
    """One row's tree under way; node 0 is the row's last token."""

    row: Row
    slot: int
    levels: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[Tensor | None] = field(default_factory=list)
    words: list[tuple[int, ...]] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)

    def add(self, token: int, parent: int, law: Tensor | None) -> int:
        """A node; its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(law)
        self.words.append(() if parent < 0 else (*self.words[parent], token))
        return len(self.tokens) - 1

    def tree(self) -> TokenTree:
        """What has grown."""
        laws = tuple(self.laws) if any(law is not None for law in self.laws) else None
        return TokenTree(tuple(self.tokens), tuple(self.parents), laws)


class ModelDrafter:
    """See `shoal.decode.recipe.Drafter`.

    The cache holds, per row, a beginning of the row's tokens as committed and the nodes of the last tree as scratch.
    With the next proposal the accepted ones among these are committed, so that only what the model has not seen runs.

    Args:
        proposer: the model and how to use it.
        vocabulary: tokens of the target's logits.
    """

    def __init__(self, proposer: ModelProposer, vocabulary: int) -> None:
        self._stack, self._shape, self._follow = proposer.stack, proposer.shape, proposer.follow
        self._name, self._vocabulary = proposer.name, vocabulary
        self._head, self._ids = proposer.head, torch.tensor(proposer.ids, dtype=torch.long, device=self._stack.device)
        self._plan = DepthPlan.full(self._stack.num_layers)
        self._cache = KVCache(self._stack.windows, 0)
        self._rows: list[Row] = []
        self._drafts: list[TokenTree] = []

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per row.

        Raises:
            Unsupported: a row may grow beyond the draft model's context.
        """
        self._check_context(rows)
        self._keep(rows)
        allowed = {id(row): min(limit, self._shape.length) for row, limit in zip(rows, limits, strict=True)}
        grown = [_Growth(row, slot, allowed[id(row)]) for slot, row in enumerate(self._rows)]
        for one in grown:
            one.leaves = [Leaf(one.add(one.row.tokens[-1], -1, None))]
        busy = [one for one in grown if one.levels > 0 and self._readable(one)]
        if busy:
            self._grow(busy)
        trees = {id(one.row): one.tree() for one in grown}
        self._drafts = [trees[id(row)] for row in self._rows]
        return [trees[id(row)] for row in rows]

    def observe(self, row: Row, tree: TokenTree, outcome: Outcome) -> None:
        """Nothing to learn: which guesses were kept is read off the row's tokens."""

    def _readable(self, one: _Growth) -> bool:
        """Whether the draft model has an embedding for all it would read; a smaller one lacks the padded ids."""
        return max(one.row.tokens[self._cache.positions[one.slot] :]) < self._stack.vocab_size

    def _check_context(self, rows: Sequence[Row]) -> None:
        most = self._stack.max_positions
        longest = max(len(row.tokens) + row.stop.room for row in rows)
        if most is not None and longest > most:
            raise Unsupported(
                f"a text of up to {longest} tokens with {self._name}",
                f"its context is {most} tokens",
                f"Use a max_new_tokens that keeps prompt and answer within {most}, or draft with another model",
            )

    def _keep(self, rows: Sequence[Row]) -> None:
        """Commit what was accepted of the last trees, let rows go that have left and take in new ones."""
        for slot, (row, tree) in enumerate(zip(self._rows, self._drafts, strict=True)):
            self._commit(slot, row, tree)
        wanted = {id(row) for row in rows}
        stay = [slot for slot, row in enumerate(self._rows) if id(row) in wanted]
        if len(stay) < len(self._rows):
            self._rows = [self._rows[former] for former in self._cache.select(stay)]
        known = {id(row) for row in self._rows}
        new = [row for row in rows if id(row) not in known]
        if new:
            self._cache.extend(len(new))
            self._rows.extend(new)

    def _commit(self, slot: int, row: Row, tree: TokenTree) -> None:
        """Follow the row's tokens, but for its last one, down the nodes that have run."""
        known = self._cache.positions[slot]
        path, node = [], 0
        for token in row.tokens[known:-1]:
            child = tree.child(node, token)
            if child is None or child - 1 >= self._cache.layers[0].scratch[slot]:
                break
            path.append(child - 1)  # the root is no node of the feed
            node = child
        self._cache.commit(slot, path)

    def _grow(self, grown: list[_Growth]) -> None:
        """Level after level, one forward for all rows."""
        try:
            logits = self._read(grown)
            for level in range(max(one.levels for one in grown)):
                alive = [one for one in grown if one.levels > level and one.leaves]
                if not alive:
                    return
                if level > 0:
                    logits = self._forward([self._feed(one) for one in alive], alive)
                self._extend(alive, logits, level)
        except BaseException:
            for one in grown:
                self._cache.rollback(one.slot)
            raise

    def _read(self, grown: list[_Growth]) -> Tensor:
        """Run what the model has not seen of each row, the row's last token included; logits [rows, V] after it."""
        last: dict[int, Tensor] = {}
        while waiting := [one for one in grown if one.slot not in last]:
            chunk = max(1, self._stack.prefill_chunk // len(waiting))
            feeds = []
            for one in waiting:
                first = self._cache.positions[one.slot]
                tokens = one.row.tokens[first : first + chunk]
                feeds.append(Feed(one.slot, tokens, [0] * len(tokens), self._plan))
            logits = self._forward(feeds, waiting)
            for one, feed, values in zip(waiting, feeds, logits, strict=True):
                self._cache.commit(one.slot, range(len(feed.tokens)))
                if self._cache.positions[one.slot] == len(one.row.tokens):
                    last[one.slot] = values
        return torch.stack([last[one.slot] for one in grown])

    def _feed(self, one: _Growth) -> Feed:
        """The level's nodes; they and those before them are a forest below the committed tokens."""
        first = one.leaves[0].node
        tokens = one.tokens[first:]
        parents = [parent - 1 for parent in one.parents[1:]]
        depths = [len(words) - 1 for words in one.words[1:]]
        return Feed(
            one.slot,
            tokens,
            [0] * len(tokens),
            self._plan,
            parents,
            depths,
            wanted=len(tokens),
            fed=first - 1,
        )

    def _forward(self, feeds: Sequence[Feed], grown: Sequence[_Growth]) -> Tensor:
        """Logits [sum of wanted, V] in the target's vocabulary."""
        logits = self._stack.forward(feeds, self._cache) if self._head is None else self._by_own_head(feeds, self._head)
        for one in grown:
            one.row.ledger.draft_forwards += 1
        missing = self._vocabulary - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _by_own_head(self, feeds: Sequence[Feed], head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits in the model's vocabulary, of which only some tokens are possible."""
        last: list[Tensor] = []

        def tap(layer: int, hidden: Tensor) -> None:
            if layer == self._stack.num_layers:
                ends = ((states, len(feed.tokens), feed.wanted) for states, feed in zip(hidden, feeds, strict=True))
                last.extend(states[end - wanted : end] for states, end, wanted in ends)

        self._stack.forward([replace(feed, wanted=0) for feed in feeds], self._cache, tap)
        part = head(torch.cat(last))
        whole = part.new_full((len(part), self._stack.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._ids, part)

    def _extend(self, grown: list[_Growth], logits: Tensor, level: int) -> None:
        """Draw the children of every leaf."""
        places = [
            Place(one.row, one.words[leaf.node], followed if self._follow else independent(at))
            for one in grown
            for at, leaf in enumerate(one.leaves)
        ]
        guesses = choose(places, logits, self._shape.width(level))
        first = 0
        for one in grown:
            count = len(one.leaves)
            own = slice(first, first + count)
            self._settle(one, guesses[own], places[own])
            first += count

    def _settle(self, one: _Growth, guesses: Sequence[Guesses], places: Sequence[Place]) -> None:
        """Add the children that the shape keeps; they are the next leaves."""

        def noise(leaf: int, rank: int) -> float | None:
            if one.row.sampling.greedy:
                return None
            return Place(one.row, places[leaf].words, lambda r: f"draft value {leaf}.{r}").uniform(rank)

        kept = self._shape.keep(one.leaves, [guess.logs for guess in guesses], noise)
        leaves = []
        for leaf, guess, children in zip(one.leaves, guesses, kept, strict=True):
            for token, (log, value) in zip(guess.tokens, children, strict=False):
                leaves.append(Leaf(one.add(token, leaf.node, guess.law), log, value))
        one.leaves = leaves
