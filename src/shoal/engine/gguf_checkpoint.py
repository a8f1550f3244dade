"""The parts of a GGUF file: read here where its architecture and types are known, else by transformers."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import Unsupported

if TYPE_CHECKING:
    from shoal.model.gguf.file import GgufFile
    from shoal.model.gguf.source import GgufSource

_MAGIC = b"GGUF"
_OF_TRANSFORMERS = ("gguf", "accelerate")
"""What transformers reads such files with; the extra `gguf` brings both."""

log = logging.getLogger(__name__)


class GgufCheckpoint:
    """Config, weights, tokenizer and modules of one file; nothing is read before it is asked for.

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
            Unsupported: it is of a kind that is not known.
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

        return self._by_transformers(AutoModelForCausalLM, dtype=dtype)

    @cached_property
    def _own(self) -> tuple[GgufFile, Any] | None:
        """The open file and its config, or None, said once, where Shoal does not read it."""
        from shoal.model.gguf.config import config_of
        from shoal.model.gguf.file import GgufFile

        try:
            file = GgufFile(self.path)
            return file, config_of(file)
        except Unsupported as reason:
            self._reason = reason
            log.info("reading the GGUF file by way of transformers: %s", reason)
            return None

    def _by_transformers(self, kind: Any, **options: Any) -> Any:
        try:
            return kind.from_pretrained(os.fspath(self.path.parent), gguf_file=self.path.name, **options)
        except (ValueError, ImportError, NotImplementedError, KeyError) as error:
            told = (str(error).splitlines() or [type(error).__name__])[0]
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
