"""From a config and a source of weights to a packed runner. Matrices of a GGUF file keep the types of the file."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from shoal.errors import Unsupported
from shoal.heap import available
from shoal.model.encoders.encoder_decoder import EncoderDecoderSource
from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.source import GgufSource
from shoal.model.modules import quantised_by
from shoal.model.packed import native
from shoal.model.packed.classics import READERS
from shoal.model.packed.kinds import HYBRIDS, MIXTURES
from shoal.model.packed.latent import LatentRows
from shoal.model.packed.linear import Blocked, Dense, Linear, Quant, Stacked, pack
from shoal.model.packed.native_runner import NativeRunner, fits_kernels, pack_for
from shoal.model.packed.order import by_heads, by_parts
from shoal.model.packed.repacked import Repacked
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.shape import REMEDY, RotaryTable, Shape, shape_of
from shoal.model.packed.source import (
    BY_COLUMNS,
    PUBLISHED,
    ColumnsAsRows,
    EitherWay,
    ExpertsApart,
    ExpertsByRows,
    FewerLayers,
    GatesBelow,
    HalvesPaired,
    KeyHeadsApart,
    ModelSource,
    PublishedNames,
    Source,
)
from shoal.model.packed.weights import DTYPES, Pack, PackBlocks, Packer, PackFile, Role, check_names
from shoal.model.quantised.source import QuantisedSource, in_numbers
from shoal.model.sambay import OWN_CONFIGS

log = logging.getLogger(__name__)
QUANTS = ("int8", "int4")
_PACKED_ALONE = ("recurrent_gemma", "bloom", "mpt")
"""Model types whose modules keep states to themselves, or are given biases by distance: they run packed or not at all.
"""
_SCARCE = 2 / 3
"""Experts are read ahead where memory holds less of the weights. Where it holds most, asking takes time for nothing."""
ReadBlocks = Callable[[str], Blocks]
"""Maps the name of a matrix to its blocks."""


class TorchFilePacker:
    """Dequantises to `dtype` once if memory allows; otherwise leaves the blocks in the file, see `Blocked`."""

    def __init__(self, source: GgufSource, dtype: torch.dtype, read: ReadBlocks) -> None:
        self._source, self._dtype, self._read = source, dtype, read
        wanted = dtype.itemsize * sum(rows * columns for _, (rows, columns) in source.matrices())
        self._once = fits(wanted)
        if not self._once:
            log.warning("the weights stay in %s's blocks and are dequantised at every use, which is very slow: without "
                        "the native kernels (`shoal env` says why) they take %.1f GB of memory", source.path.name,
                        wanted / 1e9)

    def __call__(self, names: Sequence[str], role: Role) -> Linear:
        """Pack the matrices of these names, one above the other, for their role."""
        blocks = [self._read(name) for name in names]
        if self._once:
            whole = torch.cat([part.dequantise(self._dtype) for part in blocks])
            self._source.release()
            return Dense(whole, indexed=role == "table")
        parts = [Blocked(part, self._dtype) for part in blocks]
        return parts[0] if len(parts) == 1 else Stacked(parts)


class QuantisedPacker:
    """Packs what a checkpoint has in the numbers of another tool as blocks of the same numbers, where there are such.

    Attributes:
        counts: matrices by what they are held as.
    """

    def __init__(self, source: QuantisedSource, dtype: torch.dtype, pack: PackBlocks | None) -> None:
        self._source, self._pack, self._dtype, self.counts = source, pack, dtype, Counter[str]()

    def __call__(self, names: Sequence[str], role: Role) -> Linear | None:
        """Pack the matrices of these names, one above the other, for their role; None if they are packed as numbers."""
        quantised = sum(map(self._source.is_quantised, names))
        blocks = self._source.blocks(names) if self._pack is not None else None
        self.counts[str(self._dtype) if blocks is None else blocks.type.name] += quantised
        return None if blocks is None or self._pack is None else self._pack(blocks, role)

    def tell(self, tool: str) -> None:
        """Log what became of the matrices."""
        held = ", ".join(f"{count} as {form}" for form, count in sorted(self.counts.items()) if count)
        log.log(logging.WARNING if self.counts[str(self._dtype)] else logging.INFO,
                "matrices that %s has quantised are held in another form: %s%s", tool, held,
                "" if not self.counts[str(self._dtype)] else ", into which they were dequantised")


def fits(wanted: int) -> bool:
    """Whether `wanted` bytes leave a fifth of the free memory."""
    free = available()
    return free is None or wanted < 0.8 * free


class NativeFilePacker:
    """Repacks blocks into the layout of the kernels, or takes what earlier runs have `kept`.

    Matrices of one type become one, others a stack.
    """

    def __init__(self, source: GgufSource, kept: Repacked, read: ReadBlocks) -> None:
        self._source, self._kept, self._read = source, kept, read

    def __call__(self, names: Sequence[str], role: Role) -> Linear:
        """Pack the matrices of these names, one above the other, for their role."""
        groups = [list(group) for _, group in groupby(names, self._source.type_of)]
        if len(groups) > 1 and not self._fits(groups, role):
            return self._as_floats(names, role)
        paired = role == "pair" and len(groups) == 1
        parts = [self._woven(group, paired) for group in groups]
        self._source.release()
        return parts[0] if len(parts) == 1 else Stacked(parts)

    def _woven(self, names: Sequence[str], paired: bool) -> Linear:
        def make(arena: native.Memory) -> native.PackedWeight:
            blocks = [self._read(name) for name in names]
            whole = blocks[0] if len(blocks) == 1 else Blocks.cat(blocks)
            return native.pack_blocks(whole, paired, arena, self._source.release)

        return self._kept.take("+".join(names), make)

    def _fits(self, groups: Sequence[Sequence[str]], role: Role) -> bool:
        """Whether the kernels take the groups as a stack: whole row blocks, and for a pair one form of inputs."""
        rows = [sum(self._source.shape_of(name)[0] for name in group) for group in groups]
        if role == "pair":
            kinds = [native.kind_of_type(self._source.type_of(group[0])) for group in groups]
            return len(groups) == 2 and rows[0] == rows[1] and native.share_inputs(*kinds)
        return len(groups) <= 3 and not any(count % native.LANES for count in rows[:-1])

    def _as_floats(self, names: Sequence[str], role: Role) -> Linear:
        """Matrices that cannot form a stack, packed as float32: exact, but larger."""

        def make(arena: native.Memory) -> native.PackedWeight:
            whole = torch.cat([self._read(name).dequantise() for name in names])
            self._source.release()
            return native.pack(whole, "fp32", role == "pair", arena)

        return self._kept.take("+".join(names), make)


def file_packer(
    source: GgufSource, dtype: torch.dtype, kernels: bool, ordered: GatesBelow | HalvesPaired | LatentRows | None
) -> tuple[PackFile, Repacked | None]:
    """The packer of a file's matrices, and what keeps repacked ones on disk: call its `finish` when all are packed."""
    def read(name: str) -> Blocks:
        """The blocks of a matrix, its rows in the order of the packed layer."""
        blocks = source.blocks(name)
        rows = None if ordered is None else ordered.order(name, len(blocks.data))
        return blocks if rows is None else blocks.select(rows)

    if not kernels:
        return TorchFilePacker(source, dtype, read), None
    matrices = source.matrices()
    most = sum(native.packed_bytes(native.kind_of_type(kind), rows + native.LANES, columns)  # row blocks may be padded
               for kind, (rows, columns) in matrices)
    if grown := ", ".join(sorted({f"{kind.name} as {native.kind_of_type(kind)}" for kind, _ in matrices
                                  if native.kind_of_type(kind).upper() != kind.name and not kind.is_plain})):
        log.info("some matrices are held in another form of the same numbers: %s", grown)
    kept = Repacked(source.paths, most)
    return NativeFilePacker(source, kept, read), kept


