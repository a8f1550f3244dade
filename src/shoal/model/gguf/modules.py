"""transformers models from GGUF files: modules with dequantised weights, and checks of what transformers loads itself.

`modules_of` is the reference of the packed executor. transformers' own reader believes metadata and drops tensors in
silence, so `check_said` and `check_taken` check both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.header import Header
from shoal.model.gguf.metadata import Metadata, vocabulary_of
from shoal.model.gguf.source import ASIDE, GgufSource
from shoal.model.modules import expected, loaded, refuse

_REMEDY = "Convert the model again"
_COUNTS = ("embedding_length", "feed_forward_length", "vocab_size", "attention.head_count", "attention.head_count_kv",
           "expert_count")
_NEXT = ".nextn."
"""Part of the names of multi-token-prediction tensors, which transformers' modules do not have."""


def modules_of(file: GgufFile, config: Any, dtype: torch.dtype) -> Any:
    """A transformers model with the dequantised weights in `dtype`, on the CPU, in eval mode.

    Raises:
        Unsupported: a tensor is missing or has another shape than the config says.
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


def check_said(header: Header, sizes: Mapping[str, int]) -> None:
    """Refuse metadata of a wrong type, and numbers that do not fit the tensors.

    Args:
        sizes: number of values of each tensor.

    Raises:
        ValueError: names the entry.
    """
    metadata = Metadata(header)
    vocabulary_of(header)
    layers, largest = metadata.whole("block_count", 1, least=0), max(sizes.values(), default=0)
    if layers > len(sizes):
        raise ValueError(f"the GGUF file announces {layers} layers and has {len(sizes)} tensors; each layer has "
                         "several. Convert the model again")
    for key in _COUNTS:
        found = header.metadata.get(f"{metadata.architecture}.{key}")
        if found is None or isinstance(found, memoryview):  # an array has one number per layer
            continue
        if metadata.whole(key, least=0) > largest:
            raise ValueError(f"the GGUF file announces {key} {found}, and its largest tensor has {largest} values. "
                             "Convert the model again")


def check_taken(model: Any, sizes: Mapping[str, int], name: str) -> None:
    """Refuse a file of which transformers has not read every tensor.

    Args:
        sizes: number of values of each tensor in the file.

    Raises:
        Unsupported: values are left over; names the tensors if transformers says which.
    """
    own = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    wanted = {place: size for place, size in sizes.items() if not ASIDE.search(place) and _NEXT not in place}
    if sum(wanted.values()) > sum(own.values()):
        refuse((), _unmapped(model, wanted), f"the GGUF file {name!r}")


def _unmapped(model: Any, names: Mapping[str, int]) -> list[str]:
    """The tensors that transformers has no name for; all of them if it does not say."""
    try:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        kind = TENSOR_PROCESSORS.get(model.config.model_type, TensorProcessor)
        known = get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    except Exception:  # private functions of transformers, which releases may change
        return list(names)
    return [name for name in names if name not in known] or list(names)
