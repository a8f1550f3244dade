"""transformers' own modules with the weights of a GGUF file: the slow road, and the twin of the fast one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.source import GgufSource
from shoal.model.modules import expected, loaded
from shoal.model.whole import refuse

_REMEDY = "Convert the model again"


def modules_of(file: GgufFile, config: Any, dtype: torch.dtype) -> Any:
    """A transformers model in `dtype` with the dequantised weights, on the CPU, in eval mode.

    Raises:
        Unsupported: a tensor is missing, or not of the shape that the config asks for.
    """
    source, wanted = GgufSource(file, config), expected(config)
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    refuse((name for name in wanted if not source.has(name)), source.unread(wanted), "a GGUF file")
    tensors = {name: _tensor(source, name, like.shape).to(dtype, copy=True) for name, like in wanted.items()}
    return loaded(config, tensors, dtype)


def _tensor(source: GgufSource, name: str, shape: torch.Size) -> Tensor:
    found = source[name]
    if found.shape != shape:
        what = f"a GGUF file whose {name!r} is {list(found.shape)}"
        raise Unsupported(what, f"its metadata ask for {list(shape)}", _REMEDY)
    return found
