"""Calls of tools in a chat: asked about, made, shown.

What a tool returns is untrusted. It is shown between bars without control characters, and its text cannot spell the
marks by which a template tells roles apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shoal.integrations.mcp_servers import MOST, CallFailed, McpServers, OfferedTool, one_line
from shoal.serve.errors import ApiError
from shoal.serve.protocol.thoughts import AnswerReader, thoughts_of
from shoal.serve.protocol.tools import tools_of

_LINES, _WIDTH = 12, 200
"""Lines of a result that are shown, and characters of each."""
_JOINT = "\u200b"
_REFUSED = "The user did not allow this call."
_NO_PLACE = "this model's chat template has no place for tools; MCP needs a model that calls some, such as Qwen's"


class ToolUse:
    """The tools of one chat.

    Args:
        servers: where they are from.
        allowed: names of tools that are called without asking.
        ask: gets an answer to a question, empty where nobody is there.
    """

    def __init__(self, servers: McpServers, allowed: Collection[str], ask: Callable[[str], str]) -> None:
        self._servers, self._ask = servers, ask
        self._allowed = {*allowed, *(tool.name for tool in servers.tools if tool.allowed)}
        for name in sorted({*allowed} - {tool.name for tool in servers.tools}):
            say(f"--mcp-allow names {name!r}, which no server offers; there are: {self.names}")

    @property
    def names(self) -> str:
        """The tools that there are."""
        return ", ".join(tool.name for tool in self._servers.tools) or "none"

    def functions(self, tokenizer: Any) -> list[dict[str, Any]]:
        """What a session offers to its model; ValueError for one whose template has no place for tools."""
        if "tools" not in str(tokenizer.chat_template):
            raise ValueError(_NO_PLACE)
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
        tool = next((one for one in self._servers.tools if one.name == name), None)
        if tool is None:
            text = f"There is no tool {name!r} any more."
            say(text)
        elif not self._may(tool, arguments):
            text = _REFUSED
        else:
            text = self._called(tool, arguments, MOST if context is None else min(MOST, context))
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
        try:
            text = self._servers.call(tool, arguments, most)
        except CallFailed as error:
            say(str(error))
            return f"The call failed: {error}"
        print(f"[untrusted text from {tool.name} of {tool.server!r}]\n{barred(text)}", file=sys.stderr)
        return text


def _result_of(call: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A call's result as templates take it."""
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


def say(line: str) -> None:
    """A line about tools, on stderr."""
    print(f"[{line}]", file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Text with its control characters spelled out."""
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)


def barred(text: str) -> str:
    """The first lines of a text between bars, without control characters."""
    lines = text.splitlines() or [""]
    cut = [visible(line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ...") for line in lines[:_LINES]]
    rest = f"\n| ... {len(lines)} lines in all" if len(lines) > _LINES else ""
    return "\n".join(f"| {line}" for line in cut) + rest


def defused(text: str, tokenizer: Any) -> str:
    """Text in which a tokenizer finds none of its special tokens: each is parted by a character without width."""
    marks = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    for mark in sorted((one for one in map(str, marks) if _is_mark(one)), key=len, reverse=True):
        text = text.replace(mark, f"{mark[0]}{_JOINT}{mark[1:]}")
    return text


def _is_mark(token: str) -> bool:
    """Whether an added token is a mark, rather than white space or a word."""
    return len(token) > 1 and any(not letter.isalnum() and not letter.isspace() for letter in token)
