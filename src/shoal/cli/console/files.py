"""Files that a person names in a chat: texts, pictures, films and sounds that go with a message."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.user_cache import expanded

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

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
    found = _read(path, MOST, "cut what matters out of it")
    try:
        text = found.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{path} is no text in UTF-8; /image adds a picture, where the model sees")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{path.name}:\n{fence}\n{text.removesuffix(chr(10))}\n{fence}"


def picture(path: Path, engine: Engine) -> str:
    """The data URL of a picture's file.

    Raises:
        ValueError: it cannot be read, is too large, or is no whole picture.
        Unsupported: the model reads none.
    """
    from shoal.engine.picture_files import MOST_BYTES, decoded, url_of
    from shoal.engine.pictures import blind

    if engine.vision is None:
        raise blind(engine)
    data = _read(path, MOST_BYTES >> 10, "make it smaller")
    try:
        decoded(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return url_of(data)


def film(path: Path, engine: Engine) -> str:
    """The data URL of a film's file.

    Raises:
        ValueError: it cannot be read, is too large, or is no film.
        Unsupported: the model sees none.
    """
    from shoal.engine.film_files import MOST_BYTES, FilmFile
    from shoal.engine.pictures import check_films

    check_films(engine)
    data = _read(path, MOST_BYTES >> 10, "cut it into parts")
    FilmFile(data, str(path))
    return f"data:video/{path.suffix[1:].lower() or 'mp4'};base64,{base64.b64encode(data).decode()}"


def sound(path: Path, engine: Engine) -> str:
    """The data URL of a sound's file.

    Raises:
        ValueError: it cannot be read, is too large, or has no sound.
        Unsupported: the model hears none.
    """
    from shoal.audio import Audio
    from shoal.engine.sounds import MOST_BYTES, deaf

    if engine.hearing is None:
        raise deaf(engine)
    data = _read(path, MOST_BYTES >> 10, "cut it into parts")
    with Audio(io.BytesIO(data), str(path)):
        return f"data:audio/{path.suffix[1:].lower() or 'wav'};base64,{base64.b64encode(data).decode()}"


def with_shown(urls: Collection[str], text: str) -> str | list[dict[str, Any]]:
    """A message's content: text, or parts where pictures, films and sounds come before it."""
    kinds = [{"data:audio": "audio_url", "data:video": "video_url"}.get(url.partition("/")[0], "image_url")
             for url in urls]
    shown = [{"type": kind, kind: {"url": url}} for kind, url in zip(kinds, urls, strict=True)]
    return [*shown, {"type": "text", "text": text}] if shown else text


def _read(path: Path, most: int, remedy: str) -> bytes:
    """A file of at most `most` kB; ValueError for a larger one, and where there is none."""
    try:
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name one file")
        with path.open("rb") as file:
            found = file.read((most << 10) + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    if len(found) > most << 10:
        raise ValueError(f"{path} is larger than {most} kB, the most that goes with a message; {remedy}")
    return found
