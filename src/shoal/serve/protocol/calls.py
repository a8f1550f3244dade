"""Calls read out of an answer's text, piece by piece, in the forms in which models write them.

A call is JSON with the name of an offered function. It may stand alone or in a list, between tags, in a fence, and in
the midst of words; models forget closing tags and the word after a fence. A stream says what the whole text says.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex

from shoal.serve.protocol.tools import Tools, key_of

_TAGS = "tool_call|tools|tool|function_call"
_KEYS = "name|function|arguments|parameters|type|id|tool_calls"
_FENCE = "```"
_OBJECT = rf'\{{\s*"(?:{_KEYS})"\s*:'
"""How JSON begins that may be a call."""
_CLOSING = regex.compile(rf"[\s;,]*(?:</(?:{_TAGS})>|{_FENCE}|\}})")
"""What may close a call; a brace too many is common, as is one before."""
_PLAIN, _QUOTED = re.compile(r'["\[\]{}<`]'), re.compile(r'\\.|\\$|"', re.S)
_PAIRS = {"{": "}", "[": "]"}
_FORGOTTEN = 2
"""How many closing brackets a call may lack: those of its arguments and its own."""
_TRIES = 16
"""How many beginnings of calls are looked at in a text that none of them brings to an end."""
_BARE = {"name", "function", "type", "id"}
"""Keys of a call without arguments."""


@cache
def _opening(bound: bool) -> regex.Pattern[str]:
    """How a call begins; a bound answer has it in the forms that bind it, and nothing before."""
    if bound:
        return regex.compile(rf"[\s;]*(?:<tool_call>\s*)?(?P<value>{_OBJECT})")
    return regex.compile(rf"(?:(?:<(?:{_TAGS})>|{_FENCE}\w*)\s*){{0,4}}(?:\{{\s*)?(?P<value>(?:\[\s*)?{_OBJECT})")


@dataclass
class _Brackets:
    """Looks for the end of a JSON value in a text that grows; no character is read twice.

    Attributes:
        at: how far it was read.
        missing: what closes the brackets that are open.
        quoted: whether a text is.
    """

    at: int
    missing: str = ""
    quoted: bool = False

    def end(self, text: str) -> int | None:
        """Where the value ends that begins where this began, by its last bracket or a mark behind it; None as yet."""
        while found := (_QUOTED if self.quoted else _PLAIN).search(text, self.at):
            letter = found[0]
            if letter == "\\":  # what it escapes is still to come
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
    """Reads calls out of an answer; what may be a part of one is held back.

    Attributes:
        tools: what may be called.
        calls: how many were read.
    """

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
        """The delta that a piece of text brings: `content`, `tool_calls`, or nothing.

        Args:
            piece: of the text.
            last: whether it is the last one, after which nothing is held.
            cut: whether the text was ended by a limit; a call that lacks its end is none then.
        """
        self._text += piece
        content, calls = "", list[dict[str, Any]]()
        for said in self._parts(last, cut):
            content += said if isinstance(said, str) else ""
            calls += said if isinstance(said, list) else []
        content += self._space if last and not self.calls else ""
        return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}

    def _parts(self, last: bool, cut: bool) -> Iterator[str | list[dict[str, Any]]]:
        """Text beside calls and lists of calls, as far as it is certain what they are."""
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
        """Where a call begins, or may; None where there is none."""
        bound = self.tools.constraint is not None
        if self._final or self._tries > _TRIES:
            return None
        pattern = _opening(bound)
        if not bound:
            return pattern.search(self._text, partial=not last)
        found = pattern.match(self._text, partial=not last)
        self._final = found is None and not self.calls
        return found

    def _closed(self, last: bool) -> bool | None:
        """Leave out what closes a call; None where more must come before that is known."""
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
        """Text beside calls. White space waits for what comes after it, and falls away before a call.

        So do commas and semicolons between calls.
        """
        said, self._text = self._space + self._text[:size], self._text[size:]
        kept = said.rstrip(" \t\r\n;,") if self._between else said.rstrip()
        if kept and self._between:
            self._between, kept = False, said.rstrip()
        self._space = said[len(kept) :]
        return kept

    def _calls(self, text: str, marked: bool) -> list[dict[str, Any]]:
        """The calls of a JSON value; none where it holds anything else, or repeats calls without a tag or fence."""
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if isinstance(said, dict) and isinstance(said.get("tool_calls"), list):
            said = said["tool_calls"]
        found = [self._call(one) for one in (said if isinstance(said, list) else [said])]
        if not all(found) or not (marked or self.tools.constraint or self._news(found)):
            return []
        calls = [{"index": self.calls + place, **call} for place, call in enumerate(found) if call is not None]
        self.calls += len(calls)
        return calls

    def _news(self, calls: Sequence[dict[str, Any] | None]) -> bool:
        """Whether one of some calls was not made before in this turn."""
        made = [key_of(call["function"]["name"], call["function"]["arguments"]) for call in calls if call is not None]
        return not {*made} <= self.tools.made

    def _call(self, said: Any) -> dict[str, Any] | None:
        """A call of its JSON; None where that is none, or of no function that was offered."""
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
