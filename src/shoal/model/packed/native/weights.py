"""Matrices in the layout of the kernels, in huge pages.

16 rows are interleaved, so that one register holds 16 rows (see layout.h). Weights stream about a third faster out of
huge pages than out of pages of 4 KiB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import linear
from typing_extensions import override

from shoal.model.gguf.blocks import Blocks, plain
from shoal.model.gguf.header import GgmlType
from shoal.model.packed.linear import Linear
from shoal.model.packed.native.batch import address
from shoal.model.packed.native.library import HUGE_PAGES, KINDS, PANEL_ROWS, Weight, require
from shoal.model.packed.native.threads import MACHINE

_HUGE = 1 << 21
_LINE = 64
Kind = Literal["fp32", "bf16", "fp16", "int8", "int4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k",
               "upper", "rough", "iq4_nl", "mxfp4", "q2_k", "q3_k", "iq2", "iq1", "iq4_xs", "iq3_s", "iq3_xxs"]
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GROUP_BYTES, _UPPER_BYTES = 512, 320
"""Bytes of 32 inputs of 16 rows, with 8 and with 5 bits each."""
_INFINITE = 0x7C00
"""The bits of a float16 infinity; larger values are NaN."""
_FLOATS, _MOST_COLUMNS = ("fp32", "bf16", "fp16"), 16_384
"""Kinds whose products can be bounded by rounding the weights, and the most inputs for which that holds; see acts.h."""
_SUPER = ("q4_k", "q5_k", "q6_k", "q2_k", "q3_k", "iq2", "iq1", "iq4_xs", "iq3_s", "iq3_xxs")
"""Kinds with super-blocks of 256 inputs."""
_PIECE = 8 << 20
"""Bytes of a file's blocks that are packed at a time."""
OWN: tuple[Kind, ...] = ("fp32", "bf16", "fp16", "int8", "int4")
"""Kinds that plain matrices are packed as; the other kinds keep the numbers of a file."""


