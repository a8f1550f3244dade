"""Every field that OpenAI's client can send, and what the server does with it. Unknown fields are ignored.

`python -m shoal.serve.protocol.fields` prints the first table of docs/reference_server.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.serve.errors import ApiError, refused


@dataclass(frozen=True)
class Honoured:
    """A field that has its effect."""

    note: str


@dataclass(frozen=True)
class Refused:
    """A field that is answered 400, unless its value is neutral: it asks for nothing."""

    note: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Ignored:
    """A field without effect; a response header names it, and a strict server refuses it."""

    note: str
    neutral: tuple[Any, ...] = ()


Field = Honoured | Refused | Ignored

_COMMON: dict[str, Field] = {
    "model": Honoured("must be the served name; another one is answered 404"),
    "frequency_penalty": Honoured("-2 to 2, over generated tokens"),
    "presence_penalty": Honoured("-2 to 2, over generated tokens"),
    "logit_bias": Honoured("token ids to -100..100, or pairs of them; false bans a token"),
    "n": Honoured("answers per prompt; each is one row of the batch"),
    "seed": Honoured("makes sampling repeatable, whatever else is running; -1 is none; `metrics` shows the one drawn"),
    "stop": Honoured("a string, or up to 256; empty ones are none"),
    "stream": Honoured("server-sent events"),
    "stream_options": Honoured("`include_usage`, `continuous_usage_stats`; `include_obfuscation` may only be false"),
    "temperature": Honoured("0 to 2; 0 takes the most likely token; see [sampling](#sampling) for the default"),
    "top_p": Honoured("0 to 1; 0 keeps the most likely token"),
    "user": Honoured("written to the server's log"),
}
_OURS: dict[str, Field] = {
    "method": Honoured("name of a decoding method, or a list to be combined, where the server's policy allows it"),
    "method_args": Honoured("the method's options"),
    "top_k": Honoured("0 and -1 keep every token"),
    "min_p": Honoured("0 to 1"),
    "repetition_penalty": Honoured("above 0; 1 is neutral"),
    "stop_token_ids": Honoured("token ids that end the answer"),
    "ignore_eos": Honoured("continue after the model's end of sequence"),
    "chat_template_kwargs": Honoured("variables of the chat template, such as `enable_thinking`; chats only"),
    "add_generation_prompt": Honoured("false ends the prompt with the last message, with no answer begun; chats only"),
    "continue_final_message": Honoured("true continues the last message, by default if it is an assistant's without "
                                       "calls; false begins a new answer; chats only"),
    "guided_json": Honoured("a JSON schema that the answer is valid under"),
    "guided_regex": Honoured("a pattern that matches the whole answer"),
    "guided_grammar": Honoured("a grammar of the answer, in Lark's notation or GBNF"),
    "guided_choice": Honoured("the texts of which the answer is one"),
    "guided_members": Honoured("`python`: after a dot in Python code only members may come, where they are known"),
    "metrics": Honoured("adds the cost of the answer: layers, drafts, times, branches, switches of models"),
    "steps": Honoured("adds `steps` to every choice: each token's index, id, text, layers, and whether it was drafted"),
    "canvas": Honoured("in a stream, adds `canvas` to a choice when a masked-diffusion model decides tokens: position "
                       "in the answer, text and step of each, in the order in which they are decided"),
}
PROMPT_CACHE: dict[str, Field] = dict.fromkeys(
    ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    Ignored("the cache matches prompts by their beginnings only"))
_OLD_TOOLS = "give `tools`"
CHAT: dict[str, Field] = {
    **_COMMON,
    "messages": Honoured("through the model's chat template; content is text, a text part, or a list of them"),
    "max_tokens": Honoured("most generated tokens; the server's limit and the context apply too; -1 sets no other"),
    "max_completion_tokens": Honoured("the same; of several limits the lowest counts"),
    "logprobs": Honoured("of the chosen tokens"),
    "top_logprobs": Honoured("0 to 20 alternatives; needs `logprobs`"),
    "audio": Refused("the model makes text only"),
    "modalities": Refused("the model makes text only", (["text"],)),
    "function_call": Refused(_OLD_TOOLS, ("none",)),
    "functions": Refused(_OLD_TOOLS, ([],)),
    "tools": Honoured("functions, through the model's chat template, which must have a place for them"),
    "tool_choice": Honoured("`none`, `auto`, `required`, or one function; the last two bind the answer"),
    "parallel_tool_calls": Honoured("false allows one call where `tool_choice` binds the answer"),
    "web_search_options": Refused("the server searches nothing"),
    "response_format": Honoured("`text`, `json_object`, or `json_schema`, which binds every token"),
    "prediction": Ignored("methods that draft need no prediction from the client"),
    "reasoning_effort": Honoured("given to the chat template; most templates do not use it"),
    "verbosity": Ignored("the server has no such option"),
    "metadata": Ignored("nothing is stored", ({},)),
    "store": Ignored("nothing is stored", (False,)),
    "moderation": Refused("the server moderates nothing"),
    "safety_identifier": Ignored("the server keeps no account of users; `user` goes to its log"),
    "service_tier": Ignored("there is one tier", ("auto", "default")),
    **PROMPT_CACHE,
}
COMPLETION: dict[str, Field] = {
    **_COMMON,
    "prompt": Honoured("text, token ids, or a list of either"),
    "max_tokens": Honoured("as in a chat, default 16; 0 makes none, and scores a prompt with `echo` and `logprobs`"),
    "logprobs": Honoured("0 to 20 alternatives for each token"),
    "echo": Honoured("puts the prompt before the answer; with `logprobs` the prompt is read once more"),
    "best_of": Honoured("answers to generate; the `n` most likely by mean log-probability come; not in a stream"),
    "suffix": Refused("the model continues texts, it fills no gaps", ("",)),
}


def extras() -> Mapping[str, Field]:
    """Fields beyond OpenAI's, sent through `extra_body`."""
    return _OURS


