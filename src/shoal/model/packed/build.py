"""From a config and a source of weights to a packed stack."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shoal.errors import Unsupported
from shoal.model.gguf.source import GgufSource
from shoal.model.modules import quantised_by
from shoal.model.packed import native
from shoal.model.packed.from_file import FilePacker, file_packer
from shoal.model.packed.linear import Linear, Quant, pack
from shoal.model.packed.names import check_names
from shoal.model.packed.native_stack import NativeMatrix, NativeStack, fits_kernels
from shoal.model.packed.rotary import RotaryTable
from shoal.model.packed.shape import REMEDY, shape_of
from shoal.model.packed.source import FewerLayers, HalvesPaired, ModelSource, Source
from shoal.model.packed.stack import PackedStack
from shoal.model.packed.weights import DTYPES, Pack, Packer, Role

QUANTS = ("int8", "int4")


def build(
    config: Any,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    quant: Quant | None = None,
    *,
    kernels: bool = True,
) -> PackedStack:
    """Pack a decoder.

    Args:
        config: its transformers config.
        source: its weights by name; those of a GGUF file keep its types unless `quant` says otherwise.
        dtype: of the computation and the KV.
        device: where to put it.
        quant: how matrices are stored; None keeps them in `dtype`.
        kernels: whether the native kernels are used where they can run.

    Raises:
        Unsupported: the model or the dtype does not fit the packed block.
    """
    shape = shape_of(config, dtype)
    check(dtype, quant)
    if not isinstance(source, ModelSource):  # a model that is loaded is what it is
        check_unquantised(config)
        check_names(config, shape, source)
    if shape.interleaved:
        source = HalvesPaired(source, shape.head_dim, shape.rotary_dim)
    rotary = RotaryTable(config, device, dtype if dtype == torch.float64 else torch.float32)
    kernels = kernels and fits_kernels(shape, dtype, device) and native.available()
    pack_one: Pack = partial(pack, quant=quant)
    if kernels:
        pack_one = partial(NativeMatrix.pack, quant=quant, arena=native.Arena())
    pack_file, kept = None, None
    file = source.source if isinstance(source, FewerLayers) else source
    if isinstance(file, GgufSource) and quant is None and device.type == "cpu":
        pack_file, kept = file_packer(file, dtype, kernels)
        if isinstance(source, FewerLayers):
            pack_file = partial(_pack_original, source, pack_file)
    try:
        weights = Packer(source, shape, dtype, device, pack_one, pack_file).weights()
    except BaseException:
        if kept is not None:
            kept.abandon()
        raise
    if kept is not None and file is source:
        kept.finish()
    elif kept is not None:  # without the other layers it is no copy of the file
        kept.abandon()
    return (NativeStack if kernels else PackedStack)(shape, weights, rotary, dtype, device)


def _pack_original(source: FewerLayers, pack: FilePacker, names: Sequence[str], role: Role) -> Linear:
    """Matrices by the names that the file knows them by."""
    return pack([source.origin(name) or name for name in names], role)


def check_unquantised(config: Any) -> None:
    """Refuse weights that their config calls quantised: the packed block starts from plain ones."""
    kind = quantised_by(config)
    if kind is not None:
        why = f"its config says that its weights are quantised by {kind!r}, and the packed block starts from plain ones"
        raise Unsupported(f"the packed backend for model type {config.model_type!r}", why, REMEDY)


def check(dtype: torch.dtype, quant: str | None) -> None:
    """Refuse what the packed block has no arithmetic for."""
    check_quant(quant)
    if dtype not in DTYPES:
        raise Unsupported(f"the packed backend in {dtype}", "its kernels are made for bfloat16 and float32",
                          'Use dtype="bfloat16", or backend="hf"')


def check_quant(quant: str | None) -> None:
    """Refuse an unknown quantisation."""
    if quant is not None and quant not in QUANTS:
        raise ValueError(f"quant is {quant!r}; it must be None or one of {', '.join(QUANTS)}")


def worth_packing(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse where the model's own modules do better: float64, and float16 on a CPU."""
    if dtype == torch.float64 or (dtype == torch.float16 and device.type == "cpu"):
        what = f"the packed backend in {dtype} on {device.type}"
        raise Unsupported(what, "it gains nothing there", 'Use backend="hf"')
