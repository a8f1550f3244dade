"""Fetches a model into the Hub's cache, where every tool that uses `huggingface_hub` finds it.

That package asks the Hub and places files; its own downloads begin anew when a process is killed (its version 2), so a
large file is read here into `<hash>.part` beside the cache's other files, goes on from there, and gets its place once
its SHA-256 is the one that the Hub states.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.hub.choose import Chosen, choose
from shoal.hub.failures import FULL, patient, told
from shoal.hub.names import Wanted
from shoal.hub.places import storage
from shoal.user_cache import computed_sha256, sha256

PART = ".part"
_BREAKS = 20
"""How often an answer may break off before a pull ends."""


@dataclass(frozen=True)
class Remote:
    """A file as the Hub knows it.

    Attributes:
        path: in the repository.
        size: its bytes.
        sha256: of its bytes, for files in the Hub's large storage; else empty.
        git: its id in git, SHA-1 of a header and its bytes, for files that are not.
    """

    path: str
    size: int
    sha256: str
    git: str


@dataclass(frozen=True)
class Order:
    """A model on the Hub that may be fetched.

    Attributes:
        wanted: what was asked for.
        revision: branch, tag or commit; None for the main branch.
        commit: the state of the repository, a hash.
        chosen: which files it is.
        files: the same files as the Hub knows them.
    """

    wanted: Wanted
    revision: str | None
    commit: str
    chosen: Chosen
    files: tuple[Remote, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def missing(self) -> int:
        """Bytes that are not on this machine yet."""
        return sum(file.size - _held(self, file) for file in self.files)


def order(wanted: Wanted, revision: str | None = None, sees: bool = True) -> Order:
    """What the Hub says of a model: its files, their sizes and hashes.

    Args:
        sees: whether what reads pictures beside a GGUF file is wanted, too.

    Raises:
        ValueError: the Hub cannot be reached, does not have it or does not give it; says what to do.
    """
    from huggingface_hub import HfApi

    revision = revision or wanted.revision
    with told(wanted):
        info = patient(lambda: HfApi().model_info(wanted.repository, revision=revision, files_metadata=True))
    known = {one.rfilename: Remote(one.rfilename, one.size or 0, "" if one.lfs is None else one.lfs.sha256,
                                   one.blob_id or "") for one in info.siblings or ()}
    chosen = choose(wanted, known, sees)
    absent = [path for path in chosen.paths if path not in known]
    if absent:
        raise ValueError(f"{wanted.repository} lacks {absent[0]!r}, a part of {chosen.first!r}; choose another file")
    return Order(wanted, revision, info.sha, chosen, tuple(known[path] for path in chosen.paths))


def fetch(asked: Order, say: Callable[[str], object] = lambda _: None) -> Path:
    """Fetch what is missing of a model, and return the file or folder to load.

    Args:
        say: gets a line before each file that is fetched.

    Raises:
        ValueError: there is no room, the Hub fails, or a file's bytes are not the ones it states; such a file and what
            a full disk has cut off are removed, what an interruption leaves is kept.
    """
    check_room(asked)
    first = Path()
    for number, file in enumerate(asked.files):
        with told(asked.wanted, file.path):
            placed = _bring(asked, file, say)
        first = first if number else placed
    return first if asked.chosen.first else first.parent


def check_room(asked: Order) -> None:
    """Refuse a model that the disk has no room for; ValueError with both sizes."""
    free, place = free_bytes(asked)
    if asked.missing > free:
        raise ValueError(f"{asked.wanted.name} takes {amount(asked.missing)} more, and {amount(free)} are free on the "
                         f"disk of {place}. Free some room, or set HF_HOME to a folder on another disk")


def free_bytes(asked: Order) -> tuple[int, Path]:
    """Bytes that are free on the disk of the cache, and the folder that says so."""
    folder = storage(asked.wanted.repository)
    place = next(one for one in (folder, *folder.parents) if one.is_dir())
    return shutil.disk_usage(place).free, place


def amount(size: int) -> str:
    """Bytes as people read them."""
    for unit, bytes_of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bytes_of:
            return f"{size / bytes_of:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{size} bytes"


def parts_of(repository: str) -> list[Path]:
    """What is here of files that were not fetched to their end."""
    return sorted((storage(repository) / "blobs").glob(f"*{PART}"))


def _held(asked: Order, file: Remote) -> int:
    """Bytes of a file that are here."""
    if _blob(asked, file).exists() or _pointer(asked, file).exists():
        return file.size
    with suppress(OSError):
        return min(_part(asked, file).stat().st_size, file.size)
    return 0


def _bring(asked: Order, file: Remote, say: Callable[[str], object]) -> Path:
    """The place of a file in the cache, with the bytes that the Hub states."""
    from huggingface_hub import constants, hf_hub_download

    checked = False
    if not _blob(asked, file).exists() and not _pointer(asked, file).exists():
        done = _held(asked, file)
        say(f"fetching {file.path}, {amount(file.size)}{f', of which {amount(done)} are here' if done else ''}")
        if file.sha256 and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            _read(asked, file)
            checked = True
    placed = Path(hf_hub_download(asked.wanted.repository, file.path, revision=asked.revision))
    if not checked:
        _check(file, placed)
    return placed


def _read(asked: Order, file: Remote) -> None:
    """Read a large file to its end, check it, and put it among the cache's blobs."""
    from huggingface_hub.file_download import hf_hub_url
    from huggingface_hub.utils import WeakFileLock

    blob, part = _blob(asked, file), _part(asked, file)
    for folder in (part.parent, _lock(asked, file).parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(_lock(asked, file)):
        if blob.exists():  # another process has read it meanwhile
            return
        with _gone_if_useless(part):
            _read_on(hf_hub_url(asked.wanted.repository, file.path, revision=asked.commit), part, file)
        _refuse_other(file, computed_sha256(part), part)
        os.replace(part, blob)


def _read_on(address: str, part: Path, file: Remote) -> None:
    """Read the rest of a file. Where an answer breaks off it is asked for from there, if that has brought something.

    Newer versions of `huggingface_hub` do so themselves, older ones at some errors only.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    for tried in range(1, _BREAKS + 1):
        with part.open("ab") as out:
            if out.tell() > file.size:  # it can be no beginning of the file
                out.truncate(0)
            begin = out.seek(0, os.SEEK_END)
            try:
                http_get(address, out, resume_size=begin, headers=build_hf_headers(), expected_size=file.size,
                         displayed_filename=file.path)
                return
            except HfHubHTTPError:
                raise
            except (HTTPError, OSError) as error:
                full = isinstance(error, OSError) and error.errno is not None  # without a number, a size is wrong
                if full or tried == _BREAKS or out.seek(0, os.SEEK_END) <= begin:
                    raise


@contextmanager
def _gone_if_useless(part: Path) -> Iterator[None]:
    """Remove a file that a full disk has cut off, or that has no byte."""
    try:
        yield
    except BaseException as error:
        if (isinstance(error, OSError) and error.errno in FULL) or (part.exists() and not part.stat().st_size):
            part.unlink(missing_ok=True)
        raise


def _check(file: Remote, placed: Path) -> None:
    """Refuse a file of the cache with other bytes than the Hub states, and remove it."""
    if file.sha256:
        _refuse_other(file, sha256(placed), placed)
    elif file.git:
        data = placed.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        _refuse_other(file, found, placed)


def _refuse_other(file: Remote, found: str, path: Path) -> None:
    stated = file.sha256 or file.git
    if found != stated:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise ValueError(f"{file.path} has the hash {found}, and the Hub states {stated}: its bytes were changed or "
                         "damaged on the way. It is removed; pull again")


def _blob(asked: Order, file: Remote) -> Path:
    """Where the cache has the bytes of a file."""
    return storage(asked.wanted.repository) / "blobs" / (file.sha256 or file.git)


def _part(asked: Order, file: Remote) -> Path:
    """Where the bytes of a file are until all are there."""
    return _blob(asked, file).with_name((file.sha256 or file.git) + PART)


def _lock(asked: Order, file: Remote) -> Path:
    """The lock of `huggingface_hub` for a file."""
    home = storage(asked.wanted.repository)
    return home.parent / ".locks" / home.name / f"{file.sha256}.lock"


def _pointer(asked: Order, file: Remote) -> Path:
    """Where the cache has a file under its name."""
    return storage(asked.wanted.repository) / "snapshots" / asked.commit / file.path
