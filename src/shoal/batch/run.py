"""Lines through the scheduler: as many under way as it takes, each answered once, in the order in which they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from shoal.batch.lines import Line, fields_of, id_of, task_of
from shoal.batch.records import Record, answered, failed
from shoal.engine.scheduling.request_handle import Item, RequestHandle
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Closed, QueueFull

Name = str | int | None


class BatchRunner:
    """Hands lines to a scheduler and takes the answers back.

    Args:
        scheduler: who decodes; nobody else should use it, as its queue is kept short.
        defaults: options of every line that does not give its own.
    """

    def __init__(self, scheduler: Scheduler, defaults: Mapping[str, Any]) -> None:
        self._scheduler, self._defaults = scheduler, defaults
        self._tokenizer = scheduler.engine.tokenizer
        self._ended: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._open: dict[int, tuple[Name, Sequence[str], RequestHandle]] = {}
        self._most = scheduler.max_rows + min(scheduler.max_rows, scheduler.max_waiting)

    def answers(self, lines: Iterable[Line]) -> Iterator[Record]:
        """A record for every line. A line in error gets one that says so, and the others go on.

        Raises:
            BaseException: what ended the scheduler; lines that were under way then have no record.
        """
        for line in lines:
            while len(self._open) >= self._most:
                yield self._next()
            name: Name = None
            try:
                fields = fields_of(line.raw)
                name = id_of(fields)
                self._submit(line, name, fields)
            except (Closed, QueueFull):
                raise
            except Exception as error:
                yield failed(line.number, name, error)
        while self._open:
            yield self._next()

    def _submit(self, line: Line, name: Name, fields: Mapping[str, Any]) -> None:
        task = task_of(line, fields, self._defaults, self._tokenizer)
        deliver = partial(self._take, line.number)
        handle = self._scheduler.submit(task.prompt, deliver=deliver, **task.options)
        self._open[line.number] = name, task.ignored, handle

    def _take(self, number: int, item: Item) -> None:
        """Called by the scheduler's thread."""
        if item is None or isinstance(item, BaseException):
            self._ended.put((number, item))

    def _next(self) -> Record:
        """The record of the next line that ends."""
        number, error = self._ended.get()
        name, ignored, handle = self._open.pop(number)
        if error is None:
            made = answered(number, name, handle.results[0], with_tokens=self._tokenizer is None)
            return {**made, "ignored": list(ignored)} if ignored else made
        if handle.entries[0].error is None:  # the scheduler failed, not this line
            raise error
        return failed(number, name, error)
