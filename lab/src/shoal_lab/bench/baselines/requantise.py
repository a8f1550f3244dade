"""A GGUF file in another type, by llama.cpp's own quantiser: the numbers are dequantised and quantised again."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from shoal.errors import unknown
from shoal_lab.bench.system import NotMeasured

FTYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0",
          "Q4_1": "MOSTLY_Q4_1", "Q4_K_M": "MOSTLY_Q4_K_M"}
"""Name of a mix of types -> how llama.cpp's enumeration calls it."""


def requantise(api: Any, source: Path, target: Path, kind: str, threads: int, *, pure: bool = True) -> None:
    """Write `target` from `source`.

    Args:
        api: llama-cpp-python's low-level module.
        source: a GGUF file of any type.
        target: where to.
        kind: a key of `FTYPES`.
        threads: CPU threads.
        pure: hold every matrix in the type itself; otherwise llama.cpp gives some, such as the LM head, more bits.

    Raises:
        NotMeasured: the quantiser refuses.
    """
    if kind not in FTYPES:
        raise unknown("type of weights", kind, list(FTYPES))
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_{FTYPES[kind]}")
    params.nthread, params.allow_requantize, params.pure = threads, True, pure
    code = api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if code:
        raise NotMeasured(f"llama.cpp could not make {kind} from {source.name} (code {code})")
