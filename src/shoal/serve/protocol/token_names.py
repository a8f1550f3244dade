"""Tokens in answers that tell of log-probabilities: their texts, their bytes, and where they stand in the text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from shoal.decode.text.pieces import Detokenizer
from shoal.decode.text.token_bytes import TokenBytes
from shoal.types import TokenLogprob, finite_logprob


class TokenNames:
    """How the tokens of one answer are called.

    Args:
        words: the bytes of tokens; None for a model without a tokenizer.
        as_ids: whether they are called by their ids, `token_id:5`, as where there is no tokenizer.
    """

    def __init__(self, words: TokenBytes | None, as_ids: bool = False) -> None:
        self.words, self._as_ids = words, as_ids

    def raw(self, token: int) -> list[int] | None:
        """The bytes of a token's text; None without a tokenizer."""
        return None if self.words is None else list(self.words(token))

    def text(self, token: int, mark: str = "") -> str:
        """A token's text; bytes that are no character are written as OpenAI does, in hex, with `mark` before them."""
        if self._as_ids or self.words is None:
            return f"token_id:{token}"
        raw = self.words(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return mark + raw.decode("utf-8", "backslashreplace")

    def legacy(self, entry: TokenLogprob) -> tuple[str, dict[str, float]]:
        """A token and its alternatives by their texts, as plain completions tell them; the token is one of them.

        Of several tokens with one text the chosen one has it, else the likeliest; the others are called by their ids.
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
    """Where the tokens of one text begin in it, in characters. A part of a character begins where that does.

    Args:
        words: the bytes of tokens; None where there are no texts.
        start: characters before the first token.
        shown: whether special tokens are a part of the text.
    """

    def __init__(self, words: TokenBytes | None, start: int = 0, shown: bool = False) -> None:
        self._at, self._words, self._shown = start, words, shown
        tokenizer = None if words is None else words.tokenizer
        self._detokenizer = Detokenizer(_Shown(tokenizer) if shown else tokenizer)
        self._decoder = _UTF8("replace")

    def push(self, token: int) -> int:
        """Where `token` begins."""
        if self._words is None or (token in self._words.special and not self._shown):
            return self._at + len(self._detokenizer.tail)
        if self._words.byte_level:
            return self._push_bytes(self._words(token))
        begins = self._at + len(self._detokenizer.tail)
        self._at += len(self._detokenizer.push(token))
        return begins

    def _push_bytes(self, raw: bytes) -> int:
        """Of bytes that are no character one stands in the text for each run that began as one."""
        pending = self._decoder.getstate()[0]
        begins = self._at + (bool(pending and raw) and not _goes_on(pending + raw[:1]))
        self._at += len(self._decoder.decode(raw))
        return begins


class _Shown:
    """A tokenizer that decodes special tokens as all others."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


_UTF8 = codecs.getincrementaldecoder("utf-8")


def _goes_on(raw: bytes) -> bool:
    """Whether bytes are a character or the beginning of one."""
    try:
        _UTF8("strict").decode(raw)
    except UnicodeDecodeError:
        return False
    return True


def prompt_offsets(prompt: str | Sequence[int], ids: Sequence[int], words: TokenBytes) -> list[int]:
    """Where the tokens of a prompt begin in it, as text; those that the tokenizer adds to a text take no room.

    Args:
        prompt: as it was given, text or ids.
        ids: its tokens.
        words: the bytes of tokens.
    """
    if isinstance(prompt, str) and words.tokenizer.is_fast and not words.byte_level:
        starts = [start for start, _ in words.tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]]
        return list(accumulate(starts, max))  # what is added at the end is told as standing at the beginning
    added = _added(prompt, ids, words.tokenizer)
    where = Offsets(words, shown=True)
    told = {place: where.push(token) for place, token in enumerate(ids) if place not in added}
    return [told.get(place, 0 if place < min(told, default=0) else max(told.values(), default=0))
            for place in range(len(ids))]


def _added(prompt: str | Sequence[int], ids: Sequence[int], tokenizer: Any) -> set[int]:
    """Places of the tokens that a tokenizer adds to a text: a beginning of sequence before it, mostly."""
    if not isinstance(prompt, str):
        return set()
    plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    places = range(len(ids) - len(plain) + 1)
    before = next((place for place in places if list(ids[place : place + len(plain)]) == plain), 0)
    return set(range(len(ids))) - set(range(before, before + len(plain)))
