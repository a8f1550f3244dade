"""Tools of MCP servers: real servers on stdio and over HTTP, that answer, fail, hang, flood and die."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving import wait
from shoal.integrations import mcp_servers
from shoal.integrations.mcp_servers import MOST, CallFailed, McpServers, ServerConfig, bounded, configs_of, one_line
from tool_scripts import PATHS, SERVER, tool_server

pytest.importorskip("mcp")

@pytest.fixture(scope="module")
def running() -> Iterator[McpServers]:
    said: list[str] = []
    servers = McpServers([tool_server("test", allow=frozenset({"clock"}))], said.append)
    assert said == []
    yield servers
    servers.close()


def call(servers: McpServers, name: str, **arguments: Any) -> str:
    return servers.call(next(tool for tool in servers.tools if tool.name == name), arguments)


def test_tools_are_offered_in_the_form_of_templates(running: McpServers) -> None:
    assert {tool.name: tool.allowed for tool in running.tools} == {
        "clock": True, "hang": False, "megabyte": False, "fail": False, "die": False}
    function = running.tools[0].function["function"]
    assert (function["name"], function["description"]) == ("clock", "Tells the time at a place.")
    assert function["parameters"]["required"] == ["place"]


def test_a_tool_answers(running: McpServers) -> None:
    assert call(running, "clock", place="Rome") == "It is noon in Rome.\x1b[2J"


def test_a_megabyte_is_cut(running: McpServers) -> None:
    text = call(running, "megabyte")
    assert text == f"{'x' * MOST}\n[cut here: {MOST} of {1 << 20} characters]"


@pytest.mark.parametrize(("name", "arguments", "said"), [
    ("fail", {}, "the tool 'fail' reports an error: Error executing tool fail"),
    ("clock", {}, "the tool 'clock' reports an error: .*validation error"),
    ("hang", {}, "the tool 'hang' of the MCP server 'test' gave no answer within 1 s"),
])
def test_a_call_that_fails_says_why_and_the_next_one_works(
    running: McpServers, name: str, arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as hurried, pytest.raises(CallFailed, match=f"^{said}"):
        hurried.setattr(running, "_calling", 1.0 if name == "hang" else 60.0)
        call(running, name, **arguments)
    assert call(running, "clock", place="Oslo").startswith("It is noon in Oslo.")


def test_arguments_that_are_no_object_are_refused(running: McpServers) -> None:
    with pytest.raises(CallFailed, match="takes an object"):
        running.call(running.tools[0], ["Rome"])


def test_a_server_that_dies_is_gone_and_the_others_stay() -> None:
    servers = McpServers([tool_server("one"), tool_server("two")], pytest.fail)
    try:
        assert {tool.name for tool in servers.tools} >= {"one__die", "two__clock"}
        dead = next(tool for tool in servers.tools if tool.name == "one__clock")
        with pytest.raises(CallFailed, match="^the MCP server 'one' has ended, and its tools are gone$"):
            call(servers, "one__die")
        assert {tool.server for tool in servers.tools} == {"two"}
        with pytest.raises(CallFailed, match="^the MCP server 'one' has ended$"):
            servers.call(dead, {"place": "Rome"})
        assert call(servers, "two__clock", place="Oslo").startswith("It is noon")
    finally:
        servers.close()


def test_servers_that_do_not_start_cost_a_line_each_and_leave_no_process() -> None:
    said: list[str] = []
    gone = [tool_server("broken", "broken"), ServerConfig("none", "/nowhere/at/all"),
            ServerConfig("web", url="http://127.0.0.1:9/mcp")]
    for configs, seconds in ((gone, 60.0), ([tool_server("silent", "silent")], 1.5)):
        servers = McpServers(configs, said.append, starting=seconds)
        servers.close()
        assert servers.tools == []
    assert len(said) == 4 and not any("\n" in line or "\x1b" in line for line in said)
    for line, (name, why) in zip(said, {
        "broken": "Connection closed; it said: no licence", "none": "No such file", "web": "connection",
        "silent": "no answer within 1.5 s",
    }.items(), strict=True):
        assert line.startswith(f"the MCP server {name!r} does not start: ") and why in line
    assert not [one for one in psutil.Process().children() if {"broken", "silent"} & {*one.cmdline()}]


def test_too_many_tools_and_too_large_schemas_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "_MOST_TOOLS", 2)
    said: list[str] = []
    servers = McpServers([tool_server("test")], said.append)
    servers.close()
    assert [tool.name for tool in servers._tools] == ["clock", "hang"]
    assert said == [f"the tool {name!r} of the MCP server 'test' is left out: there are 2 already"
                    for name in ("megabyte", "fail", "die")]
    monkeypatch.setattr(mcp_servers, "_MOST_SCHEMA", 10)
    assert mcp_servers._offered([], said.append) == []


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_server_over_http() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    web = psutil.Popen([sys.executable, SERVER, "http", str(port)], env={**os.environ, **PATHS})
    try:
        wait(lambda: listens(port))
        servers = McpServers([ServerConfig("web", url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "k"})],
                             pytest.fail)
        try:
            assert call(servers, "clock", place="Rome").startswith("It is noon in Rome.")
        finally:
            servers.close()
    finally:
        web.kill()
        web.wait()


def written(folder: Path, value: Any) -> Path:
    path = folder / "servers.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_file_of_other_clients_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, {"mcpServers": {
        "files": {"command": "npx", "args": ["-y", "x"], "env": {"A": "b"}, "type": "stdio", "allow": ["read"]},
        "web": {"url": "http://localhost/mcp", "headers": {"Authorization": "Bearer k"}},
        "off": {"command": "x", "disabled": True}}})
    assert configs_of(path) == [
        ServerConfig("files", "npx", ("-y", "x"), {"A": "b"}, allow=frozenset({"read"})),
        ServerConfig("web", url="http://localhost/mcp", headers={"Authorization": "Bearer k"})]


@pytest.mark.parametrize(("value", "said"), [
    ("{", "cannot read"), ({"servers": {}}, "names no servers"), ({"mcpServers": []}, "names no servers"),
    ({"mcpServers": {"a": 1}}, "server 'a' must be an object"),
    ({"mcpServers": {"a": {"command": "x", "url": "y"}}}, "a command or a url, one of them"),
    ({"mcpServers": {"a": {"args": []}}}, "a command or a url, one of them"),
    ({"mcpServers": {"a": {"comand": "x"}}}, "unknown key 'comand'. Did you mean 'command'?"),
    ({"mcpServers": {"a": {"command": ["x"]}}}, r"command is \['x'\]; it must be a str"),
    ({"mcpServers": {"a": {"command": "x", "args": "y"}}}, "args is 'y'; it must be a list of strings"),
    ({"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}, "env must be an object of strings"),
])
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        configs_of(written(tmp_path, value))
    assert "\n" not in str(caught.value)


def test_texts_are_bounded_and_harmless() -> None:
    assert bounded("abcd", 4) == "abcd" and bounded("abcde", 4) == "abcd\n[cut here: 4 of 5 characters]"
    assert one_line("a\n\x1b[31m b\u202e") == "a [31m b" and one_line("x" * 300) == "x" * 200 + " ..."