_UNKNOWN = Ignored("unknown; see docs/serving.md for those that there are")


def check_names(given: Mapping[str, Any], known: Mapping[str, Field], strict: bool) -> tuple[dict[str, Any], list[str]]:
    """The honoured fields of a request, and the names of fields without effect.

    Raises:
        ApiError: 400 for a refused field that is not neutral, and in a strict server for one without effect.
    """
    kept, ignored = dict[str, Any](), list[str]()
    for name, value in flattened(given).items():
        field = known.get(name, _UNKNOWN)
        if isinstance(field, Honoured):
            kept[name] = value
        elif field is not _UNKNOWN and (value is None or _is_one_of(value, field.neutral)):
            continue
        elif isinstance(field, Ignored) and not strict:
            ignored.append(name)
        else:
            raise ApiError(400, f"{name} is not supported: {field.note}", param=name, code="unsupported_parameter")
    return kept, ignored


def flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, including those in Ollama's `options`.

    Raises:
        ApiError: 400 if `options` is no object, or contradicts the request.
    """
    inner = given.get("options")
    outer = {name: value for name, value in given.items() if name != "options"}
    if inner is None:
        return outer
    if not isinstance(inner, Mapping) or "options" in inner:
        raise refused("options", "options must be an object, whose entries count as fields of the request")
    twice = sorted(name for name in inner if outer.get(name) not in (None, inner[name]))
    if twice:
        raise refused("options", f"options.{twice[0]} differs from {twice[0]}; give one")
    return {**outer, **inner}


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def table() -> str:
    """The fields as Markdown."""
    rows = list[tuple[str, str, Field]]()
    for name in sorted({*CHAT, *COMPLETION, *_OURS}):
        both = (("chat", CHAT), ("completions", COMPLETION))
        kinds = [(name, where, fields[name]) for where, fields in both if name in fields]
        if name in _OURS:
            kinds = [(name, "both, `extra_body`", _OURS[name])]
        elif len(kinds) == 2 and kinds[0][2] == kinds[1][2]:
            kinds = [(name, "both", kinds[0][2])]
        rows += kinds
    return markdown(rows)


def markdown(rows: Iterable[tuple[str, str, Field]]) -> str:
    """A table of fields; each row is a name, where the field belongs, and the field."""
    lines = [f"| `{name}` | {where} | {answer_of(field)} | {field.note} |" for name, where, field in rows]
    return "\n".join(["| field | in | answer | why |", "|---|---|---|---|", *lines])


def answer_of(field: Field) -> str:
    """What the server does with a field, in the words of the table."""
    if isinstance(field, Honoured):
        return "honoured"
    if isinstance(field, Ignored):
        return "no effect"
    allowed = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"400, unless {allowed}" if allowed else "400"


if __name__ == "__main__":
    print(table())
