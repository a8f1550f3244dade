"""Fetch a model from the Hub by its name, into the Hub's cache, where other tools find it, too.

NAME is a repository (org/name), with a quantisation (org/name:Q4_K_M) or a file (org/name:file.gguf), the address of
its page, or a short name that `shoal models` lists. Of a repository with GGUF files and no quantisation in the name
Q4_K_M is taken, or what is nearest to it; what reads pictures for a GGUF file (mmproj-*.gguf) comes with it. A pull
that was interrupted goes on where it ended. Every file is compared with the hash that the Hub states.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shoal import catalog
from shoal.cli.options import bring, common
from shoal.cli.options.parser import Parser

EXAMPLES = """examples:
  shoal pull qwen3:4b
  shoal pull unsloth/Qwen3.5-4B-GGUF:Q4_K_M
  shoal pull HuggingFaceTB/SmolLM2-135M-Instruct
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("name", metavar="NAME", help="which model, as above")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit on the Hub")
    parser.add_argument("--no-mmproj", action="store_true", help="leave out what reads pictures beside a GGUF file")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Fetch and print where it is."""
    if (own := catalog.find(args.name)) != args.name or Path(own).exists():
        return common.show(args, {"name": args.name, "path": own}, own)  # it is no name of the Hub, and is here
    asked = bring.asked(args.name, args.revision, sees=not args.no_mmproj)
    if asked is None:
        raise ValueError(f"{args.name!r} is no name of a model on the Hub; give one such as org/name:Q4_K_M")
    bring.tell(asked)
    place = bring.fetched(asked)
    facts = {"name": args.name, "repository": asked.wanted.repository, "commit": asked.commit,
             "files": [file.path for file in asked.files], "nbytes": asked.nbytes, "path": str(place)}
    print(f"done: shoal chat --model {args.name}", file=sys.stderr)
    return common.show(args, facts, str(place))
