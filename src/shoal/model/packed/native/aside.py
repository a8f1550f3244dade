"""Work that one thread of a forward does while the others go on without it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from shoal.model.packed.native.library import ASIDE, BatchStruct
from shoal.model.packed.native.threads import MACHINE


class Aside:
    """A call that a thread of a forward makes as soon as the states that enter a layer are in its taps.

    It runs on one thread, and what it raises is kept for the forward to raise. It may run forwards of other models.

    Args:
        entry: before which of the running layers the thread leaves the others; their number for the head.
        work: what it does.

    Attributes:
        error: what was raised.
    """

    def __init__(self, entry: int, work: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._entry, self._work, self._others = entry, work, ctypes.c_double()
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()  # of the thread that asks for it
        self._inside: set[int] = set()
        self._function = ASIDE(self._run)

    @property
    def others(self) -> float:
        """Seconds that the forward went on for meanwhile; 0 if no thread has left, and the work was not done."""
        return self._others.value

    def put_into(self, struct: BatchStruct, inside: set[int]) -> None:
        """Let a thread of this batch's forward do it; it is noted among the threads that are inside the forward."""
        self._inside = inside
        struct.aside, struct.others = self._function, ctypes.addressof(self._others)
        struct.leaves_at = self._entry

    def _run(self) -> None:
        self._inside.add(threading.get_ident())
        try:
            with MACHINE.alone(), torch.inference_mode(self._modes[0]), torch.set_grad_enabled(self._modes[1]):
                self._work()
        except BaseException as error:  # it cannot be raised through the library
            self.error = error
