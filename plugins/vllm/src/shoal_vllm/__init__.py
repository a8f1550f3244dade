"""Shoal's depth plans and its drafter inside vLLM. Importing it loads neither vLLM nor torch."""

__version__ = "0.1.0"

TESTED = ("0.32.0",)
"""Versions of vLLM that the tests ran on."""
