"""The batches of a scheduler: one for each loop that rows under way have. Rows of one loop share forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.decode import loop

if TYPE_CHECKING:
    from shoal.decode.prefixes import Prefixes
    from shoal.decode.recipe import Loop
    from shoal.decode.row import Row
    from shoal.model.stack import Stack


class Batches:
    """See the file; the plain batch is always there, another one as long as it has rows.

    Args:
        stack: the model.
        prefixes: where what rows have stored is kept for later ones.

    Attributes:
        plain: the batch of rows without a loop of their own.
    """

    def __init__(self, stack: Stack, prefixes: Prefixes) -> None:
        self._stack, self._prefixes = stack, prefixes
        self.plain = loop.begin(None, stack, prefixes=prefixes)
        self._all: list[tuple[Loop | None, loop.RowBatch]] = [(None, self.plain)]

    def __iter__(self) -> Iterator[loop.RowBatch]:
        """Those that there are now."""
        return iter([batch for _, batch in self._all])

    @property
    def rows(self) -> list[Row]:
        """Those under way, of all batches."""
        return [row for batch in self for row in batch.rows]

    def of(self, row: Row) -> loop.RowBatch:
        """The batch in which a row decodes; a new one where its loop has none."""
        for known, batch in self._all:
            if known == row.recipe.loop:
                return batch
        self._all.append((row.recipe.loop, loop.begin(row.recipe.loop, self._stack, prefixes=self._prefixes)))
        return self._all[-1][1]

    def drop(self, batch: loop.RowBatch) -> None:
        """Give up a batch that is in no known state; the plain one begins anew."""
        if batch is self.plain:
            self.plain = loop.begin(None, self._stack, prefixes=self._prefixes)
        self._all = [(None, self.plain), *(pair for pair in self._all if pair[0] is not None and pair[1] is not batch)]

    def tidy(self) -> None:
        """Give up batches that have no rows."""
        self._all = [pair for pair in self._all if pair[0] is None or pair[1].rows]
