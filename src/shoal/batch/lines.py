"""Lines of the input and of the output.

A line of the input is one JSON object:

    {"prompt": "Once upon a time", "max_new_tokens": 64}
    {"id": "q7", "messages": [{"role": "user", "content": "Hello"}], "method": "d3", "method_args": {"alpha": 0.99}}

A prompt is text or token ids and goes to the model unchanged. Messages are those of the server's chats, with pictures
where the model sees, and go through the chat template. All other fields are options of `Engine.generate`; the job
supplies those that a line leaves out.
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.engine.chats import read_chat
from shoal.engine.constraints.constraint import GUIDED, guided
from shoal.engine.loaded import LoadedModel
from shoal.engine.messages import opening, plain
from shoal.engine.request import Options
from shoal.errors import unknown
from shoal.model.layers.pictures import Pictures
from shoal.types import Result, TokenLogprob, finite_logprob

Record = dict[str, Any]
"""A line of the output: `line` is the number of the input's line, with its `text`, or an `error` in its place."""
_OWN = ("id", "prompt", "messages", "method_args")
_OPTIONS = tuple(name for name in Options.__annotations__
                 if name not in ("logits_processor", "stopping_criteria", "source"))
"""Options of `Engine.generate` that JSON can hold."""


@dataclass(frozen=True)
class Line:
    """A non-blank line: its number in the file, from 1, blank lines counted, and its bytes."""

    number: int
    raw: bytes


@dataclass(frozen=True)
class Contents:
    """An input file: its hash, its number of lines, and how many of them are not blank."""

    sha256: str
    lines: int
    tasks: int


@dataclass(frozen=True)
class Task:
    """A line as the scheduler takes it: prompt, names of message fields without effect, options of `submit`."""

    prompt: str | Sequence[int]
    ignored: Sequence[str]
    options: dict[str, Any]


def read(path: Path) -> Iterator[Line]:
    """The non-blank lines, in order; a byte order mark before the first is removed."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            raw = raw if number > 1 else raw.removeprefix(BOM_UTF8)
            if raw.strip():
                yield Line(number, raw)


def contents(path: Path) -> Contents:
    """Read the file once, to hash it and to count its lines; ValueError if it is no readable file, or empty."""
    digest, lines, tasks = hashlib.sha256(), 0, 0
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file, so a job over it could not be resumed")
    try:
        with path.open("rb") as file:
            for raw in file:
                digest.update(raw)
                lines, tasks = lines + 1, tasks + bool((raw if lines else raw.removeprefix(BOM_UTF8)).strip())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    if not tasks:
        raise ValueError(f"{path} is empty; it must hold one JSON object per line")
    return Contents(digest.hexdigest(), lines, tasks)


def id_of(fields: Mapping[str, Any]) -> str | int | None:
    """The line's id; ValueError for anything but a text or a whole number."""
    name = fields.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise ValueError(f"id is {name!r}; it must be a text or a whole number")
    return name


def task_of(line: Line, fields: Mapping[str, Any], defaults: Mapping[str, Any], engine: LoadedModel) -> Task:
    """The line's prompt and options, over the job's defaults.

    A line without a seed draws with the job's seed plus its number, so that lines differ.

    Raises:
        ValueError: a field is unknown or wrong, the line has no prompt or two, or a picture is refused.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if "body" in given:
        raise ValueError('the line is in the format of OpenAI\'s batches; write {"id": ..., "messages": [...]} instead')
    known = (*_OWN, *GUIDED, *_OPTIONS)
    for name in given:
        if name not in known:
            raise unknown("field", name, known)
    options = {**defaults, **{name: given[name] for name in _OPTIONS if name in given}}
    if options.get("seed") is not None and "seed" not in given:
        options["seed"] += line.number
    if "method" in given or "method_args" in given:
        options["method"] = _method(given)
    if "logit_bias" in given:
        options["logit_bias"] = _bias(given["logit_bias"])
    if bound := [name for name in ("constraint", *GUIDED) if name in given]:
        if len(bound) > 1:
            raise ValueError(f"{' and '.join(bound)} both say what the answer must look like; give one")
        options["constraint"] = guided("guided_json" if bound[0] == "constraint" else bound[0], given[bound[0]])
    prompt, pictures, ignored = _prompt(given, engine)
    return Task(prompt, ignored, options if pictures is None else {**options, "source": pictures})


def _method(given: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(given.get("method"), str | list):
        raise ValueError('method is the name of a method (or a list), and method_args its options: {"method": "d3"}')
    return {"method": given["method"], "method_args": given.get("method_args", {})}


def _bias(given: Any) -> dict[int, float]:
    """The bias of each token id; JSON's keys are text."""
    try:
        return {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"logit_bias is {given!r}; it must map token ids to numbers") from None


def _prompt(given: Mapping[str, Any], engine: LoadedModel) -> tuple[str | list[int], Pictures | None, list[str]]:
    """The prompt, its pictures, and the names of message fields without effect."""
    if ("prompt" in given) == ("messages" in given):
        raise ValueError("a line needs either prompt or messages")
    if "messages" in given:
        return _chat(given["messages"], engine)
    prompt = given["prompt"]
    if not isinstance(prompt, str | list):
        raise ValueError(f"prompt is {prompt!r}; it must be text, or a list of token ids")
    return prompt, None, []


def _chat(messages: Any, engine: LoadedModel) -> tuple[list[int], Pictures | None, list[str]]:
    """Token ids of messages, their pictures, and the names of fields without effect, as in the server."""
    template = getattr(engine.tokenizer, "chat_template", None)
    if not template:
        raise ValueError("this model has no chat template; give a prompt instead of messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, Mapping) for one in messages):
        raise ValueError('messages must be a list of objects, such as {"role": "user", "content": "Hello"}')
    told, ignored = plain(messages, str(template))
    return *read_chat(engine, told, **opening(told, None, None)), ignored


def answered(line: int, name: str | int | None, result: Result, *, with_tokens: bool) -> Record:
    """The record of an answer; `with_tokens` adds the token ids, which a model without a tokenizer needs."""
    stats = result.stats
    return {"line": line, "id": name, "text": result.text, **({"tokens": result.tokens} if with_tokens else {}),
            "finish_reason": result.finish_reason, "prompt_tokens": stats.prompt_tokens, "new_tokens": stats.new_tokens,
            "mean_layers": round(stats.mean_layers, 4), **stats.extra, "seed": result.seed,
            **({"alternatives": [text for text, *_ in result.alternatives]} if result.alternatives else {}),
            **({} if result.logprobs is None else {"logprobs": [_logprob(entry) for entry in result.logprobs]})}


def failed(line: int, name: str | int | None, error: BaseException) -> Record:
    """The record of a line without an answer."""
    message = " ".join(str(error).split())
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return {"line": line, "id": name, "error": kind + message}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [[token, finite_logprob(value)] for token, value in entry.top]
    return {"token": entry.token, "logprob": finite_logprob(entry.logprob), "top": top}
