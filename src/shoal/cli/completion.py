"""Print a script that completes commands, options, methods and files in a shell. Needs the extra `completion`.

bash: source <(shoal completion bash)
zsh: write it as _shoal into a folder of $fpath
tcsh: write it to a file and source that
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.cli.options.parser import Parser
from shoal.errors import needs

EXAMPLES = """examples:
  source <(shoal completion bash)
  shoal completion zsh > ~/.zfunc/_shoal
"""
SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("shell", choices=SHELLS, help="the shell to print a script for")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    with needs("completion", "shoal completion"):
        import shtab
    print(shtab.complete(whole(files=shtab.FILE), args.shell))
    return 0


def whole(files: Any) -> argparse.ArgumentParser:
    """One parser with every command as a subparser; options for paths are completed by `files`."""
    from shoal import methods
    from shoal.cli.entry import known

    top = Parser(prog="shoal")
    commands = top.add_subparsers(parser_class=Parser)
    for name, module in known().items():
        command = import_module(module)
        about = (command.__doc__ or "").strip().partition("\n")[0]
        parser = commands.add_parser(name, help=about, description=about)
        command.add_arguments(parser)
        for action in parser._actions:
            if action.dest == "method":
                action.choices = methods.names()
            elif action.type is Path or action.dest == "model":
                action.complete = files  # type: ignore[attr-defined]
    return top
