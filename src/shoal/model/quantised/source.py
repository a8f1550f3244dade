"""A checkpoint in the numbers of other tools, by the names of plain weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.gguf.blocks import Blocks
from shoal.model.modules import check_quantised, quantised_by
from shoal.model.packed.source import ChangedSource, FileSource, Source
from shoal.model.quantised.forms import FORMS, REMEDY, Stored, StoredForm, settings
from shoal.model.quantised.levels import GroupScaled

_PLAIN = "weight"


class QuantisedSource(ChangedSource):
    """Dequantises matrices as they are read.

    Args:
        source: the checkpoint.
        said: its config's `quantization_config`, whose `quant_method` is one of `FORMS`.
    """

    def __init__(self, source: FileSource, said: Mapping[str, Any]) -> None:
        super().__init__(source)
        self._forms = [form(said) for form in FORMS[said["quant_method"]]]
        self._types = source.types()

    @override
    def names(self) -> list[str]:
        return sorted(found for name in self._source.names() if (found := self._plain(name)) is not None)

    @override
    def has(self, name: str) -> bool:
        stem = name.removesuffix(f".{_PLAIN}")
        if stem == name:
            return self._source.has(name) and self._plain(name) is not None
        return self._source.has(name) or any(self._source.has(f"{stem}.{form.main}") for form in self._forms)

    def __getitem__(self, name: str) -> Tensor:
        found = self._found(name)
        if found is None:
            return self._source[name]
        return found if isinstance(found, Tensor) else found.dequantise()

    def blocks(self, names: Sequence[str]) -> Blocks | None:
        """Matrices, one above the other, as GGUF blocks of the same numbers; None if they have no such form."""
        forms = [(self._form(name), self._stored(name)) for name in names]
        if not all(form is not None and form.in_blocks(stored) for form, stored in forms):
            return None
        found = [self._found(name) for name in names]
        blocks = [one for one in found if isinstance(one, Blocks)]
        scaled = [one for one in found if isinstance(one, GroupScaled)]
        if len(blocks) == len(names):
            return Blocks.cat(blocks)
        whole = GroupScaled.cat(scaled) if len(scaled) == len(names) else None
        return None if whole is None else whole.blocks()

    def is_quantised(self, name: str) -> bool:
        """Whether a weight is not a plain one."""
        return self._form(name) is not None

    def _found(self, name: str) -> GroupScaled | Blocks | Tensor | None:
        """What stands for a plain weight; None if it is plain."""
        form = self._form(name)
        if form is None:
            return None
        try:
            return form.read(self._stored(name))
        except Unsupported:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError) as error:  # of parts whose shapes or types are odd
            why = " ".join(str(error).split()) or type(error).__name__
            raise Unsupported(f"a checkpoint whose {name!r} cannot be read", why, REMEDY) from error

    def _form(self, name: str) -> StoredForm | None:
        stored = self._stored(name)
        if stored.stem == name:
            return None
        return next((form for form in self._forms if stored.has(form.main) and form.reads(stored)), None)

    def _stored(self, name: str) -> Stored:
        return Stored(self._source, self._types, name.removesuffix(f".{_PLAIN}"))

    def _plain(self, name: str) -> str | None:
        """The name of the weight for which a tensor stands; None if it lies beside one."""
        for form in self._forms:
            if name.endswith(f".{form.main}"):
                return f"{name.removesuffix(f'.{form.main}')}.{_PLAIN}"
            if any(self._beside(name, part, form) for part in form.beside):
                return None
        return name

    def _beside(self, name: str, part: str, form: StoredForm) -> bool:
        stem = name.removesuffix(f".{part}")
        return stem != name and self._source.has(f"{stem}.{form.main}")


def in_numbers(config: Any, source: Source) -> QuantisedSource | None:
    """A checkpoint whose config names one of `FORMS`, as plain weights; None for any other."""
    if quantised_by(config) not in FORMS or not isinstance(source, FileSource):
        return None
    check_quantised(config, source.types())
    return QuantisedSource(source, settings(config))
