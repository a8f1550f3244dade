"""Answers of a model to many prompts, as many at once as the scheduler takes, in the order of the prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.engine.engine import Engine
from shoal.engine.scheduling.request_handle import RequestHandle
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.types import Result


def answered(
    engine: Engine, prompts: Sequence[Sequence[int]], *, together: int = 16, seed: int = 0, **options: Any
) -> Iterator[Result]:
    """The full model's answers; prompt i draws with `seed` + i.

    Args:
        engine: the model.
        prompts: token ids.
        together: rows decoded at once.
        seed: of the draws, if the options sample.
        **options: as for `shoal.engine.request.Request`.
    """
    with Scheduler(engine, max_rows=together, max_waiting=4 * together, prefix_bytes=0) as scheduler:
        under_way: deque[RequestHandle] = deque()
        for number, prompt in enumerate(prompts):
            if len(under_way) >= 3 * together:
                yield _ended(under_way.popleft())
            under_way.append(scheduler.submit(list(prompt), method="full", seed=seed + number, **options))
        while under_way:
            yield _ended(under_way.popleft())


def _ended(handle: RequestHandle) -> Result:
    for _ in handle:
        pass
    return handle.results[0]
