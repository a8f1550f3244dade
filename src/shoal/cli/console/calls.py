"""Calls of tools in a chat: asked about, made, shown.

What a tool returns is untrusted. It is shown between bars without control characters, and its text cannot spell the
marks by which a template tells roles apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.cli.options.tool_servers import say
from shoal.integrations.mcp_servers import NO_PLACE, CallFailed, McpServers, OfferedTool, defused, most_of, one_line
from shoal.serve.errors import ApiError
from shoal.serve.protocol.thoughts import AnswerReader, thoughts_of
from shoal.serve.protocol.tools import tools_of

_LINES, _WIDTH = 12, 200
"""Lines of a result that are shown, and characters of each."""
_REFUSED = "The user did not allow this call."


class ToolUse:
    """The tools of one chat.

    Args:
        servers: where they are from.
        ask: gets an answer to a question, empty where nobody is there.
    """

    def __init__(self, servers: McpServers, ask: Callable[[str], str]) -> None:
        self._servers, self._ask = servers, ask
        self._allowed = {tool.name for tool in servers.tools if tool.allowed}

    def functions(self, tokenizer: Any) -> list[dict[str, Any]]:
        """What a session offers to its model; ValueError for one whose template has no place for tools."""
        if "tools" not in str(tokenizer.chat_template):
            raise ValueError(NO_PLACE)
        return [dict(tool.function) for tool in self._servers.tools]

    def reader(self, tokenizer: Any, prompt: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> AnswerReader:
        """Parts an answer to the prompt into thoughts, calls, and what is said."""
        try:
            tools = tools_of(self.functions(tokenizer), None, None, tokenizer.chat_template, None, messages)
        except ApiError as error:
            raise ValueError(error.message) from None
        return AnswerReader(tools, thoughts_of(tokenizer, prompt, "beside"))

    def listed(self) -> str:
        """A line for each tool."""
        return "\n".join(f"{tool.name:<20} {tool.server}, {self._state(tool)}: "
                         f"{one_line(str(tool.function['function']['description']))}"
                         for tool in self._servers.tools) or "no MCP server offers any"

    def _state(self, tool: OfferedTool) -> str:
        return "allowed" if tool.name in self._allowed else "asks"

    def result(self, call: Mapping[str, Any], tokenizer: Any, context: int | None) -> dict[str, Any]:
        """Make a call, if that is allowed, and show what comes of it; a message for the template.

        Args:
            context: positions of the model: a result has at most as many characters, some quarter of them in tokens.
        """
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            tool = self._servers.find(name)
            text = self._called(tool, arguments, most_of(context)) if self._may(tool, arguments) else _REFUSED
        except CallFailed as error:
            say(str(error))
            text = f"The call failed: {error}"
        return _result_of(call, defused(text, tokenizer))

    def no_result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The message for a call that was interrupted."""
        return _result_of(call, "The user interrupted this call.")

    def _may(self, tool: OfferedTool, arguments: Any) -> bool:
        """Whether the person allows the call."""
        shown = f"{tool.name} of {tool.server!r} with {visible(json.dumps(arguments, ensure_ascii=False))}"
        if tool.name in self._allowed:
            say(f"calls {shown}")
            return True
        said = self._ask(f"[the model wants to call {shown}] allow? [y]es, [N]o, [a]lways: ")
        if said in ("a", "always"):
            self._allowed.add(tool.name)
        if said in ("y", "yes", "a", "always"):
            return True
        say(f"{tool.name} was not called" + ("" if said else f"; --mcp-allow {tool.name} allows it without asking"))
        return False

    def _called(self, tool: OfferedTool, arguments: Any, most: int) -> str:
        text = self._servers.call(tool, arguments, most)
        print(f"[untrusted text from {tool.name} of {tool.server!r}]\n{barred(text)}", file=sys.stderr)
        return text


def _result_of(call: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A call's result as templates take it."""
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


def visible(text: str) -> str:
    """Text with its control characters spelled out."""
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)


def barred(text: str) -> str:
    """The first lines of a text between bars, without control characters."""
    lines = text.splitlines() or [""]
    cut = [visible(line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ...") for line in lines[:_LINES]]
    rest = f"\n| ... {len(lines)} lines in all" if len(lines) > _LINES else ""
    return "\n".join(f"| {line}" for line in cut) + rest
