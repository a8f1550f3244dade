"""Runs one command and returns its exit code.

Codes: 0 done, 1 a check failed, 2 bad usage or bad input (one line on stderr), 130 interrupted, 141 broken pipe. Only
the command that was asked for is imported, and no command imports torch before it runs. Other packages add commands
through the entry-point group `shoal.commands`; each entry names a module like those in this folder. Those of shoal-lab
are called by `shoal lab NAME` or `shoal NAME`.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from importlib import import_module

from shoal.cli.options import config
from shoal.cli.options.parser import Parser, parse
from shoal.errors import LAB_INSTALL, unknown
from shoal.methods import plugins

ABOUT = """Run open language models on the machine you have: faster than other software on the same files, without a
changed word. D3 and other ways to trade answers for time come with what they lose, measured."""
USUAL = {
    "generate": "continue a prompt, streaming the text",
    "run": "chat with a model by its name, as Ollama's command",
    "chat": "chat with a model in the terminal",
    "serve": "answer requests over HTTP, as OpenAI's API does",
    "transcribe": "write down what is said in audio files",
    "pull": "fetch a model from the Hub by its name",
    "models": "list the models on this machine, those with short names, and what fits",
    "rm": "remove a model from the Hub's cache",
    "batch": "answer a file of prompts, resumable",
    "recommend": "say which method to use for a model, from what was measured of it",
}
"""The commands that `shoal --help` shows."""
COMMANDS = {
    **USUAL,
    "methods": "list the methods, what they need and what they promise",
    "env": "print versions and hardware for a bug report",
    "completion": "print a script that completes commands and options in a shell",
}
GROUP = "shoal.commands"
LAB = ("bench", "bench-drafts", "bench-serve", "calibrate", "correctness", "eval", "plan", "prune", "studies", "train")
"""Commands of shoal-lab, to say where they come from while it is not installed."""
FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _never_fail_to_print()
    if argv[:1] == ["lab"]:
        argv = argv[1:] or ["--help"]
        if argv[0] in ("-h", "--help"):
            return _lab_help()
    name = argv[0] if argv and argv[0] in known() else None
    try:
        return _call(name, argv[1:]) if name else _top(argv)
    except SystemExit as leave:  # argparse ends the process after --help
        return int(leave.code or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (ValueError, OSError) as error:
        if "--debug" in argv:
            raise
        program = f"shoal {name}" if name else "shoal"
        message = " ".join(str(error).split()).removeprefix(f"{program}: ")  # it may name the command already
        print(f"{program}: error: {_as_typed(message, argv)}", file=sys.stderr)
        return BAD_INPUT


def known() -> dict[str, str]:
    """Every command and the module that runs it."""
    return {**_plugins(), **{name: f"shoal.cli.{name.replace('-', '_')}" for name in COMMANDS}}


def _plugins() -> dict[str, str]:
    """Commands of other packages, and their modules."""
    return {name: entry.value for name, entry in plugins(GROUP).items()}


def _lab_help() -> int:
    """`shoal lab`: the commands of other packages, one line each."""
    found = _of_lab()
    absent = f"shoal lab: its commands, {', '.join(LAB)}, come with shoal-lab: {LAB_INSTALL}"
    print("\n".join(["shoal lab COMMAND, or shoal COMMAND:", "", *_listed(found)]) if found else absent)
    return 0 if found else BAD_INPUT


def _of_lab() -> dict[str, str]:
    """Commands of other packages, and what each does."""
    texts = {name: (import_module(module).__doc__ or "").strip() for name, module in sorted(_plugins().items())}
    return {name: text.partition("\n")[0] for name, text in texts.items()}


def _listed(commands: Mapping[str, str]) -> list[str]:
    """A line for each command, wrapped by words at the terminal's width."""
    width = shutil.get_terminal_size().columns - 2
    return [textwrap.fill(text, width, initial_indent=f"  {name:<13}", subsequent_indent=" " * 15)
            for name, text in commands.items()]


def _as_typed(message: str, argv: Sequence[str]) -> str:
    """A message that begins with the library's name of a value, with the option that the user typed instead."""
    name, is_, rest = message.partition(" is ")
    option = f"--{name.replace('_', '-')}"
    given = is_ and any(arg == option or arg.startswith(f"{option}=") for arg in argv)
    return f"{option} is {rest}" if given else message


def _call(name: str, argv: list[str]) -> int:
    command = import_module(known()[name])
    parser = Parser(prog=f"shoal {name}", description=command.__doc__, epilog=command.EXAMPLES)
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if not parser.usual:
        parser.add_argument("--help-all", action="help", help=SUPPRESS)
    argv = [*config.arguments(name, {*known(), *LAB}, parser.options, argv), *argv]
    args = parse(parser, argv)
    args.argv = ["shoal", name, *argv]
    return int(command.run(args))


def _top(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        if argv[0] in LAB and not _plugins():
            raise ValueError(f"{argv[0]} is a command of shoal-lab, which is not installed: {LAB_INSTALL}")
        raise unknown("command", argv[0], known())
    parser = Parser(prog="shoal", description=_overview("--help-all" in argv),
                    epilog="shoal COMMAND --help shows a command's usual options, --help-all all of them.")
    parser.add_argument("--help-all", action="help", help="show every command")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands above")
    if parser.parse_all(argv).version:
        from shoal import __version__

        print(f"shoal {__version__}")
        return 0
    parser.print_help()
    return BAD_INPUT


def _overview(whole: bool) -> str:
    """The commands: the usual ones, or all, with those of other packages."""
    if not whole:
        more = f"shoal --help-all shows {len(COMMANDS) - len(USUAL)} more, and those to measure and train (shoal lab)."
        return "\n".join([ABOUT, "", "commands:", *_listed(USUAL), "", more])
    lab = _listed(_of_lab()) or [f"  (none here: {LAB_INSTALL})"]
    return "\n".join([ABOUT, "", "commands:", *_listed(COMMANDS), "", "to measure and train (shoal lab):", *lab])


def _never_fail_to_print() -> None:
    """Replace characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
