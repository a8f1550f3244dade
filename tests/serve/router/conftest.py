"""Fixtures of tests of several models."""

from __future__ import annotations

from hub_fixtures import at_hub

__all__ = ["at_hub"]
