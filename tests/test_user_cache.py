"""Files in the user's cache are there whole or not at all."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

import shoal
from gguf_fixtures import FILES, IDS
from shoal import catalog, user_cache
from shoal.cli.options import config
from shoal.engine.cards import card as cards
from shoal.model.packed import native
from shoal.model.packed.native import build
from shoal.user_cache import cache_folder, expanded, write_whole

FOLDERS = ("HOME", "SHOAL_CONFIG", "SHOAL_MODELS", "SHOAL_WEIGHTS", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
HOMELESS = """
import pwd, sys
def unknown(user): raise KeyError(user)
pwd.getpwuid = unknown
from shoal.cli.entry import main
sys.exit(main())
"""


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user id that has no name, as a container may be started with: no home folder, and nothing says where else."""

    def unknown(user: int) -> Any:
        raise KeyError(user)

    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_without_a_home_folder_nothing_is_kept(homeless: Path) -> None:
    write_whole(cache_folder() / "a" / "b", lambda file: file.write(b"x"))
    assert not cache_folder().exists()
    assert expanded("~/x") is None and expanded("x") == Path("x")
    assert config.files() == [] and list(cards.cached().glob("*.json")) == []
    assert catalog.find("nobody-knows-it") == "nobody-knows-it" and catalog.place("gemma3-270m") is None
    (homeless / "file").write_bytes(b"abc")
    assert user_cache.sha256(homeless / "file").startswith("ba7816bf")
    assert [path.name for path in homeless.iterdir()] == ["file"]


def test_without_a_home_folder_a_model_runs(homeless: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert native.available() in (True, False)  # what was compiled for this process stays
    engine = shoal.load(FILES[0].path, dtype="float32")
    assert len(engine.generate(IDS, max_new_tokens=3, ignore_eos=True).tokens) == 3
    assert not native.available() or "not kept for the next start" in caplog.text
    assert list(homeless.iterdir()) == []


@pytest.mark.parametrize("home", ["none", "forbidden"])
def test_kernels_are_compiled_where_nothing_can_be_kept(
    homeless: Path, home: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if home == "forbidden":
        monkeypatch.setenv("HOME", str(homeless / "file"))
        (homeless / "file").write_text("")
    folder = build._writable(build.cache_folder() / "some")
    assert folder.is_dir() and homeless not in folder.parents and os.devnull not in str(folder)
    assert "compiled for this process alone" in caplog.text and "XDG_CACHE_HOME" in caplog.text
    assert build._writable(homeless / "some") == homeless / "some"


@pytest.mark.slow
def test_a_command_of_a_user_without_a_home_folder(tmp_path: Path) -> None:
    words = ["generate", "The quick", "--model", str(FILES[0].path), "--max-new-tokens", "3", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in FOLDERS}
    done = subprocess.run([sys.executable, "-c", HOMELESS, *words], env=environment, cwd=tmp_path, check=False,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and '"tokens"' in done.stdout and "Traceback" not in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []
