"""What differs between versions of the libraries underneath, without importing them."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

TESTED = {"torch": "2.14.1", "transformers": "5.24.0"}
"""The newest releases with which the tests have passed."""

log = logging.getLogger(__name__)


def installed_version(package: str) -> str | None:
    """The installed version of a distribution as it calls itself, or None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def untested() -> list[str]:
    """Of each installed library that is newer than any with which the tests have passed: "name version"."""
    found = {package: installed_version(package) for package in TESTED}
    return [f"{package} {version}" for package, version in found.items()
            if version is not None and release(version) > release(TESTED[package])]


@functools.cache
def tell_untested() -> None:
    """Say once in a process, in one line, which libraries are newer than any that was tested."""
    if newer := untested():
        known = ", ".join(f"{package} {version}" for package, version in TESTED.items())
        log.warning("%s: newer than any version that Shoal was tested with (%s); if something fails, install that",
                    ", ".join(newer), known)


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (2, 13, 0) of "2.13.0+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # type: ignore[index]


def cache_name(forward: Callable[..., Any]) -> str:
    """How a model's `forward` calls the cache of keys and values that it takes.

    Args:
        forward: of a transformers model; 5.24 has renamed the argument, and code that comes with a model may not have.
    """
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def is_cache(value: object) -> bool:
    """Whether it does what every cache of transformers does, whatever its class and the argument's name."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
