"""Fixtures of tests of commands."""

from cli_fixtures import _cards_of_nobody, measures_layers, tiny_folder

__all__ = ["_cards_of_nobody", "measures_layers", "tiny_folder"]
