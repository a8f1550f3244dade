"""Amounts of memory as people write them: `2GiB`, `512 MB`, or a number of bytes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, **{f"{letter}{end}": base**power for power, letter in enumerate("KMGT", 1)
                            for end, base in (("B", 1000), ("iB", 1024))}}
_KNOWN = {unit.lower(): size for unit, size in _UNITS.items()}


def parse(amount: str | int) -> int:
    """Bytes; ValueError for what is no amount, or none at all.

    Args:
        amount: a whole number of bytes, or a number and a unit, whose case does not count: KiB is 1024, KB 1000 bytes.
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
    """Bytes for people, in units of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
