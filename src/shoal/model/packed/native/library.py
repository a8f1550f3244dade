"""The loaded library of kernels, if this machine can have one."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_void_p

from shoal.model.packed.native.build import BuildError, build, openmp_runtime, prebuilt, vector_sets
from shoal.model.packed.native.structs import BatchStruct, ChainStruct, Model, Weight

_log = logging.getLogger(__name__)
_SIGNATURES = {
    "shoal_missing_feature": (c_char_p, []),
    "shoal_vectors": (c_char_p, []),
    "shoal_sizes": (None, [POINTER(c_int64)]),
    "shoal_advise": (None, [c_void_p, c_int64]),
    "shoal_lay_out": (None, [POINTER(Weight), POINTER(c_int64), POINTER(c_int64)]),
    "shoal_pack_scratch": (c_int64, [POINTER(Weight)]),
    "shoal_pack": (None, [POINTER(Weight), c_void_p, c_int, c_void_p, c_int]),
    "shoal_pack_blocks": (None, [POINTER(Weight), c_void_p, c_void_p, c_int]),
    "shoal_take_upper": (None, [c_void_p, c_int64, c_void_p, c_int]),
    "shoal_roughen": (None, [POINTER(Weight), POINTER(Weight), c_void_p, c_int]),
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
    """The library and "", or None and the reason, which is logged once.

    If an old compiler or the system lacks a vector set, a narrower one is tried.
    """
    reasons = []
    try:
        for vectors in vector_sets():
            library, reason = _open_for(vectors)
            if library is not None:
                return library, ""
            _log.info("no kernels for %s: %s", vectors, reason)
            reasons.append(reason)
    except BuildError as error:
        reasons.append(str(error))
    _log.info("native kernels are off: %s", reasons[0])
    return None, reasons[0]


def _open_for(vectors: str) -> tuple[ctypes.CDLL | None, str]:
    try:
        library = _prebuilt(vectors) or ctypes.CDLL(str(build(vectors)))
    except (BuildError, OSError) as error:
        return None, str(error)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    missing = library.shoal_missing_feature()
    return (library, "") if missing is None else (None, f"the processor lacks {missing.decode()}")


def _prebuilt(vectors: str) -> ctypes.CDLL | None:
    """The library of the wheel, with the OpenMP library that torch uses; None if either is missing."""
    path, runtime = prebuilt(vectors), openmp_runtime()
    if path is None or runtime is None:
        return None
    try:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except OSError as error:
        _log.info("the kernels that came with the package cannot be loaded, so they are compiled: %s", error)
        return None


def load() -> ctypes.CDLL | None:
    """The library, built on the first call; None if it cannot be had. Never raises."""
    return _open()[0]


def available() -> bool:
    """Whether the kernels can run here."""
    return load() is not None


def vector_set() -> str:
    """The vector set that the kernels use (see `vector_sets`); RuntimeError if they cannot run here."""
    vectors: bytes = require().shoal_vectors()
    return vectors.decode()


def why_not() -> str:
    """Why the kernels cannot run here; empty if they can."""
    return _open()[1]


def require() -> ctypes.CDLL:
    """The library; RuntimeError if it cannot be had (see `available`)."""
    library = load()
    if library is None:
        raise RuntimeError(f"the native kernels cannot run here: {why_not()}; use the torch path instead")
    return library
