"""Tools: what a request offers, how the answer is bound to call them, and how calls are read out of its text.

Two notations are known, told apart by the chat template: `<tool_call>` around JSON (Hermes, Qwen), and JSON alone
(Llama 3). An answer that is JSON alone, fenced or not, is read as calls under both: small models forget the tags. Shoal
calls no tool itself.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.engine.constraint import Constraint, Grammar
from shoal.serve.errors import refused

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_JSON = re.compile(r"(```json\s*)?(\[\s*)?(\{|$)")
"""How an answer begins that may be JSON alone."""
_MODES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tools:
    """The functions of a request that may be called.

    Attributes:
        offered: as the template is given them.
        bound: those of which the answer must call one; none where that is the model's choice.
        several: whether it may call more than one.
        tagged: whether the template has calls between `<tool_call>` and `</tool_call>`.
        named: whether the request names the one function to call.
    """

    offered: tuple[Mapping[str, Any], ...]
    bound: tuple[Mapping[str, Any], ...] = ()
    several: bool = True
    tagged: bool = True
    named: bool = False

    @property
    def constraint(self) -> Constraint | None:
        """What makes the answer a call, where it must be one."""
        if not self.bound:
            return None
        calls = [_call_schema(tool["function"], "arguments" if self.tagged else "parameters") for tool in self.bound]
        schema = {"anyOf": calls, "x-guidance": {"whitespace_pattern": "[ ]?"}}
        call = f'"{_OPEN}\\n" json "\\n{_CLOSE}"' if self.tagged else "json"
        rest = (f' ("\\n" {call})*' if self.tagged else f' ("; " {call})*') if self.several else ""
        return Grammar(f"start: {call}{rest}\njson: %json {json.dumps(schema)}", wind_up=True)


def _call_schema(function: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    given = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", "properties": {"name": {"const": function["name"]}, arguments: given},
            "required": ["name", arguments], "additionalProperties": False}


def tools_of(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, several: bool | None, template: Any
) -> Tools | None:
    """What a request says of tools; None where it offers none, or none may be called.

    Raises:
        ApiError: 400 for what is no tool or no choice, and a model whose template has no place for tools.
    """
    for place, tool in enumerate(tools):
        _check_tool(tool, f"tools.{place}")
    names = [tool["function"]["name"] for tool in tools]
    named = choice["function"]["name"] if isinstance(choice, Mapping) and _is_function(choice) else None
    if named is None and choice is not None and choice not in _MODES:
        raise refused("tool_choice", f"tool_choice must be {', '.join(_MODES)}, or name one function")
    if named is not None and named not in names:
        raise refused("tool_choice", f"tool_choice names {named!r}; the tools are {', '.join(names) or 'none'}")
    if choice == "required" and not tools:
        raise refused("tool_choice", "tool_choice is 'required' without tools")
    if not tools or choice == "none":
        return None
    if "tools" not in str(template):
        raise refused("tools", "this model's chat template has no place for tools")
    bound = [tool for tool in tools if choice == "required" or tool["function"]["name"] == named]
    return Tools(tuple(tools), tuple(bound), several is not False and named is None, _OPEN in str(template),
                 named is not None)


def _check_tool(tool: Any, where: str) -> None:
    if not _is_function(tool):
        raise refused(where, f"{where} must be an object of type function, with a function that has a name")


def _is_function(value: Any) -> bool:
    function = value.get("function") if isinstance(value, Mapping) else None
    return (isinstance(function, Mapping) and value.get("type") == "function" and isinstance(function.get("name"), str)
            and bool(function["name"]) and isinstance(function.get("parameters", {}), Mapping | None))


@dataclass
class CallReader:
    """Reads calls out of an answer, piece by piece; what may be a part of one is held back.

    Attributes:
        tools: what may be called.
        calls: how many were read.
    """

    tools: Tools
    calls: int = 0
    _text: str = ""
    _space: str = ""
    _begun: bool = False

    def read(self, piece: str, last: bool) -> dict[str, Any]:
        """The delta that a piece of text brings: `content`, `tool_calls`, or nothing. After `last` nothing is held."""
        self._text += piece
        head = self._text.lstrip()
        if not self._begun and ("```json".startswith(head) or _JSON.match(head)):
            if not last:
                return {}
            if calls := self._all(head.removeprefix("```json").rstrip().removesuffix("```").strip()):
                return {"tool_calls": calls}
        self._begun = True
        content, calls = self._tagged(last) if self.tools.tagged else self._free()
        return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}

    def _free(self) -> tuple[str, list[dict[str, Any]]]:
        said, self._text = self._text, ""
        return said, []

    def _tagged(self, last: bool) -> tuple[str, list[dict[str, Any]]]:
        content, calls = "", list[dict[str, Any]]()
        while (start := self._text.find(_OPEN)) >= 0 and (end := self._text.find(_CLOSE, start)) >= 0:
            content += self._outside(self._text[:start])
            if call := self._call(self._text[start + len(_OPEN) : end]):
                calls.append(call)
                self._space = ""
            else:
                content += self._outside(self._text[start : end + len(_CLOSE)])
            self._text = self._text[end + len(_CLOSE) :]
        free = len(self._text) if last else start if start >= 0 else self._tail()
        content += self._outside(self._text[:free])
        self._text = self._text[free:]
        return content + ("" if self.calls or not last else self._space), calls

    def _tail(self) -> int:
        """Where an opening tag may begin at the text's end."""
        longest = next(size for size in range(len(_OPEN) - 1, -1, -1) if self._text.endswith(_OPEN[:size]))
        return len(self._text) - longest

    def _outside(self, text: str) -> str:
        """Text beside calls; white space waits for what comes after it, and falls away before a call."""
        said = self._space + text
        self._space = said[len(said.rstrip()) :]
        return said.rstrip()

    def _all(self, text: str) -> list[dict[str, Any]]:
        """Calls of a text that is nothing else: one object, several with semicolons between them, or a list."""
        try:
            found = json.loads(text if text.startswith("[") else "[" + _commas(text) + "]")
        except ValueError:
            return []
        calls = [self._call(json.dumps(one)) for one in found]
        return [call for call in calls if call] if all(calls) else []

    def _call(self, text: str) -> dict[str, Any]:
        """A call of its JSON; empty where that is none, or of no function that was offered."""
        try:
            said = json.loads(text)
        except ValueError:
            return {}
        names = [tool["function"]["name"] for tool in self.tools.offered]
        if not isinstance(said, dict) or said.get("name") not in names:
            return {}
        arguments = said.get("arguments", said.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.calls += 1
        return {"index": self.calls - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                "function": {"name": said["name"], "arguments": written}}


def _commas(text: str) -> str:
    """JSON objects that stand one after another, or with semicolons between them, as the items of a list."""
    items, at, decoder = list[str](), 0, json.JSONDecoder()
    while at < len(text):
        _, end = decoder.raw_decode(text, at)
        items.append(text[at:end])
        at = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
    return ",".join(items)
