"""The decoding loop: a batch of rows without arrivals, from its prompts to its end.

All prompts are read first, so that rows decode side by side: those at one step run the same layers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from shoal.decode.batch import Batch
from shoal.decode.row import Row
from shoal.model.kv import KVCache
from shoal.model.stack import Stack
from shoal.types import Step


class Loop(Batch):
    """Decodes rows until all have finished.

    Args:
        stack: the model.
        cache: one cache row per row, in the order of `rows`; may hold the beginning of a row's prompt already.
        rows: the rows, each with at least one token that is not in the cache.
        prefill_chunk: the most prompt tokens per row and forward.
        release: whether a dropped layer's KV is given up at once; a row that goes on later must keep it.
    """

    def __init__(
        self, stack: Stack, cache: KVCache, rows: Sequence[Row], *, prefill_chunk: int = 2048, release: bool = True
    ) -> None:
        super().__init__(stack, cache, rows, release=release)
        self._chunk = prefill_chunk

    def run(self) -> Generator[list[Step], None, None]:
        """What every step emits. After leaving early the cache holds committed tokens only."""
        try:
            while self.rows:
                yield self.step(self.stack.prefill_chunk, self.reading or None, self._chunk)
        finally:
            self.rollback()
            for search in self.searches[:]:
                search.stop(left=1)
            for row in self.rows:
                row.note_bytes(self.cache.row_bytes(row.slot))
