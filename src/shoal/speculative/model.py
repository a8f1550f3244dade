"""A second, smaller model that guesses ahead, with a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from shoal.speculative.choose import RowTree, extend
from shoal.speculative.growth import TreeShape

if TYPE_CHECKING:
    from shoal.decode.row import Row


@dataclass(frozen=True)
class ModelProposer(Proposer):
    """Draws a tree of guesses from a second model with the same tokens, with the random numbers of the row's rule.

    Attributes:
        stack: the second model.
        shape: how the tree grows.
        name: of the model, for messages.
    """

    stack: Stack
    shape: TreeShape
    name: str

    @property
    @override
    def second_stack(self) -> Stack:
        return self.stack

    def begin(self, stack: Any, cache: Any) -> ModelDrafter:
        """A drafter with an empty cache of its own."""
        return ModelDrafter(self, stack.vocab_size)


def check_context(stack: Stack, name: str, longest: int) -> None:
    """Refuse a text of so many tokens if it is too long for the draft model of that name."""
    most = stack.max_positions
    if most is not None and longest > most:
        raise Unsupported(
            f"a text of up to {longest} tokens with {name}",
            f"its context is {most} tokens",
            f"Use a max_new_tokens that keeps prompt and answer within {most}, or draft with another model",
        )


class ModelDrafter(Drafter):
    """Drafts with the second model. It reads off the rows' tokens which guesses were kept.

    Per row, the cache holds a prefix of the row's tokens as committed and the nodes of the last tree as scratch. The
    next proposal commits the accepted nodes, so that the model runs only tokens that it has not seen.

    Args:
        proposer: the model, and how it is used.
        vocabulary: tokens of the target's logits.
    """

    def __init__(self, proposer: ModelProposer, vocabulary: int) -> None:
        self._stack, self._shape, self._name = proposer.stack, proposer.shape, proposer.name
        self._vocabulary = vocabulary
        self._plan = DepthPlan.full(self._stack.num_layers)
        self._cache = KVCache(self._stack.windows, 0)
        self._rows: list[Row] = []
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

    def _begun(self, row: Row, slot: int, levels: int) -> RowTree:
        """A tree without guesses."""
        return RowTree(row, slot, levels)

    def _readable(self, one: RowTree) -> bool:
        """Whether the draft model has embeddings for all it would read; a smaller table lacks the padded ids."""
        return max(self._text(one.row, self._cache.positions[one.slot])) < self._stack.vocab_size

    def _text(self, row: Row, first: int) -> Sequence[int]:
        """A row's tokens, as the draft model has them, from a position on."""
        return row.tokens[first:]

    def _length(self, row: Row) -> int:
        """How many tokens of a row the draft model has."""
        return len(row.tokens)

    def _keep(self, rows: Sequence[Row]) -> None:
        """Commit the accepted nodes of the last trees, remove rows that have left and add new ones."""
        for slot, (row, tree) in enumerate(zip(self._rows, self._drafts, strict=True)):
            self._commit(slot, row, tree)
        wanted = set(rows)
        stay = [slot for slot, row in enumerate(self._rows) if row in wanted]
        if len(stay) < len(self._rows):
            self._rows = [self._rows[former] for former in self._cache.select(stay)]
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

    def _grow(self, grown: list[RowTree]) -> None:
        """Grow the trees: the first level follows the unread tokens, each further one the level before."""
        try:
            while alive := [one for one in grown if one.goes_on]:
                extend(alive, self._after(alive), self._shape)
        except BaseException:
            for one in grown:
                self._cache.rollback(one.slot)
            raise

    def _after(self, grown: list[RowTree]) -> Tensor:
        """Logits [leaves of all trees, V] after the last level, which is equally deep in all."""
        if not grown[0].level:
            return self._read(grown)
        return self._forward([one.chunk(self._plan) for one in grown], [one.row for one in grown])

    def _read(self, grown: list[RowTree]) -> Tensor:
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

    def _forward(self, chunks: Sequence[SequenceChunk], rows: Sequence[Row]) -> Tensor:
        """Logits [sum of wanted, V] in the target's vocabulary, for some rows."""
        logits = self._logits(chunks)
        for row in rows:
            row.ledger.draft_forwards += 1
        missing = self._vocabulary - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _logits(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Logits [sum of wanted, tokens of the draft model]."""
        return self._stack.forward(chunks, self._cache)
