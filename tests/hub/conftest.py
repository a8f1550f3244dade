"""Fixtures of tests of the Hub."""

from cli_fixtures import _cards_of_nobody
from hub_fixtures import at_hub

__all__ = ["_cards_of_nobody", "at_hub"]
