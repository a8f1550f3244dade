"""The command line: one file per command, imported when that command is called."""

from shoal.cli.entry import main

__all__ = ["main"]
