"""The header reader: what it finds in sound files, and what it says of unsound ones."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gguf_models import ALIGNMENT, BIG, Raw, fuzzed, gguf_bytes, metadata_of, string, tiny_model, value
from shoal.errors import Unsupported
from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.header import GgmlType, Strings, read_header
from shoal.model.gguf.tokenizer import tokenizer_of

METADATA = {"general.architecture": "llama", "a.whole": 7, "a.number": 0.5, "a.flag": True, "a.text": "héllo",
            "a.words": ["", "a", "日本", "x" * 300], "a.numbers": [1, -2, 3],
            "a.reals": [0.5, 1.5], "a.flags": [True, False]}
TENSORS: dict[str, Raw] = {
    "one": ("F32", (3,), struct.pack("<3f", 1, 2, 3)),
    "two": ("Q8_0", (2, 32), bytes(range(68))),
    "three": ("F16", (2, 3, 4), bytes(48)),
}


def saved(folder: Path, raw: bytes) -> Path:
    path = folder / "file.gguf"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_a_sound_file(tmp_path: Path, version: int) -> None:
    header = read_header(saved(tmp_path, gguf_bytes(METADATA, TENSORS, version)))
    assert header.version == version
    found = {key: list(one) if isinstance(METADATA[key], list) else one for key, one in header.metadata.items()}
    assert found == METADATA
    assert {name: (info.type.name, info.shape, info.nbytes) for name, info in header.tensors.items()} == {
        name: (kind, shape, len(raw)) for name, (kind, shape, raw) in TENSORS.items()
    }
    assert header.data_offset % ALIGNMENT == 0
    assert [info.offset - header.data_offset for info in header.tensors.values()] == [0, 32, 128]


def test_strings_by_index_slice_and_all(tmp_path: Path) -> None:
    words = read_header(saved(tmp_path, gguf_bytes(METADATA, {}))).metadata["a.words"]
    assert isinstance(words, Strings)
    assert words[2] == words[-2] == "日本"
    assert words[1:3] == ["a", "日本"] == list(words)[1:3]
    assert len(words) == 4
    with pytest.raises(IndexError):
        words[4]


def test_the_library_reads_the_same(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = saved(tmp_path, gguf_bytes(METADATA, TENSORS))
    theirs, ours = gguf.GGUFReader(path), read_header(path)
    assert {one.name: (int(one.tensor_type), one.data_offset, one.n_bytes) for one in theirs.tensors} == {
        name: (int(info.type), info.offset, info.nbytes) for name, info in ours.tensors.items()
    }
    for key, found in METADATA.items():
        assert theirs.fields[key].contents() == found


def with_tensors(*infos: bytes, data: int = 256, alignment: Any = None) -> bytes:
    """A file whose tensor entries are given as bytes."""
    entries = [] if alignment is None else [string("general.alignment") + value(alignment)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries)) + b"".join(entries) + b"".join(infos)
    return head + bytes(-len(head) % ALIGNMENT) + bytes(data)


def info(name: str = "t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def head(version: int = 3, tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


UNSOUND = {
    "magic": (b"GGML" + bytes(60), "first bytes are b'GGML'"),
    "short magic": (b"GG", "first bytes are b'GG'"),
    "cut in counts": (b"GGUF" + struct.pack("<IQ", 3, 0), "ends within its header"),
    "many tensors": (head(tensors=BIG) + bytes(64), "announces 4611686018427387904 tensors"),
    "many entries": (head(entries=BIG) + bytes(64), "announces 4611686018427387904 metadata entries"),
    "long key": (head(entries=1) + struct.pack("<Q", BIG) + bytes(64), "a metadata key' has 4611686018427387904 bytes"),
    "key no text": (head(entries=1) + string(b"\xff\xfe") + value(1) + bytes(64), "no UTF-8"),
    "twice": (head(entries=2) + 2 * (string("key") + value(1)) + bytes(64), "'key' occurs twice"),
    "value type": (head(entries=1) + string("key") + struct.pack("<I", 13) + bytes(64), "has type 13; it must be 0 to"),
    "nested": (head(entries=1) + string("key") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "items of type 9"),
    "many numbers": (head(entries=1) + string("key") + struct.pack("<IIQ", 9, 5, BIG) + bytes(64), "numbers in 'key'"),
    "many strings": (head(entries=1) + string("key") + struct.pack("<IIQ", 9, 8, BIG) + bytes(64), "strings in 'key'"),
    "long string": (head(entries=1) + string("key") + struct.pack("<IIQQ", 9, 8, 1, 99) + bytes(64), "ends after the"),
    "string value": (head(entries=1) + string("key") + struct.pack("<IQ", 8, 999) + bytes(64), "'key' has 999 bytes"),
    "alignment 0": (with_tensors(alignment=0), "general.alignment is 0; it must be a power of two"),
    "alignment 24": (with_tensors(alignment=24), "general.alignment is 24"),
    "alignment text": (with_tensors(alignment="32"), "general.alignment is '32'"),
    "alignment flag": (with_tensors(alignment=True), "general.alignment is True"),
    "no dimensions": (with_tensors(info(shape=())), "has 0 dimensions; it must be 1 to 4"),
    "five dimensions": (with_tensors(info(shape=(1,) * 5)), "has 5 dimensions"),
    "dimension zero": (with_tensors(info(shape=(0, 4))), r"has shape \[4, 0\]; each dimension must be at least 1"),
    "huge": (with_tensors(info(shape=(BIG, BIG))), "cut off or damaged"),
    "half a block": (with_tensors(info(shape=(33,), kind=8)), "Q8_0 with 33 columns; it must be a positive multiple"),
    "offset": (with_tensors(info(offset=8)), "begins at offset 8; it must be a multiple of the alignment, 32"),
    "outside": (with_tensors(info(offset=256)), "the file has"),
    "overlap": (with_tensors(info("a", (16,)), info("b", (4,), offset=32)), "'a' and 'b' overlap"),
    "same name": (with_tensors(info("a"), info("a", offset=32)), "'a' occurs twice"),
    "version 1": (head(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "type 15": (with_tensors(info(kind=15, shape=(256,))), "of type Q8_K.*Shoal reads F32"),
    "type 99": (with_tensors(info(kind=99)), "of type 99"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_an_unsound_file(tmp_path: Path, case: str) -> None:
    raw, message = UNSOUND[case]
    with pytest.raises(ValueError, match=message) as caught:
        read_header(saved(tmp_path, raw))
    assert isinstance(caught.value, Unsupported) == case.startswith(("version", "big", "type"))
    assert "\n" not in str(caught.value)


def test_every_cut_is_told(tmp_path: Path) -> None:
    raw = gguf_bytes(METADATA, TENSORS)
    for end in range(1, len(raw) - ALIGNMENT, 7):
        with pytest.raises(ValueError, match=r"file\.gguf"):
            read_header(saved(tmp_path, raw[:end]))


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "absent.gguf", "there is no file"),
                          (saved(tmp_path, b""), "is empty")):
        with pytest.raises(ValueError, match=message):
            read_header(path)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = saved(tmp_path, gguf_bytes(METADATA, TENSORS))
    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(ValueError, match=r"file\.gguf' cannot be read: Permission denied"):
        read_header(path)


def test_a_closed_file(tmp_path: Path) -> None:
    path = saved(tmp_path, gguf_bytes(METADATA, TENSORS))
    with GgufFile(path) as file:
        blocks, words = file.blocks("two"), file.header.metadata["a.words"]
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.blocks("two")
    assert bytes(blocks.data.flatten().tolist()) == bytes(range(68)) and list(words)[1] == "a"  # type: ignore[call-overload]
    assert (blocks.type, blocks.shape, blocks.nbytes) == (GgmlType.Q8_0, (2, 32), 68)


def whole_file(architecture: str) -> tuple[bytes, int]:
    """A file with metadata, tokenizer and tensors, and where its header ends."""
    words = [f"tok{number}" for number in range(94)] + ["a", "b", "ab"]
    spoken = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": words,
              "tokenizer.ggml.token_type": [3] + [1] * 96, "tokenizer.ggml.merges": ["a b"],
              "tokenizer.ggml.eos_token_id": 0}
    kinds = {"token_embd.weight": ("F16", 97), **{f"blk.{n}.ffn_up.weight": (kind, 64) for n, kind in enumerate(
        ("F16", "IQ2_XXS", "MXFP4", "Q1_0"))}}
    tensors: dict[str, Raw] = {name: (kind, (rows, 256), bytes(GgmlType[kind].row_bytes(256) * rows))
                               for name, (kind, rows) in kinds.items()}
    metadata = {**METADATA, **metadata_of(architecture, tiny_model(architecture).config), **spoken}
    raw = gguf_bytes(metadata, tensors)
    return raw, raw.index(b"blk.3.ffn_up.weight") + 60


@pytest.mark.parametrize("count", [pytest.param(40, id="40"), pytest.param(2500, id="2500", marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "smollm3"])
def test_changed_headers_end_in_one_of_two_errors(tmp_path: Path, architecture: str, count: int) -> None:
    """No crash, and no more memory than the file has bytes, whatever the header says."""
    raw, end = whole_file(architecture)
    path, rng, refused = tmp_path / "file.gguf", random.Random(count), 0
    path.write_bytes(raw)
    tokenizer_of(GgufFile(path).header)
    config_of(GgufFile(path))
    tracemalloc.start()
    try:
        for number in range(count):
            path.write_bytes(fuzzed(raw, rng, end))
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            try:
                try:
                    file = GgufFile(path)
                finally:
                    peak = tracemalloc.get_traced_memory()[1] - before
                config_of(file)
                tokenizer_of(file.header)
            except ValueError as error:
                assert "\n" not in str(error)
                refused += 1
            assert peak < len(raw), number
            assert tracemalloc.get_traced_memory()[1] - before < 20 * len(raw), number
    finally:
        tracemalloc.stop()
    assert count / 3 < refused < count
