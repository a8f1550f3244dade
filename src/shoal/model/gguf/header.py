"""The header of a GGUF file: metadata, and where each tensor lies. Bounds are checked before they are used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian; number types are
those of ggml-common.h. Every count and length is compared with the bytes that are left, so what a damaged file
announces is never allocated. Long arrays stay in the file (`Strings`, `memoryview`) until their items are read.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import overload

from shoal.errors import Unsupported

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEY_BYTES, _NAME_BYTES, _TEXT_BYTES, _DIMENSIONS = 65535, 255, 1 << 20, 4
_ALIGNMENTS = tuple(1 << power for power in range(3, 17))
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8
_AGAIN = "Fetch the file again"


class GgmlType(IntEnum):
    """Number types of tensors that Shoal reads, by their number in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I64 = 27
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def values(self) -> int:
        """Values in a block."""
        return _SIZES[self][0]

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return _SIZES[self][1]

    @property
    def is_plain(self) -> bool:
        """Whether the type has one value per block: floating point, or whole numbers."""
        return self.values == 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row; ValueError if `columns` is not a multiple of the block."""
        if columns < 1 or columns % self.values:
            raise ValueError(f"{self.name} with {columns} columns; it must be a positive multiple of {self.values}")
        return columns // self.values * self.nbytes


_SIZES = {
    GgmlType.F32: (1, 4), GgmlType.F16: (1, 2), GgmlType.BF16: (1, 2), GgmlType.I64: (1, 8), GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20), GgmlType.Q5_0: (32, 22), GgmlType.Q5_1: (32, 24), GgmlType.Q8_0: (32, 34),
    GgmlType.Q4_K: (256, 144), GgmlType.Q5_K: (256, 176), GgmlType.Q6_K: (256, 210), GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110), GgmlType.IQ2_XXS: (256, 66), GgmlType.IQ2_XS: (256, 74), GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ3_XXS: (256, 98), GgmlType.IQ3_S: (256, 110), GgmlType.IQ1_S: (256, 50), GgmlType.IQ1_M: (256, 56),
    GgmlType.IQ4_NL: (32, 18), GgmlType.IQ4_XS: (256, 136), GgmlType.TQ1_0: (256, 54), GgmlType.TQ2_0: (256, 66),
    GgmlType.MXFP4: (32, 17), GgmlType.NVFP4: (64, 36), GgmlType.Q1_0: (128, 18), GgmlType.Q2_0: (64, 18),
}

OTHERS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 28: "F64"}
"""Types that Shoal does not read, for error messages."""


class Strings(Sequence[str]):
    """An array of strings in the file, each preceded by its length; a string is decoded when it is read.

    Args:
        buffer: the mapped file; stays open as long as this object.
        start: where the first length begins.
        places: where each length begins and where the last string ends, counted from `start`.
        name: name of the metadata entry, for errors.
    """

    def __init__(self, buffer: mmap.mmap, start: int, places: array[int], name: str) -> None:
        self._buffer, self._start, self._places, self._name = buffer, start, places, name

    def __len__(self) -> int:
        return len(self._places) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        first, end = self._start + self._places[place], self._start + self._places[place + 1]
        with _text_of(self._name):
            return self._buffer[first + 8 : end].decode()

    def __iter__(self) -> Iterator[str]:
        region = self._buffer[self._start : self._start + self._places[-1]]
        with _text_of(self._name):  # all strings are decoded at once, which is much faster than one by one
            return iter([region[start + 8 : end].decode() for start, end in pairwise(self._places)])


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type, shape and place.

    Attributes:
        name: its name in the file.
        type: number type of its values.
        shape: in torch's order; the last dimension is contiguous.
        offset: its first byte in the file.
        nbytes: its size in bytes.
        part: number of the file that it is in, of a model in several files.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Attributes:
        metadata: values by key: strings, numbers, bools, `Strings`, or a `memoryview` of numbers.
        tensors: tensors by name, in the order of the file.
        data_offset: where the tensors begin.
    """

    version: int
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    data_offset: int


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a GGUF file.

    Raises:
        ValueError: the file is missing, a folder, not readable, no GGUF file, or damaged.
        Unsupported: the version of the format, or the type of a tensor, is one that Shoal does not read.
    """
    return parse(mapped(path), Path(path).name)


def read_said(path: str | os.PathLike[str]) -> tuple[Header, dict[str, int]]:
    """A header without tensors, and the number of values of each, whatever its type; raises as `read_header`.

    For files that another library will load.
    """
    buffer, name = mapped(path), Path(path).name
    with _whole(buffer, name):
        return _Reader(buffer, name).said()


def mapped(path: str | os.PathLike[str]) -> mmap.mmap:
    """Map a file read-only, for as long as anything made from it lives; ValueError if it is missing or unreadable."""
    name = os.fspath(path)
    if os.path.isdir(name):
        raise ValueError(f"{name!r} is a folder; give the .gguf file in it")
    try:
        with open(name, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ValueError(f"{name!r} is empty; it must be a GGUF file. {_AGAIN}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ValueError(f"there is no file {name!r}") from None
    except OSError as error:
        raise ValueError(f"{name!r} cannot be read: {error.strerror}; see its permissions and its disk") from None


def parse(buffer: mmap.mmap, name: str) -> Header:
    """The header of a mapped file, as `read_header` gives it; `name` is for errors."""
    with _whole(buffer, name):
        return _Reader(buffer, name).header()


@contextmanager
def _whole(buffer: mmap.mmap, name: str) -> Iterator[None]:
    try:
        yield
    except struct.error:
        found = f"{name!r} ends within its header, after {len(buffer)} bytes; it is cut off"
        raise ValueError(f"{found}. {_AGAIN}") from None


@contextmanager
def _text_of(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"a string of {name!r} is no UTF-8 ({error.reason}); the file is damaged. {_AGAIN}") from None


_Raw = dict[str, tuple[GgmlType, tuple[int, ...], int]]
"""Type, shape and offset of tensors by name."""


class _Reader:
    """Reads a header from front to back."""

    def __init__(self, buffer: mmap.mmap, name: str) -> None:
        self._buffer, self._name, self._end, self._at = buffer, name, len(buffer), 0

    def header(self) -> Header:
        version, tensor_count, metadata = self._preface()
        alignment = metadata.get("general.alignment", 32)
        if alignment not in _ALIGNMENTS or isinstance(alignment, bool | float):
            raise self._wrong(f"general.alignment is {_short(alignment)}", "it must be a power of two from 8 to 65536")
        assert isinstance(alignment, int)
        raw = self._raw_tensors(tensor_count)
        data_offset = -(-self._at // alignment) * alignment
        return Header(version, metadata, self._placed(raw, data_offset, alignment), data_offset)

    def said(self) -> tuple[Header, dict[str, int]]:
        version, tensor_count, metadata = self._preface()
        sizes = {}
        for _ in range(tensor_count):
            name = self._string("a tensor's name", _NAME_BYTES)
            shape, _, _ = self._tensor(name)
            sizes[name] = prod(shape)
        return Header(version, metadata, {}, self._at), sizes

    def _preface(self) -> tuple[int, int, dict[str, object]]:
        """Version, number of tensors and metadata."""
        version = self._start()
        tensor_count, entry_count = self._scalar("Q"), self._scalar("Q")
        self._fits("tensors", tensor_count, _SMALLEST_TENSOR)
        self._fits("metadata entries", entry_count, _SMALLEST_ENTRY)
        return version, tensor_count, self._metadata(entry_count)

    def _start(self) -> int:
        magic = self._buffer[:4]
        if magic != _MAGIC:
            raise self._wrong(f"its first bytes are {magic!r}", f"those of a GGUF file are {_MAGIC!r}")
        self._at = 4
        version = int(self._scalar("I"))
        if version in _VERSIONS:
            return version
        if version & 0xFFFF == 0 and version >> 24 in _VERSIONS:
            remedy = "Convert the model again on a little-endian machine"
            raise Unsupported(f"the GGUF file {self._name!r}", "it is big-endian", remedy)
        remedy = "Convert the model again with a current llama.cpp"
        raise Unsupported(f"the GGUF file {self._name!r} of version {version}", "Shoal reads versions 2 and 3", remedy)

    def _metadata(self, count: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for _ in range(count):
            key = self._string("a metadata key", _KEY_BYTES)
            if key in metadata:
                raise self._wrong(f"the metadata key {_short(key)} occurs twice", "each must occur once")
            metadata[key] = self._value(key)
        return metadata

    def _value(self, key: str) -> object:
        kind = self._scalar("I")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string(key, _TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        raise self._wrong(f"metadata entry {_short(key)} has type {kind}", "it must be 0 to 12")

    def _array(self, key: str) -> object:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            self._fits(f"strings in {_short(key)}", count, 8)
            return self._strings(key, count)
        if kind not in _SCALARS:
            raise self._wrong(f"metadata array {_short(key)} has items of type {kind}",
                              "they must be numbers or strings, not arrays")
        size = struct.calcsize("<" + _SCALARS[kind])
        self._fits(f"numbers in {_short(key)}", count, size)
        start, self._at = self._at, self._at + count * size
        return memoryview(self._buffer)[start : self._at].cast(_SCALARS[kind])  # type: ignore[call-overload]

    def _strings(self, key: str, count: int) -> Strings:
        """Find where each string lies, without decoding any."""
        places = array("I", [0])
        places *= count + 1
        start, length, buffer, at = self._at, struct.Struct("<Q").unpack_from, self._buffer, self._at
        end = min(self._end, start + 0xFFFFFFFF)
        for number in range(1, count + 1):
            at += 8 + length(buffer, at)[0]
            if at > end:
                raise self._wrong(f"string {number - 1} of {_short(key)} ends after the file",
                                  f"the file has {self._end} bytes, and all strings together at most 4 GiB")
            places[number] = at - start
        self._at = at
        return Strings(self._buffer, start, places, key)

    def _raw_tensors(self, count: int) -> _Raw:
        found: _Raw = {}
        for _ in range(count):
            name = self._string("a tensor's name", _NAME_BYTES)
            if name in found:
                raise self._wrong(f"the tensor {_short(name)} occurs twice", "each must occur once")
            shape, kind, offset = self._tensor(name)
            found[name] = self._known(name, kind, len(shape)), shape, offset
        return found

    def _tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Shape, type number and offset of the next tensor."""
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= _DIMENSIONS:
            raise self._wrong(f"tensor {_short(name)} has {dimensions} dimensions", f"it must be 1 to {_DIMENSIONS}")
        shape = tuple(int(self._scalar("Q")) for _ in range(dimensions))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        if not all(shape):
            raise self._wrong(f"tensor {_short(name)} has shape {list(shape)}", "each dimension must be at least 1")
        return shape, kind, offset

    def _known(self, name: str, kind: int, dimensions: int) -> GgmlType:
        if kind not in GgmlType.__members__.values() or (kind == GgmlType.I64 and dimensions > 1):
            known = ", ".join(kind.name for kind in GgmlType if kind is not GgmlType.I64)
            what = f"tensor {_short(name)} of type {OTHERS.get(kind, kind)} in {self._name!r}"
            raise Unsupported(what, f"Shoal reads {known}", "Quantise the model to one of them, such as Q4_K_M or Q8_0")
        return GgmlType(kind)

    def _placed(self, raw: _Raw, start: int, alignment: int) -> dict[str, TensorInfo]:
        """The tensors with their sizes; each must lie within the file and overlap no other."""
        placed = {}
        for name, (kind, shape, offset) in raw.items():
            if offset % alignment:
                raise self._wrong(f"tensor {_short(name)} begins at offset {offset}",
                                  f"it must be a multiple of the alignment, {alignment}")
            try:
                nbytes = prod(shape[:-1]) * kind.row_bytes(shape[-1])
            except ValueError as error:
                raise self._wrong(f"tensor {_short(name)} is {error}", "its rows are whole blocks") from None
            if start + offset + nbytes > self._end:
                raise self._wrong(f"tensor {_short(name)} of {nbytes} bytes begins at byte {start + offset}",
                                  f"the file has {self._end} bytes, so it is cut off or damaged")
            placed[name] = TensorInfo(name, kind, shape, start + offset, nbytes)
        for first, second in pairwise(sorted(placed.values(), key=lambda info: info.offset)):
            if first.offset + first.nbytes > second.offset:
                raise self._wrong(f"the tensors {_short(first.name)} and {_short(second.name)} overlap",
                                  "each must have bytes of its own")
        return placed

    def _scalar(self, code: str) -> int:
        size = struct.calcsize("<" + code)
        value = struct.unpack_from("<" + code, self._buffer, self._at)[0]
        self._at += size
        return value  # type: ignore[no-any-return]  # a bool or float where the file says so

    def _string(self, what: str, most: int) -> str:
        size, most = self._scalar("Q"), min(most, max(256, self._end // 4), self._end - self._at)
        if size > most:
            raise self._wrong(f"{_short(what)} has {size} bytes", f"it must have at most {most}")
        start, self._at = self._at, self._at + size
        with _text_of(what):
            return str(memoryview(self._buffer)[start : self._at], "utf-8")

    def _fits(self, what: str, count: int, size: int) -> None:
        left = self._end - self._at
        if count * size > left:
            raise self._wrong(f"its header announces {count} {what}", f"the {left} bytes that follow hold no more than "
                              f"{left // size}")

    def _wrong(self, found: str, allowed: str) -> ValueError:
        return ValueError(f"{self._name!r} is no sound GGUF file: {found}; {allowed}. {_AGAIN}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
