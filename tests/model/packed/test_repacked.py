"""Woven weights that are kept between starts."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gguf_blocks import random_blocks
from shoal.model.gguf.header import GgmlType
from shoal.model.packed import native, repacked
from shoal.model.packed.repacked import Repacked

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

BLOCKS = {"a": random_blocks(GgmlType.Q4_K, 48, 256), "b": random_blocks(GgmlType.Q5_0, 16, 64)}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SHOAL_WEIGHTS", raising=False)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"some bytes")
    return path


def load(file: Path, expected: int = 1 << 20) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The matrices of a file, and which of them had to be made."""
    made: list[str] = []

    def maker(name: str):
        def make(arena: native.Memory) -> native.PackedWeight:
            made.append(name)
            return native.pack_blocks(BLOCKS[name], arena=arena)

        return make

    kept = Repacked((file,), expected)
    packed = {name: kept.take(name, maker(name)) for name in BLOCKS}
    kept.finish()
    return {name: matrix.unpack() for name, matrix in packed.items()}, made


def right(matrices: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(matrices[name], blocks.dequantise()) for name, blocks in BLOCKS.items())


def folders() -> list[Path]:
    return list(repacked.cache_folder().iterdir())


def test_where_they_are_kept(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repacked.cache_folder() == tmp_path / "cache" / "shoal" / "weights"
    monkeypatch.setenv("SHOAL_WEIGHTS", str(tmp_path / "elsewhere"))
    load(file)
    assert load(file)[1] == [] and len(folders()) == 1
    monkeypatch.setenv("SHOAL_WEIGHTS", "")
    assert right(load(file)[0]) and load(file)[1] == ["a", "b"]


def test_the_second_start_makes_nothing(file: Path) -> None:
    first, made = load(file)
    assert right(first) and made == ["a", "b"]
    second, made = load(file)
    assert right(second) and made == []
    assert len(folders()) == 1


def test_another_file_of_the_same_bytes_shares_them(file: Path) -> None:
    load(file)
    copy = file.with_name("copy.gguf")
    copy.write_bytes(file.read_bytes())
    assert right(load(copy)[0])
    assert len(folders()) == 1


def test_a_changed_file_is_woven_anew(file: Path) -> None:
    load(file)
    file.write_bytes(b"other bytes")
    os.utime(file, ns=(1, 1))
    assert load(file)[1] == ["a", "b"]
    assert len(folders()) == 2


@pytest.mark.parametrize("damage", ["cut", "index", "no index"])
def test_damage_is_found_and_mended(file: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    load(file)
    (folder,) = folders()
    if damage == "cut":
        os.truncate(folder / "weights.bin", 100)
    elif damage == "index":
        (folder / "index.json").write_text(json.dumps([1]))
    else:
        (folder / "index.json").unlink()
    matrices, made = load(file)
    assert right(matrices) and made == ["a", "b"]
    assert ("made anew" in caplog.text) == (damage != "no index")


def test_a_full_disk_costs_the_copy_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING):
        matrices, made = load(file)
    assert right(matrices) and made == ["a", "b"]
    assert "not kept for the next start: No space left on device" in caplog.text
    assert folders() == []


def test_more_than_was_set_aside(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    matrices, _ = load(file, expected=4096)
    assert right(matrices)
    assert "larger than was expected" in caplog.text
    assert folders() == []


def test_a_load_that_fails_leaves_nothing(file: Path) -> None:
    kept = Repacked((file,), 1 << 20)
    kept.take("a", lambda arena: native.pack_blocks(BLOCKS["a"], arena=arena))
    kept.abandon()
    assert folders() == []


def test_what_a_killed_process_left_is_removed(file: Path) -> None:
    left = repacked.cache_folder() / ".making-x"
    left.mkdir(parents=True)
    os.utime(left, (1, 1))
    load(file)
    assert not left.exists()


def age(folder: Path, days: float) -> None:
    """Let the last start that used a copy lie so long ago."""
    then = time.time() - days * 24 * 3600
    os.utime(folder / "index.json", (then, then))


def test_copies_that_no_start_uses_are_removed(file: Path, tmp_path: Path) -> None:
    load(file)
    (old,), other = folders(), tmp_path / "other.gguf"
    other.write_bytes(b"other bytes")
    age(old, 29)
    load(other)
    assert old.exists() and len(folders()) == 2
    age(old, 29)
    assert load(file)[1] == []  # which uses it
    age(new := next(one for one in folders() if one != old), 31)
    other.write_bytes(b"third bytes")
    load(other)
    assert old.exists() and not new.exists()


def test_the_oldest_copy_makes_room(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [tmp_path / f"{number}.gguf" for number in range(2)]
    for number, other in enumerate(others):
        other.write_bytes(bytes([number]))
        load(other)
        age(next(one for one in folders() if (one / "index.json").stat().st_mtime > time.time() - 9), 2 - number)
    first, second = sorted(folders(), key=lambda one: (one / "index.json").stat().st_mtime)
    free = iter([1 << 20, 1 << 40])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    assert right(load(file)[0])
    assert not first.exists() and second.exists()
