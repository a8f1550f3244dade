"""Request bodies: from JSON to checked values, and from these to the engine's options."""

from __future__ import annotations

import reprlib
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import override

from shoal.engine.constraints.constraint import Constraint
from shoal.engine.constraints.forbidden import NEVER
from shoal.engine.loading.generation_config import filled
from shoal.engine.messages import opening
from shoal.engine.request import drawn_seed
from shoal.errors import json_object
from shoal.serve.errors import ApiError, refused
from shoal.serve.protocol.fields import CHAT, COMPLETION, Unread, sorted_out
from shoal.serve.protocol.formats import constraint_of
from shoal.serve.protocol.thoughts import Shown
from shoal.serve.protocol.tools import Tools, tools_of

Checked = TypeVar("Checked", bound=BaseModel)
Asked = TypeVar("Asked", bound="Body")
TEMPLATE_OPTIONS = frozenset((
    "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
    "messages", "conversations", "self", "add_special_tokens", "look", "seconds",
))  # fmt: skip
"""Arguments of `apply_chat_template`, `chat_ids` and `read_chat`; all others are variables of the template."""
_LEAST_P = 1e-9
"""A top_p so small that it keeps the most likely token alone."""
_MOST_STOPS = 256
"""Most stop strings of a request; each is searched for after every token."""
_LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict", "num_predict", "max_new_tokens")
_NO_LIMIT = (-1, -2)
"""No limit, and until the context is full, in llama.cpp and Ollama; here both mean the same."""
_STREAMED = ("include_usage", "continuous_usage_stats")
_EFFORT = ("effort", "summary", "generate_summary", "exclude", "enabled", "max_tokens")
_OF_CHATS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_OF_THOUGHTS = {"reasoning_format": (None, "none", "raw", "auto"), "include_reasoning": (True,),
                "thinking_token_budget": (None, -1), "reasoning_budget_tokens": (None, -1)}
"""Fields that would bind thoughts, and what they may say where there are none."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


class Extras(BaseModel):
    """Fields beyond OpenAI's, Shoal's own and those of other servers, in all three APIs. Null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    format: dict[str, Any] | str | None = None
    typical_p: float = Field(default=1.0, gt=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0, le=100)
    repeat_last_n: int | None = Field(default=None, ge=-1, le=1 << 30)
    min_tokens: int = Field(default=0, ge=0, le=1 << 30)
    bad_words: list[str] = Field(default_factory=list, max_length=1024)
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1, max_length=1 << 20)
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    n_predict: int | None = Field(default=None, ge=-2)
    num_predict: int | None = Field(default=None, ge=-2)
    max_new_tokens: int | None = Field(default=None, ge=-2)
    n_cmpl: int | None = Field(default=None, ge=1, le=128)
    return_tokens_as_token_ids: bool = False
    method: str | list[Any] | None = None
    method_args: dict[str, Any] = Field(default_factory=dict)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=1024)
    ignore_eos: bool = False
    metrics: bool = False
    steps: bool = False
    canvas: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = Field(default=None, max_length=1024)
    guided_members: str | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    reasoning_format: Literal["none", "auto", "deepseek", "raw", "parsed", "hidden"] | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    reasoning_in_content: bool = False
    thinking_token_budget: int | None = Field(default=None, ge=-1, le=1 << 30)
    reasoning_budget_tokens: int | None = Field(default=None, ge=-1, le=1 << 30)