def build(
    config: Any, source: Source, dtype: torch.dtype, device: torch.device, quant: Quant | None = None, *,
    kernels: bool = True, shaped: Callable[[Shape], Shape] | None = None,
) -> PackedRunner:
    """Pack a decoder; Unsupported if the model or the dtype does not fit the packed block.

    Args:
        source: weights by name; those of a GGUF file keep their types unless `quant` is given.
        quant: how matrices are quantised; None keeps them in `dtype`.
        kernels: whether to use the native kernels if they can run.
        shaped: changes the config's shape, for decoders that differ from their type's; None leaves it.
    """
    shape = shape_of(config, dtype)
    shape = shape if shaped is None else shaped(shape)
    check(dtype, quant)
    numbers = in_numbers(config, source)
    source = source if numbers is None else numbers
    file, plain = source.source if isinstance(source, FewerLayers) else source, source
    if config.get_text_config().model_type == "qwen3_next" and not isinstance(file, GgufSource):
        source = _apart(config.get_text_config(), source)
    if config.get_text_config().model_type == "gpt_oss" and not isinstance(file, GgufSource):
        source = ExpertsByRows(source)
    if shape.experts is not None and config.model_type == "dbrx" and not isinstance(file, GgufSource):
        source = ExpertsApart(source, shape.experts.routing.count)
    if config.get_text_config().model_type in BY_COLUMNS and not isinstance(file, GgufSource):
        source = ColumnsAsRows(source, BY_COLUMNS[config.get_text_config().model_type])
    if config.model_type == "qwen3_vl_moe" and shape.experts is not None:
        width, hidden = shape.experts.width, shape.hidden
        source = EitherWay(source, {"experts.gate_up_proj": (2 * width, hidden), "experts.down_proj": (hidden, width)})
    if config.model_type in READERS:
        source = source if isinstance(file, GgufSource) else EncoderDecoderSource(source, config)
        shape = replace(shape, tied=shape.tied or not source.has("lm_head.weight"))
    if config.model_type in PUBLISHED and not isinstance(plain, ModelSource | GgufSource):
        source = PublishedNames(source, PUBLISHED[config.model_type])
    if not isinstance(plain, ModelSource):  # a loaded model needs no check
        if numbers is None:
            check_unquantised(config)
        check_names(config, shape, source)
    as_held = source
    if not isinstance(file, GgufSource):
        source = by_parts(shape, source)
    straight = source is as_held
    ordered: GatesBelow | HalvesPaired | LatentRows | None = None
    ordered = by_heads(shape, source)
    source = source if ordered is None else ordered
    if shape.latent is not None:
        source = ordered = LatentRows(source, config.get_text_config())
    rotary = RotaryTable(config, device, dtype if dtype == torch.float64 else torch.float32)
    kernels = kernels and fits_kernels(shape, dtype, device) and native.available()
    pack_one: Pack = partial(pack, quant=quant)
    if kernels:
        halves = vars(config).get("dtype") == torch.float16
        pack_one = partial(pack_for, quant=quant, arena=native.Arena(), halves=halves)
    pack_file, kept, pack_blocks, told = None, None, None, None
    if kernels and quant is None:
        pack_blocks = partial(_pack_blocks, native.Arena())
    if isinstance(file, GgufSource) and quant is None and device.type == "cpu":
        pack_file, kept = file_packer(file, dtype, kernels, ordered)
        if isinstance(plain, FewerLayers):
            pack_file = partial(_pack_original, plain, pack_file)
    if numbers is not None:
        straight = straight and ordered is None  # blocks have their rows in the checkpoint's order
        pack_file = told = QuantisedPacker(numbers, dtype, pack_blocks if straight else None)
    with ExitStack() as undone:
        if kept is not None:
            undone.callback(kept.abandon)
        by_turns = isinstance(file, GgufSource) and file.by_turns
        packer = Packer(source, shape, dtype, device, pack_one, pack_file, config.get_text_config(), by_turns,
                        pack_blocks)
        weights = packer.weights()
        if told is not None:
            told.tell(str(quantised_by(config)))
        if kept is not None and file is plain:  # with layers left out it is no copy of the file
            undone.pop_all()
            kept.finish()
    runner = (NativeRunner if kernels else PackedRunner)(shape, weights, rotary, dtype, device)
    if kept is not None and kept.held < _SCARCE and isinstance(runner, NativeRunner):
        runner.read_ahead()
    return runner


