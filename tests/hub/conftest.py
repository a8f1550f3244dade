"""Fixtures of tests of the Hub."""

from hub_fixtures import at_hub

__all__ = ["at_hub"]
