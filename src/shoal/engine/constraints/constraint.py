"""Constraints on answers, compiled by llguidance to masks over a model's tokens.

llguidance refuses by name what it cannot honour of a schema; xgrammar warns and ignores it. Both are fast enough beside
a forward (docs/constraints.md compares them).
"""

from __future__ import annotations

import json
import logging
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.prefixes import common
from shoal.decode.sampling import Allowed
from shoal.engine.constraints.length_end import LengthAwareEnd, Spelling
from shoal.engine.constraints.monitor import MarkedTokens, Monitor, Watched, python_members
from shoal.errors import Unsupported, check_text, needs
from shoal.sandbox.helper import Helpers, NoAnswer

log = logging.getLogger(__name__)

_trials = Helpers("shoal.engine.constraints.grammar_trial", seconds=6, memory=512 << 20)
_LARK = re.compile(r"%llguidance\b|start\s*:")
"""The beginning of a grammar in Lark's notation, which no GBNF has."""
_KEPT = 64
_RESERVE = 16, 128
"""Least and most tokens that one token is assumed to add to the way to a text's end. In between it grows with the
length of the schema, which names all that can be opened at once."""
_REMEDY = "Change the constraint, or leave it out"
_SAID = 400
"""Most characters of llguidance's own message that an error quotes."""
_DEEPEST = 127
"""Most levels of a schema that llguidance reads."""
_SPACE = r"[ ]?|\n{1,2}[ \t]{0,20}"
"""White space between the parts of a JSON text, as in llama.cpp. Small models would else write it for ever."""

_WHOLE, _PLACES = 2**53 - 1, 9
"""The largest integer that every reader of JSON holds, and the digits after the point of a number that has a bound.
Small models would else write digits for ever. llguidance allows no exponent there either."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
GUIDED = ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "guided_members")
_INTEGER = "shoal-integer"
_REFERENCE = f"#/$defs/{_INTEGER}"
_SAYS_NO_MORE = {"type", "title", "description", "default", "examples"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
_LISTED, _INNER = {"anyOf", "prefixItems"}, {"items", "additionalProperties"}
"""Where schemas lie within a schema: by name, in a list, or alone."""
KNOWN_FORMATS = frozenset((
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
))
"""Formats of JSON schemas that llguidance knows. Only these bind an answer."""


@dataclass(frozen=True)
class Constraint(ABC):
    """What an answer must look like: a `JsonSchema`, `Regex` or `Grammar`.

    Attributes:
        text: the schema, pattern or grammar.
        wind_up: whether an answer is brought to its end before the limit of its length cuts it; see `LengthAwareEnd`.
    """

    text: str
    wind_up: bool = False

    def __post_init__(self) -> None:
        check_text(self.text, f"the text of a {type(self).__name__}")

    @abstractmethod
    def grammar(self) -> str:
        """The constraint in llguidance's dialect of Lark's notation; Unsupported for what cannot be translated."""

    def __str__(self) -> str:
        return f"{type(self).__name__}({reprlib.repr(self.text)})"


@dataclass(frozen=True)
class JsonSchema(Constraint):
    """A JSON text that is valid under a schema, with its parts in the schema's order.

    Attributes:
        text: the schema: JSON text, a mapping, or a pydantic model.
        wind_up: see `Constraint`.

    Raises:
        ValueError: it is none of these.
    """

    def __init__(self, schema: Any, wind_up: bool = True) -> None:
        object.__setattr__(self, "text", _schema_text(schema))
        object.__setattr__(self, "wind_up", wind_up)
        check_text(json.loads(self.text), "a JSON schema")

    @override
    def grammar(self) -> str:
        schema = known_formats(json.loads(self.text))
        if isinstance(schema, dict):
            named = schema.get("$defs", {})
            shared = '"$id"' not in self.text and isinstance(named, dict)  # `$id` changes what references point to
            schema = {"x-guidance": {"whitespace_pattern": _SPACE}, **_ending(schema, shared)}
            if _REFERENCE in (text := json.dumps(schema)):
                integer = _ending({"type": "integer"}, False)
                text = json.dumps({**schema, "$defs": {**schema.get("$defs", {}), _INTEGER: integer}})
            return f"start: %json {text}"
        return f"start: %json {self.text}"


@dataclass(frozen=True)
class Regex(Constraint):
    """Text that a regular expression in Rust's syntax matches from its first character to its last."""

    @override
    def grammar(self) -> str:
        from llguidance import LLMatcher

        made: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(self.text))
        return str(made["grammars"][0]["lark_grammar"])


