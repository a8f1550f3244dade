"""What is checked of a GGUF file that transformers reads: it believes metadata, and drops tensors in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.model.gguf.header import Header
from shoal.model.gguf.metadata import Metadata
from shoal.model.gguf.source import ASIDE
from shoal.model.gguf.vocabulary import vocabulary_of
from shoal.model.whole import refuse

_COUNTS = ("embedding_length", "feed_forward_length", "vocab_size", "attention.head_count", "attention.head_count_kv",
           "expert_count")
_NEXT = ".nextn."
"""In names of tensors that guess tokens ahead: transformers' modules do without."""


def check_said(header: Header, sizes: Mapping[str, int]) -> None:
    """Refuse metadata of a wrong kind, and numbers that no model with these tensors has.

    Args:
        header: of the file.
        sizes: how many values each tensor has.

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
        if found is None or isinstance(found, memoryview):  # one for each layer
            continue
        if metadata.whole(key, least=0) > largest:
            raise ValueError(f"the GGUF file announces {key} {found}, and its largest tensor has {largest} values. "
                             "Convert the model again")


def check_taken(model: Any, sizes: Mapping[str, int], name: str) -> None:
    """Refuse a file of which transformers has not taken all values.

    Args:
        model: what transformers made of it.
        sizes: how many values each of the file's tensors has.
        name: of the file.

    Raises:
        Unsupported: some are left over; names them where transformers says which.
    """
    own = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    wanted = {place: size for place, size in sizes.items() if not ASIDE.search(place) and _NEXT not in place}
    if sum(wanted.values()) > sum(own.values()):
        refuse((), _unmapped(model, wanted), f"the GGUF file {name!r}")


def _unmapped(model: Any, names: Mapping[str, int]) -> list[str]:
    """The tensors that transformers has no name for; all where it does not say."""
    try:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        kind = TENSOR_PROCESSORS.get(model.config.model_type, TensorProcessor)
        known = get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    except Exception:  # its inner workings, which releases may change
        return list(names)
    return [name for name in names if name not in known] or list(names)
