"""The parts of a GGUF file. Shoal reads them where it knows architecture and types, else transformers does.

transformers' own reader believes metadata and drops tensors in silence, so `check_said` and `check_taken` check both.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch

from shoal.engine.loading.form import FileForm, of_header
from shoal.errors import Unsupported, pip_install
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.header import Header, read_said
from shoal.model.gguf.metadata import Metadata, vocabulary_of
from shoal.model.gguf.mmproj import Sight, sight_beside
from shoal.model.gguf.source import ASIDE, GgufSource, matrix_sizes
from shoal.model.gguf.splits import further_beside
from shoal.model.lora.adapter import Place
from shoal.model.modules import check_loading_info, expected, loaded, refuse

_COUNTS = ("embedding_length", "feed_forward_length", "vocab_size", "attention.head_count", "attention.head_count_kv",
           "expert_count")
_NEXT = ".nextn."
"""Part of the names of multi-token-prediction tensors, which transformers' modules do not have."""
_OF_TRANSFORMERS = ("gguf", "accelerate")
"""Packages that transformers needs for such files; the extra `gguf` brings both."""

log = logging.getLogger(__name__)


def _same(header: Header) -> tuple[str, ...]:
    """Entries of the metadata in which a model's files agree."""
    kind = header.metadata.get("general.architecture")
    return "general.architecture", *(f"{kind}.{name}" for name in ("embedding_length", "attention.head_count"))


@dataclass(frozen=True)
class Spoken:
    """What a checkpoint says of text.

    Attributes:
        template: of chats; None without one.
        tokens: all of its tokens.
        tokenizer: where one was made to know that; a GGUF file's ends are among its `GgufCheckpoint.ends`.
    """

    template: str | None = None
    tokens: Collection[str] = ()
    tokenizer: Any = None


class GgufCheckpoint:
    """Config, weights, tokenizer and modules of one file. Nothing is read before it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Any:
        """The transformers config; Unsupported where nobody reads the file, ValueError where it is damaged."""
        return self._by_transformers("AutoConfig") if self._own is None else self._own[1]

    def entry(self, key: str) -> Any:
        """An entry of the metadata, None where there is none or Shoal does not read the file."""
        return self._own and self._own[0].header.metadata.get(key)

    def weights(self) -> GgufSource | None:
        """The weights by transformers' names, or None where only transformers reads the file."""
        return None if self._own is None else GgufSource(*self._own)

    def form(self) -> FileForm:
        """How its weights lie in it."""
        if self._own is not None:
            return of_header(self._own[0].header)
        return FileForm("gguf") if self._said is None else of_header(*self._said)

    def sizes(self) -> dict[Place, tuple[int, int]]:
        """Rows and columns of the matrices of layers; empty where only transformers reads the file."""
        return {} if self._own is None else matrix_sizes(self._own[0])

    def spoken(self) -> Spoken:
        """What it says of text, without a tokenizer made of it where Shoal reads the file."""
        if self._own is None:
            return spoken_by(self.tokenizer())
        vocabulary = vocabulary_of(self._own[0].header)
        return Spoken() if vocabulary is None else Spoken(vocabulary.chat_template, {*vocabulary.tokens})

    def beside(self) -> GgufSource | None:
        """The weights of a file of the same folder that has this model's layer for further tokens; None without one."""
        if self._own is None:
            return None
        file, config = self._own
        for path in further_beside(self.path.parent):
            try:
                other = GgufFile(path)
            except (OSError, ValueError) as error:
                log.warning("guessing without the GGUF file %r beside %r: %s", path.name, self.path.name, error)
                continue
            if all(other.header.metadata.get(key) == file.header.metadata.get(key) for key in _same(file.header)):
                return GgufSource(other, config)
            log.info("the GGUF file %r predicts further tokens for another model than %r", path.name, self.path.name)
        return None

    def sight(self, config: Any, tokens: Callable[[], Mapping[str, int]]) -> tuple[Sight | None, str]:
        """What reads pictures for it, from a file of its folder; if nothing does, why, where there is such a file."""
        return (None, "") if self._own is None else sight_beside(self.path.parent, config, tokens)

    def tokenizer(self) -> Any | None:
        """The file's tokenizer, None where it has none; Unsupported where its kind is not known."""
        if self._own is not None:
            from shoal.model.gguf.tokenizer import tokenizer_of

            return tokenizer_of(self._own[0].header)
        return self._by_transformers("AutoTokenizer")

    def model(self, dtype: Any) -> Any:
        """The modules of transformers with the file's weights, dequantised."""
        if self._own is not None:
            return modules_of(*self._own, dtype)
        model, info = self._by_transformers("AutoModelForCausalLM", dtype=dtype, output_loading_info=True)
        check_loading_info(info, f"the GGUF file {self.path.name!r}")
        if self._said is not None:
            check_taken(model, self._said[1], self.path.name)
        return model

    def ends(self) -> dict[str, Any]:
        """What the metadata say of where an answer ends: options of `eos_ids`."""
        header = self._own[0].header if self._own is not None else self._said and self._said[0]
        vocabulary = vocabulary_of(header) if header else None
        return {"written": self._own is not None, "more": [] if vocabulary is None else vocabulary.ends}

    @cached_property
    def _own(self) -> tuple[GgufFile, Any] | None:
        """The open file and its config; None, which is logged once, where Shoal does not read it."""
        from shoal.model.gguf.config import config_of

        try:
            file = GgufFile(self.path)
            check_counts(file.header, {name: prod(info.shape) for name, info in file.header.tensors.items()})
            return file, config_of(file)
        except Unsupported as reason:
            self._reason = reason
            log.info("reading the GGUF file by way of transformers: %s", reason)
            return None

    @cached_property
    def _said(self) -> tuple[Header, dict[str, int]] | None:
        """Metadata and sizes of tensors; None for a version of the format that only transformers may read."""
        try:
            return read_said(self.path)
        except Unsupported:
            return None

    def _by_transformers(self, kind: str, **options: Any) -> Any:
        import transformers

        if self._said is not None and (count := self._said[0].metadata.get("split.count", 1)) != 1:
            why = f"{self._reason.why}, and it is in {count} parts, which transformers does not read"
            raise Unsupported(self._reason.what, why, "Join them with llama.cpp's gguf-split, or use safetensors")
        if self._said is not None:
            check_said(*self._said)
        try:
            folder, name = os.fspath(self.path.parent), self.path.name
            return getattr(transformers, kind).from_pretrained(folder, gguf_file=name, **options)
        except (MemoryError, OSError, Unsupported):
            raise
        except Exception as error:
            if "memory" in str(error):  # running out of memory on a CPU is a RuntimeError
                raise
            info = " ".join(f"{type(error).__name__}: {error}".split())
            why = f"{self._reason.why}, and transformers does not read it either ({info:.160})"
            remedy = "Use the model's safetensors, or a Q4_K_M file of a known architecture"
            if lacking := [name for name in _OF_TRANSFORMERS if find_spec(name) is None]:
                why = f"{self._reason.why}, and transformers may, but not without {' and '.join(lacking)}"
                remedy = f"Install the extra: {pip_install('shoal[gguf]')}"
            raise Unsupported(self._reason.what, why, remedy) from error


