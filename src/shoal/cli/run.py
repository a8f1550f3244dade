"""Chat with a model by its name, as `ollama run` does. With a prompt: answer that and end.

All else is as in `shoal chat`.
"""

from __future__ import annotations

import argparse

from shoal.cli import chat
from shoal.cli.options.parser import Parser

EXAMPLES = """examples:
  shoal run qwen3:4b
  shoal run qwen3:4b "What is the capital of France?"
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("name", metavar="NAME", help="the model, as for --model, which it goes before")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="answer this and end")
    chat.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Chat, or answer the prompt."""
    args.model = args.name  # that of a configuration file is for commands without a name
    return chat.run(args) if args.prompt is None else chat.once(args, args.prompt)
