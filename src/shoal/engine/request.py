"""What a caller asks for, checked before anything runs: prompts to token ids, options to sampling and stop rules."""

from __future__ import annotations

import difflib
import operator
import reprlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral
from typing import Any, TypedDict

from shoal.decode.text.stop import StopRules
from shoal.engine.constraints.constraint import Constraint, constraint_of
from shoal.engine.constraints.forbidden import Forbidden, check_ids, spelled
from shoal.engine.constraints.monitor import Monitor
from shoal.engine.messages import chat_text, shown_in
from shoal.errors import Unsupported, check_text
from shoal.methods.base import Method
from shoal.model.layers.cross_attention import Encoded
from shoal.model.layers.pictures import Pictures
from shoal.sandbox.template import rendered
from shoal.types import Sampling

_SEED_BITS = 53
"""Bits of a drawn seed: few enough for every reader of JSON to keep it exactly."""
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages
_LISTS: Mapping[str, tuple[Any, str]] = {
    "stop": (str, "strings"),
    "stop_token_ids": (Integral, "token ids"),
    "bad_words": (str, "strings"),
    "allowed_token_ids": (Integral, "token ids"),
    "logits_processor": (Callable, "callables"),
    "stopping_criteria": (Callable, "callables"),
}


class Options(TypedDict, total=False):
    """Options of `generate`, `stream` and `send`; see `Request` for their meaning."""

    method: Method | str | Mapping[str, Any] | Sequence[Any]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    repetition_window: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    keep_stop: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_new_tokens: int
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int] | None
    logits_processor: Sequence[Callable[..., Any]]
    stopping_criteria: Sequence[Callable[..., Any]]
    constraint: Any
    cache_salt: str
    adapter: str | None
    source: Any


