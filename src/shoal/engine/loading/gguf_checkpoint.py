"""The parts of a GGUF file. Shoal reads them where it knows architecture and types, else transformers does."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import Unsupported
from shoal.model.gguf.header import Header, read_said
from shoal.model.gguf.metadata import vocabulary_of
from shoal.model.gguf.modules import check_said, check_taken
from shoal.model.modules import check_told

if TYPE_CHECKING:
    from shoal.model.gguf.file import GgufFile
    from shoal.model.gguf.source import GgufSource

_MAGIC = b"GGUF"
_OF_TRANSFORMERS = ("gguf", "accelerate")
"""Packages that transformers needs for such files; the extra `gguf` brings both."""

log = logging.getLogger(__name__)


class GgufCheckpoint:
    """Config, weights, tokenizer and modules of one file. Nothing is read before it is needed.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Any:
        """The transformers config.

        Raises:
            Unsupported: neither Shoal nor transformers reads the file.
            ValueError: it is damaged.
        """
        if self._own is not None:
            return self._own[1]
        from transformers import AutoConfig

        return self._by_transformers(AutoConfig)

    def entry(self, key: str) -> Any:
        """An entry of the metadata, None where there is none or Shoal does not read the file."""
        return self._own and self._own[0].header.metadata.get(key)

    def weights(self) -> GgufSource | None:
        """The weights by transformers' names, or None where only transformers reads the file."""
        if self._own is None:
            return None
        from shoal.model.gguf.source import GgufSource

        return GgufSource(*self._own)

    def tokenizer(self) -> Any | None:
        """The file's tokenizer, None where it has none.

        Raises:
            Unsupported: its kind is not known.
        """
        if self._own is not None:
            from shoal.model.gguf.tokenizer import tokenizer_of

            return tokenizer_of(self._own[0].header)
        from transformers import AutoTokenizer

        return self._by_transformers(AutoTokenizer)

    def model(self, dtype: Any) -> Any:
        """The modules of transformers with the file's weights, dequantised."""
        if self._own is not None:
            from shoal.model.gguf.modules import modules_of

            return modules_of(*self._own, dtype)
        from transformers import AutoModelForCausalLM

        model, told = self._by_transformers(AutoModelForCausalLM, dtype=dtype, output_loading_info=True)
        check_told(told, f"the GGUF file {self.path.name!r}")
        if self._said is not None:
            check_taken(model, self._said[1], self.path.name)
        return model

    @property
    def owned(self) -> bool:
        """Whether Shoal reads the file itself."""
        return self._own is not None

    def ends(self) -> list[int]:
        """Ids that end an answer by the file's metadata; none where it has no vocabulary."""
        header = self._own[0].header if self._own is not None else self._said and self._said[0]
        words = vocabulary_of(header) if header else None
        return [] if words is None else words.ends

    @cached_property
    def _own(self) -> tuple[GgufFile, Any] | None:
        """The open file and its config; None, which is logged once, where Shoal does not read it."""
        from shoal.model.gguf.config import config_of
        from shoal.model.gguf.file import GgufFile

        try:
            file = GgufFile(self.path)
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

    def _by_transformers(self, kind: Any, **options: Any) -> Any:
        if self._said is not None:
            check_said(*self._said)
        try:
            return kind.from_pretrained(os.fspath(self.path.parent), gguf_file=self.path.name, **options)
        except (MemoryError, OSError, Unsupported):
            raise
        except Exception as error:
            if "memory" in str(error):  # running out of memory on a CPU is a RuntimeError
                raise
            told = " ".join(f"{type(error).__name__}: {error}".split())
            why = f"{self._reason.why}, and transformers does not read it either ({told:.160})"
            remedy = "Use the model's safetensors, or a Q4_K_M file of a known architecture"
            if lacking := [name for name in _OF_TRANSFORMERS if find_spec(name) is None]:
                why = f"{self._reason.why}, and transformers may, but not without {' and '.join(lacking)}"
                remedy = "Install the extra: pip install 'shoal[gguf]'"
            raise Unsupported(self._reason.what, why, remedy) from error


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False
