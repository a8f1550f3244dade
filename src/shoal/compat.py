"""Versions of the libraries underneath. No other file looks at one, and nothing here imports them."""

from __future__ import annotations

import re
from importlib import metadata


def installed_version(package: str) -> str | None:
    """The installed version of a distribution as it calls itself, or None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without suffixes: `2.13.0+cpu` is (2, 13, 0), `5.0.0rc1` is (5, 0, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None:
        raise ValueError(f"version is {version!r}; it must begin with a number, such as 5.0")
    return tuple(int(part) for part in numbers.group().split("."))


def at_least(package: str, minimum: str) -> bool:
    """Whether `package` is installed in release `minimum` or a newer one; a pre-release counts as its release."""
    found = installed_version(package)
    return found is not None and release(found) >= release(minimum)


def torch_version() -> tuple[int, ...]:
    """The release of the installed torch, (0,) where there is none."""
    return release(installed_version("torch") or "0")


def transformers_version() -> tuple[int, ...]:
    """The release of the installed transformers, (0,) where there is none."""
    return release(installed_version("transformers") or "0")
