"""What a model's files say of generation: how tokens are drawn, where an answer ends, what is forced and forbidden.

Sampling follows one rule for commands and servers. What the model's makers recommend fills the fields that a request
leaves out, as in vLLM. Where neither says how to draw, tokens are drawn so that small models too write sense. The
library's own calls do not come here: they stay greedy.

A generation config names the ends of turns, a config that of a text, a tokenizer its own, and makers of models keep one
or another of them up to date. One source alone misses the end of a turn now and then, and the model goes on with the
user's next question. So they are united, as vLLM, SGLang and llama.cpp do.

What is forced and forbidden is applied as in transformers' `generate`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from shoal.types import Sampling

log = logging.getLogger(__name__)

DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Fields that say how to draw. Penalties, a bias and a seed do not."""
FALLBACK: Mapping[str, float] = {"temperature": 0.7, "min_p": 0.05}
_PLAIN = 1.0
"""The temperature of OpenAI's API, of transformers and of vLLM, for a request that says how to draw but not how hot."""
_OF_FILES = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty", "penalty_last_n": "repetition_window"}
"""Keys of GGUF files under `general.sampling.`, and what they are called here."""
_NOT_HERE = ("mirostat", "xtc_probability")
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Ends of a text, of a turn, and of a message after which a tool answers."""
FIELDS = ("sequence_bias", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
          "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
"""What a generation config forces and forbids, in the order in which transformers applies it."""


def filled(asked: Mapping[str, Any], recommended: Mapping[str, float]) -> dict[str, Any]:
    """A request's sampling, a temperature too; what it leaves out, or None, comes from what is recommended."""
    asked = {name: value for name, value in asked.items() if value is not None}
    said = dict(recommended)
    if any(name in asked for name in DRAWING):
        said["temperature"] = said.get("temperature") or _PLAIN  # greedy is for requests that ask for nothing
    elif not any(name in said for name in DRAWING):
        said |= FALLBACK
    return {"temperature": _PLAIN, **said, **asked}


def recommended(generation_config: Any) -> dict[str, float]:
    """What a generation config says of sampling beyond transformers' own defaults; `do_sample: false` is greedy."""
    said = {} if generation_config is None else generation_config.to_diff_dict()
    found = {name: said.get(name) for name in (*DRAWING, "repetition_penalty")}
    if said.get("do_sample") is False:
        found["temperature"] = 0.0
    return _possible(found)


def of_file(entry: Callable[[str], Any]) -> dict[str, float]:
    """What the metadata of a GGUF file, given by `entry`, say of sampling, under `general.sampling.`."""
    if strange := [name for name in _NOT_HERE if entry(f"general.sampling.{name}")]:
        log.warning("the file recommends sampling by %s, which Shoal does not have", " and ".join(strange))
    found = _possible({ours: entry(f"general.sampling.{theirs}") for theirs, ours in _OF_FILES.items()})
    if entry("general.sampling.penalty_last_n") == 0:  # of no tokens
        found.pop("repetition_penalty", None)
    if "repetition_penalty" not in found:
        found.pop("repetition_window", None)
    return found


def _possible(found: Mapping[str, Any]) -> dict[str, float]:
    """The values that are possible; each of the others is named in a warning."""
    kept = dict[str, float]()
    for name, value in found.items():
        if value is None:
            continue
        try:
            Sampling(**{name: _plain(name, value)})
            kept[name] = _plain(name, value)
        except (TypeError, ValueError) as error:
            log.warning("what is recommended for the model is left out: %s", error)
    return kept


def _plain(name: str, value: Any) -> Any:
    """A number as it was meant: a file's float32 with the digits that it holds, and what peers write for "off"."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name in ("top_k", "repetition_window"):
        return max(int(value), 0) if math.isfinite(value) and value == int(value) else value
    short = float(f"{value:.7g}")
    return max(short, 0.0) if name in ("temperature", "min_p") else short


def eos_ids(
    generation_config: Any, config: Any, tokenizer: Any, *, written: bool | None = None, more: Iterable[int] = ()
) -> frozenset[int]:
    """The ids that end an answer, by everything that names some.

    Args:
        written: whether the config's file names its end; None where that is not known. Where it does not,
            transformers gives every model of the type the same id, which is another token in many vocabularies. That
            id counts where nothing else names one. Where the file may have written it, it also counts if it is a
            special token.
        more: ids that are named elsewhere.
    """
    texts = [config, *([config.get_text_config()] if hasattr(config, "get_text_config") else [])]
    own = {token for one in texts for token in _ids(one)}
    copied = own if getattr(generation_config, "_from_model_config", False) else set()  # made from it by transformers
    said = {token for token in _ids(generation_config) if token not in copied}
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
    for name in _ENDS:
        found: Any = getattr(holder, name, None)
        tokens: Iterable[Any] = found if isinstance(found, list | tuple | set | frozenset) else [found]
        for token in tokens:
            if not isinstance(token, bool) and isinstance(token, Integral):
                yield int(token)


def _is_default(config: Any, token: int) -> bool:
    """Whether transformers gives the id to every model of that type: by its class, or the class's constructor."""
    kind = type(config)
    given = inspect.signature(kind).parameters.get("eos_token_id")  # transformers 5.0 has defaults there alone
    found = getattr(kind, "eos_token_id", None if given is None else given.default)
    return token in (found if isinstance(found, list | tuple) else [found])


def generation_settings(generation_config: Any) -> Mapping[str, Any]:
    """The fields that ask for something, with their values."""
    found = {name: getattr(generation_config, name, None) for name in FIELDS}
    least, ends = getattr(generation_config, "min_length", None), [*_ids(generation_config)]
    if least and ends:
        found = {"min_length": (least, ends), **found}
    tokens = ("forced_bos_token_id", "forced_eos_token_id")  # 0 is one
    return {name: value for name, value in found.items() if value or (name in tokens and value is not None)}


def processors(
    generation_rules: Mapping[str, Any], prompt: Sequence[int], most: int, device: Any,
    source: Sequence[int] | None = None,
) -> tuple[Any, ...]:
    """Logits processors for one sequence; a forced end comes as the last of `most` tokens.

    Args:
        source: what an encoder read; None for models without one.
    """
    if not generation_rules:
        return ()
    import torch
    from transformers.generation import logits_process as hf

    from shoal.engine.constraints.forbidden import Suppressed

    ids, length, device = torch.tensor([list(prompt)], device=device), len(prompt), str(device)
    first = length + (length == 1 and "forced_bos_token_id" in generation_rules)
    make = {
        "sequence_bias": hf.SequenceBiasLogitsProcessor,
        "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size": lambda size: hf.EncoderNoRepeatNGramLogitsProcessor(
            size, ids if source is None else torch.tensor([list(source)], device=device)),
        "bad_words_ids": hf.NoBadWordsLogitsProcessor,
        "min_length": lambda asked: hf.MinLengthLogitsProcessor(*asked, device=device),
        "forced_bos_token_id": hf.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda token: hf.ForcedEOSTokenLogitsProcessor(length + most, token, device),
        "suppress_tokens": Suppressed,
        "begin_suppress_tokens": lambda tokens: Suppressed(tokens, first),
    }
    return tuple(make[name](value) for name, value in generation_rules.items())
