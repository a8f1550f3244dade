"""Tools of MCP servers, for chats: servers from a configuration file, their tools in OpenAI's form, and calls.

The file is that of other clients: `{"mcpServers": {NAME: {"command", "args", "env", "cwd"} or {"url", "headers"}}}`.
`"allow"` beside them names tools that may be called without asking, `"disabled": true` leaves a server out. Servers run
in an event loop of their own thread. What they say is untrusted: it is bounded in size and time, and nothing here acts
on it. A server that fails costs one line, and its tools.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from shoal.errors import needs, unknown

STARTING, CALLING = 30.0, 60.0
"""Seconds for a server to start and list its tools, and for a call."""
MOST = 8_000
"""Characters of a result that a model reads."""
_MOST_TOOLS, _MOST_ABOUT, _MOST_SCHEMA = 64, 1_000, 8_000
"""Tools of all servers, and characters of a tool's description and of its schema."""
_SAID, _TAIL, _LONGEST_NAME = 200, 4096, 64
_LOCAL, _REMOTE = ("command", "args", "env", "cwd"), ("url", "headers")
_KNOWN = (*_LOCAL, *_REMOTE, "allow", "disabled", "type")
_NAME = re.compile(r"[^A-Za-z0-9_-]")
_JOINT = "\u200b"
NO_PLACE = "this model's chat template has no place for tools; MCP needs a model that calls some, such as Qwen's"


class CallFailed(Exception):
    """A call brought no result; says why in a line."""


@dataclass(frozen=True)
class ServerConfig:
    """One entry of a configuration file: `command` with what belongs to it, or `url`."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    allow: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OfferedTool:
    """A tool of a running server.

    Attributes:
        name: for the model: the tool's own, with its server's before it where two servers have the same.
        server, tool: where it is from, and its name there.
        function: what a chat template takes.
        allowed: whether the operator lets it be called without asking.
    """

    name: str
    server: str
    tool: str
    function: Mapping[str, Any]
    allowed: bool


def configs_of(path: Path) -> list[ServerConfig]:
    """The servers of a file; ValueError in one line for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    servers = found.get("mcpServers") if isinstance(found, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f'{path} names no servers; it must be {{"mcpServers": {{NAME: {{"command": ..., "args": '
                         f'[...]}}}}}}, or with "url" in place of "command"')
    made = [_config(path, name, entry) for name, entry in servers.items()]
    return [one for one in made if one is not None]


def _config(path: Path, name: str, entry: Any) -> ServerConfig | None:
    """One server; None if it is disabled."""
    where = f"{path}: server {name!r}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object with a command or a url")
    for key in entry:
        if key not in _KNOWN:
            raise ValueError(f"{where}: {unknown('key', key, _KNOWN)}")
    if bool(entry.get("command")) == bool(entry.get("url")):
        raise ValueError(f"{where} must have a command or a url, one of them")
    for key, kind in {"command": str, "cwd": str, "url": str, "disabled": bool}.items():
        if not isinstance(entry.get(key, kind()), kind):
            raise ValueError(f"{where}: {key} is {entry[key]!r}; it must be a {kind.__name__}")
    for key in ("args", "allow"):
        if not isinstance(entry.get(key, []), list) or not all(isinstance(one, str) for one in entry.get(key, [])):
            raise ValueError(f"{where}: {key} is {entry[key]!r}; it must be a list of strings")
    for key in ("env", "headers"):
        given = entry.get(key, {})
        if not isinstance(given, dict) or not all(isinstance(one, str) for one in given.values()):
            raise ValueError(f"{where}: {key} must be an object of strings")
    if entry.get("disabled"):
        return None
    given = {key: value for key, value in entry.items() if key not in ("disabled", "type")}
    given |= {"args": tuple(entry.get("args", ())), "allow": frozenset(entry.get("allow", ()))}
    return ServerConfig(name, **given)


