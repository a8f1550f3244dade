"""Files in the user's cache are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import pytest

from shoal.user_cache import cache_folder, write_whole


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "shoal"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "shoal"


def test_a_file_takes_its_name_when_all_of_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen, replace = [], os.replace

    def watched(source: Any, target: Any) -> None:
        seen.append(Path(source).read_bytes())
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write_whole(tmp_path / "a" / "b", lambda file: file.write(b"short"))
    assert seen == [b"short"] and [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(error: Exception) -> Any:
        def write(file: IO[bytes]) -> None:
            file.write(b"half")
            raise error

        return write

    write_whole(tmp_path / "full", fails(OSError("no space left")))
    with pytest.raises(ZeroDivisionError):
        write_whole(tmp_path / "wrong", fails(ZeroDivisionError()))
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    write_whole(tmp_path / "file" / "below", lambda file: file.write(b"x"))
