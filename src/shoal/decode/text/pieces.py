"""Tokens to text and to bytes.

The pieces of text join to what decoding all tokens at once gives. Only text that no later token can change is given
out. Held back are the last replacement character, which a later byte may complete, and, with byte-fallback tokenizers
(Llama 2 style), a run of byte tokens until it ends, since one bad byte turns the whole run into replacement characters.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class Detokenizer:
    """Incremental decoder of one sequence, at a cost linear in its tokens; without a tokenizer every piece is "".

    The pieces of all `push` calls and of `flush` join to
    `tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)`.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # finished tokens that keep the next ones from being first in their text
        self._open: list[int] = []  # tokens whose text may still change
        self._given = 0  # characters of decode(context + open) given out
        self._run: _ByteRun | None = None
        self._kinds: dict[int, bytes | None] = {}
        self._alone: dict[int, str] = {}  # texts of tokens by themselves
        self._whole = _whole_texts(tokenizer)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Any tokens as text; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._decode(list(tokens))

    def copy(self) -> Detokenizer:
        """The same state for other tokens to come."""
        copied = copy.copy(self)
        copied._context, copied._open, copied._run = list(self._context), list(self._open), copy.deepcopy(self._run)
        return copied

    @property
    def tail(self) -> str:
        """Whole characters that decoding now would give beyond the pieces so far; a later token may undo them."""
        return self._run.text if self._run else ""

    def push(self, token: int) -> str:
        """The text that became certain with `token`."""
        if self._whole is not None and not self._open:
            whole = self._whole.get(token)
            if whole is not None:
                self._run = None
                return whole
        if token not in self._kinds:
            self._kinds[token] = self._classify(token)
        kind = self._kinds[token]
        if kind == b"":
            return ""
        if kind is not None:
            return self._push_byte(token, kind)
        self._run = None
        self._open.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT):
            piece = self._give(text[:-1])
            self._narrow(text)
        else:
            piece = self._give(text)
            self._close(self._open)
        return piece

    def flush(self) -> str:
        """What was held back, an unfinished character as U+FFFD; to be called once, after the last token."""
        self._run = None
        return self._give(self._text()) if self._open else ""

    def _classify(self, token: int) -> bytes | None:
        """The byte that `token` stands for, b"" for a token without text of its own, None for any other."""
        if self._tokenizer is None or (name := self._tokenizer.convert_ids_to_tokens(token)) is None:
            return b""
        text = self._alone[token] = self._decode([token])
        if text == "" and self._decode([token], skip_special_tokens=False) != "":
            return b""
        byte = _BYTE.fullmatch(name)
        if byte and text != name:
            return bytes.fromhex(byte[1])
        if self._whole is not None and REPLACEMENT not in text:
            self._whole[token] = text
        return None

    def _push_byte(self, token: int, byte: bytes) -> str:
        piece = ""
        if self._run is None:
            piece = self._give(self._text()) if self._open else ""
            self._close(self._open)
            self._run = _ByteRun()
        if self._context or self._open or self._decode([token]):  # else a leading space that the tokenizer strips
            self._run.push(byte)
        self._open.append(token)
        return piece

    def _narrow(self, text: str) -> None:
        """Close what stands before the last token where the two share no character, so that the window stays small."""
        *before, last = self._open
        if before and text == self._decode(self._context + before) + self._decode([last]):
            given = len(text) - self._given
            self._close(before)
            self._open = [last]
            self._given = len(self._text()) - given

    def _close(self, tokens: list[int]) -> None:
        """Make `tokens` the context: they show all that a tokenizer may drop or add between two tokens."""
        if tokens and (text := self._alone[tokens[0]] if len(tokens) == 1 else self._decode(tokens)):
            self._context, self._given = tokens, len(text)
        else:
            self._context = self._context + tokens
        self._open = []

    def _give(self, text: str) -> str:
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece

    def _text(self) -> str:
        return self._decode(self._context + self._open)

    def _decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        tokenizer: Any = self._tokenizer
        text: str = tokenizer.decode(
            tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


_TEXTS: WeakKeyDictionary[Any, tuple[int, dict[int, str]]] = WeakKeyDictionary()
_JOINING = {"ByteFallback", "ByteLevel", "Fuse", "Replace"}
"""Decoders that turn tokens, one by one, into bytes: the text of several is that of their bytes."""


def _whole_texts(tokenizer: Any | None) -> dict[int, str] | None:
    """The texts of tokens of whole characters, as far as they are known, for all sequences; None if texts do not join.

    They are forgotten when the tokenizer gets other tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer is None or backend is None or _decodes_by_itself(type(tokenizer)):
        return None
    size, texts = _TEXTS.get(tokenizer, (-1, {}))
    if size != len(tokenizer):
        form = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        if not {one.get("type") for one in form.get("decoders", [form])} <= _JOINING:
            return None
        texts = {}
        _TEXTS[tokenizer] = len(tokenizer), texts
    return texts


def _decodes_by_itself(kind: type) -> bool:
    """Whether a tokenizer's class adds to what its backend decodes."""
    from transformers import PreTrainedTokenizerFast as Plain  # not while modules are imported: it takes seconds

    return not issubclass(kind, Plain) or any(
        getattr(kind, name) is not getattr(Plain, name) for name in ("decode", "_decode"))


class _ByteRun:
    """Consecutive byte tokens: their whole characters while they are valid UTF-8, nothing after a bad byte."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")("strict")
        self.text = ""

    def push(self, byte: bytes) -> None:
        if self._decoder is None:
            return
        try:
            self.text += self._decoder.decode(byte)
        except UnicodeDecodeError:
            self._decoder, self.text = None, ""


class TokenBytes:
    """The bytes that a token of one tokenizer stands for within a text, which decoding it alone does not always tell.

    Decoding shows nothing of a part of a character, and loses the space before a word where a tokenizer writes a mark
    for it. Answers are kept.

    Attributes:
        tokenizer: a transformers tokenizer.
        special: ids of tokens that texts do not show.
        byte_level: whether a text is the bytes of its tokens, whatever those are.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.special, self._known = tokenizer, frozenset(tokenizer.all_special_ids), dict[int, bytes]()
        self._added = {token: str(added) for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self.byte_level = _is_byte_level(tokenizer)
        self._letters = _letters() if self.byte_level else {}

    def __call__(self, token: int) -> bytes:
        """Empty for an id without a text, as of a padded embedding."""
        if token not in self._known:
            self._known[token] = self._of(token)
        return self._known[token]

    def _of(self, token: int) -> bytes:
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None or (token in self._added and (self.byte_level or token in self.special)):
            return self._added.get(token, "").encode("utf-8")
        if self.byte_level and all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        text: str = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        byte = _BYTE.fullmatch(name)
        if byte and text != name:
            return bytes.fromhex(byte[1])
        return (name.replace(_SPACE, " ") if _SPACE in name and _SPACE not in text else text).encode("utf-8")


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and '"ByteLevel"' in json.dumps(json.loads(decoder.__getstate__()))


def _letters() -> dict[str, int]:
    """The letters in which GPT-2's tokenizers write bytes: printable ones as themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