class Memory(Protocol):
    """Allocates memory for packed matrices."""

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], aligned to a cache line, uninitialised."""


class Arena(Memory):
    """Hands out pieces of large slabs; a slab is freed with the last tensor on it.

    Args:
        slab: bytes of a slab; at most that much stays unused. Larger requests, with 0 all, get memory of their own.
    """

    def __init__(self, slab: int = 64 << 20) -> None:
        self._slab = slab
        self._rest = torch.empty(0, dtype=torch.uint8)

    @override
    def take(self, nbytes: int) -> Tensor:
        padded = -(-nbytes // _LINE) * _LINE
        if padded > self._rest.numel():
            if padded >= self._slab:
                return _huge(padded)[:nbytes]
            self._rest = _huge(self._slab)
        piece, self._rest = self._rest[:nbytes], self._rest[padded:]
        return piece


def _huge(nbytes: int) -> Tensor:
    """Memory that begins on a huge page, if it is large enough for one."""
    if nbytes < _HUGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = torch.empty(nbytes + _HUGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % _HUGE :][:nbytes]
    require().shoal_advise(memory.data_ptr(), nbytes, HUGE_PAGES)
    return memory


@dataclass(eq=False)
class PackedWeight(Linear):
    """A matrix [rows, columns] that the kernels multiply with; called, it is unpacked, so calls are for many tokens.

    Attributes:
        kind: `fp32`, `bf16`, `fp16`, `int8` (symmetric, one scale per 64 inputs of a row), `int4` (symmetric, one per
            32), or the GGML type whose numbers it holds.
        rows, columns: its shape; rows count both halves of a pair.
        data: uint8 [bytes].
        scales: uint8 [bytes] of scales and minima, or None.
        paired: whether it has two halves (gate, up) whose row blocks alternate.
        nbytes: bytes that a product reads: data and scales, padding included.
    """

    kind: Kind
    rows: int
    columns: int
    data: Tensor
    scales: Tensor | None = None
    paired: bool = False

    def __post_init__(self) -> None:
        self.nbytes = self.data.numel() + (0 if self.scales is None else self.scales.numel())

    @cached_property
    def upper(self) -> PackedWeight | None:
        """Five bits of each number, which bound products from above; made on first use.

        For Q8_0 they are the upper bits, with the same scales; for floats, the upper bits of a rounding to 8 bits. None
        for other kinds, and if a scale is negative or NaN.
        """
        if not self.upper_bytes:
            return None
        made = self._roughened() if self.scales is None else self._halved(self.scales)
        assert made.scales is not None
        least, most = made.scales.view(torch.int16).aminmax()
        return None if least < 0 or most >= _INFINITE else made

    @property
    def upper_bytes(self) -> int:
        """Bytes that making `upper` takes; 0 if it exists or never will."""
        if self.paired or "upper" in self.__dict__ or self.columns > _MOST_COLUMNS:
            return 0
        if self.kind == "q8_0":
            return self.data.numel() // _GROUP_BYTES * _UPPER_BYTES
        return packed_bytes("rough", self.rows, self.columns) if self.kind in _FLOATS else 0

    def _halved(self, scales: Tensor) -> PackedWeight:
        upper = PackedWeight("upper", self.rows, self.columns, Arena(0).take(self.upper_bytes), scales)
        groups, threads = self.data.numel() // _GROUP_BYTES, torch.get_num_threads()
        require().shoal_take_upper(self.data.data_ptr(), groups, upper.data.data_ptr(), threads)
        return upper

    def _roughened(self) -> PackedWeight:
        library, threads = require(), torch.get_num_threads()
        upper = _room("rough", self.rows, self.columns, False, None)
        structs = [ctypes.byref(one.struct()) for one in (upper, self)]
        scratch = torch.empty(threads * sum(map(library.shoal_pack_scratch, structs)), dtype=torch.uint8)
        library.shoal_roughen(*structs, scratch.data_ptr(), threads)
        return upper

    def struct(self) -> Weight:
        """The matrix in the library's form; valid as long as this object lives."""
        struct, _, _ = _laid_out(self.kind, self.rows, self.columns, self.paired)
        struct.data = self.data.data_ptr()
        struct.scales = None if self.scales is None else self.scales.data_ptr()
        return struct

    def part(self, rows: slice) -> PackedWeight:
        """Some rows of an unpaired matrix, in the same memory; they begin and end at panels."""
        ends = [_laid_out(self.kind, end, self.columns, False)[1:] for end in (rows.start, rows.stop)]
        data, scales = (slice(first, last) for first, last in zip(*ends, strict=True))
        some = None if self.scales is None else self.scales[scales]
        return PackedWeight(self.kind, rows.stop - rows.start, self.columns, self.data[data], some)

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantised matrix [rows, columns] in `dtype` (float32 or bfloat16)."""
        out = torch.empty(self.rows, self.columns, dtype=dtype)
        _convert("shoal_unpack", self.struct(), out)
        return out

    @override
    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.unpack(x.dtype))

    @override
    def lookup(self, ids: Tensor) -> Tensor:
        """Dequantised rows: int64 [n] to float32 [n, columns]; ValueError for a row that the matrix does not have."""
        rows = ids.contiguous()
        if rows.dtype != torch.int64 or (rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows):
            raise ValueError(f"rows must be int64 numbers in 0..{self.rows - 1}")
        out = torch.empty(len(rows), self.columns)
        struct = ctypes.byref(self.struct())
        require().shoal_lookup(struct, rows.data_ptr(), len(rows), out.data_ptr(), torch.get_num_threads())
        return out


def pack(weight: Tensor, kind: Kind, paired: bool = False, arena: Memory | None = None) -> PackedWeight:
    """Pack a matrix [rows, columns]; integer kinds round to nearest, int4 after a search for the scale.

    Args:
        weight: float matrix on the CPU; dtypes that the kernels do not know pass through float32.
        paired: whether the rows are two halves, gate then up, of a gated MLP.
        arena: where memory comes from; decoding is fastest with one arena for a whole model.

    Raises:
        ValueError: `weight` is no float matrix on the CPU, the kind is unknown, or the number of paired rows is odd.
        RuntimeError: the kernels cannot run here.
    """
    _check_weight(weight, kind, paired)
    source = (weight if weight.dtype in _DTYPES else weight.float()).detach().contiguous()
    packed = _room(kind, source.shape[0], source.shape[1], paired, arena)
    _convert("shoal_pack", packed.struct(), source)
    return packed


def pack_blocks(
    blocks: Blocks, paired: bool = False, arena: Memory | None = None, done: Callable[[], None] | None = None
) -> PackedWeight:
    """Pack a matrix of a GGUF file, with the same numbers; docs/models.md says how many bits they take.

    Most take those of the file. K types take 1/8 bit more per weight, since their 6-bit scales and minima are stored as
    bytes, and types whose values come from a grid are stored by value, in 3 or 4 bits.

    Args:
        paired, arena: as for `pack`.
        done: called after every piece of rows; rows so far are not read again, so their pages may be released.

    Raises:
        ValueError: an odd number of paired rows.
        RuntimeError: the kernels cannot run here.
    """
    if paired and blocks.rows % 2:
        raise ValueError(f"a paired matrix has an even number of rows, not {blocks.rows}")
    packed = _room(kind_of_type(blocks.type), blocks.rows, blocks.columns, paired, arena)
    row_bytes = blocks.columns if blocks.is_recoded else blocks.type.row_bytes(blocks.columns)
    panels = max(1, _PIECE // (PANEL_ROWS * row_bytes))
    step = blocks.rows if paired else panels * PANEL_ROWS
    for first in range(0, blocks.rows, step):
        rows = slice(first, min(first + step, blocks.rows))
        _weave(packed.part(rows) if rows.stop - first < blocks.rows else packed, blocks.select(rows))
        if done is not None:
            done()
    return packed


def _weave(packed: PackedWeight, blocks: Blocks) -> None:
    """Fill a packed matrix from blocks."""
    if packed.kind in _FLOATS:
        exact = plain(blocks.data.contiguous(), blocks.type) if blocks.type.is_plain else blocks.dequantise()
        _convert("shoal_pack", packed.struct(), exact)
        return
    data = blocks.recoded().contiguous()
    library, threads, weight = require(), torch.get_num_threads(), ctypes.byref(packed.struct())
    scratch = torch.empty(threads * library.shoal_pack_scratch(weight), dtype=torch.uint8)
    library.shoal_pack_blocks(weight, data.data_ptr(), scratch.data_ptr(), threads)


_KINDS: dict[str, Kind] = {
    "F32": "fp32", "F16": "fp16", "BF16": "bf16", "NVFP4": "fp16", "IQ2_XXS": "iq2", "IQ2_XS": "iq2", "IQ2_S": "iq2",
    "IQ1_S": "iq1", "IQ1_M": "iq1", "TQ1_0": "q2_k", "TQ2_0": "q2_k", "Q1_0": "q4_0", "Q2_0": "q4_0",
}
"""Kinds of another name than the type: all hold its numbers without loss."""


def as_packed(matrix: object) -> PackedWeight:
    """A matrix that is known to be packed for the kernels."""
    assert isinstance(matrix, PackedWeight)
    return matrix


def kind_of_type(type_: GgmlType) -> Kind:
    """The kind in which blocks of a GGML type are packed."""
    return _KINDS.get(type_.name) or cast(Kind, type_.name.lower())


def packed_bytes(kind: Kind, rows: int, cols: int) -> int:
    """Bytes of a packed matrix, with data and scales each rounded up to a cache line."""
    _, data, scales = _laid_out(kind, rows, cols, False)
    return data + scales + 2 * _LINE


def share_inputs(first: Kind, second: Kind) -> bool:
    """Whether both kinds take activations in the same form: exact, bfloat16, or int8 with scales per 64, 32 or 256."""
    forms: dict[str, str] = {"fp32": "float", "fp16": "float", "bf16": "bf16", "int8": "int8"}
    forms |= dict.fromkeys(_SUPER, "super-blocks")
    return forms.get(first, "groups of 32") == forms.get(second, "groups of 32")


def _room(kind: Kind, rows: int, cols: int, paired: bool, arena: Memory | None) -> PackedWeight:
    """A packed matrix that is not filled yet."""
    arena = arena or Arena(0)
    _, data_bytes, scale_bytes = _laid_out(kind, rows, cols, paired)
    data = arena.take(data_bytes)
    return PackedWeight(kind, rows, cols, data, arena.take(scale_bytes) if scale_bytes else None, paired)


def matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in float32 [tokens, rows] by the kernel that decoding uses, which may quantise activations.

    Args:
        x: [tokens, cols], at least one token; float32 or bfloat16.
        bias: float32 [rows], or None.
    """
    if x.ndim != 2 or x.shape[1] != weight.columns or not len(x):
        raise ValueError(f"x is {list(x.shape)}; it must be [1 or more, {weight.columns}]")
    if weight.paired:
        raise ValueError("a paired matrix is multiplied only inside the gated MLP; pack its halves one by one")
    library, threads, struct = require(), MACHINE.choose(), weight.struct()
    source, added = x.float().contiguous(), None if bias is None else address("bias", bias, (weight.rows,))
    out = torch.empty(x.shape[0], weight.rows)
    scratch = torch.empty(threads * library.shoal_matmul_scratch(ctypes.byref(struct), x.shape[0]), dtype=torch.uint8)
    library.shoal_matmul(
        ctypes.byref(struct), source.data_ptr(), added, x.shape[0], out.data_ptr(), scratch.data_ptr(), threads
    )
    return out