class McpServers:
    """Running servers. `close` ends them.

    Args:
        configs: the servers to start.
        say: told in a line what fails; the rest goes on.
        allow: names of tools that may be called without asking, beside those of the configuration.
        starting, calling: seconds that a server has to start, and that a call may take.

    Raises:
        Unsupported: the package `mcp` is not installed.
    """

    def __init__(
        self, configs: Sequence[ServerConfig], say: Callable[[str], None], allow: Collection[str] = (), *,
        starting: float = STARTING, calling: float = CALLING,
    ) -> None:
        with needs("mcp", "tools of MCP servers"):
            import mcp  # noqa: F401
            from anyio.from_thread import start_blocking_portal
        self._say, self._starting, self._calling = say, starting, calling
        self._clients: dict[str, Any] = {}
        self._open = ExitStack()
        self._portal = self._open.enter_context(start_blocking_portal())
        self._open.callback(lambda: self._portal.call(self._portal.stop, True))
        try:
            found = _offered([(one, tool) for one in configs for tool in self._start(one)], say)
        except BaseException:
            self.close()
            raise
        self._tools = [replace(tool, allowed=tool.allowed or tool.name in allow) for tool in found]
        for name in sorted({*allow} - {tool.name for tool in found}):
            say(f"--mcp-allow names {name!r}, which no server offers; there are: {self.names}")

    @property
    def names(self) -> str:
        """The names of the tools."""
        return ", ".join(tool.name for tool in self.tools) or "none"

    @property
    def tools(self) -> list[OfferedTool]:
        """The tools of servers that run."""
        return [tool for tool in self._tools if tool.server in self._clients]

    def _start(self, config: ServerConfig) -> Sequence[Any]:
        """Start a server; its tools, none if it fails."""
        log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - open while it runs
        self._open.enter_context(log)
        try:
            _, (client, tools) = self._portal.start_task(partial(_live, config, log, self._starting))
        except Exception as error:
            why = f"no answer within {self._starting:g} s" if isinstance(error, TimeoutError) else _why(error)
            self._say(f"the MCP server {config.name!r} does not start: {why}{_last_line(log)}")
            return ()
        self._clients[config.name] = client
        return list(tools)

    def find(self, name: str) -> OfferedTool:
        """The tool of that name; CallFailed if there is none any more."""
        for tool in self.tools:
            if tool.name == name:
                return tool
        raise CallFailed(f"there is no tool {one_line(name)!r} any more")

    def call(self, tool: OfferedTool, arguments: Any, most: int = MOST) -> str:
        """The text of a tool's result, at most `most` characters.

        Raises:
            CallFailed: the tool reports an error, takes too long, or its server has ended.
        """
        task = self.begin(tool, arguments, most)
        try:
            return task.result()
        except KeyboardInterrupt:
            task.cancel()
            raise

    def begin(self, tool: OfferedTool, arguments: Any, most: int = MOST) -> Future[str]:
        """`call` without waiting for its result; cancelling that ends the call."""
        return self._portal.start_task_soon(self._called, tool, arguments, most)

    async def _called(self, tool: OfferedTool, arguments: Any, most: int) -> str:
        import anyio

        if not isinstance(arguments, Mapping):
            raise CallFailed(f"the tool {tool.name!r} takes an object, and the call has none")
        client = self._clients.get(tool.server)
        if client is None:
            raise CallFailed(f"the MCP server {tool.server!r} has ended")
        try:
            with anyio.fail_after(self._calling):
                result = await client.call_tool(tool.tool, dict(arguments))
        except Exception as error:
            raise CallFailed(self._failure(tool, error)) from None
        text = bounded(_text(result), most)
        if result.is_error:
            raise CallFailed(f"the tool {tool.name!r} reports an error: {one_line(text) or 'it says no more'}")
        return text

    def _failure(self, tool: OfferedTool, error: Exception) -> str:
        """Why a call failed. A server that has ended is forgotten."""
        if isinstance(error, TimeoutError):
            return f"the tool {tool.name!r} of the MCP server {tool.server!r} gave no answer within {self._calling:g} s"
        if _is_over(error):
            self._clients.pop(tool.server, None)
            return f"the MCP server {tool.server!r} has ended, and its tools are gone"
        return f"the tool {tool.name!r} failed: {_why(error)}"

    def close(self) -> None:
        """End the servers; the package mcp bounds the time that this takes."""
        self._clients = {}
        self._open.close()


async def _live(config: ServerConfig, log: IO[str], seconds: float, *, task_status: Any) -> None:
    """Keep a server running until this is cancelled; TimeoutError if it has not listed its tools within `seconds`."""
    import anyio
    from mcp import Client

    with anyio.CancelScope(deadline=anyio.current_time() + seconds) as starting:
        async with AsyncExitStack() as opened:
            client = await opened.enter_async_context(Client(await _transport(config, log, opened)))
            tools = await _listed(client)
            starting.deadline = math.inf
            task_status.started((client, tools))
            await anyio.sleep_forever()
    if starting.cancelled_caught:
        raise TimeoutError


