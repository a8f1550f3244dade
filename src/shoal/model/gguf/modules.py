"""transformers' own modules with the weights of a GGUF file: the slow road, and the twin of the fast one."""

from __future__ import annotations

from typing import Any

import torch

from shoal.errors import Unsupported
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.source import GgufSource

_REMEDY = "Convert the model again"


def modules_of(file: GgufFile, config: Any, dtype: torch.dtype) -> Any:
    """A transformers model in `dtype` with the dequantised weights, on the CPU, in eval mode.

    Raises:
        Unsupported: a tensor is missing, or not of the shape that the config asks for.
    """
    from transformers import AutoModelForCausalLM

    source = GgufSource(file, config)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config, dtype=dtype).state_dict()
    tensors = {}
    for name, wanted in expected.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if not source.has(name):
            raise Unsupported(f"a GGUF file without {name!r}", "its architecture has one", _REMEDY)
        found = source[name]
        if found.shape != wanted.shape:
            what = f"a GGUF file whose {name!r} is {list(found.shape)}"
            raise Unsupported(what, f"its metadata ask for {list(wanted.shape)}", _REMEDY)
        tensors[name] = found.to(dtype, copy=True)
    model = AutoModelForCausalLM.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
    return model.eval()