def spoken_by(tokenizer: Any) -> Spoken:
    """What a tokenizer says of text; nothing for none."""
    if tokenizer is None:
        return Spoken()
    return Spoken(getattr(tokenizer, "chat_template", None), tokenizer.get_vocab(), tokenizer)


def modules_of(file: GgufFile, config: Any, dtype: torch.dtype) -> Any:
    """A transformers model with the dequantised weights in `dtype`, on the CPU, in eval mode.

    Raises:
        Unsupported: a tensor is missing, left over, or has another shape than the config says, or the modules do not
            compute what the file means.
    """
    if config.model_type == "minimax" and config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("the modules of a minimax-01 GGUF file that rotates a part of each head",
                          "transformers' MiniMax rotates all of it", 'Use backend="packed"')
    source, wanted = GgufSource(file, config), expected(config)
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    parts = {name: source.parts(name) for name in wanted}
    missing = (name for name, held in parts.items() if not all(map(source.has, held)))
    refuse(missing, source.unread(chain.from_iterable(parts.values())), "a GGUF file")
    found = {name: tensor for name in wanted if (tensor := source.of_modules(name)) is not None}
    return loaded(config, {name: tensor.to(dtype, copy=True) for name, tensor in found.items()}, dtype)


def check_said(header: Header, sizes: Mapping[str, int]) -> None:
    """Refuse metadata of a wrong type, and numbers that do not fit the `sizes` of tensors; the ValueError says what."""
    vocabulary_of(header)
    check_counts(header, sizes)


def check_counts(header: Header, sizes: Mapping[str, int]) -> None:
    """Refuse numbers that do not fit the `sizes` of tensors; the ValueError says what."""
    metadata = Metadata(header)
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
    """Refuse a file where transformers has not read all tensors of these sizes, by their names if it tells them."""
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
