"""Differences between versions of torch and transformers, found without importing them."""

from __future__ import annotations

import functools
import logging
import re
from importlib import metadata

TESTED = {"torch": "2.14.1", "transformers": "5.24.0"}
"""The newest releases that the tests have passed with."""

log = logging.getLogger(__name__)


def installed_version(package: str) -> str | None:
    """The installed version of a distribution; None if it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def untested() -> list[str]:
    """Installed libraries that are newer than the tested releases, as "name version"."""
    found = {package: installed_version(package) for package in TESTED}
    return [f"{package} {version}" for package, version in found.items()
            if version is not None and release(version) > release(TESTED[package])]


@functools.cache
def tell_untested() -> None:
    """Log one line, once per process, about libraries newer than the tested releases."""
    if newer := untested():
        known = ", ".join(f"{package} {version}" for package, version in TESTED.items())
        log.warning("%s: newer than any version that Shoal was tested with (%s); if something fails, install that",
                    ", ".join(newer), known)


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (2, 13, 0) of "2.13.0+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # type: ignore[index]


def is_cache(value: object) -> bool:
    """Whether the value has the methods of a transformers cache, whatever its class."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