@dataclass(frozen=True)
class Grammar(Constraint):
    """Text that a context-free grammar gives: Lark's notation, or GBNF, which has `::=`."""

    @override
    def grammar(self) -> str:
        if _LARK.match(self.text):
            return self.text
        try:  # a translation takes time, so another process makes it
            return str(_trials.ask([self.text, None]))
        except NoAnswer as error:
            raise _unmet(self, str(error)) from None


def constraint_of(value: Any) -> Constraint | Monitor | None:
    """The constraint of an option: itself, a monitor, or a schema that is no text; ValueError for anything else."""
    if value is None or isinstance(value, Constraint | Monitor):
        return value
    if isinstance(value, Mapping) or hasattr(value, "model_json_schema"):
        return JsonSchema(value)
    raise ValueError(f"constraint is {reprlib.repr(value)}; it must be shoal.JsonSchema, shoal.Regex, shoal.Grammar, "
                     "a shoal.Monitor, a JSON schema as a mapping, or a pydantic model")


def guided(field: str, value: Any) -> Constraint | Monitor:
    """The constraint of a field of a request that `GUIDED` names; ValueError for a value that is none."""
    check_text(value, field)
    if field == "guided_json":
        return JsonSchema(value)
    if field == "guided_choice":
        if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
            raise ValueError(f"{field} is {reprlib.repr(value)}; it must be a list of at least one text")
        return Grammar("start: " + " | ".join(map(json.dumps, value)))
    if not isinstance(value, str):
        raise ValueError(f"{field} is {reprlib.repr(value)}; it must be text")
    if field == "guided_members":
        if value != "python":
            raise ValueError(f'{field} is {value!r}; it must be "python"')
        return python_members()
    return Regex(value) if field == "guided_regex" else Grammar(value)


def _schema_text(schema: Any) -> str:
    made = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
    try:
        made = json.loads(made) if isinstance(made, str) else made
        if _depth(made) > _DEEPEST:
            raise RecursionError
        text = json.dumps(made)
    except RecursionError:
        raise ValueError(f"the JSON schema {reprlib.repr(schema)} is nested more than {_DEEPEST} deep") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema {reprlib.repr(schema)} is no JSON: {error}") from None
    if not isinstance(made, Mapping | bool):
        raise ValueError(f"the JSON schema is {reprlib.repr(schema)}; it must be an object, true or false")
    return text


def _depth(value: Any) -> int:
    """Levels of nested lists and objects, counted up to one more than is allowed."""
    deep, level = 0, [value]
    while deep <= _DEEPEST and (level := [one for one in level if isinstance(one, list | tuple | Mapping)]):
        level = [inner for one in level for inner in (one.values() if isinstance(one, Mapping) else one)]
        deep += 1
    return deep


def _ending(schema: Any, shared: bool) -> Any:
    """The schema with numbers of bounded length.

    It stays as it is below `oneOf` and `allOf`, where a narrower part can widen the whole or leave nothing.

    Args:
        shared: whether integers without bounds may be references to one, since each alone takes long to compile.
    """
    if not isinstance(schema, dict) or schema.keys() & {"enum", "const"}:
        return schema
    if shared and schema.get("type") == "integer" and schema.keys() <= _SAYS_NO_MORE:
        return {"$ref": _REFERENCE}
    made = {word: _inside(word, inner, shared) for word, inner in schema.items()}
    kinds: Any = made.get("type") if isinstance(made.get("type"), list) else [made.get("type")]
    bounds = {word: made[word] for word in _BOUNDS if isinstance(made.get(word), int | float)}
    if "number" in kinds and bounds and all(round(bound, _PLACES) == bound for bound in bounds.values()):
        made.setdefault("multipleOf", 10.0**-_PLACES)
    elif "integer" in kinds and "number" not in kinds and all(abs(bound) < _WHOLE for bound in bounds.values()):
        made = {**({} if any("inimum" in word for word in bounds) else {"minimum": -_WHOLE}),
                **({} if any("aximum" in word for word in bounds) else {"maximum": _WHOLE}), **made}
    return made


