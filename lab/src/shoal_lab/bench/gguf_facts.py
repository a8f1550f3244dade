"""Sizes and types of a GGUF file's tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import Unsupported
from shoal.model.gguf.header import read_header


@dataclass(frozen=True)
class Facts:
    """Sizes of a file.

    Attributes:
        bytes: of the whole file.
        tensor_bytes: of all its tensors.
        layer_bytes: of all tensors of the layers, but for those that only guess further tokens.
        head_bytes: of the LM head, which may be the embedding.
        weights: numbers in all tensors.
        layer_weights: numbers in the matrices of the layers.
        types: GGML type -> number of matrices of that type, the most frequent first.
    """

    bytes: int
    tensor_bytes: int
    layer_bytes: int
    head_bytes: int
    weights: int
    layer_weights: int
    types: Mapping[str, int]

    @property
    def kinds(self) -> str:
        """The types as text, such as "Q5_0 and Q6_K"."""
        return " and ".join(self.types)

    @property
    def bits_per_weight(self) -> float:
        """Mean over all tensors; the vocabulary is left out."""
        return 8 * self.tensor_bytes / self.weights

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"bytes": self.bytes, "types": dict(self.types), "bits_per_weight": self.bits_per_weight}


def read(path: str | Path) -> Facts:
    """Read the tensor table of a file.

    Raises:
        Unsupported: the file is not a whole GGUF file.
    """
    try:
        tensors = read_header(path).tensors.values()
    except ValueError as error:
        raise Unsupported(f"the file {path}", f"it is no whole GGUF file ({error})", "Download it again") from error
    sizes = {tensor.name: tensor.nbytes for tensor in tensors}
    matrices = Counter(tensor.type.name for tensor in tensors if len(tensor.shape) > 1)
    head = sizes.get("output.weight", sizes.get("token_embd.weight", 0))
    further = {tensor.name.split(".")[1] for tensor in tensors if ".nextn." in tensor.name}
    layers = [one for one in tensors if one.name.startswith("blk.") and one.name.split(".")[1] not in further]
    return Facts(
        Path(path).stat().st_size, sum(sizes.values()), sum(tensor.nbytes for tensor in layers), head,
        sum(math.prod(tensor.shape) for tensor in tensors),
        sum(math.prod(tensor.shape) for tensor in layers if len(tensor.shape) > 1), dict(matrices.most_common()),
    )
