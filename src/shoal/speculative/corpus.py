"""Text files as tokens, for proposers that learn from text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 16


def tokens_of(path: str, tokenizer: Any, option: str) -> list[int]:
    """The tokens of the text file that an option names; ValueError if there is none, or no tokenizer, or no UTF-8."""
    if tokenizer is None:
        raise ValueError(f"{option} is {path!r}, but the model has no tokenizer to read it with; "
                         "load the model with one")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{option} is {path!r}, which cannot be read as UTF-8 text: {error}") from error
    found: list[int] = []
    for piece in _pieces(text):
        found.extend(tokenizer(piece, add_special_tokens=False)["input_ids"])
    return found


def _pieces(text: str) -> Iterator[str]:
    """Pieces of moderate size that end at line ends: tokenizers are slow on one long string."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def stamp_of(path: str) -> int:
    """Modification time of a file in ns, as a cache key for its text; 0 if there is no file."""
    return Path(path).stat().st_mtime_ns if Path(path).is_file() else 0
