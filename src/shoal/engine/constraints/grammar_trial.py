"""Compiles grammars in a process of its own first: llguidance bounds most of its work, but not how deep it recurses.

A chain of a few thousand rules or references overflows the stack, which ends the process. A grammar that compiles
here, on a small stack and in limited time, compiles safely in any other process. Imports no torch.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from shoal.sandbox.helper import NoAnswer

_STACK = 1 << 20
"""Bytes, where threads of this system have at least twice as many."""
_OPTIONS = '\n%llguidance {"no_forcing": true}'
"""Else only the tokenizer's own cut of settled text is allowed, which changes the distribution."""
_FUEL, _ITEMS, _STATES = 3_000_000, 200_000, 100_000
"""Work of llguidance for a whole grammar, in its own unit; alternatives that are open at once; states of its lexer, a
kilobyte or two each. Objects of thousands of properties need more than its defaults."""


def matcher_of(tokenizer: Any, lark: str) -> Any:
    """A grammar's `LLMatcher`, in an error state where it cannot be compiled.

    Args:
        tokenizer: llguidance's tokenizer.
        lark: the grammar in its dialect of Lark's notation.
    """
    limits = LLParserLimits(initial_lexer_fuel=_FUEL, max_items_in_row=_ITEMS, step_max_items=_ITEMS,
                            max_lexer_states=_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark + _OPTIONS), log_level=0, limits=limits)


def stand_in(tokenizer: Any, size: int, eos: frozenset[int]) -> list[Any]:
    """A small stand-in for a model's vocabulary: its size, ends of sequence, and special tokens with their texts.

    Grammars name no other tokens. A trial reads the rest byte by byte, which takes less time than a vocabulary.
    """
    special = [token for token in range(size) if token in eos or tokenizer.is_special_token(token)]
    return [size, sorted(eos), [[token, tokenizer.decode_bytes([token]).decode("latin-1")] for token in special]]


def answer(question: tuple[str, list[Any] | None]) -> str | None:
    """The work of a helper's process: translate a grammar to Lark's notation, or compile one, which returns None.

    Args:
        question: a grammar that may be GBNF, and None; or one in Lark's notation, and the stand-in for the vocabulary.

    Raises:
        NoAnswer: it cannot be translated or compiled, or no text meets it; says why.
    """
    grammar, vocabulary = question
    threading.stack_size(_STACK)  # of the threads that begin from now on
    with ThreadPoolExecutor(1) as pool:
        if vocabulary is None:
            return pool.submit(_translated, grammar).result()
        return pool.submit(_compile, grammar, vocabulary).result()


def _translated(grammar: str) -> str:
    try:
        return str(any_to_lark(grammar))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # it raises errors of any type
        raise NoAnswer(str(error)) from None


def _compile(lark: str, vocabulary: list[Any]) -> None:
    size, eos, special = vocabulary
    matcher = matcher_of(_tokenizer(size, tuple(eos), tuple(map(tuple, special))), lark)
    if not matcher.is_error():
        matcher.compute_logit_bias()
    if matcher.is_error():
        raise NoAnswer(matcher.get_error())


@lru_cache(4)
def _tokenizer(size: int, eos: tuple[int, ...], special: tuple[tuple[int, str], ...]) -> Any:
    named = {token: text.encode("latin-1") for token, text in special}
    size = max(size, len(named) + 256)
    texts, singles = [named.get(token, b"") for token in range(size)], iter(range(256))
    for token in range(size):
        if token not in named and (byte := next(singles, None)) is not None:
            texts[token] = bytes([byte])
    return LLTokenizer(_Texts(texts, list(named), eos[0]), n_vocab=size, eos_token=list(eos), slices=[])


class _Texts:
    """A vocabulary as llguidance takes one from Python."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos

    def __call__(self, text: str) -> list[int]:
        """Unused, since settled text is not forced."""
        return []