@dataclass(frozen=True)
class Request:
    """Options of one call.

    Attributes:
        method: a `Method`, its name, `{"method": ..., "method_args": {...}}`, the path of a JSON card, or a list of
            these that fill different components of the recipe.
        max_new_tokens: most tokens to generate per sequence; also the default horizon of a depth schedule.
        sampling: how tokens are chosen.
        seed: seed of the draws; None picks one, which the result reports.
        stop: strings before which the text ends, or after which it ends with `keep_stop`.
        stop_token_ids: token ids that end a sequence, besides the model's end-of-sequence ids.
        ignore_eos: whether the model's end-of-sequence ids do not end a sequence.
        min_new_tokens: how many tokens come before an id may end a sequence; a stop string may end it earlier.
        bad_words: texts that do not come as the tokenizer spells them, with and without a space before.
        allowed_token_ids: the only ids that may come; None for all. A constraint that allows nothing else goes before
            this and the two above.
        logits_processor, stopping_criteria: as in transformers, called for one sequence at a time.
        constraint: what the answer must look like: a JSON schema as a mapping, a pydantic model, or one of
            `shoal.JsonSchema`, `shoal.Regex`, `shoal.Grammar` and `shoal.Monitor`; or a list with one, or None,
            for each prompt. An answer that `max_new_tokens` ends is the beginning of such a text; under a schema this
            is rare.
        cache_salt: a scheduler lets this request use what it keeps of prompts with the same salt, and of no others.
        adapter: the name of an adapter that `Engine.add_adapter` has added, which runs beside the model; "" for none,
            None for the engine's own choice.
        source: what the engine's `encoder` made of the source that a text is about, or its `vision` of the pictures in
            a prompt, or a list with one for each prompt; None for a prompt without pictures and for other models.

    Raises:
        Unsupported: a constraint beside ignore_eos.
    """

    method: Any = "full"
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = field(default_factory=lambda: drawn_seed())
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    keep_stop: bool = False
    ignore_eos: bool = False
    min_new_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processor: tuple[Callable[..., Any], ...] = ()
    stopping_criteria: tuple[Callable[..., Any], ...] = ()
    constraint: Constraint | Monitor | tuple[Constraint | Monitor | None, ...] | None = None
    cache_salt: str = ""
    adapter: str | None = None
    source: Encoded | Pictures | tuple[Encoded | Pictures | None, ...] | None = None

    def __post_init__(self) -> None:
        wanted = self.constraint if isinstance(self.constraint, tuple) else (self.constraint,)
        if self.ignore_eos and any(isinstance(one, Constraint) for one in wanted):
            raise Unsupported("a constraint with ignore_eos", "nothing but an end of sequence follows what meets it",
                              "Leave ignore_eos out")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Request:
        """Check and sort the options of a call; ValueError for an unknown or impossible one."""
        known = Options.__annotations__
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"unknown option {name!r}.{hint} The options are {', '.join(known)}")
        given = {name: value for name, value in options.items() if value is not None or name == "logprobs"}
        sampled = {f.name: given.pop(f.name) for f in fields(Sampling) if f.name in given}
        given.update({name: _items(name, given.get(name, ())) for name in _LISTS
                      if name in given or name != "allowed_token_ids"})
        check_text(given["stop"], "a stop string")
        given["stop_token_ids"] = frozenset(map(int, given["stop_token_ids"]))
        whole = ("max_new_tokens", "min_new_tokens", "seed")
        given.update({name: _whole(name, given[name]) for name in whole if name in given})
        if "constraint" in given:
            wanted = given["constraint"]
            several = isinstance(wanted, list | tuple)
            given["constraint"] = tuple(map(constraint_of, wanted)) if several else constraint_of(wanted)
        if not isinstance(given.get("cache_salt", ""), str):
            raise ValueError(f"cache_salt is {given['cache_salt']!r}; it must be text")
        if not isinstance(given.get("adapter", ""), str):
            raise ValueError(f"adapter is {given['adapter']!r}; it must be an adapter's name")
        if isinstance(given.get("source"), list):
            given["source"] = tuple(given["source"])
        request = cls(sampling=Sampling(**sampled), **given)
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        if request.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens is {request.min_new_tokens}; it must be >= 0")
        if request.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty; give at least one token id, or leave it out")
        return request

    def constraints(self, prompts: int) -> Sequence[Constraint | Monitor | None]:
        """The constraint of each prompt; ValueError where a list has more or fewer than `prompts`."""
        found = self.constraint if isinstance(self.constraint, tuple) else (self.constraint,) * prompts
        if len(found) != prompts:
            raise ValueError(f"constraint is a list of {len(found)} for {prompts} prompts; give one for each")
        return found

    def sources(
        self, prompts: Sequence[Sequence[int]], wanted: bool, beside: bool
    ) -> Sequence[Encoded | Pictures | None]:
        """The source of each prompt; pictures and sounds at their places in it.

        Args:
            wanted: whether the model has an encoder of sources.
            beside: whether it has one of pictures or sounds.

        Raises:
            ValueError: there is none, a list has more or fewer than `prompts`, or pictures or sounds do not fit.
            Unsupported: the model reads none.
        """
        found = self.source if isinstance(self.source, tuple) else (self.source,) * len(prompts)
        if not wanted and not beside and self.source is not None:
            raise Unsupported("a source for a model without an encoder", "it reads text alone", "Leave source out")
        if len(found) != len(prompts):
            raise ValueError(f"source is a list of {len(found)} for {len(prompts)} prompts; give one for each")
        if wanted and not all(isinstance(one, Encoded) for one in found):
            raise ValueError("the model has an encoder and reads a source; give source=engine.encoder(inputs)")
        if beside and not all(one is None or isinstance(one, Pictures) for one in found):
            raise ValueError("the source is no pictures or sounds; give a chat with them as the prompt, and no source")
        return [one.laid(ids) if isinstance(one, Pictures) else one for one, ids in zip(found, prompts, strict=True)]

    def rules(self, eos: frozenset[int], max_length: int | None) -> StopRules:
        """Where a sequence of this request ends."""
        return StopRules(eos_token_ids=frozenset() if self.ignore_eos else eos, stop_token_ids=self.stop_token_ids,
                         stop_strings=self.stop, max_new_tokens=self.max_new_tokens, max_length=max_length,
                         criteria=self.stopping_criteria, keep_stop=self.keep_stop)

    def forbids(self, rules: StopRules, tokenizer: Any, vocabulary: int) -> Callable[[int], tuple[Forbidden, ...]]:
        """A function from a prompt's length to the logits processors; ValueError for an id that is no token."""
        check_ids({"allowed_token_ids": self.allowed_token_ids or ()}, vocabulary)
        only, least, ends = self.allowed_token_ids, self.min_new_tokens, rules.eos_token_ids | rules.stop_token_ids
        if not self.bad_words and only is None and least < 1:
            return lambda start: ()
        forbidden = spelled(self.bad_words, tokenizer)
        return lambda start: (Forbidden(start, forbidden, only, ends, least),)


