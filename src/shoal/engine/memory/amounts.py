"""Memory in bytes: amounts as people write them, what a device has to spare, and what is said when it runs out."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from shoal.errors import OutOfMemory
from shoal.heap import available

_UNITS = {"": 1, "B": 1, **{f"{letter}{end}": base**power for power, letter in enumerate("KMGT", 1)
                            for end, base in (("B", 1000), ("iB", 1024))}}
_KNOWN = {unit.lower(): size for unit, size in _UNITS.items()}
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")


def parse(amount: str | int) -> int:
    """The bytes of an amount.

    Args:
        amount: a whole number of bytes, or a number and a unit in any case. KiB is 1024 bytes, KB is 1000.

    Raises:
        ValueError: it is no amount, or less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(amount))
    size = None if found is None or isinstance(amount, bool) else _KNOWN.get(found[2].lower())
    if found is None or size is None:
        units = ", ".join(filter(None, _UNITS))
        raise ValueError(f"memory is {amount!r}; it must be a number and one of {units}, such as 2GiB")
    value = int(float(found[1]) * size)
    if value < 1:
        raise ValueError(f"memory is {amount!r}; it must be at least 1 byte")
    return value


def shown(size: float) -> str:
    """An amount in bytes for people to read, in units of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


class naming(AbstractContextManager[None]):  # noqa: N801 - reads like a function
    """Turns errors of the allocators into `OutOfMemory`; `describe` gives what was asked for, and the remedy."""

    def __init__(self, describe: Callable[[], tuple[str, str]]) -> None:
        self._describe = describe

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and exhausted(error):
            what, remedy = self._describe()
            first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
            raise OutOfMemory(what, f"memory ran out ({first})", remedy) from error


def free(device: torch.device) -> int | None:
    """Bytes that the device has to spare; None where the system does not say."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available()


def exhausted(error: BaseException) -> bool:
    """Whether an allocation failed. torch has a type for it on accelerators only; on a CPU the message tells."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
