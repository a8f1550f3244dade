"""What the engine and the scheduler ask of a batch of rows, whatever a step does; and a batch decoded to its end."""

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
    """Rows under way on one cache, all of them of one loop; see `shoal.decode.batch.Batch`, the plain one.

    Attributes:
        cache: what the rows store.
        rows: those under way; a row that has ended is none of them.
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
        """Take in rows that have run nothing yet; of each, how many columns its layers may come to store, if known."""
        ...

    def leave(self, rows: Sequence[Row]) -> None:
        """Let rows of its own go before their end: they count as cancelled, and what they stored is free."""
        ...

    def step(self, budget: int, rows: Sequence[Row] | None = None, most: int | None = None) -> list[Step]:
        """Move rows on; what they emit goes through their stop rules, and into their tokens, steps and ledgers.

        Args:
            budget: tokens of the forward, guesses apart.
            rows: which rows; None for all.
            most: prompt tokens of a row; None for as many as fit.
        """
        ...

    def rollback(self) -> None:
        """Forget what a step that failed has left unfinished, so that other rows can go on."""
        ...

    def close(self) -> None:
        """End all rows where they stand: the cache holds committed tokens only."""
        ...


def begin(
    loop: Loop | None, stack: Stack, cache: KVCache | None = None, rows: Sequence[Row] = (), *,
    prefixes: Prefixes | None = None, release: bool = True,
) -> RowBatch:
    """A batch for rows of that loop; None is the plain one, which also says what the arguments are."""
    make = Batch if loop is None else loop.batch()
    return make(stack, cache, rows, prefixes=prefixes, release=release)


def run(batch: RowBatch, budget: int, most: int = 2048) -> Generator[list[Step], None, None]:
    """What every step emits until all rows have ended. After leaving early the cache holds committed tokens only.

    All prompts are read first, so that rows decode side by side: those at one step run the same layers.

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