def drawn_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(_SEED_BITS)


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """An option that is a list; a string alone stands for a list of one."""
    kind, described = _LISTS[name]
    values = (value,) if isinstance(value, str) else value
    items = tuple(values) if isinstance(values, Iterable) and not isinstance(values, Mapping | bytes) else (None,)
    if not all(isinstance(item, kind) for item in items):
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be a list of {described}")
    return items


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    return int(value)


def is_batch(prompt: Any) -> bool:
    """Whether `prompt` is a list of prompts rather than one; ValueError if it is neither."""
    if isinstance(prompt, str):
        return False
    if hasattr(prompt, "ndim"):
        return bool(prompt.ndim == 2)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise _no_prompt(prompt)
    if not prompt or isinstance(prompt[0], Integral | Mapping):
        return False
    return bool(getattr(prompt[0], "ndim", None) != 0)  # a tensor without dimensions is an id


def _no_prompt(value: Any) -> ValueError:
    return ValueError(f"the prompt is {reprlib.repr(value)}; it must be text, whole token ids, chat messages, or "
                      "a list of such prompts")


def prompt_ids(prompt: Any, tokenizer: Any, vocab_size: int, max_length: int | None) -> list[int]:
    """Token ids of one prompt, checked against vocabulary and context."""
    ids = _ids(prompt, tokenizer)
    if not ids:
        raise ValueError("the prompt is empty; give at least one token, such as the model's beginning-of-sequence id")
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"the prompt holds token id {wrong}; the model's ids are 0..{vocab_size - 1}")
    if max_length is not None and len(ids) >= max_length:
        raise ValueError(f"the prompt has {len(ids)} tokens and the model's context {max_length}, which must also hold "
                         "the answer; shorten the prompt")
    return ids


def _ids(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; load the model with one, or give token ids")
        if not prompt:
            raise ValueError("the prompt is empty; give some text, or token ids such as the beginning-of-sequence id")
        check_text(prompt, "the prompt")
        return list(tokenizer(prompt)["input_ids"])
    if isinstance(prompt, Sequence) and prompt and all(isinstance(one, Mapping) for one in prompt):
        return chat_ids(prompt, tokenizer)
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise _no_prompt(prompt) from None


def chat_ids(messages: Messages, tokenizer: Any, /, *, add_special_tokens: bool = False, **options: Any) -> list[int]:
    """Token ids of a conversation, with the beginning of the answer.

    Args:
        add_special_tokens: whether the tokenizer adds those of a text to those of the template.
        **options: see `chat_text`; the template's own variables too.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("a prompt of messages needs a tokenizer with a chat template, and this model has none; give "
                         "text, or set tokenizer.chat_template")
    if shown_in(messages)[1]:
        raise Unsupported("a picture or sound here", "only text is read", "Send it in a chat")
    text = chat_text(messages, partial(rendered, tokenizer), **options)
    check_text(text, "the conversation")
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
