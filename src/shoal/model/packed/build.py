"""From a config and a source of weights to a packed stack."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shoal.errors import Unsupported
from shoal.model.gguf.source import GgufSource
from shoal.model.packed import native
from shoal.model.packed.from_file import file_packer
from shoal.model.packed.linear import Quant, pack
from shoal.model.packed.native_stack import NativeMatrix, NativeStack, fits_kernels
from shoal.model.packed.rotary import RotaryTable
from shoal.model.packed.shape import shape_of
from shoal.model.packed.source import HalvesPaired, Source
from shoal.model.packed.stack import PackedStack
from shoal.model.packed.weights import DTYPES, Pack, Packer

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
    if shape.interleaved:
        source = HalvesPaired(source, shape.head_dim, shape.rotary_dim)
    rotary = RotaryTable(config, device, dtype if dtype == torch.float64 else torch.float32)
    kernels = kernels and fits_kernels(shape, dtype, device) and native.available()
    pack_one: Pack = partial(pack, quant=quant)
    if kernels:
        pack_one = partial(NativeMatrix.pack, quant=quant, arena=native.Arena())
    pack_file, kept = None, None
    if isinstance(source, GgufSource) and quant is None and device.type == "cpu":
        pack_file, kept = file_packer(source, dtype, kernels)
    try:
        weights = Packer(source, shape, dtype, device, pack_one, pack_file).weights()
    except BaseException:
        if kept is not None:
            kept.abandon()
        raise
    if kept is not None:
        kept.finish()
    return (NativeStack if kernels else PackedStack)(shape, weights, rotary, dtype, device)


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
