"""Tools: those that a request offers, the constraint that makes the answer call them, and calls parsed from its text.

Constraints use one of two notations, chosen by the chat template: `<tool_call>` around JSON (Hermes, Qwen), or JSON
alone (Llama 3). A free answer may hold calls in many forms: JSON with the name of an offered function, alone or in a
list, between tags, in a fence, or amid text; models forget closing tags and fences. A stream gives what the whole text
gives. No tool is called here.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex
from typing_extensions import override

from shoal.engine.constraints.constraint import Constraint, JsonSchema
from shoal.serve.errors import refused

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = "[ ]?"
"""White space between the parts of arguments."""
_MODES = ("none", "auto", "required")
_TAGS = "tool_call|tools|tool|function_call"
_KEYS = "name|function|arguments|parameters|type|id|tool_calls"
_FENCE = "```"
_OBJECT = rf'\{{\s*"(?:{_KEYS})"\s*:'
"""The beginning of JSON that may be a call."""
_BOUND = regex.compile(rf"[\s;]*(?:<tool_call>\s*)?(?P<value>{_OBJECT})")
"""The beginning of a constrained answer, in the constraint's forms."""
_FREE = regex.compile(rf"(?:(?:<(?:{_TAGS})>|{_FENCE}\w*)\s*){{0,4}}(?:\{{\s*)?(?P<value>(?:\[\s*)?{_OBJECT})")
"""The beginning of a call in a free answer."""
_CLOSING = regex.compile(rf"[\s;,]*(?:</(?:{_TAGS})>|{_FENCE}|\}})")
"""What may close a call; one brace too many is common, before it or after it."""
_PLAIN, _QUOTED = re.compile(r'["\[\]{}<`]'), re.compile(r'\\.|\\$|"', re.S)
_PAIRS = {"{": "}", "[": "]"}
_FORGOTTEN = 2
"""Closing brackets that a call may lack: those of its arguments and its own."""
_TRIES = 16
"""Unfinished beginnings of calls that are tried in one text."""
_BARE = {"name", "function", "type", "id"}
"""Keys of a call without arguments."""


@dataclass(frozen=True)
class Tools:
    """The functions of a request that may be called.

    Attributes:
        offered: all of them, in the template's form.
        bound: the functions of which the answer must call one; empty if the model may choose not to.
        several: whether the answer may call more than one.
        tagged: whether the template writes calls between `<tool_call>` and `</tool_call>`.
        named: whether the request names the one function to call.
        final: the constraint on an answer without a call; None if that is free, or a call must be made.
        answered: whether the conversation ends with a call's result. Then a call needs tags if there is a `final`:
            small models, which forget tags, would call again and again.
        made: calls made earlier in this turn, by `key_of`. Repeated without tags they are text, copied by the model.
    """

    offered: tuple[Mapping[str, Any], ...]
    bound: tuple[Mapping[str, Any], ...] = ()
    several: bool = True
    tagged: bool = True
    named: bool = False
    final: Constraint | None = None
    answered: bool = False
    made: frozenset[str] = frozenset()

    @cached_property
    def constraint(self) -> Constraint | None:
        """The constraint that makes the answer a call, or a call or a `final` answer; None if it is free."""
        if not self.bound and self.final is None:
            return None
        forms = (self.tagged, False) if self.final and not self.answered else (self.tagged,)
        return Calls(_calls(self.bound or self.offered, forms, self.tagged, self.several), final=self.final)


@dataclass(frozen=True)
class Calls(Constraint):
    """Calls, by the rule `calls` of `text` in Lark's notation, or a text under the constraint `final`, if any."""

    wind_up: bool = True
    final: Constraint | None = None

    @override
    def grammar(self) -> str:
        if self.final is None:
            return f"start: calls\n{self.text}"
        return f"start: calls | final\nfinal: %lark {{\n{self.final.grammar()}\n}}\n{self.text}"


