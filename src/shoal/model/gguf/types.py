"""The number types of GGUF tensors that Shoal reads, and how many bytes a block of each takes.

Numbers and layouts are those of ggml, https://github.com/ggml-org/ggml (ggml-common.h).
"""

from __future__ import annotations

from enum import IntEnum


class GgmlType(IntEnum):
    """A tensor's type, by its number in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30

    @property
    def values(self) -> int:
        """Values in a block."""
        return _SIZES[self][0]

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return _SIZES[self][1]

    @property
    def is_float(self) -> bool:
        """Whether the values are plain floating-point numbers, one to a block."""
        return self.values == 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row.

        Raises:
            ValueError: `columns` is no multiple of the block.
        """
        if columns < 1 or columns % self.values:
            raise ValueError(f"{self.name} with {columns} columns; it must be a positive multiple of {self.values}")
        return columns // self.values * self.nbytes


_SIZES = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.BF16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
}

OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}
"""Names of types that Shoal does not read, for its errors."""
