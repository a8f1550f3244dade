"""How a model's weights lie in its files: the format, how many numbers, and what they are rounded to.

Nothing here reads a weight. Types of GGUF files have the names of llama.cpp (include/llama.h, `llama_ftype`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shoal.model.gguf.header import Header
from shoal.model.packed.source import FileSource

_FILE_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}
_UNITS = ((1e9, "B", 1), (1e6, "M", 2), (1e3, "K", 0))


@dataclass(frozen=True)
class FileForm:
    """What files say of their weights.

    Attributes:
        format: "gguf" or "safetensors"; "" for no files, or for those of another kind.
        parameters: numbers of all tensors; 0 where that is unknown.
        rounding: the type of most of them, such as "Q4_K_M" or "BF16"; "" where that is unknown.
    """

    format: str = ""
    parameters: int = 0
    rounding: str = ""

    @property
    def size(self) -> str:
        """The parameters as Ollama writes them, such as "134.52M"; "" where they are unknown."""
        for unit, letter, digits in _UNITS:
            if self.parameters >= unit:
                return f"{self.parameters / unit:.{digits}f}{letter}"
        return str(self.parameters or "")


def of_header(header: Header, sizes: Mapping[str, int] | None = None) -> FileForm:
    """Of a GGUF file, by its header; `sizes` of its tensors where the header has none."""
    counts = Counter[str]()
    for info in header.tensors.values():
        counts[info.type.name] += prod(info.shape)
    named = header.metadata.get("general.file_type")
    kind = _FILE_TYPES.get(named) if isinstance(named, int) else None
    return FileForm("gguf", sum(counts.values()) or sum((sizes or {}).values()), kind or _most(counts))


def of_tensors(source: FileSource, quantised: str | None) -> FileForm:
    """Of safetensors; where a tool has quantised them, its name, as its tensors hold several numbers in one."""
    if quantised is not None:
        return FileForm("safetensors", 0, quantised)
    counts = Counter[str]()
    for kind, shape in source.outlines().values():
        counts[kind] += prod(shape)
    return FileForm("safetensors", sum(counts.values()), _most(counts))


def _most(counts: Counter[str]) -> str:
    return counts.most_common(1)[0][0] if counts else ""