def _pack_blocks(arena: native.Arena, blocks: Blocks, role: Role) -> Linear:
    """Blocks of a checkpoint, packed for the kernels."""
    return native.pack_blocks(blocks, role == "pair", arena)


def _apart(text: Any, source: Source) -> KeyHeadsApart:
    groups = text.linear_num_key_heads
    shared = text.linear_num_value_heads // groups
    values = shared * text.linear_value_head_dim
    return KeyHeadsApart(source, groups, (2 * text.linear_key_head_dim, values, shared))


def _pack_original(source: FewerLayers, pack: PackFile, names: Sequence[str], role: Role) -> Linear | None:
    """Pack matrices by their names in the file, before layers were renumbered."""
    return pack([source.origin(name) or name for name in names], role)


def check_unquantised(config: Any) -> None:
    """Refuse weights that are quantised according to their config; the packed block starts from plain ones."""
    kind = quantised_by(config)
    if kind is not None and (config.model_type, kind) != ("gpt_oss", "mxfp4"):
        why = f"its config says that its weights are quantised by {kind!r}, and the packed block starts from plain ones"
        raise Unsupported(f"the packed backend for model type {config.model_type!r}", why, REMEDY)


def check(dtype: torch.dtype, quant: str | None) -> None:
    """Refuse a dtype or quantisation that the packed block cannot compute with."""
    check_quant(quant)
    if dtype not in DTYPES:
        raise Unsupported(f"the packed backend in {dtype}", "its kernels are made for bfloat16 and float32",
                          'Use dtype="bfloat16", or backend="hf"')


def check_quant(quant: str | None) -> None:
    """Refuse an unknown quantisation."""
    if quant is not None and quant not in QUANTS:
        raise ValueError(f"quant is {quant!r}; it must be None or one of {', '.join(QUANTS)}")


def worth_packing(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse where the model's own modules are better: float64, float16 on a CPU, and layers without kernels."""
    kind = config.get_text_config().model_type
    if kind in (*OWN_CONFIGS, *_PACKED_ALONE):
        return
    special = kind in (*HYBRIDS, *MIXTURES)
    if special and not (fits_kernels(shape_of(config, dtype), dtype, device) and native.available()):
        what, lacking = f"the packed backend for model type {kind!r}", "recurrences" if kind in HYBRIDS else "experts"
        raise Unsupported(what, f"its {lacking} have no kernels here, which is slow on prompts", 'Use backend="hf"')
    if dtype == torch.float64 or (dtype == torch.float16 and device.type == "cpu"):
        what = f"the packed backend in {dtype} on {device.type}"
        raise Unsupported(what, "it gains nothing there", 'Use backend="hf"')
