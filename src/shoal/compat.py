"""Versions of the libraries underneath, without importing them."""

from __future__ import annotations

from importlib import metadata


def installed_version(package: str) -> str | None:
    """The installed version of a distribution as it calls itself, or None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
