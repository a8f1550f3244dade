"""Constraints: what every answer must look like, compiled by llguidance to masks over a model's tokens.

llguidance refuses by name what it cannot honour of a schema, where xgrammar warns and lets it go; both are fast enough
beside a forward (docs/constraints.md compares them).
"""

from __future__ import annotations

import json
import logging
import reprlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import Unsupported, needs

log = logging.getLogger(__name__)

_KEPT = 64
_REMEDY = "Change the constraint, or leave it out"
_OPTIONS = '\n%llguidance {"no_forcing": true}'
"""Else only the tokens into which the tokenizer would cut settled text are let through, which is another law."""
_SPACE = r"[ ]?|\n{1,2}[ \t]{0,20}"
"""White space between the parts of a JSON text, as llama.cpp has it: small models would go on with it for ever."""


@dataclass(frozen=True)
class Constraint(ABC):
    """What an answer must look like: see `JsonSchema`, `Regex` and `Grammar`.

    Attributes:
        text: the schema, pattern or grammar.
    """

    text: str

    @abstractmethod
    def grammar(self) -> str:
        """The same in llguidance's dialect of Lark's notation; Unsupported for what cannot be translated."""

    def __str__(self) -> str:
        return f"{type(self).__name__}({reprlib.repr(self.text)})"


@dataclass(frozen=True)
class JsonSchema(Constraint):
    """A JSON text that is valid under a schema; its parts stand in the schema's order.

    Attributes:
        text: the schema: JSON text, a mapping, or a pydantic model.

    Raises:
        ValueError: it is none of these.
    """

    text: str

    def __init__(self, schema: Any) -> None:
        object.__setattr__(self, "text", _schema_text(schema))

    def grammar(self) -> str:
        """See the base class."""
        schema = json.loads(self.text)
        if isinstance(schema, dict):
            schema = {"x-guidance": {"whitespace_pattern": _SPACE}, **schema}
        return f"start: %json {json.dumps(schema)}"


@dataclass(frozen=True)
class Regex(Constraint):
    """Text that a regular expression matches from its first character to its last, in Rust's syntax."""

    def grammar(self) -> str:
        """See the base class."""
        from llguidance import LLMatcher

        made: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(self.text))
        return str(made["grammars"][0]["lark_grammar"])


@dataclass(frozen=True)
class Grammar(Constraint):
    """Text that a context-free grammar gives: Lark's notation, or GBNF, which has `::=`."""

    def grammar(self) -> str:
        """See the base class."""
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return str(any_to_lark(self.text))
        except Exception as error:  # the translation from GBNF raises what it likes
            raise _unmet(self, str(error)) from error


def constraint_of(value: Any) -> Constraint | None:
    """The constraint that an option names: one of the classes here, what `JsonSchema` takes but for text, or None.

    Raises:
        ValueError: it is neither.
    """
    if value is None or isinstance(value, Constraint):
        return value
    if isinstance(value, Mapping) or hasattr(value, "model_json_schema"):
        return JsonSchema(value)
    raise ValueError(f"constraint is {reprlib.repr(value)}; it must be shoal.JsonSchema, shoal.Regex or shoal.Grammar, "
                     "a JSON schema as a mapping, or a pydantic model")


def _schema_text(schema: Any) -> str:
    made = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
    try:
        made = json.loads(made) if isinstance(made, str) else made
        text = json.dumps(made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema {reprlib.repr(schema)} is no JSON: {error}") from None
    if not isinstance(made, Mapping | bool):
        raise ValueError(f"the JSON schema is {reprlib.repr(schema)}; it must be an object, true or false")
    return text


def _unmet(wanted: Constraint, why: str) -> Unsupported:
    said = why.partition("<state>")[0].strip()  # what follows is for llguidance's own developers
    dead = said.startswith("NoExtension")
    return Unsupported(f"the constraint {wanted}", "no text meets it" if dead else said, _REMEDY)


class Compiler:
    """Makes masks over the tokens of one model; the constraints asked for last are kept compiled.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: V of the model's logits.
        eos: ids that end an answer.

    Raises:
        Unsupported: llguidance is not installed, or cannot read the tokenizer, or no token ends an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> None:
        with needs("constraints", "a constraint"):
            from llguidance import LLMatcher, hf
        if tokenizer is None or not eos:
            missing = "the model has no tokenizer" if tokenizer is None else "the model has no end-of-sequence token"
            raise Unsupported("a constraint", missing, "Load the model with a tokenizer that names one")
        self._eos, self._size, self._make = eos, vocab_size, LLMatcher
        self._known: OrderedDict[Constraint, Any] = OrderedDict()
        try:
            self._words = hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos))
        except Exception as error:  # it raises what it likes about a tokenizer that it cannot read
            raise Unsupported("a constraint with this model's tokenizer", f"llguidance cannot read it: {error}",
                              "Use a tokenizer of the `tokenizers` library") from error

    def __call__(self, wanted: Constraint) -> Callable[[], Mask]:
        """The part of a recipe for a constraint.

        Raises:
            Unsupported: it cannot be compiled, or no text meets it.
        """
        matcher = self._known.pop(wanted, None) or self._compiled(wanted)
        self._known[wanted] = matcher
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return partial(Mask, matcher, wanted, self._eos, self._size)

    def _compiled(self, wanted: Constraint) -> Any:
        matcher = self._make(self._words, self._make.grammar_from_lark(wanted.grammar() + _OPTIONS), log_level=0)
        if matcher.is_error():
            raise _unmet(wanted, matcher.get_error())
        for warning in matcher.get_grammar_warnings():
            log.warning("the constraint %s: %s", wanted, warning)
        Mask(matcher, wanted, self._eos, self._size)([])
        return matcher


class Mask:
    """Which tokens may follow what one row has generated; asked about any text, it goes back as far as that differs.

    Args:
        matcher: of the constraint, at its beginning; it is not moved.
        wanted: the constraint, for messages.
        eos: ids that end an answer.
        size: V.
    """

    def __init__(self, matcher: Any, wanted: Constraint, eos: frozenset[int], size: int) -> None:
        self._matcher, self._wanted, self._size = matcher.deep_copy(), wanted, size
        self._ends = torch.zeros(size, dtype=torch.bool)
        self._ends[sorted(eos)] = True
        self._eos, self._read = eos, list[int]()
        self._mask: Tensor | None = None

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Bool [V], not to be written to. Beyond an end of sequence, as in a draft, another one alone.

        Raises:
            Unsupported: the text does not meet the constraint, or cannot be brought to an end that does.
        """
        if not self._move(tokens):
            return self._ends
        if self._mask is None:
            self._mask = torch.from_numpy(np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) != 0)
            ended = self._matcher.is_stopped() and not self._matcher.is_accepting()
            if self._matcher.is_error() or ended:
                raise _unmet(self._wanted, self._matcher.get_error() or "NoExtension")
        return self._mask

    def _move(self, tokens: Sequence[int]) -> bool:
        """Let the matcher stand behind `tokens`; False where a sequence has ended among them."""
        read = self._read
        if read == tokens:
            return True
        common = _common(read, tokens)
        if common < len(read):
            self._matcher.rollback(len(read) - common)
            del read[common:]
        for token in tokens[common:]:
            if token in self._eos:
                self._mask = None
                return False
            if not self._matcher.try_consume_tokens([token]):
                self._mask = None
                raise _unmet(self._wanted, f"token {token} does not follow the {len(read)} before it")
            read.append(token)
        self._mask = None
        return True


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens are the same."""
    if left == right[: len(left)]:
        return len(left)
    return next((at for at, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
                min(len(left), len(right)))
