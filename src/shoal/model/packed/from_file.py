"""Matrices out of a GGUF file, in the types that it holds them in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch

from shoal.errors import Unsupported
from shoal.heap import available
from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.header import GgmlType
from shoal.model.gguf.source import GgufSource
from shoal.model.packed import native
from shoal.model.packed.blocked import Blocked
from shoal.model.packed.linear import Dense, Linear
from shoal.model.packed.native_stack import NativeMatrix
from shoal.model.packed.repacked import Repacked
from shoal.model.packed.shape import REMEDY
from shoal.model.packed.stacked import Stacked
from shoal.model.packed.weights import Role

log = logging.getLogger(__name__)


class FilePacker(Protocol):
    """Packs matrices of a file by their names."""

    def __call__(self, names: Sequence[str], role: Role) -> Linear:
        """The matrices of these names, one above the other, for their role."""
        ...


class TorchFilePacker:
    """Dequantises once, where memory allows; else leaves the blocks where they are, see `Blocked`.

    Args:
        source: the file.
        dtype: of the computation, and of what is dequantised.
    """

    def __init__(self, source: GgufSource, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype
        wanted = dtype.itemsize * sum(rows * columns for _, (rows, columns) in source.matrices())
        self._once = fits(wanted)
        if not self._once:
            log.warning("the weights stay in %s's blocks and are dequantised at every use, which is very slow: without "
                        "the native kernels (`shoal env` says why) they take %.1f GB of memory", source.path.name,
                        wanted / 1e9)

    def __call__(self, names: Sequence[str], role: Role) -> Linear:
        """See `FilePacker`."""
        blocks = [_blocks(self._source, name) for name in names]
        if self._once:
            whole = torch.cat([part.dequantise(self._dtype) for part in blocks])
            self._source.release()
            return Dense(whole, indexed=role == "table")
        parts = [Blocked(part, self._dtype) for part in blocks]
        return parts[0] if len(parts) == 1 else Stacked(parts)


def fits(wanted: int) -> bool:
    """Whether so many bytes leave a fifth of the memory that is free now to others."""
    free = available()
    return free is None or wanted < 0.8 * free


class NativeFilePacker:
    """Weaves the blocks as the kernels read them; what was woven before is taken from where it was kept.

    Args:
        source: the file.
        kept: where woven matrices are kept.
    """

    def __init__(self, source: GgufSource, kept: Repacked) -> None:
        self._source, self._kept = source, kept

    def __call__(self, names: Sequence[str], role: Role) -> Linear:
        """See `FilePacker`; matrices of one type become one, others a stack."""
        for name in names:
            _check(self._source, name)
        groups = [list(group) for _, group in groupby(names, self._source.type_of)]
        if len(groups) > 1 and not self._fits(groups, role):
            return self._as_floats(names, role)
        paired = role == "pair" and len(groups) == 1
        parts = [self._woven(group, paired) for group in groups]
        self._source.release()
        return parts[0] if len(parts) == 1 else Stacked(parts)

    def _woven(self, names: Sequence[str], paired: bool) -> NativeMatrix:
        def make(arena: native.Memory) -> native.PackedWeight:
            blocks = [_blocks(self._source, name) for name in names]
            whole = blocks[0] if len(blocks) == 1 else Blocks.cat(blocks)
            return native.pack_blocks(whole, paired, arena, self._source.release)

        return NativeMatrix(self._kept.take("+".join(names), make))

    def _fits(self, groups: Sequence[Sequence[str]], role: Role) -> bool:
        """Whether the kernels take them as a stack: whole row blocks each, and one form of inputs for a pair."""
        rows = [sum(self._source.shape_of(name)[0] for name in group) for group in groups]
        if role == "pair":
            kinds = [native.kind_of_type(self._source.type_of(group[0])) for group in groups]
            return len(groups) == 2 and rows[0] == rows[1] and native.share_inputs(*kinds)
        return not any(count % native.LANES for count in rows[:-1])

    def _as_floats(self, names: Sequence[str], role: Role) -> NativeMatrix:
        """Matrices that cannot stand in a stack, dequantised: nothing is lost but room."""

        def make(arena: native.Memory) -> native.PackedWeight:
            whole = torch.cat([_blocks(self._source, name).dequantise() for name in names])
            self._source.release()
            return native.pack(whole, "fp32", role == "pair", arena)

        return NativeMatrix(self._kept.take("+".join(names), make))


def _check(source: GgufSource, name: str) -> None:
    if not source.has(name):
        why = "the packed backend finds weights by the names that transformers gives them"
        raise Unsupported(f"a GGUF file without {name!r}", why, REMEDY)


def _blocks(source: GgufSource, name: str) -> Blocks:
    _check(source, name)
    blocks = source.blocks(name)
    assert blocks is not None
    return blocks


def file_packer(source: GgufSource, dtype: torch.dtype, kernels: bool) -> tuple[FilePacker, Repacked | None]:
    """Who packs the matrices of a file, and where the woven ones are kept; `finish` that when all are packed."""
    if not kernels:
        return TorchFilePacker(source, dtype), None
    kept = Repacked(source.path, sum(_woven_bytes(kind, *shape) for kind, shape in source.matrices()))
    return NativeFilePacker(source, kept), kept


def _woven_bytes(kind: GgmlType, rows: int, columns: int) -> int:
    """The most bytes that a matrix takes, alone or above others: its last row block may be padded."""
    return native.packed_bytes(native.kind_of_type(kind), rows + native.LANES, columns)
