"""The interface of a batch to the engine and the scheduler, whatever its step does; and decoding a batch to its end."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from shoal.decode.batch import Batch
from shoal.decode.ledger import Clock
from shoal.decode.prefixes import Prefixes
from shoal.decode.recipe import Loop
from shoal.decode.row import Row
from shoal.model.kv.cache import KVCache
from shoal.model.stack import Stack
from shoal.types import Step


class RowBatch(Protocol):
    """Rows of one loop that run on one cache. `shoal.decode.batch.Batch` is the plain one.

    Attributes:
        cache: what the rows store.
        rows: the running rows.
        clock: seconds spent.
    """

    cache: KVCache
    rows: list[Row]
    clock: Clock

    @property
    def reading(self) -> list[Row]:
        """Rows that read their prompts."""
        ...

    def join(self, rows: Sequence[Row], columns: Sequence[Sequence[int]] | None = None) -> None:
        """Add rows that have run nothing yet; `columns`: how many columns the layers of each may store, if known."""
        ...

    def leave(self, rows: Sequence[Row]) -> None:
        """Cancel rows of the batch before their end and free what they stored."""
        ...

    def step(self, budget: int, rows: Sequence[Row] | None = None, most: int | None = None) -> list[Step]:
        """Advance rows. What they emit passes their stop rules and enters their tokens, steps and ledgers.

        Args:
            budget: tokens of the forward, guesses apart.
            rows: which rows; None for all.
            most: prompt tokens of a row; None for as many as fit.
        """
        ...

    def rollback(self) -> None:
        """Drop the unfinished state that a failed step has left, so that other rows can continue."""
        ...

    def close(self) -> None:
        """End all rows where they are. The cache then holds committed tokens only."""
        ...


def begin(
    loop: Loop | None, stack: Stack, cache: KVCache | None = None, rows: Sequence[Row] = (), *,
    prefixes: Prefixes | None = None, release: bool = True,
) -> RowBatch:
    """A batch for rows of that loop; None is the plain loop. The arguments are those of `shoal.decode.batch.Batch`."""
    make = Batch if loop is None else loop.batch()
    return make(stack, cache, rows, prefixes=prefixes, release=release)


def run(batch: RowBatch, budget: int, most: int = 2048) -> Generator[list[Step], None, None]:
    """Yield what every step emits until all rows have ended.

    All prompts are read first, so that rows decode side by side: rows at the same step run the same layers. If the
    caller leaves early, the cache holds committed tokens only.

    Args:
        batch: the rows.
        budget: tokens of a forward.
        most: prompt tokens per row and forward.
    """
    try:
        while batch.rows:
            yield batch.step(budget, batch.reading or None, most)
    finally:
        batch.close()
