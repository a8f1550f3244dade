"""Whether all systems fit into memory at once, as interleaved rounds need."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.engine.loading.device import as_dtype
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.process import library
from shoal_lab.bench.system import Setting

_BITS = {"int8": (8.5, 8.5), "int4": (4.5, 8.5)}
"""Bits per weight of layers, and of embedding and LM head, by format."""
_OVERHEAD = 2**29
"""Bytes of a process with its libraries, without weights."""


def needed(model: MeasuredModel, settings: Iterable[Setting]) -> int:
    """Bytes that systems with these settings hold together, roughly."""
    return sum(_weights(model, setting) + _OVERHEAD for setting in settings)


def _weights(model: MeasuredModel, setting: Setting) -> int:
    if setting.quant == FILE:
        return model.file.bytes
    plain = as_dtype(setting.dtype).itemsize * 8
    layers, tables = _BITS.get(setting.quant or "", (plain, plain))
    held = model.table_weights()
    return int(((model.weights() - held) * layers + held * tables) / 8)


def check(model: MeasuredModel, settings: Iterable[Setting]) -> None:
    """Refuse systems that would not fit.

    Raises:
        ValueError: the message says how much is needed and how much there is.
    """
    listed = [setting for setting in settings if setting.device == "cpu"]
    want, have = needed(model, listed), library().virtual_memory().available
    if want > have:
        raise ValueError(
            f"{len(listed)} systems with the weights of {model.name} need about {want / 2**30:.0f} GiB at once, and "
            f"{have / 2**30:.0f} GiB are free; measure fewer peers or number formats in one command"
        )