def _inside(word: str, inner: Any, shared: bool) -> Any:
    if word in _NAMED and isinstance(inner, dict):
        return {name: _ending(one, shared) for name, one in inner.items()}
    if word in _LISTED and isinstance(inner, list):
        return [_ending(one, shared) for one in inner]
    return _ending(inner, shared) if word in _INNER else inner


def _unmet(wanted: Constraint, why: str) -> Unsupported:
    said = " ".join(re.split("<state>|<backtrace>", why, maxsplit=1)[0].split())  # without the debug state
    if said.startswith("NoExtension"):
        said = "no text meets it"
    elif "symbols.len()" in said:
        said = "it has too many parts; llguidance holds some 65,000"
    if len(said) > _SAID:
        said = f"{said[: _SAID // 2]} ... {said[-_SAID // 2 :]}"
    return Unsupported(f"the constraint {wanted}", said or "llguidance takes it no further", _REMEDY)


class Compiler:
    """Makes masks over the tokens of one model. The last constraints are kept, compiled or refused. Thread-safe.

    Each is tried in a process of its own first, which bounds its time and memory.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: V of the model's logits.
        eos: ids that end an answer.

    Raises:
        Unsupported: llguidance is not installed, or cannot read the tokenizer, or no token ends an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> None:
        with needs("constraints", "a constraint"):
            from llguidance import hf

            from shoal.engine.constraints import grammar_trial
        if tokenizer is None or not eos:
            missing = "the model has no tokenizer" if tokenizer is None else "the model has no end-of-sequence token"
            raise Unsupported("a constraint", missing, "Load the model with a tokenizer that names one")
        self._eos, self._size, self._trial = eos, vocab_size, grammar_trial
        self._known = lru_cache(_KEPT)(self._made)
        self._vocabulary = cache(self._marked)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        try:
            self._words = hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos))
        except Exception as error:  # it raises errors of any type for a tokenizer that it cannot read
            raise Unsupported("a constraint with this model's tokenizer", f"llguidance cannot read it: {error}",
                              "Use a tokenizer of the `tokenizers` library") from error

    def __call__(
        self, wanted: Constraint | Monitor, limit: int | None = None, prompt: Sequence[int] = (),
        patient: bool = True,
    ) -> Callable[[], Mask | Watched]:
        """The component of a recipe for a constraint.

        Args:
            wanted: the constraint.
            limit: most tokens of the answer, its end of sequence included; None for no limit.
            prompt: the sequence's, which monitors read.
            patient: whether monitors are waited for; see `shoal.engine.constraints.monitor.Watched`.

        Raises:
            Unsupported: it cannot be compiled, or no text meets it.
        """
        if isinstance(wanted, Monitor):
            return partial(Watched, wanted, self._vocabulary(wanted.mark), prompt, patient)
        matcher = self.prepare(wanted)
        end = None
        if wanted.wind_up and limit is not None:
            reserve = min(max(_RESERVE[0], len(wanted.text) // 4), _RESERVE[1])
            end = partial(LengthAwareEnd, matcher, self._spelling, limit, reserve)
        return partial(Mask, matcher, wanted, self._eos, self._size, end)

    def prepare(self, wanted: Constraint) -> Any:
        """The matcher of a constraint, at its beginning.

        A large one takes seconds to compile, once. Unsupported as for a call.
        """
        found = self._known(wanted)
        if isinstance(found, Unsupported):
            raise Unsupported(found.what, found.why, found.remedy)
        return found

    def _made(self, wanted: Constraint) -> Any | Unsupported:
        """The same, or why there is none."""
        try:
            lark = wanted.grammar()
            _trials.ask([lark, self._stand_in])
            matcher = self._trial.matcher_of(self._words, lark)
            if matcher.is_error():
                return _unmet(wanted, matcher.get_error())
            for warning in matcher.get_grammar_warnings():
                log.warning("the constraint %s: %s", wanted, warning)
            Mask(matcher, wanted, self._eos, self._size)([])
            return matcher
        except NoAnswer as error:
            return _unmet(wanted, str(error))
        except Unsupported as error:
            return error

    @cached_property
    def _stand_in(self) -> list[Any]:
        return self._trial.stand_in(self._words, self._size, self._eos)

    def _marked(self, mark: str) -> MarkedTokens:
        said = self._words.decode_bytes
        texts = [b"" if token in self._special else said([token]) for token in range(self._size)]
        return MarkedTokens(texts, self._eos, mark)

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self._words, self._size, self._eos)


class Mask(Allowed):
    """The tokens that may follow what one sequence has generated. For another text it goes back to where that differs.

    Args:
        matcher: of the constraint, at its beginning; it is not moved.
        wanted: the constraint, for messages.
        eos: ids that end an answer.
        size: V.
        end: makes what brings the text to its end before a limit; None for no limit.
    """

    def __init__(
        self, matcher: Any, wanted: Constraint, eos: frozenset[int], size: int,
        end: Callable[[], LengthAwareEnd] | None = None,
    ) -> None:
        self._matcher, self._wanted, self._size = matcher.deep_copy(), wanted, size
        self._ends = torch.zeros(size, dtype=torch.bool)
        self._ends[sorted(eos)] = True
        self._eos, self._read = eos, list[int]()
        self._mask: Tensor | None = None
        self._end = None if end is None else end()

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Bool [V], read-only. Behind an end of sequence, as in a draft, only another one may follow.

        Raises:
            Unsupported: the text does not meet the constraint, or no end of it would.
        """
        if not self._move(tokens):
            return self._ends
        if self._mask is None:
            self._mask = self._all()
            if self._end is not None and self._end.near(tokens):
                self._mask = self._end.narrowed(self._mask)
        return self._mask

    def _all(self) -> Tensor:
        """The tokens that the constraint alone allows."""
        # A copy computes it: after a rollback, a matcher of llguidance 1.9.1 may give another text's mask once more.
        matcher = self._matcher.deep_copy()
        mask = torch.from_numpy(np.frombuffer(matcher.compute_logit_bias(), np.uint8) != 0)
        ended = matcher.is_stopped() and not matcher.is_accepting()
        if matcher.is_error() or ended:
            raise _unmet(self._wanted, matcher.get_error() or "NoExtension")
        return mask

    @override
    def lets(self, tokens: Sequence[int], token: int) -> bool:
        # a mask walks over all tokens, whose memory has gone cold beside a model; one token does not
        if token in self._eos or not self._move(tokens) or self._mask is not None:
            return super().lets(tokens, token)
        if not self._matcher.validate_tokens([token]):
            return False
        if self._end is None or not self._end.near(tokens):
            return True
        return self._end.keeps(self._all(), token) or super().lets(tokens, token)

    @override
    def sole(self, tokens: Sequence[int]) -> int | None:
        # where no byte is settled, and the text may not end, several tokens may follow
        if self._move(tokens) and not self._matcher.is_stopped() and not self._matcher.compute_ff_bytes():
            return None
        return super().sole(tokens)

    def _move(self, tokens: Sequence[int]) -> bool:
        """Move the matcher behind `tokens`; False where one of them ends the sequence."""
        read = self._read
        if read == tokens:
            return True
        same = common(read, tokens)
        if same < len(read):
            self._matcher.rollback(len(read) - same)
            del read[same:]
        for token in tokens[same:]:
            if token in self._eos:
                self._mask = None
                return False
            if not self._matcher.try_consume_tokens([token]):
                self._mask = None
                why = self._matcher.get_error() or f"token {token} does not follow the {len(read)} before it"
                raise _unmet(self._wanted, why)
            read.append(token)
        self._mask = None
        return True


def known_formats(schema: Any) -> Any:
    """The schema without formats that bind nothing.

    JSON Schema 2020-12 says so of `format` (validation, section 7): what a reader does not know is an annotation.
    """
    if isinstance(schema, list):
        return [known_formats(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {word: _known_inside(word, inner) for word, inner in schema.items()
            if word != "format" or (isinstance(inner, str) and inner in KNOWN_FORMATS)}


def _known_inside(word: str, inner: Any) -> Any:
    if word in _NAMED | {"dependentSchemas"} and isinstance(inner, dict):
        return {name: known_formats(one) for name, one in inner.items()}
    return inner if word in ("enum", "const", "default", "examples", "example") else known_formats(inner)