def _laid_out(kind: Kind, rows: int, cols: int, paired: bool) -> tuple[Weight, int, int]:
    """The struct without addresses, and the bytes of data and of scales."""
    struct = Weight(kind=KINDS.index(kind), rows=rows, cols=cols, paired=paired)
    data, scales = ctypes.c_int64(), ctypes.c_int64()
    require().shoal_lay_out(ctypes.byref(struct), ctypes.byref(data), ctypes.byref(scales))
    return struct, data.value, scales.value


def _convert(function: str, struct: Weight, plain: Tensor) -> None:
    if plain.dtype not in _DTYPES:
        raise ValueError(f"dtype is {plain.dtype}; it must be torch.float32 or torch.bfloat16")
    library, threads, weight = require(), torch.get_num_threads(), ctypes.byref(struct)
    scratch = torch.empty(threads * library.shoal_pack_scratch(weight), dtype=torch.uint8)
    getattr(library, function)(weight, plain.data_ptr(), _DTYPES[plain.dtype], scratch.data_ptr(), threads)


def _check_weight(weight: Tensor, kind: str, paired: bool) -> None:
    if kind not in OWN:
        known = ", ".join(OWN)
        raise ValueError(f"unknown kind of weight {kind!r}; known: {known}, and GGML's types for the blocks of a file")
    if weight.ndim != 2 or not weight.is_floating_point() or weight.device.type != "cpu" or not weight.numel():
        found = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
        raise ValueError(f"weight is {found}; a float matrix on the CPU is needed")
    if paired and weight.shape[0] % 2:
        raise ValueError(f"a paired matrix has an even number of rows, not {weight.shape[0]}")
