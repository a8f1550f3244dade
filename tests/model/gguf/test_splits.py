"""Models in several GGUF files: read as one, every part that does not fit named in one line; files beside a model."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import shoal
from gguf_models import fuzzed, gguf_bytes, metadata_of, part_of, split_entries, tiny_model, write_model
from llama_cpp_oracle import Oracle
from shoal.engine.cards import fingerprint
from shoal.engine.memory.footprint import weights_on_disk
from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.splits import models_among
from shoal.model.packed.repacked import _digest
from shoal.user_cache import sha256

IDS = [3, 41, 5, 92, 66, 53]
PARTS = 3


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first of three parts of a tiny model; the other parts lie beside it."""
    write_model("llama", tmp_path / "tiny.gguf", "Q4_K", parts=PARTS)
    return part_of(tmp_path / "tiny.gguf", 0, PARTS)


def other(first: Path, part: int) -> Path:
    return first.with_name(first.name.replace("-00001-", f"-{part:05}-"))


def test_the_parts_are_the_whole_file(first: Path, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "whole.gguf", "Q4_K")
    whole, parts = GgufFile(tmp_path / "whole.gguf"), GgufFile(first)
    assert parts.paths == tuple(other(first, part) for part in range(1, PARTS + 1))
    assert set(whole.header.tensors) == set(parts.header.tensors)
    assert {info.part for info in parts.header.tensors.values()} == {0, 1, 2}
    for name in whole.header.tensors:
        assert torch.equal(whole.values(name), parts.values(name)), name
    engines = [shoal.load(path, dtype="float32") for path in (tmp_path / "whole.gguf", first)]
    texts = [engine.generate(IDS, max_new_tokens=12).tokens for engine in engines]
    assert texts[0] == texts[1]
    assert len({fingerprint.of_model(None, str(path)) for path in (tmp_path / "whole.gguf", first)}) == 1
    sizes = [other(first, part).stat().st_size for part in (1, 2, 3)]
    assert weights_on_disk(str(first), torch.float32, None) == sum(sizes)


def test_llama_cpp_agrees(first: Path, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "whole.gguf", "Q4_K")
    found = []
    for path in (first, tmp_path / "whole.gguf"):
        oracle = Oracle(path)
        found.append(oracle.logits(IDS))
        oracle.close()
    assert torch.equal(*found)


def test_what_is_kept_of_them_follows_every_part(first: Path) -> None:
    paths = GgufFile(first).paths
    before = _digest(paths, sha256)
    raw = bytearray(paths[2].read_bytes())
    raw[-40] ^= 1
    paths[2].write_bytes(raw)
    os.utime(paths[2], ns=(1, 1))
    assert _digest(paths, sha256) != before
    assert _digest(paths[:1], sha256) == sha256(paths[0])


def said_by(path: Path) -> str:
    with pytest.raises(ValueError, match="gguf") as caught:
        shoal.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_parts_are_named(first: Path) -> None:
    other(first, 2).unlink()
    assert "in 3 parts" in said_by(first) and "'tiny-00002-of-00003.gguf' in its" in said_by(first)
    other(first, 3).unlink()
    assert "lacks 'tiny-00002-of-00003.gguf', 'tiny-00003-of-00003.gguf' in" in said_by(first)


def test_a_later_part_asks_for_the_first(first: Path) -> None:
    assert "is part 2 of 3 of a model; give the first one, 'tiny-00001-of-00003.gguf'" in said_by(other(first, 2))
    alone = other(first, 1).rename(first.with_name("mine.gguf"))
    assert "its name does not end in 00001-of-00003.gguf. Rename it" in said_by(alone)


@pytest.mark.parametrize(("what", "message"), [
    ("swapped", "does not belong to 'tiny-00001-of-00003.gguf': it says that it is part 3 of 3"),
    ("more parts", "it says that it is part 2 of 4; it must be part 2 of 3"),
    ("alone", "it says nothing of parts; it must be part 2 of 3"),
    ("other total", "it says that all parts have 999 tensors"),
    ("tensors twice", "is in 'tiny-00001-of-00003.gguf', too"),
    ("fewer tensors", "tensors; it says"),
])
def test_a_part_of_another_model(first: Path, what: str, message: str) -> None:
    second, total = other(first, 2), len(GgufFile(first).header.tensors)
    if what == "swapped":
        second.write_bytes(other(first, 3).read_bytes())
    elif what == "more parts":
        second.write_bytes(gguf_bytes(split_entries(1, 4, total), {}))
    elif what == "alone":
        second.write_bytes(gguf_bytes({}, {}))
    elif what == "other total":
        second.write_bytes(gguf_bytes(split_entries(1, PARTS, 999), {}))
    elif what == "tensors twice":
        own = next(name for name, info in GgufFile(first).header.tensors.items() if info.part == 0)
        second.write_bytes(gguf_bytes(split_entries(1, PARTS, total), {own: ("F32", (1,), bytes(4))}))
    else:
        second.write_bytes(gguf_bytes(split_entries(1, PARTS, total), {}))
        message = f"have {total - len(range(1, total, PARTS))} tensors; it says {total}, so one is of another model"
    assert message in said_by(first)


@pytest.mark.parametrize("count", [numpy.uint16(65535), True, 0.5, "3", 1 << 31])
def test_a_count_that_is_none(first: Path, count: Any) -> None:
    entries = {**metadata_of("llama", tiny_model("llama").config), **split_entries(0, 3, 9), "split.count": count}
    first.write_bytes(gguf_bytes(entries, {}))
    said_by(first)


@pytest.mark.parametrize("count", [pytest.param(40, id="40"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)])
def test_changed_parts_end_in_an_error_or_a_model(first: Path, count: int) -> None:
    rng, refused = random.Random(count), 0
    raws = {path: path.read_bytes() for path in GgufFile(first).paths}
    for _ in range(count):
        path = rng.choice(list(raws))
        end = raws[path].index(b"blk.") + 400
        path.write_bytes(fuzzed(raws[path], rng, end))
        try:
            config_of(GgufFile(first))
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
        path.write_bytes(raws[path])
    assert count / 3 < refused < count


def test_a_folder_holds_one_model_and_what_lies_beside_it(first: Path) -> None:
    folder = first.parent
    (folder / "mmproj-F16.gguf").write_bytes(gguf_bytes({"general.architecture": "clip"}, {}))
    (folder / "mtp-tiny.gguf").write_bytes(gguf_bytes({"general.architecture": "llama"}, {}))
    (folder / "tiny-mmproj-f16.gguf").write_bytes(gguf_bytes({"general.architecture": "clip"}, {}))
    assert models_among(folder.glob("*.gguf")) == [first]
    found = [shoal.load(place, dtype="float32").generate(IDS, max_new_tokens=8).tokens for place in (folder, first)]
    assert found[0] == found[1]
    write_model("llama", folder / "another.gguf")
    assert "holds several models: 'another.gguf', 'tiny-00001-of-00003.gguf'. Give one" in said_by(folder)


def test_an_encoder_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "mmproj-F16.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "clip"}, {}))
    assert "encodes images or sound for a model, and is none itself" in said_by(path)
