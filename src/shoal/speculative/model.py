"""A second, smaller model that guesses ahead, with a KV cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.stack import SequenceChunk, Stack
from shoal.speculative.choose import Guesses, Place, choose
from shoal.speculative.growth import Growth, Leaf, TreeShape, grow

if TYPE_CHECKING:
    from shoal.decode.row import Row

View = Callable[[Sequence[int]], Sequence[int]]
"""Maps a prompt to the tokens that the draft model reads instead."""


@dataclass(frozen=True)
class ModelProposer(Proposer):
    """Draws a tree of guesses from a second model with the same tokens, with the random numbers of the row's rule.

    Attributes:
        stack: the second model; None for the target itself, which then reads a shorter view of the prompt.
        shape: how the tree grows.
        name: of the model, for messages.
        head: maps hidden states [N, D] to logits of the tokens `ids`, in place of the model's whole head.
        ids: the only tokens that are drafted, if `head` is given.
        view: gives the tokens to read in place of a prompt, before the emitted ones; None for the prompt.
    """

    stack: Stack | None
    shape: TreeShape
    name: str = "the draft model"
    head: Callable[[Tensor], Tensor] | None = None
    ids: tuple[int, ...] = ()
    view: View | None = None

    @property
    @override
    def second_stack(self) -> Stack | None:
        return self.stack

    def begin(self, stack: Any, cache: Any) -> ModelDrafter:
        """A drafter with an empty cache of its own."""
        return ModelDrafter(self, stack if self.stack is None else self.stack, stack.vocab_size)


def check_context(stack: Stack, name: str, longest: int) -> None:
    """Refuse a text of so many tokens if it is too long for the draft model of that name."""
    most = stack.max_positions
    if most is not None and longest > most:
        raise Unsupported(
            f"a text of up to {longest} tokens with {name}",
            f"its context is {most} tokens",
            f"Use a max_new_tokens that keeps prompt and answer within {most}, or draft with another model",
        )


class TreeUnderWay(Growth):
    """One row's growing tree.

    Attributes:
        row, slot: the row, and its place in the draft model's cache.
        levels: most levels.
        level: the levels that it has.
        leaves: nodes of the last level.
    """

    def __init__(self, row: Row, slot: int, levels: int) -> None:
        super().__init__(row.tokens[-1])
        self.row, self.slot, self.levels = row, slot, levels
        self.level, self.leaves = 0, [Leaf(0)]

    def take(self, guesses: Sequence[tuple[int, Tensor | None]]) -> None:
        """Guesses, one after another, that are there already, each with what it was drawn from; no other is wanted."""
        for token, probs in guesses[: self.levels]:
            self.add(token, len(self.tokens) - 1, probs)
        self.leaves = []

    @property
    def goes_on(self) -> bool:
        """Whether another level is wanted and there is a leaf to grow from."""
        return self.level < self.levels and bool(self.leaves)


class ModelDrafter(Drafter):
    """Drafts with the second model. It reads off the rows' tokens which guesses were kept.

    Per row, the cache holds a prefix of the row's tokens as committed and the nodes of the last tree as scratch. The
    next proposal commits the accepted nodes, so that the model runs only tokens that it has not seen.

    Args:
        proposer: how the model is used.
        stack: the model.
        vocabulary: tokens of the target's logits.
    """

    def __init__(self, proposer: ModelProposer, stack: Stack, vocabulary: int) -> None:
        self._stack, self._shape, self._view = stack, proposer.shape, proposer.view
        self._name, self._vocabulary = proposer.name, vocabulary
        self._head, self._ids = proposer.head, torch.tensor(proposer.ids, dtype=torch.long, device=self._stack.device)
        self._plan = DepthPlan.full(self._stack.num_layers)
        self._cache = KVCache(self._stack.windows, 0)
        self._rows: list[Row] = []
        self._prompts: dict[Row, Sequence[int]] = {}
        self._drafts: list[TokenTree] = []

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per row.

        Raises:
            Unsupported: a row may grow beyond the draft model's context.
        """
        check_context(self._stack, self._name, max(self._length(row) + row.stop.room for row in rows))
        self._keep(rows)
        allowed = {row: min(limit, self._shape.length) for row, limit in zip(rows, limits, strict=True)}
        grown = [self._begun(row, slot, allowed[row]) for slot, row in enumerate(self._rows)]
        busy = [one for one in grown if one.goes_on and self._readable(one)]
        if busy:
            self._grow(busy)
        trees = {one.row: one.tree() for one in grown}
        self._drafts = [trees[row] for row in self._rows]
        return [trees[row] for row in rows]

    def _begun(self, row: Row, slot: int, levels: int) -> TreeUnderWay:
        """A tree without guesses."""
        return TreeUnderWay(row, slot, levels)

    def _readable(self, one: TreeUnderWay) -> bool:
        """Whether the draft model has embeddings for all it would read; a smaller table lacks the padded ids."""
        return max(self._text(one.row, self._cache.positions[one.slot])) < self._stack.vocab_size

    def _text(self, row: Row, first: int) -> Sequence[int]:
        """A row's tokens that the draft model reads from a position on: the view of the prompt, then the answer."""
        prompt = self._prompt(row)
        if prompt is None:
            return row.tokens[first:]
        past = first - len(prompt)
        emitted = row.tokens[row.prompt_length + max(past, 0) :]
        return emitted if past >= 0 else [*prompt[first:], *emitted]

    def _prompt(self, row: Row) -> Sequence[int] | None:
        """The tokens that are read in place of the row's prompt, chosen once."""
        if self._view is not None and row not in self._prompts:
            self._prompts[row] = self._view(row.tokens[: row.prompt_length])
        return self._prompts.get(row)

    def _length(self, row: Row) -> int:
        """Tokens of a row as the draft model has them."""
        prompt = self._prompt(row)
        return len(row.tokens) if prompt is None else len(prompt) + row.emitted

    def _keep(self, rows: Sequence[Row]) -> None:
        """Commit the accepted nodes of the last trees, remove rows that have left and add new ones."""
        for slot, (row, tree) in enumerate(zip(self._rows, self._drafts, strict=True)):
            self._commit(slot, row, tree)
        wanted = set(rows)
        stay = [slot for slot, row in enumerate(self._rows) if row in wanted]
        if len(stay) < len(self._rows):
            self._rows = [self._rows[former] for former in self._cache.select(stay)]
            self._prompts = {key: prompt for key, prompt in self._prompts.items() if key in wanted}
        known = set(self._rows)
        new = [row for row in rows if row not in known]
        if new:
            self._cache.extend(len(new))
            self._rows.extend(new)

    def _commit(self, slot: int, row: Row, tree: TokenTree) -> None:
        """Follow the row's tokens, except the last one, down the nodes that have run."""
        known = self._cache.positions[slot]
        path, node = [], 0
        for token in self._text(row, known)[:-1]:
            child = tree.child(node, token)
            if child is None or child - 1 >= self._cache.layers[0].scratch[slot]:
                break
            path.append(child - 1)  # the root is no node of the chunk
            node = child
        self._cache.commit(slot, path)

    def _grow(self, grown: list[TreeUnderWay]) -> None:
        """Grow the trees: the first level follows the unread tokens, each further one the level before."""
        try:
            grow(grown, self._after, self._extend)
        except BaseException:
            for one in grown:
                self._cache.rollback(one.slot)
            raise

    def _after(self, grown: list[TreeUnderWay]) -> Tensor:
        """Logits [leaves of all trees, V] after the last level, which is equally deep in all."""
        if not grown[0].level:
            return self._read(grown)
        return self._forward([self._feed(one) for one in grown], [one.row for one in grown])

    def _read(self, grown: list[TreeUnderWay]) -> Tensor:
        """Run the tokens of each row that the model has not seen, the last one included; logits [rows, V] after it."""
        last: dict[int, Tensor] = {}
        while waiting := [one for one in grown if one.slot not in last]:
            most = max(1, self._stack.prefill_chunk // len(waiting))
            chunks = []
            for one in waiting:
                first = self._cache.positions[one.slot]
                tokens = self._text(one.row, first)[:most]
                chunks.append(SequenceChunk(one.slot, tokens, [0] * len(tokens), self._plan))
            logits = self._forward(chunks, [one.row for one in waiting])
            for one, chunk, values in zip(waiting, chunks, logits, strict=True):
                self._cache.commit(one.slot, range(len(chunk.tokens)))
                if self._cache.positions[one.slot] == self._length(one.row):
                    last[one.slot] = values
        return torch.stack([last[one.slot] for one in grown])

    def _feed(self, one: TreeUnderWay) -> SequenceChunk:
        """A chunk of the level's nodes; with the earlier ones they are a forest below the committed tokens."""
        first = one.leaves[0].node
        tokens = one.tokens[first:]
        parents = [parent - 1 for parent in one.parents[1:]]
        depths = [len(words) - 1 for words in one.words[1:]]
        return SequenceChunk(
            one.slot,
            tokens,
            [0] * len(tokens),
            self._plan,
            parents,
            depths,
            wanted=len(tokens),
            fed=first - 1,
        )

    def _forward(self, chunks: Sequence[SequenceChunk], rows: Sequence[Row]) -> Tensor:
        """Logits [sum of wanted, V] in the target's vocabulary, for some rows."""
        logits = (
            self._stack.forward(chunks, self._cache) if self._head is None else self._by_own_head(chunks, self._head)
        )
        for row in rows:
            row.ledger.draft_forwards += 1
        missing = self._vocabulary - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _by_own_head(self, chunks: Sequence[SequenceChunk], head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits in the model's vocabulary, in which only the tokens `ids` are possible."""
        last: list[Tensor] = []

        def hook(layer: int, hidden: Tensor) -> None:
            if layer == self._stack.num_layers:
                ends = ((states, len(chunk.tokens), chunk.wanted) for states, chunk in zip(hidden, chunks, strict=True))
                last.extend(states[end - wanted : end] for states, end, wanted in ends)

        self._stack.forward([replace(chunk, wanted=0) for chunk in chunks], self._cache, hook)
        part = head(torch.cat(last))
        whole = part.new_full((len(part), self._stack.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._ids, part)

    def _extend(self, grown: list[TreeUnderWay], logits: Tensor) -> None:
        """Draw the children of every leaf."""
        places = [Place(one.row, one.words[leaf.node], at) for one in grown for at, leaf in enumerate(one.leaves)]
        guesses = choose(places, logits, self._shape.width(grown[0].level))
        first = 0
        for one in grown:
            count = len(one.leaves)
            own = slice(first, first + count)
            self._settle(one, guesses[own], places[own])
            first += count

    def _settle(self, one: TreeUnderWay, guesses: Sequence[Guesses], places: Sequence[Place]) -> None:
        """Add the children that the shape keeps, as the next leaves."""

        def noise(leaf: int, rank: int) -> float | None:
            if one.row.sampling.greedy:
                return None
            return one.row.uniform(places[leaf].depth, f"draft value {leaf}.{rank}")

        kept = self._shape.keep(one.leaves, [guess.logs for guess in guesses], noise)
        leaves = []
        for leaf, guess, children in zip(one.leaves, guesses, kept, strict=True):
            for token, (log, value) in zip(guess.tokens, children, strict=False):
                leaves.append(Leaf(one.add(token, leaf.node, guess.probs), log, value))
        one.leaves, one.level = leaves, one.level + 1
