"""The bytes that a token stands for within a text, which decoding it alone does not always tell.

It tells nothing of a part of a character, and loses the space before a word where a tokenizer writes a mark for it.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenBytes:
    """Of one tokenizer; what was asked is remembered.

    Args:
        tokenizer: a transformers tokenizer.

    Attributes:
        tokenizer: that one.
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
