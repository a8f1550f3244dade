"""Where an answer ends: the ids that a model's files name, all of them together.

A generation config names the ends of turns, a config that of a text, a tokenizer its own, and makers of models keep one
or another of them up to date. Whoever takes one source alone misses the end of a turn now and then, and the model goes
on with the user's next question; so they are united, as vLLM, SGLang and llama.cpp do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any

_NAMES = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Ends of a text, of a turn, and of a message after which a tool answers."""


def eos_ids(
    generation_config: Any, config: Any, tokenizer: Any, *, written: bool | None = None, more: Iterable[int] = ()
) -> frozenset[int]:
    """The ids that end an answer, by everything that names some.

    Args:
        generation_config: or None.
        config: the model's, or None.
        tokenizer: or None.
        written: whether the config's file names its end; None where that is not known. Where it does not, the id is
            one that transformers gives to every model of the type, which is another token in many vocabularies: it
            counts where nothing else names one, and, where it may be written, if it is a special token.
        more: ids that are named elsewhere.
    """
    texts = [config, *([config.get_text_config()] if hasattr(config, "get_text_config") else [])]
    own = {token for one in texts for token in _ids(one)}
    said = {token for token in _ids(generation_config) if not (_mirrors(generation_config) and token in own)}
    said |= {*_ids(tokenizer), *more}
    doubtful = {token for one in texts for token in _ids(one) if _is_default(one, token)}
    if written or not (said or own - doubtful):
        doubtful = set()
    elif written is None:
        doubtful -= set(getattr(tokenizer, "all_special_ids", ()) or ())
    size = getattr(texts[-1], "vocab_size", None)
    return frozenset(token for token in said | (own - doubtful)
                     if token >= 0 and (not isinstance(size, int) or token < size))


def _ids(holder: Any) -> Iterator[int]:
    """The ids that one source names."""
    for name in _NAMES:
        found: Any = getattr(holder, name, None)
        tokens: Iterable[Any] = found if isinstance(found, list | tuple | set | frozenset) else [found]
        for token in tokens:
            if _is_whole(token):
                yield int(token)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _mirrors(generation_config: Any) -> bool:
    """Whether transformers has made it of the config, so that it names nothing of its own."""
    return bool(getattr(generation_config, "_from_model_config", False))


def _is_default(config: Any, token: int) -> bool:
    """Whether transformers gives the id to every model of that type."""
    found = getattr(type(config), "eos_token_id", None)
    return token in (found if isinstance(found, list | tuple) else [found])
