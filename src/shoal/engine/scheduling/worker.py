"""A thread that restarts its work when that dies. Knows nothing of the work."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable

log = logging.getLogger(__name__)


class WorkerThread:
    """Works until there is nothing more to do.

    Args:
        died: called on the same thread before the next attempt, and again if it is interrupted.
        pause: seconds before the next attempt, so that a lasting fault does not keep the machine busy.
    """

    def __init__(self, name: str, work: Callable[[], None], died: Callable[[], None], pause: float = 1.0) -> None:
        self._work, self._died, self._pause = work, died, pause
        self._hurry = threading.Event()
        self._well, self._begun = True, False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def well(self) -> bool:
        """Whether work is being done, or would be if there were any."""
        return self._well and self._thread.is_alive()

    @property
    def ended(self) -> bool:
        """Whether no more will be done."""
        return not self._thread.is_alive()

    def stack(self) -> str:
        """The current stack, line by line as in a traceback; empty once the thread has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end. From now on no pause follows an attempt that fails."""
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                if self._begun:
                    self._died()
                    self._hurry.wait(self._pause)
                self._well = self._begun = True
                return self._work()
            except BaseException:  # `died` may be interrupted, too
                self._well = False
                log.error("%s died and begins anew", self._thread.name, exc_info=True)
