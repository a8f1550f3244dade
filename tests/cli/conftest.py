"""Fixtures of tests of commands."""

from cli_fixtures import _cards_of_nobody, measures_layers, say, tiny_folder
from hub_fixtures import at_hub

__all__ = ["_cards_of_nobody", "at_hub", "measures_layers", "say", "tiny_folder"]
