"""A thread that begins anew when its work dies. Knows nothing of the work."""

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
        name: of the thread.
        work: returns when all is done.
        died: called on the same thread before the next attempt; again, should it be interrupted.
        pause: seconds until that, so that a fault that stays does not keep the machine busy.
    """

    def __init__(self, name: str, work: Callable[[], None], died: Callable[[], None], pause: float = 1.0) -> None:
        self._work, self._died, self._pause = work, died, pause
        self._hurry = threading.Event()
        self._well, self._begun, self._done = True, False, False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
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
        """Where it is just now, line by line as a traceback has it; empty once it has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end; from now on an attempt that fails is followed by the next without a pause."""
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._done:
            try:
                self._attempt()
            except BaseException:  # it may be killed while it picks up the pieces, too
                self._well = False
                log.error("%s died and begins anew", self._thread.name, exc_info=True)

    def _attempt(self) -> None:
        if self._begun:
            self._died()
            self._hurry.wait(self._pause)
        self._well = self._begun = True
        self._work()
        self._done = True
