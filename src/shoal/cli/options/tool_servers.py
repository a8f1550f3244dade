"""The options of tools of MCP servers, and the servers that they start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options.parser import Parser

if TYPE_CHECKING:
    from shoal.integrations.mcp_servers import McpServers, ServerConfig


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("tools")
    group.add_argument("--mcp", metavar="CONFIG.json", type=Path, help="start the MCP servers of this file, whose "
                       "tools the model may call; needs the extra mcp")
    group.add_argument("--mcp-allow", metavar="TOOL", action="append", default=[], help="call this tool without "
                       "asking each time; repeatable")


def configs(args: argparse.Namespace) -> Sequence[ServerConfig]:
    """The servers that the options name, before minutes are spent on a model; ValueError for a wrong file."""
    if args.mcp is None:
        if args.mcp_allow:
            raise ValueError("--mcp-allow names tools of MCP servers; give --mcp CONFIG.json too")
        return ()
    from shoal.errors import needs
    from shoal.integrations.mcp_servers import configs_of

    with needs("mcp", "--mcp"):
        import mcp  # noqa: F401
    return configs_of(args.mcp)


@contextmanager
def running(args: argparse.Namespace, named: Sequence[ServerConfig]) -> Iterator[McpServers | None]:
    """These servers while the context lasts; None where none is named."""
    if not named:
        yield None
        return
    from shoal.integrations.mcp_servers import McpServers

    with closing(McpServers(named, say, args.mcp_allow)) as servers:
        yield servers


def say(line: str) -> None:
    """A line about tools, on stderr."""
    print(f"[{line}]", file=sys.stderr, flush=True)