class Body(Extras):
    """What chats and completions have in common."""

    unread: ClassVar[Mapping[str, Unread]]

    model: str = ""
    n: int = Field(default=1, ge=1, le=128)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[str, Any] | list[Any] = Field(default_factory=dict, max_length=1024)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: dict[str, bool | None] = Field(default_factory=dict)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    user: str | None = None
    max_tokens: int | None = Field(default=None, ge=-2)

    def limit(self, default: int, most: int) -> int:
        """Most tokens of the answer: `default` where the request has no limit, never more than the server's `most`."""
        given: list[int] = [value for name in _LENGTHS if (value := getattr(self, name, None)) is not None]
        bounds = [value for value in given if value not in _NO_LIMIT]
        return min([*bounds, most] if given else [default, most])

    def _peers_sampling(self) -> dict[str, Any]:
        """Fields of `Sampling` under the names of other servers."""
        asked: dict[str, Any] = {"typical_p": self.typical_p} if "typical_p" in self.model_fields_set else {}
        if self.repeat_penalty is not None:
            asked["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n is not None:
            asked["repetition_window"] = max(0, self.repeat_last_n)
        return {**asked, "repetition_penalty": 1.0} if self.repeat_last_n == 0 else asked

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk with its usage."""
        return bool(self.stream_options.get("include_usage"))

    def options(self, defaults: Mapping[str, float]) -> dict[str, Any]:
        """The engine's options, except method, length and log-probabilities; `defaults` are the model's."""
        given = self.model_fields_set
        asked = {name: getattr(self, name) for name in _SAMPLING if name in given}
        made = filled(asked | self._peers_sampling(), defaults)
        made |= {"top_k": max(0, made.get("top_k", 0)), "top_p": max(_LEAST_P, made.get("top_p", 1.0))}
        return {
            **made, "min_new_tokens": self.min_tokens, "bad_words": self.bad_words,
            "allowed_token_ids": self.allowed_token_ids,
            "keep_stop": self.include_stop_str_in_output or self.no_stop_trim,
            "seed": drawn_seed() if self.seed in (None, -1) else self.seed, "stop": _stops(self.stop),
            "logit_bias": _bias(self.logit_bias), "stop_token_ids": self.stop_token_ids, "ignore_eos": self.ignore_eos,
            "constraint": constraint_of(dict(self)), "cache_salt": self.cache_salt or "",
        }

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to give with log-probabilities; None for no log-probabilities."""
        return None

    @property
    def answers(self) -> int:
        """How many answers to generate for each prompt; the `n` best are returned."""
        return self.n

    def check(self) -> None:
        """Check what involves several fields; raises ApiError."""
        for name, other in (("repetition_penalty", "repeat_penalty"), ("n", "n_cmpl")):
            one, two = getattr(self, name), getattr(self, other)
            if two is not None and name in self.model_fields_set and one != two:
                raise refused(other, f"{name} is {one} and {other} {two}, which are two names of one thing; give one")
        self.n = self.n_cmpl or self.n
        wrong = [name for name, value in self.stream_options.items() if value and name not in _STREAMED]
        if wrong:
            raise refused("stream_options", f"stream_options.{wrong[0]} is not supported; give include_usage")
        if any(self.stream_options.values()) and not self.stream:
            raise refused("stream_options", "stream_options belongs to stream=true")
        if self.metrics and self.stream and not self.include_usage:
            raise refused("metrics", "in a stream, metrics are part of the usage chunk; ask for include_usage as well")
        if self.canvas and not self.stream:
            raise refused("canvas", "canvas belongs to stream=true: a whole answer has its tokens in order")


class ChatBody(Body):
    """`/v1/chat/completions`."""

    unread = CHAT

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=-2)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | float | None = None
    reasoning: dict[str, Any] | None = None
    enable_thinking: bool | None = None

    def tools_for(self, template: Any, strict: bool) -> tuple[Tools | None, list[str]]:
        """The tools that a model with that chat template may call, and the names of what has no effect with it.

        Raises:
            ApiError: 400 if the request for them is wrong, or cannot be met.
        """
        asked = constraint_of(dict(self)) if self.tools else None
        final = asked if isinstance(asked, Constraint) else None
        tools = tools_of(self.tools, self.tool_choice, self.parallel_tool_calls, template, final, self.messages, strict)
        return tools, ["tools"] if self.tools and tools is None and self.tool_choice != "none" else []

    def variables(self, tools: Tools | None, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Variables of the chat template, in addition to the messages, and where the answer to these begins."""
        asked = self.reasoning or {}
        told = self.reasoning_effort or asked.get("effort")
        effort: dict[str, Any] = {} if told is None else {"reasoning_effort": told}
        thinks = next((said for said in (self.enable_thinking, asked.get("enabled")) if said is not None), None)
        if thinks is not None or told == "none":
            effort |= dict.fromkeys(("enable_thinking", "thinking"), bool(thinks))  # templates name it either way
        offered = {} if tools is None else {"tools": list(tools.offered)}
        begins = opening(messages, self.add_generation_prompt, self.continue_final_message)
        return {**effort, **self.chat_template_kwargs, **offered, **begins}

    @property
    def thoughts_shown(self) -> Shown:
        """Where thoughts are told."""
        if not self.include_reasoning or self.reasoning_format == "hidden" or (self.reasoning or {}).get("exclude"):
            return "hidden"
        within = self.reasoning_format in ("none", "raw") or not self.separate_reasoning or self.reasoning_in_content
        return "within" if within else "beside"

    @property
    def thoughts_limit(self) -> int | None:
        """Most tokens of thoughts; None for no limit."""
        asked = (self.thinking_token_budget, self.reasoning_budget_tokens, (self.reasoning or {}).get("max_tokens"))
        return min((most for most in asked if most not in (None, -1)), default=None)

    @property
    @override
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @override
    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs=true")
        if (zero := next((name for name in _LENGTHS if getattr(self, name, None) == 0), None)) is not None:
            raise refused(zero, f"{zero} is 0; a chat answers with at least 1 token, and -1 is no limit")
        if wrong := sorted(name for name, value in (self.reasoning or {}).items()
                           if name not in _EFFORT and value not in (None, False)):
            raise refused("reasoning", f"reasoning.{wrong[0]} is not supported; give effort, or chat_template_kwargs")
        if type(most := (self.reasoning or {}).get("max_tokens", 0)) is not int or most < -1:
            raise refused("reasoning", f"reasoning.max_tokens is {most!r:.50}; it must be a whole number >= -1")
        if self.continue_final_message and self.add_generation_prompt:
            raise refused("continue_final_message", "continue_final_message continues the last message, and "
                          "add_generation_prompt begins a new one; give one of them")
        if wrong := sorted(set(self.chat_template_kwargs) & TEMPLATE_OPTIONS):
            raise refused("chat_template_kwargs", f"chat_template_kwargs.{wrong[0]} is no variable of a template")


class CompletionBody(Body):
    """`/v1/completions`."""

    unread = COMPLETION

    prompt: str | list[str] | list[int] | list[list[int]]
    max_completion_tokens: int | None = Field(default=None, ge=-2)
    response_format: dict[str, Any] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | Literal[False] | None = None
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=128)
    suffix: str = ""

    @property
    @override
    def answers(self) -> int:
        return self.best_of or self.n

    @property
    @override
    def alternatives(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    @override
    def check(self) -> None:
        super().check()
        wrong = [name for name in _OF_CHATS if getattr(self, name)]
        wrong += [name for name, neutral in _OF_THOUGHTS.items() if getattr(self, name) not in neutral]
        if wrong:
            raise refused(wrong[0], "completions go through no chat template")
        if self.suffix and self.echo:
            raise refused("echo", "with a suffix there is no one prompt to repeat; leave echo out")
        if self.best_of is not None and (self.best_of < self.n or (self.stream and self.best_of > self.n)):
            raise refused("best_of", "best_of must be at least n, and no more than n in a stream")


class PlanBody(BaseModel):
    """`/playground/plan`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    method: str | list[Any] | None = None
    method_args: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int = Field(default=64, ge=1, le=1 << 20)


class ToolCallBody(BaseModel):
    """`/playground/call`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    name: str
    arguments: Any = Field(default_factory=dict)


def with_model(given: Mapping[str, Any], served: str) -> dict[str, Any]:
    """A request's fields; one that names no model means the one that is served."""
    return {**given, "model": served} if given.get("model") is None else dict(given)


def parse(given: Mapping[str, Any], kind: type[Asked], strict: bool) -> tuple[Asked, list[str]]:
    """A request for text, checked, and the names of its fields without effect; ApiError 400 if it is wrong."""
    kept, ignored = sorted_out(given, kind.model_fields, kind.unread, strict)
    body = validated(kept, kind)
    body.check()
    return body, ignored


def validated(given: Mapping[str, Any], kind: type[Checked]) -> Checked:
    """Checked values, nulls left out; ApiError 400 about the first wrong one."""
    try:
        return kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise refused(place, f"{place}: {first['msg']}") from None


def read(raw: bytes) -> dict[str, Any]:
    """A JSON object from its bytes; ApiError 400 for anything else, for NaN and infinity, and for lone surrogates."""
    try:
        return json_object(raw.removeprefix(BOM_UTF8), "the body")
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _stops(stop: str | list[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > _MOST_STOPS:
        raise refused("stop", f"stop holds {len(stops)} strings; it may hold up to {_MOST_STOPS}")
    return [one for one in stops if one]


def _bias(given: Mapping[str, Any] | Sequence[Any]) -> dict[int, float]:
    """The bias of each token, from an object or, as in llama.cpp, from pairs."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    for pair in pairs:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and _is_id(pair[0]) and _is_bias(pair[1])):
            raise refused("logit_bias", f"logit_bias holds {reprlib.repr(pair)}; it must map token ids to numbers in "
                          "-100..100, or to false, which bans a token")
    return {int(token): NEVER if value is False else float(value) for token, value in pairs}


def _is_id(token: Any) -> bool:
    return type(token) is int or (isinstance(token, str) and token.isascii() and token.isdigit())


def _is_bias(value: Any) -> bool:
    return value is False or (type(value) in (int, float) and abs(value) <= 100)
