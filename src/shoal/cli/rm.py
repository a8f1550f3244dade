"""Remove a model from the Hub's cache. Asks before, unless --yes is given.

Files of other tools, in folders and in $SHOAL_MODELS are never removed.
"""

from __future__ import annotations

import argparse
import sys

from shoal import catalog
from shoal.cli.options.parser import Parser
from shoal.errors import Unsupported
from shoal.hub.names import parse
from shoal.hub.places import OLLAMA, here

EXAMPLES = """examples:
  shoal rm qwen3:4b
  shoal rm unsloth/Qwen3.5-4B-GGUF --yes
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("name", metavar="NAME", help="a name as for `shoal pull`; of a repository all that is here")
    parser.add_argument("--yes", action="store_true", help="remove without asking")


def run(args: argparse.Namespace) -> int:
    """Remove, if the user agrees."""
    from shoal.hub.fetch import amount
    from shoal.hub.remove import removal

    _refuse_others(args.name)
    wanted = parse(args.name)
    found = None if wanted is None else removal(wanted)
    if wanted is None or found is None:
        place = None if wanted is None else here(wanted)
        if place is not None:
            raise _elsewhere(args.name, f"it is {str(place)!r}, which LM Studio keeps", "Remove it there")
        raise Unsupported(f"the model {args.name!r}", "the Hub's cache holds none of it", "`shoal models` lists them")
    what = ", ".join(found.paths) or "all of it"
    if not args.yes:
        _ask(f"remove {wanted.repository} ({what}, {amount(found.nbytes)})? [y/N] ")
    found.execute()
    print(f"removed {wanted.repository}: {what}, {amount(found.nbytes)}")
    return 0


def _refuse_others(name: str) -> None:
    """Refuse what is not in the Hub's cache."""
    if name.startswith(OLLAMA):
        raise _elsewhere(name, "Ollama keeps it", f"Remove it with: ollama rm {name.removeprefix(OLLAMA)}")
    path = catalog.find(name)
    if path != name:
        raise _elsewhere(name, f"it is {path!r}, which is not in the Hub's cache", "Remove the file by hand")


def _elsewhere(name: str, why: str, remedy: str) -> Unsupported:
    return Unsupported(f"removing {name!r}", why, remedy)


def _ask(question: str) -> None:
    """ValueError unless the user says yes."""
    if not sys.stdin.isatty():
        raise ValueError("nobody can be asked here; add --yes")
    print(question, end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ValueError("nothing is removed")
