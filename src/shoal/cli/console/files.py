"""Files that a person names in a chat: text that goes with a message."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.user_cache import expanded

MOST = 256
"""Most kB of a file that goes with a message, as on the server's page."""


def place(command: str, path: str) -> Path:
    """The path that was typed after a command, `~` expanded."""
    quoted = len(path) > 1 and path[0] == path[-1] and path[0] in "\"'"  # as terminals put what is dropped on them
    path = path[1:-1] if quoted else path
    if not path:
        raise ValueError(f"{command} needs the name of a file")
    if (found := expanded(path)) is None:
        raise ValueError(f"{path!r} names a home folder that does not exist; write the path in full")
    return found


def attached(path: Path) -> str:
    """A text file as it stands in a message: its name, and its text between more marks than it has in a row itself.

    Raises:
        ValueError: it cannot be read, is larger than `MOST` kB, or is no text.
    """
    try:
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name one file")
        with path.open("rb") as file:
            found = file.read((MOST << 10) + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    if len(found) > MOST << 10:
        raise ValueError(f"{path} is larger than {MOST} kB, the most that goes with a message; cut what matters out of "
                         "it")
    try:
        text = found.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{path} is no text in UTF-8; the models here read text only")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{path.name}:\n{fence}\n{text.removesuffix(chr(10))}\n{fence}"