async def _transport(config: ServerConfig, log: IO[str], opened: AsyncExitStack) -> Any:
    """What connects to a server; what it writes to stderr goes to `log`."""
    from mcp.client.stdio import StdioServerParameters, stdio_client

    if config.command:
        return stdio_client(StdioServerParameters(command=config.command, args=list(config.args), env={**config.env},
                                                  cwd=config.cwd), errlog=log)
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    web = await opened.enter_async_context(httpx2.AsyncClient(headers={**config.headers}, timeout=STARTING))
    return streamable_http_client(config.url, http_client=web)


async def _listed(client: Any) -> list[Any]:
    """A server's tools, page by page."""
    found, cursor = list[Any](), None
    while len(found) <= _MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor or not page.tools:
            break
    return found


def _offered(found: Sequence[tuple[ServerConfig, Any]], say: Callable[[str], None]) -> list[OfferedTool]:
    """The tools of all servers, each under a name of its own."""
    often = Counter(tool.name for _, tool in found)
    made = dict[str, OfferedTool]()
    for config, tool in found:
        name = _NAME.sub("_", tool.name if often[tool.name] == 1 else f"{config.name}__{tool.name}")[:_LONGEST_NAME]
        schema = json.dumps(tool.input_schema)
        if len(made) == _MOST_TOOLS or name in made or len(schema) > _MOST_SCHEMA:
            why = (f"there are {_MOST_TOOLS} already" if len(made) == _MOST_TOOLS else "there is one of that name"
                   if name in made else f"its schema has {len(schema)} characters, more than {_MOST_SCHEMA}")
            say(f"the tool {one_line(tool.name)!r} of the MCP server {config.name!r} is left out: {why}")
            continue
        function = {"name": name, "description": (tool.description or "")[:_MOST_ABOUT],
                    "parameters": tool.input_schema}
        made[name] = OfferedTool(name, config.name, tool.name, {"type": "function", "function": function},
                                 tool.name in config.allow)
    return list(made.values())


def _text(result: Any) -> str:
    """The text of a result; what is none is named."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


def _part(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    inner = getattr(getattr(block, "resource", None), "text", None)
    return inner if isinstance(inner, str) else f"[{block.type}: no text]"


def bounded(text: str, most: int) -> str:
    """A text of at most `most` characters, and a note on what was cut."""
    return text if len(text) <= most else f"{text[:most]}\n[cut here: {most} of {len(text)} characters]"


def most_of(context: int | None) -> int:
    """Characters of a result for a model of so many positions, of which the result then takes some quarter."""
    return MOST if context is None else min(MOST, context)


def defused(text: str, tokenizer: Any) -> str:
    """Text in which a tokenizer finds none of its special tokens: each is parted by a character without width."""
    marks = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    for mark in sorted((one for one in map(str, marks) if _is_mark(one)), key=len, reverse=True):
        text = text.replace(mark, f"{mark[0]}{_JOINT}{mark[1:]}")
    return text


def _is_mark(token: str) -> bool:
    """Whether an added token is a mark, rather than white space or a word."""
    return len(token) > 1 and any(not letter.isalnum() and not letter.isspace() for letter in token)


def one_line(text: str) -> str:
    """A line of a server's text that does nothing to a terminal."""
    said = " ".join("".join(letter if letter.isprintable() else " " for letter in text[:_SAID * 8]).split())
    return said if len(said) <= _SAID else f"{said[:_SAID]} ..."


def _why(error: BaseException) -> str:
    """An error in one line; of a group, its first."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return one_line(str(error)) or type(error).__name__


def _is_over(error: BaseException) -> bool:
    """Whether an error says that the server has gone."""
    from anyio import BrokenResourceError, ClosedResourceError
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return isinstance(error, BrokenResourceError | ClosedResourceError) or (
        isinstance(error, MCPError) and error.error.code == CONNECTION_CLOSED)


def _last_line(log: IO[str]) -> str:
    """The last line that a server wrote to stderr."""
    log.seek(max(0, log.seek(0, 2) - _TAIL))
    lines = [line for line in log.read().splitlines() if line.strip()]
    return f"; it said: {one_line(lines[-1])}" if lines else ""
