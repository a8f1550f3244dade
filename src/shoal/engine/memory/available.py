"""What is said when memory runs out: what was too large, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shoal.errors import OutOfMemory
from shoal.heap import available

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")


@contextmanager
def naming(describe: Callable[[], tuple[str, str]]) -> Iterator[None]:
    """Turn the allocators' errors into `OutOfMemory`.

    Args:
        describe: what was asked for, and what to do instead.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        what, remedy = describe()
        raise OutOfMemory(what, f"memory ran out ({_first_line(error)})", remedy) from error


def free(device: torch.device) -> int | None:
    """Bytes that the device has to spare; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available()


def exhausted(error: BaseException) -> bool:
    """Whether an allocation failed. torch has a type for that on accelerators only; on a CPU the message tells."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")
