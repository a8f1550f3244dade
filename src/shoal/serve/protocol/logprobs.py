"""Tokens in answers with log-probabilities: their texts, bytes and offsets, and the echo of a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from shoal.decode import sampling
from shoal.decode.text.pieces import Detokenizer, TokenBytes
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.request import prompt_ids
from shoal.model.lora.adapter import FittedAdapter
from shoal.model.runner import SequenceChunk
from shoal.types import TokenLogprob, finite_logprob

_PIECE = 64
"""Tokens of an echoed prompt that are read at a time; decoding waits meanwhile."""


class TokenNames:
    """The names of tokens in one answer: their texts, or `token_id:5` without a vocabulary or `as_ids`."""

    def __init__(self, vocabulary: TokenBytes | None, as_ids: bool = False) -> None:
        self.vocabulary, self._as_ids = vocabulary, as_ids

    def raw(self, token: int) -> list[int] | None:
        """The bytes of a token's text; None without a tokenizer."""
        return None if self.vocabulary is None else list(self.vocabulary(token))

    def text(self, token: int, mark: str = "") -> str:
        """A token's text. Bytes that are no character are written in hex, as by OpenAI, after `mark`."""
        if self._as_ids or self.vocabulary is None:
            return f"token_id:{token}"
        raw = self.vocabulary(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return mark + raw.decode("utf-8", "backslashreplace")

    def legacy(self, entry: TokenLogprob) -> tuple[str, dict[str, float]]:
        """A token, and its alternatives by their texts, itself included, in the form of plain completions.

        If several tokens have one text, the chosen or else the most likely one gets it; the others are named by id.
        """
        own = self.text(entry.token, "bytes:")
        named = {entry.token: own} if entry.top else {}
        for token, _ in entry.top:
            text = self.text(token, "bytes:")
            named.setdefault(token, f"token_id:{token}" if text in named.values() else text)
        values = {**dict(entry.top), entry.token: entry.logprob}
        order = [token for token, _ in entry.top]
        order += [token for token in named if token not in order]
        return own, {named[token]: finite_logprob(values[token]) for token in order}


class Offsets:
    """Where the tokens of one text begin, in characters. A part of a character begins where the character does.

    Args:
        vocabulary: the bytes of tokens; None if tokens have no text.
        start: characters before the first token.
        shown: whether the text contains special tokens.
    """

    def __init__(self, vocabulary: TokenBytes | None, start: int = 0, shown: bool = False) -> None:
        self._at, self._vocabulary, self._shown = start, vocabulary, shown
        tokenizer = None if vocabulary is None else vocabulary.tokenizer
        self._detokenizer = Detokenizer(_Shown(tokenizer) if shown else tokenizer)
        self._decoder = _UTF8("replace")

    def push(self, token: int) -> int:
        """Where `token` begins."""
        if self._vocabulary is None or (token in self._vocabulary.special and not self._shown):
            return self._at + len(self._detokenizer.tail)
        if self._vocabulary.byte_level:
            return self._push_bytes(self._vocabulary(token))
        begins = self._at + len(self._detokenizer.tail)
        self._at += len(self._detokenizer.push(token))
        return begins

    def _push_bytes(self, raw: bytes) -> int:
        """Where some bytes begin. Each run of bytes that began a character but is none counts as one character."""
        pending = self._decoder.getstate()[0]
        begins = self._at + (bool(pending and raw) and not _goes_on(pending + raw[:1]))
        self._at += len(self._decoder.decode(raw))
        return begins


class _Shown:
    """A tokenizer that decodes special tokens like all others."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


_UTF8 = codecs.getincrementaldecoder("utf-8")


def _goes_on(raw: bytes) -> bool:
    """Whether the bytes are a character or the beginning of one."""
    try:
        _UTF8("strict").decode(raw)
    except UnicodeDecodeError:
        return False
    return True


def prompt_offsets(prompt: str | Sequence[int], ids: Sequence[int], vocabulary: TokenBytes) -> list[int]:
    """Where the tokens of a prompt begin in its text. Tokens that the tokenizer adds have no length."""
    tokenizer = vocabulary.tokenizer
    if isinstance(prompt, str) and tokenizer.is_fast and not vocabulary.byte_level:
        starts = [start for start, _ in tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]]
        return list(accumulate(starts, max))  # tokenizers report 0 for a token added at the end
    added = _added(prompt, ids, tokenizer)
    where = Offsets(vocabulary, shown=True)
    found = {place: where.push(token) for place, token in enumerate(ids) if place not in added}
    return [found.get(place, 0 if place < min(found, default=0) else max(found.values(), default=0))
            for place in range(len(ids))]


def _added(prompt: str | Sequence[int], ids: Sequence[int], tokenizer: Any) -> set[int]:
    """Places of the tokens that a tokenizer adds to a text, mostly a beginning of sequence."""
    if not isinstance(prompt, str):
        return set()
    plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    places = range(len(ids) - len(plain) + 1)
    before = next((place for place in places if list(ids[place : place + len(plain)]) == plain), 0)
    return set(range(len(ids))) - set(range(before, before + len(plain)))


@dataclass(frozen=True)
class Echo:
    """A prompt before an answer: its text, and of its tokens log-probabilities, if wanted, and where each begins."""

    text: str = ""
    scored: Sequence[TokenLogprob] = ()
    offsets: Sequence[int] = ()


def echo_of(
    engine: Engine, prompt: str | list[int], top: int | None, vocabulary: TokenBytes | None,
    adapter: FittedAdapter | None = None,
) -> Echo:
    """The echo of a prompt, with `top` alternatives for each of its tokens; None for no log-probabilities.

    Raises:
        ValueError: the prompt is empty or too long, or the model has no tokenizer.
    """
    runner, most = engine.runner, engine.runner.max_positions
    ids = prompt_ids(prompt, engine.tokenizer, runner.vocab_size, None if most is None else most + 1)
    if vocabulary is None:
        raise ValueError("the prompt cannot be echoed: the model has no tokenizer, so tokens have no text")
    decode = vocabulary.tokenizer.decode
    text = prompt if isinstance(prompt, str) else str(decode(prompt, clean_up_tokenization_spaces=False))
    if top is None:
        return Echo(text)
    offsets = [min(offset, len(text)) for offset in prompt_offsets(prompt, ids, vocabulary)]
    return Echo(text, prompt_logprobs(engine, ids, top, adapter), offsets)


@torch.no_grad()
def prompt_logprobs(
    engine: Engine, ids: Sequence[int], top: int, adapter: FittedAdapter | None = None
) -> list[TokenLogprob]:
    """The log-probability of each token of a prompt, by all layers and without sampling options; 0 for the first.

    The prompt is read a second time for it, in turns with the scheduler.
    """
    runner, found = engine.runner, [TokenLogprob(ids[0], 0.0)]
    cache, plan = runner.new_cache(1), DepthPlan.full(runner.num_layers)
    cache.adapt(0, adapter)
    size = min(_PIECE, runner.prefill_chunk)
    for first in range(0, len(ids) - 1, size):
        tokens = ids[first : first + size]
        chunk = SequenceChunk(0, tokens, [0] * len(tokens), plan, wanted=len(tokens))
        with engine.turn():
            logits = runner.forward([chunk], cache)
            cache.commit(0, range(len(tokens)))
        following = ids[first + 1 : first + 1 + len(tokens)]
        found += [sampling.logprob(scores, token, top) for scores, token in zip(logits, following, strict=False)]
    return found
