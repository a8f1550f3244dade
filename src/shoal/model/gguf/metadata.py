"""Metadata of a model, read by key with its kind and range checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.errors import Unsupported
from shoal.model.gguf.header import Header

_REMEDY = "Convert the model again"


class Metadata:
    """Entries of a header; keys without a family are completed by the architecture.

    Args:
        header: of the file.

    Attributes:
        architecture: the value of `general.architecture`.

    Raises:
        ValueError: the file names no architecture.
    """

    def __init__(self, header: Header) -> None:
        self._entries: Mapping[str, object] = header.metadata
        self.architecture = self.text("general.architecture")

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return self._entry(key) is not None

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`; an array whose items are all equal counts as one."""
        found = self._entry(key)
        if found is None and default is not None:
            return default
        if isinstance(found, memoryview) and found.format not in ("f", "d", "?") and len(found):
            if len(set(found)) > 1:
                what = f"a GGUF file whose {self._name(key)} differs from layer to layer"
                raise Unsupported(what, "all layers must have the same shape", 'Use backend="hf"')
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 1 << 31:
            raise self._wrong(key, found, f"a whole number from {least} to 2147483647")
        return found

    def each(self, key: str, layers: int) -> list[int]:
        """A whole number of at least 1 for each layer: one for all, or an array of them."""
        found = self._entry(key)
        if not isinstance(found, memoryview):
            return [self.whole(key)] * layers
        if len(found) != layers or found.format in ("f", "d", "?") or not all(0 < one < 1 << 31 for one in found):
            raise self._wrong(key, found.tolist(), f"{layers} whole numbers from 1 to 2147483647, one per layer")
        return list(found)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        found = self._entry(key)
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
            raise self._wrong(key, found, "a positive number")
        return float(found)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        found = self._entry(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, str):
            raise self._wrong(key, found, "a string")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        found = self._entry(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self._wrong(key, found, "true or false")
        return found

    def pattern(self, key: str, default: int, layers: int) -> list[bool]:
        """One truth value per layer: given as such, or as the period whose last layer is false."""
        found = self._entry(key)
        if isinstance(found, memoryview) and len(found) == layers:
            return [bool(one) for one in found]
        if isinstance(found, memoryview):
            raise self._wrong(key, f"{len(found)} values", f"{layers} values, one per layer")
        period = self.whole(key, default)
        return [layer % period < period - 1 for layer in range(layers)]

    def _entry(self, key: str) -> object:
        return self._entries.get(self._name(key))

    def _name(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.", "split.")) else f"{self.architecture}.{key}"

    def _wrong(self, key: str, found: object, allowed: str) -> ValueError:
        if isinstance(found, Sequence | memoryview) and not isinstance(found, str):
            found = list(found[:20])  # of an array the beginning
        told = "absent" if found is None else repr(found)[:80]
        return ValueError(f"the GGUF metadata entry {self._name(key)} is {told}; it must be {allowed}. {_REMEDY}")
