"""Tokens in answers that tell of log-probabilities: their texts, their bytes, and where they stand in the text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from shoal.decode.text import Detokenizer
from shoal.decode.token_bytes import TokenBytes
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
    """

    def __init__(self, words: TokenBytes | None, start: int = 0) -> None:
        self._at, self._words = start, words
        self._detokenizer = Detokenizer(None if words is None else words.tokenizer)
        self._decoder = _UTF8("replace")

    def push(self, token: int, shown: bool = False) -> int:
        """Where `token` begins; `shown`: whether the text shows special tokens."""
        if self._words is None or (token in self._words.special and not shown):
            return self._at + len(self._detokenizer.tail)
        if self._words.byte_level:
            return self._push_bytes(self._words(token))
        if token in self._words.special:
            self._at += len(self._detokenizer.flush())
            begins, self._at = self._at, self._at + len(self._words(token).decode("utf-8"))
            return begins
        begins = self._at + len(self._detokenizer.tail)
        self._at += len(self._detokenizer.push(token))
        return begins

    def _push_bytes(self, raw: bytes) -> int:
        """Of bytes that are no character one stands in the text for each run that began as one."""
        pending = self._decoder.getstate()[0]
        begins = self._at + (bool(pending and raw) and not _goes_on(pending + raw[:1]))
        self._at += len(self._decoder.decode(raw))
        return begins


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
    added, where = _added(prompt, ids, words.tokenizer), Offsets(words)
    return [where.push(token, place not in added) for place, token in enumerate(ids)]


def _added(prompt: str | Sequence[int], ids: Sequence[int], tokenizer: Any) -> set[int]:
    """Places of the tokens that stand in no text: the beginning of sequence, mostly."""
    if not isinstance(prompt, str):
        return set()
    plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    places = range(len(ids) - len(plain) + 1)
    before = next((place for place in places if list(ids[place : place + len(plain)]) == plain), 0)
    return set(range(len(ids))) - set(range(before, before + len(plain)))
