"""A generation under way, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.decode import loop
from shoal.decode.row import Row
from shoal.engine.memory.amounts import naming
from shoal.engine.scheduling.result import result_of
from shoal.model.kv.cache import KVCache
from shoal.types import Result, Step

if TYPE_CHECKING:
    from shoal.engine.loaded import LoadedModel


class Stream(Iterator[Step]):
    """The steps of a generation as they come; `result` and `results` afterwards.

    Args:
        engine: whose turn it is to ask for before each step.
        rows: the rows to decode, all of one loop.
        cache: their cache.
        release: whether dropped layers give up their KV at once.
        prefill_chunk: the most prompt tokens per row and forward; None for the loop's own choice.
    """

    def __init__(
        self,
        engine: LoadedModel,
        rows: list[Row],
        cache: KVCache,
        *,
        release: bool = True,
        prefill_chunk: int | None = None,
    ) -> None:
        self._engine, self._rows = engine, rows
        for row in rows:
            row.check()
        batch = loop.begin(rows[0].recipe.loop, engine.stack, cache, rows, release=release)
        most = {} if prefill_chunk is None else {"most": prefill_chunk}
        self._steps, self._clock = loop.run(batch, engine.stack.prefill_chunk, **most), batch.clock
        self._ready: list[Step] = []
        self._started = time.perf_counter()
        self._seconds = 0.0

    def __next__(self) -> Step:
        while not self._ready:
            with self._engine.turn(), naming(self._size):
                self._ready = list(reversed(next(self._steps)))
            self._seconds = time.perf_counter() - self._started
        return self._ready.pop()

    def _size(self) -> tuple[str, str]:
        """What fills the memory, and what to do where it does not suffice."""
        prompt = max(row.prompt_length for row in self._rows)
        new = max(row.emitted + row.stop.room for row in self._rows)
        what = f"a batch of {len(self._rows)}, prompts of up to {prompt} tokens and max_new_tokens={new}"
        return what, "Use a smaller max_new_tokens, fewer prompts at once, or shorter ones"

    def close(self) -> None:
        """End the generation now: no further step comes, and its memory is free."""
        with self._engine.turn():
            self._steps.close()
        self._ready.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens of a single prompt."""
        return self._rows[0].tokens

    @property
    def result(self) -> Result:
        """The outcome of a single prompt."""
        return self.results[0]

    @property
    def results(self) -> list[Result]:
        """The outcome of every row; a row that was ended early has the finish reason "cancelled"."""
        return [result_of(row, self._engine.info(), self._clock, self._seconds) for row in self._rows]

