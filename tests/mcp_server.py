"""An MCP server on stdio, written with the package mcp: tools that answer, hang, return a megabyte, fail or end it."""

from __future__ import annotations

import os
import sys
import time

if sys.argv[1:] == ["broken"]:
    sys.exit("no licence \x1b[31mfound")
if sys.argv[1:] == ["silent"]:
    time.sleep(3600)

from mcp.server.mcpserver import MCPServer  # noqa: E402 - which takes a while

server = MCPServer("test")


@server.tool()
def clock(place: str) -> str:
    """Tells the time at a place."""
    return f"It is noon in {place}.\x1b[2J"


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(3600)
    return "late"


@server.tool()
def megabyte() -> str:
    """Returns much."""
    return "x" * (1 << 20)


@server.tool()
def fail() -> str:
    """Raises an error."""
    raise ValueError("this place is unknown")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
