"""Constraints of requests are compiled before these are queued: beside the event loop, and few at a time.

What takes long keeps nobody waiting but others whose constraints are new, too.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal.engine.constraints.constraint import Constraint
from shoal.engine.engine import Engine
from shoal.serve.http.errors import ApiError

_AT_ONCE, _WAITING = 2, 64


class Compiling:
    """Compiles what is not known yet.

    Args:
        engine: the model.
        timeout: seconds that a request may take; None for no limit.
    """

    def __init__(self, engine: Engine, timeout: float | None) -> None:
        self._engine, self._timeout = engine, timeout
        self._threads = ThreadPoolExecutor(_AT_ONCE, "shoal-compiling")
        self._under_way = 0

    async def __call__(self, wanted: Any) -> None:
        """Have a constraint compiled, where a request has one.

        Raises:
            ApiError: 400 with the reason where that cannot be, 429 where too many wait, 504 when time is up.
        """
        if not isinstance(wanted, Constraint):
            return
        if self._under_way >= _WAITING:
            raise ApiError(429, f"{_WAITING} constraints wait to be compiled; try again later", code="queue_full")
        self._under_way += 1
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, wanted)
            await asyncio.wait_for(work, self._timeout)
        except asyncio.TimeoutError:
            raise ApiError(504, "the request took longer than the server allows", code="timeout") from None
        except ValueError as error:
            raise ApiError(400, str(error), code="constraint") from None
        finally:
            self._under_way -= 1

    def _compile(self, wanted: Constraint) -> None:
        self._engine.constraints.prepare(wanted)
