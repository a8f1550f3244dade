"""The loaded library, if this machine can have one."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_void_p

from shoal.model.packed.native.build import BuildError, build, openmp_runtime, prebuilt
from shoal.model.packed.native.structs import BatchStruct, ChainStruct, Model, Weight

_log = logging.getLogger(__name__)
_SIGNATURES = {
    "shoal_missing_feature": (c_char_p, []),
    "shoal_sizes": (None, [POINTER(c_int64)]),
    "shoal_advise": (None, [c_void_p, c_int64]),
    "shoal_lay_out": (None, [POINTER(Weight), POINTER(c_int64), POINTER(c_int64)]),
    "shoal_pack_scratch": (c_int64, [POINTER(Weight)]),
    "shoal_pack": (None, [POINTER(Weight), c_void_p, c_int, c_void_p, c_int]),
    "shoal_pack_blocks": (None, [POINTER(Weight), c_void_p, c_void_p, c_int]),
    "shoal_unpack": (None, [POINTER(Weight), c_void_p, c_int, c_void_p, c_int]),
    "shoal_lookup": (None, [POINTER(Weight), c_void_p, c_int64, c_void_p, c_int]),
    "shoal_check": (c_int, [POINTER(Model), POINTER(BatchStruct), c_char_p, c_int]),
    "shoal_check_chains": (c_int, [POINTER(Model), POINTER(BatchStruct), POINTER(ChainStruct), c_char_p, c_int]),
    "shoal_scratch_bytes": (c_int64, [POINTER(Model), POINTER(BatchStruct), c_int]),
    "shoal_forward": (c_double, [POINTER(Model), POINTER(BatchStruct), c_void_p, c_void_p, c_int]),
    "shoal_guess": (
        c_double, [POINTER(Model), POINTER(BatchStruct), POINTER(ChainStruct), c_void_p, c_void_p, c_int],
    ),
    "shoal_matmul_scratch": (c_int64, [POINTER(Weight), c_int]),
    "shoal_matmul": (None, [POINTER(Weight), c_void_p, c_int, c_void_p, c_void_p, c_int]),
}


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """The library and "", or None and the reason. Found out once; the reason is logged then."""
    try:
        library = _prebuilt() or ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        return _refuse(str(error))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    missing = library.shoal_missing_feature()
    if missing is not None:
        return _refuse(f"the processor lacks {missing.decode()}")
    return library, ""


def _prebuilt() -> ctypes.CDLL | None:
    """The library of the wheel, with the OpenMP library that torch runs on; None where either is not to be had."""
    path, runtime = prebuilt(), openmp_runtime()
    if path is None or runtime is None:
        return None
    try:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except OSError as error:
        _log.info("the kernels that came with the package cannot be loaded, so they are compiled: %s", error)
        return None


def _refuse(reason: str) -> tuple[None, str]:
    _log.info("native kernels are off: %s", reason)
    return None, reason


def load() -> ctypes.CDLL | None:
    """The library, built on the first call, or None where it cannot be had. Never raises."""
    return _open()[0]


def available() -> bool:
    """Whether the kernels can run here."""
    return load() is not None


def why_not() -> str:
    """Why the kernels cannot run here; empty if they can."""
    return _open()[1]


def require() -> ctypes.CDLL:
    """The library.

    Raises:
        RuntimeError: it cannot be had; ask `available()` first.
    """
    library = load()
    if library is None:
        raise RuntimeError(f"the native kernels cannot run here: {why_not()}; use the torch path instead")
    return library
