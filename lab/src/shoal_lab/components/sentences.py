"""Ends of sentences, in text that comes token by token. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shoal.decode.text.pieces import Detokenizer

_CLOSING = r"[\"'”’)\]*_]*"
_END = re.compile(
    rf"\n|[!?]{_CLOSING}(?:\s|$)"  # a question, even if nothing has followed yet
    rf"|(?<!\b[^\W\d])\.{_CLOSING}\s"  # a full stop, except that of a letter, as in e.g. and J. Smith
    rf"|(?<![\d.])(?<!\b[^\W\d])\.{_CLOSING}$"  # after a number or another stop only white space decides
)


class Sentences:
    """Follows the text of one sequence.

    Args:
        tokenizer: a transformers tokenizer; None for no text, hence one endless sentence.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._text = ""

    def ends_with(self, token: int) -> bool:
        """Whether a sentence ends with this token, or within it; the rest of it begins the next one."""
        self._text += self._detokenizer.push(token)
        found = end_of(self._text)
        if found is not None:
            self._text = self._text[found:]
        return found is not None


def end_of(text: str) -> int | None:
    """Where the last complete sentence of `text` ends; None without one. A sentence has a letter or a digit."""
    return max(_ends(text), default=None)


def last_of(text: str, count: int) -> str:
    """The last `count` sentences of a text, of which the last may be incomplete."""
    ends = [end for end in _ends(text) if text[end:].strip()]
    return text[ends[-count] :] if len(ends) >= count else text


def _ends(text: str) -> Iterator[int]:
    place = 0
    while (first := re.compile(r"[^\W_]").search(text, place)) and (found := _END.search(text, first.end())):
        place = found.end()
        yield place