def _calls(tools: Sequence[Mapping[str, Any]], forms: Sequence[bool], tagged: bool, several: bool) -> str:
    """The rule for calls, with tags or without. Arguments have a grammar each: references in a schema stay in it."""
    functions = [tool["function"] for tool in tools]
    more = ' ("\\n" call)*' if tagged else ' ("; " call)*'
    rules = [f"calls: call{more if several else ''}",
             "call: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "{"arguments" if tagged else "parameters"}": '
        marks = {(f"{_OPEN}\n{head}", f"}}\n{_CLOSE}") if form else (head, "}"): None for form in forms}
        ways = (f"{json.dumps(opened)} arguments_{place} {json.dumps(closed)}" for opened, closed in marks)
        rules += [f"call_{place}: {' | '.join(ways)}",
                  f"arguments_{place}: {_arguments(function).grammar().removeprefix('start: ')}"]
    return "\n".join(rules)


def _arguments(function: Mapping[str, Any]) -> JsonSchema:
    given = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        return JsonSchema({"x-guidance": {"whitespace_pattern": _SPACE}, **given})
    except ValueError as error:
        raise refused("tools", f"the parameters of {function['name']!r}: {error}") from None


def tools_of(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, several: bool | None, template: Any,
    final: Constraint | None = None, messages: Sequence[Mapping[str, Any]] = (), strict: bool = True,
) -> Tools | None:
    """The tools of a request, None where none may be called; `final` is the constraint on an answer without a call.

    Some clients send their own tools with every conversation, whatever the model: one whose template has no place for
    them answers without, unless a call must be made or the server is strict.

    Raises:
        ApiError: 400 for a wrong tool or choice, and for a template without a place for tools that may not be left out.
    """
    for place, tool in enumerate(tools):
        if not _is_function(tool):
            where = f"tools.{place}"
            raise refused(where, f"{where} must be an object of type function, with a function that has a name")
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
        if strict or choice not in (None, "auto"):
            raise refused("tools", "this model's chat template has no place for tools")
        return None
    bound = [tool for tool in tools if choice == "required" or tool["function"]["name"] == named]
    return Tools(tuple(tools), tuple(bound), several is not False and named is None, _OPEN in str(template),
                 named is not None, None if bound else final,
                 bool(messages) and messages[-1].get("role") in ("tool", "function"), _made(messages))


def key_of(name: str, arguments: Any) -> str:
    """A key that is equal for equal calls, however their arguments are written."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return json.dumps([name, arguments], sort_keys=True)


def _made(messages: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Keys of the calls since the user's last message."""
    found = set[str]()
    for message in messages:
        if message.get("role") == "user":
            found.clear()
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                found.add(key_of(function["name"], function.get("arguments")))
    return frozenset(found)


def _is_function(value: Any) -> bool:
    function = value.get("function") if isinstance(value, Mapping) else None
    return (isinstance(function, Mapping) and value.get("type") == "function" and isinstance(function.get("name"), str)
            and bool(function["name"]) and isinstance(function.get("parameters", {}), Mapping | None))


@dataclass
class _Brackets:
    """Finds the end of a JSON value in a growing text, read until `at`; `missing` are closing brackets to come."""

    at: int
    missing: str = ""
    quoted: bool = False

    def end(self, text: str) -> int | None:
        """The end of the value, at its last bracket or before a tag or fence; None if it has not come yet."""
        while found := (_QUOTED if self.quoted else _PLAIN).search(text, self.at):
            letter = found[0]
            if letter == "\\":  # the escaped character has not come yet
                return None
            if letter in "<`":
                return found.start()
            self.at = found.end()
            if letter == '"':
                self.quoted = not self.quoted
            elif not self.quoted and letter in _PAIRS:
                self.missing = _PAIRS[letter] + self.missing
            elif not self.quoted:
                self.missing = self.missing[1:]
                if not self.missing:
                    return self.at
        self.at = len(text)
        return None


@dataclass
class CallReader:
    """Parses calls of these tools from an answer, and counts them; what may be part of a call is held back."""

    tools: Tools
    calls: int = 0
    _text: str = ""
    _space: str = ""
    _value: _Brackets | None = None
    _tries: int = 0
    _after: bool = False
    _fenced: bool = False
    _between: bool = False
    _final: bool = False

    def read(self, piece: str, last: bool, cut: bool = False) -> dict[str, Any]:
        """The delta for a piece of text: `content`, `tool_calls`, both or neither.

        Args:
            piece: of the text.
            last: whether it is the last one; then nothing is held back.
            cut: whether a limit ended the text; then an unfinished call counts as text.
        """
        self._text += piece
        content, calls = "", list[dict[str, Any]]()
        for said in self._parts(last, cut):
            content += said if isinstance(said, str) else ""
            calls += said if isinstance(said, list) else []
        content += self._space if last and not self.calls else ""
        return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}

    def _parts(self, last: bool, cut: bool) -> Iterator[str | list[dict[str, Any]]]:
        """Pieces of plain text, and lists of calls, as far as they are certain."""
        while self._text:
            if self._after:
                if (closed := self._closed(last)) is None:
                    return
                if closed:
                    continue
            found = self._begun(last)
            if found is None or found.start() > 0:
                yield self._outside(len(self._text) if found is None else found.start())
                continue
            if found.partial:
                return
            start = found.start("value")
            self._value = self._value or _Brackets(start)
            end = self._value.end(self._text)
            if end is None and not last:
                return
            missing, self._value = ("" if cut and end is None else self._value.missing), None
            marked = bool(self._text[:start].strip(" \r\n\t{"))
            calls = self._calls(self._text[start:end] + missing, marked) if len(missing) <= _FORGOTTEN else []
            self._tries += end is None
            if not calls:
                yield self._outside(end or found.end())
                continue
            self._fenced = _FENCE in self._text[:start]
            self._text = "" if end is None else self._text[end:]
            self._space, self._after, self._between = "", True, True
            yield calls

    def _begun(self, last: bool) -> Any:
        """The match of a beginning of a call, perhaps partial; None if there is none."""
        if self._final or self._tries > _TRIES:
            return None
        if self.tools.constraint is None:
            return _FREE.search(self._text, partial=not last)
        found = _BOUND.match(self._text, partial=not last)
        self._final = found is None and not self.calls
        return found

    def _closed(self, last: bool) -> bool | None:
        """Skip what closes a call; True if something was skipped, None if more text must come first."""
        found = _CLOSING.match(self._text, partial=not last)
        if found is not None and found.partial:
            return None
        fence = found is not None and found[0].endswith(_FENCE)
        if found is None or (fence and not self._fenced):
            self._after = False
            return False
        self._fenced = self._fenced and not fence
        self._text = self._text[found.end() :]
        return True

    def _outside(self, size: int) -> str:
        """Plain text. White space, and commas and semicolons between calls, wait and are dropped before a call."""
        said, self._text = self._space + self._text[:size], self._text[size:]
        kept = said.rstrip(" \t\r\n;,") if self._between else said.rstrip()
        if kept and self._between:
            self._between, kept = False, said.rstrip()
        self._space = said[len(kept) :]
        return kept

    def _calls(self, text: str, marked: bool) -> list[dict[str, Any]]:
        """The calls in a JSON text; none if it holds anything else, or repeats earlier calls without a tag or fence."""
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if isinstance(said, dict) and isinstance(said.get("tool_calls"), list):
            said = said["tool_calls"]
        found = [self._call(one) for one in (said if isinstance(said, list) else [said])]
        calls = [{"index": self.calls + place, **call} for place, call in enumerate(found) if call is not None]
        known = {key_of(call["function"]["name"], call["function"]["arguments"]) for call in calls} <= self.tools.made
        if len(calls) < len(found) or (known and not (marked or self.tools.constraint)):
            return []
        self.calls += len(calls)
        return calls

    def _call(self, said: Any) -> dict[str, Any] | None:
        """A call, from its JSON; None if it is no call of an offered function."""
        function = said.get("function") if isinstance(said, dict) else None
        said = function if isinstance(function, Mapping) else said
        names = [tool["function"]["name"] for tool in self.tools.offered]
        if not isinstance(said, Mapping) or (name := said.get("name", function)) not in names:
            return None
        given = [said[key] for key in ("arguments", "parameters") if key in said]
        if not given and not said.keys() <= _BARE:
            return None
        arguments = given[0] if given and given[0] is not None else {}
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                "function": {"name": name, "arguments": written}}
