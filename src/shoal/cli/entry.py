"""From the words of a command line to an exit code.

Codes: 0 done, 1 a check failed, 2 bad usage or bad input (one line on stderr), 130 interrupted, 141 nobody reads on.
Only the command that was asked for is imported, and no command imports torch before it runs. Other packages add
commands by the entry-point group `shoal.commands`, each entry naming a module like those beside this one; shoal-lab's
are `shoal lab NAME`, or just `shoal NAME`.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from shoal.cli.options import config
from shoal.cli.options.parser import Parser, parse
from shoal.errors import LAB_INSTALL, unknown

ABOUT = """Run open language models on the machine you have: faster than other software on the same files, without a
changed word. D3 and other ways to trade answers for time come with what they lose, measured."""
COMMANDS = {
    "generate": "continue a prompt, streaming the text",
    "chat": "talk with a model in the terminal",
    "methods": "list the methods, what they need and what they promise",
    "plan": "draw which layers every token runs",
    "batch": "answer a file of prompts, resumable",
    "serve": "answer requests over HTTP, as OpenAI's API does",
    "recommend": "say which method to use for a model, from what was measured of it",
    "models": "list the models on this machine, and what is known of them",
    "completion": "print a script that completes commands and options in a shell",
    "env": "print versions and hardware for a bug report",
}
GROUP = "shoal.commands"
LAB = ("bench", "bench-drafts", "bench-serve", "calibrate", "correctness", "eval", "prune", "train")
"""Commands of shoal-lab, to say where they come from while it is not installed."""
FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["lab"]:
        words = words[1:] or ["--help"]
        _never_fail_to_print()
        if words[0] in ("-h", "--help"):
            return _lab_help()
    name = words[0] if words and words[0] in known() else None
    _never_fail_to_print()
    try:
        return _call(name, words[1:]) if name else _top(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (ValueError, OSError) as error:
        if "--debug" in words:
            raise
        program = _program(name)
        said = " ".join(str(error).split()).removeprefix(f"{program}: ")  # what was asked for may be the command itself
        print(f"{program}: error: {_as_typed(said, words)}", file=sys.stderr)
        return BAD_INPUT


def known() -> dict[str, str]:
    """Every command's name -> the module that runs it."""
    return {**_plugins(), **{name: f"shoal.cli.{name.replace('-', '_')}" for name in COMMANDS}}


@functools.cache
def _plugins() -> dict[str, str]:
    """What other packages bring: name -> module."""
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def _lab_help() -> int:
    """`shoal lab`: what the commands of other packages do, one line each."""
    found = _plugins()
    texts = {name: (import_module(module).__doc__ or "").strip() for name, module in sorted(found.items())}
    lines = [f"  {name:<12} {text.partition(chr(10))[0]}" for name, text in texts.items()]
    print("\n".join(["shoal lab COMMAND, or shoal COMMAND:", "", *lines]) if lines else f"shoal lab: {_lab_absent()}")
    return 0 if lines else BAD_INPUT


def _lab_absent() -> str:
    return f"its commands, {', '.join(LAB)}, come with shoal-lab: {LAB_INSTALL}"


def _as_typed(message: str, words: Sequence[str]) -> str:
    """A message that begins with what the library calls a value, with the option that it was given by."""
    name, is_, rest = message.partition(" is ")
    option = f"--{name.replace('_', '-')}"
    given = is_ and any(word == option or word.startswith(f"{option}=") for word in words)
    return f"{option} is {rest}" if given else message


def _call(name: str, words: list[str]) -> int:
    command = import_module(known()[name])
    parser = Parser(prog=_program(name), description=command.__doc__, epilog=command.EXAMPLES)
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    words = [*config.words(name, {*known(), *LAB}, parser.options, words), *words]
    try:
        args = parse(parser, words)
    except SystemExit as leave:  # argparse ends the process after --help
        return int(leave.code or 0)
    args.words = ["shoal", name, *words]
    return int(command.run(args))


def _top(words: list[str]) -> int:
    if words and not words[0].startswith("-"):
        if words[0] in LAB and not _plugins():
            raise ValueError(f"{words[0]} is a command of shoal-lab, which is not installed: {LAB_INSTALL}")
        raise unknown("command", words[0], known())
    parser = Parser(prog="shoal", description=_overview(), epilog="shoal COMMAND --help shows a command's options.")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands above")
    try:
        args = parser.parse_words(words)
    except SystemExit as leave:
        return int(leave.code or 0)
    if args.version:
        from shoal import __version__

        print(f"shoal {__version__}")
        return 0
    parser.print_help()
    return BAD_INPUT


def _overview() -> str:
    lines = [f"  {name:<12} {text}" for name, text in COMMANDS.items()]
    lab = ", ".join(sorted(_plugins())) or f"none here ({LAB_INSTALL})"
    return "\n".join([ABOUT, "", "commands:", *lines, "", f"shoal lab, to measure and train: {lab}"])


def _program(name: str | None) -> str:
    return f"shoal {name}" if name else "shoal"


def _never_fail_to_print() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
