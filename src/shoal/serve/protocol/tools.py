"""Tools: what a request offers, and how the answer is bound to call them; `calls` reads them out of its text.

Two notations are known, told apart by the chat template: `<tool_call>` around JSON (Hermes, Qwen), and JSON alone
(Llama 3). Shoal calls no tool itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shoal.engine.constraints.constraint import Constraint, JsonSchema
from shoal.serve.http.errors import refused

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = "[ ]?"
"""White space between the parts of arguments."""
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
        final: what an answer without a call is bound to; None where that is free, or a call has to be made.
        answered: whether the conversation ends with a call's result. A call beside `final` has its tags then: small
            models, which forget them, would call again and again.
        made: calls of this turn that were made before, see `key_of`. One of them without tags is text: it is copied.
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
        """What makes the answer a call where it must be one, and a call or what it is bound to where both may be."""
        if not self.bound and self.final is None:
            return None
        forms = (self.tagged, False) if self.final and not self.answered else (self.tagged,)
        return Calls(_calls(self.bound or self.offered, forms, self.tagged, self.several), final=self.final)


@dataclass(frozen=True)
class Calls(Constraint):
    """Calls, or a text that is bound by something else.

    Attributes:
        text: the rule `calls` in Lark's notation.
        wind_up: see `Constraint`.
        final: what else the answer may be; None for nothing else.
    """

    wind_up: bool = True
    final: Constraint | None = None

    def grammar(self) -> str:
        """See the base class."""
        if self.final is None:
            return f"start: calls\n{self.text}"
        return f"start: calls | final\nfinal: %lark {{\n{self.final.grammar()}\n}}\n{self.text}"


def _calls(tools: Sequence[Mapping[str, Any]], forms: Sequence[bool], tagged: bool, several: bool) -> str:
    """The rule for calls. The arguments of each are a grammar of their own, so pointers in their schema stay in it.

    Args:
        tools: those that may be called.
        forms: of a call, with tags or without: who may as well say something else often forgets them.
        tagged: whether the template has tags.
        several: whether there may be more than one call.
    """
    functions = [tool["function"] for tool in tools]
    rules = [f"calls: call{_more(tagged) if several else ''}",
             "call: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "{"arguments" if tagged else "parameters"}": '
        marks = {(f"{_OPEN}\n{head}", f"}}\n{_CLOSE}") if form else (head, "}"): None for form in forms}
        ways = (f"{json.dumps(opened)} arguments_{place} {json.dumps(closed)}" for opened, closed in marks)
        rules += [f"call_{place}: {' | '.join(ways)}",
                  f"arguments_{place}: {_arguments(function).grammar().removeprefix('start: ')}"]
    return "\n".join(rules)


def _more(tagged: bool) -> str:
    return ' ("\\n" call)*' if tagged else ' ("; " call)*'


def _arguments(function: Mapping[str, Any]) -> JsonSchema:
    given = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        return JsonSchema({"x-guidance": {"whitespace_pattern": _SPACE}, **given})
    except ValueError as error:
        raise refused("tools", f"the parameters of {function['name']!r}: {error}") from None


def tools_of(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, several: bool | None, template: Any,
    final: Constraint | None = None, messages: Sequence[Mapping[str, Any]] = (),
) -> Tools | None:
    """What a request says of tools; None where it offers none, or none may be called.

    Args:
        tools: as the request has them.
        choice: its `tool_choice`.
        several: its `parallel_tool_calls`.
        template: the model's chat template.
        final: what else of the request binds the answer: its text where it calls nothing.
        messages: the conversation.

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
                 named is not None, None if bound else final,
                 bool(messages) and messages[-1].get("role") in ("tool", "function"), _made(messages))


def key_of(name: str, arguments: Any) -> str:
    """What calls have in common that are the same, however their arguments are written."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return json.dumps([name, arguments], sort_keys=True)


def _made(messages: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The calls since the last words of the user."""
    found = set[str]()
    for message in messages:
        if message.get("role") == "user":
            found.clear()
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                found.add(key_of(function["name"], function.get("arguments")))
    return frozenset(found)


def _check_tool(tool: Any, where: str) -> None:
    if not _is_function(tool):
        raise refused(where, f"{where} must be an object of type function, with a function that has a name")


def _is_function(value: Any) -> bool:
    function = value.get("function") if isinstance(value, Mapping) else None
    return (isinstance(function, Mapping) and value.get("type") == "function" and isinstance(function.get("name"), str)
            and bool(function["name"]) and isinstance(function.get("parameters", {}), Mapping | None))
