"""A checkpoint that is changed as it is loaded."""

from __future__ import annotations

from typing import Any

from shoal.engine.loading.checkpoint import Checkpoint
from shoal.errors import Unsupported
from shoal.model.modules import loaded
from shoal.model.packed.shape import shape_of
from shoal.model.packed.source import Source
from shoal.model.packed.weights import check_names
from shoal.model.transform import Transform


class Transformed(Checkpoint):
    """See `Checkpoint`; config and weights are those after the change.

    Args:
        name, revision, trust_remote_code: as there.
        transform: the change, of a decoder.

    Raises:
        Unsupported: the checkpoint cannot be changed like that.
    """

    def __init__(self, name: str, revision: str | None, trust_remote_code: bool, transform: Transform) -> None:
        super().__init__(name, revision, trust_remote_code)
        before, source = super().config(), named(super().weights(), name)
        _check(before, source)
        self._config, self._source = transform(before, source)
        same = self._config is before and self._source is source
        self.changed = None if same else self._source
        self._words = "" if same else getattr(transform, "__qualname__", "") or repr(transform)

    @property
    def changes(self) -> str:
        """See `Checkpoint`."""
        return "; ".join(filter(None, (super().changes, self._words)))

    def config(self) -> Any:
        """The transformers config after the change."""
        return self._config

    def weights(self) -> Source:
        """The weights by name after the change."""
        return self._source

    def model(self, dtype: Any, **options: Any) -> Any:
        """The model with its own modules after the change, on the CPU."""
        if self.changed is None:
            return super().model(dtype, **options)
        model = loaded(self._config, {name: self._source[name] for name in self._source.names()}, dtype)
        told = self.generation_config()
        if told is not None:
            model.generation_config = told
        return model


def _check(config: Any, source: Source) -> None:
    """Refuse what is missing or left over while that can still be seen: who makes fewer layers drops the others."""
    try:
        shape = shape_of(config)
    except Unsupported:  # its modules are asked when they are made
        return
    check_names(config, shape, source)


def named(source: Source | None, name: str) -> Source:
    """The weights of a checkpoint of that name, if there are any by their names.

    Raises:
        Unsupported: there are none.
    """
    if source is None:
        remedy = "Use its safetensors, or a GGUF file that Shoal reads itself"
        raise Unsupported(f"a transform of {name!r}", "its weights cannot be read by their names", remedy)
    return source
