"""Typed reads of GGUF metadata: entries of a model, and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import Unsupported
from shoal.model.gguf.header import Header, Strings

_REMEDY = "Convert the model again"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens."""

_KEY = "tokenizer.ggml."
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
})
"""Control tokens that end an answer in every model that has them."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Metadata:
    """Typed reads of the entries of a header; every read raises ValueError for a value of another type or range.

    A key gets the architecture as its prefix, unless it begins with `general.`, `tokenizer.`, `split.` or `xielu.`.

    Attributes:
        architecture: the value of `general.architecture`, which must be there.
    """

    def __init__(self, header: Header) -> None:
        self._entries: Mapping[str, object] = header.metadata
        self.architecture = self.text("general.architecture")

    def has(self, key: str) -> bool:
        """Whether the entry exists."""
        return self._entry(key) is not None

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`; an array of equal integers counts as one."""
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

    def each(self, key: str, layers: int, *, least: int = 1) -> list[int]:
        """An integer of at least `least` for each layer, from one number for all or an array."""
        found = self._entry(key)
        if not isinstance(found, memoryview):
            return [self.whole(key, least=least)] * layers
        if len(found) != layers or found.format in ("f", "d", "?") or not all(least <= one < 1 << 31 for one in found):
            raise self._wrong(key, found.tolist(), f"{layers} whole numbers from {least} to 2147483647, one per layer")
        return list(found)

    def wholes(self, key: str) -> list[int]:
        """Integers of at least 0, as many as there are."""
        found = self._entry(key)
        if not isinstance(found, memoryview) or found.format in ("f", "d", "?") or not all(one >= 0 for one in found):
            raise self._wrong(key, found, "an array of whole numbers of at least 0")
        return list(found)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        found = self._entry(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
            raise self._wrong(key, found, "a positive number")
        return float(found)

    def numbers(self, key: str, count: int) -> list[float] | None:
        """So many numbers, which may be infinite, from one for all or an array; None if the entry is absent."""
        found = self._entry(key)
        if found is None or isinstance(found, float):
            return None if found is None else [found] * count
        if not isinstance(found, memoryview) or found.format not in ("f", "d") or len(found) != count or any(
                one != one for one in found):
            raise self._wrong(key, found, f"{count} floating-point numbers")
        return list(found)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        found = self._entry(key, default)
        if not isinstance(found, str):
            raise self._wrong(key, found, "a string")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """A bool."""
        found = self._entry(key, default)
        if not isinstance(found, bool):
            raise self._wrong(key, found, "true or false")
        return found

    def pattern(self, key: str, default: int, layers: int) -> list[bool]:
        """One bool per layer, from an array or from a period, in which only the last layer is false."""
        found = self._entry(key)
        if isinstance(found, memoryview) and len(found) == layers:
            return [bool(one) for one in found]
        if isinstance(found, memoryview):
            raise self._wrong(key, f"{len(found)} values", f"{layers} values, one per layer")
        period = self.whole(key, default)
        return [layer % period < period - 1 for layer in range(layers)]

    def _entry(self, key: str, default: object = None) -> object:
        return self._entries.get(self._name(key), default)

    def _name(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.", "split.", "xielu.")) else f"{self.architecture}.{key}"

    def _wrong(self, key: str, found: object, allowed: str) -> ValueError:
        if isinstance(found, Sequence | memoryview) and not isinstance(found, str):
            found = list(found[:20])  # the beginning of an array is enough
        told = "absent" if found is None else repr(found)[:80]
        return ValueError(f"the GGUF metadata entry {self._name(key)} is {told}; it must be {allowed}. {_REMEDY}")


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's part of a GGUF file.

    Attributes:
        kind: "gpt2" for byte-level BPE, "llama" for SentencePiece BPE, or another name.
        pre: name of the pre-tokenizer; "" if the file gives none.
        tokens: tokens by id.
        kinds, scores: kind and score of each token by id; empty if the file has none.
        merges: pairs separated by a space, best first; empty if the file has none.
        bos, eos, unk, pad: ids or None.
        ends: ids that end an answer, the end-of-sequence id first.
        add_bos, add_eos: whether bos and eos are added around a text; None if the file does not say.
        add_space_prefix: whether a space is added before a text; None if the file does not say.
        chat_template: Jinja source or None.
    """

    kind: str
    pre: str
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    ends: list[int]
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool | None
    chat_template: str | None

    def __len__(self) -> int:
        return len(self.tokens)

    def of_kind(self, *kinds: int) -> list[int]:
        """Ids of all tokens of these kinds."""
        return [token for token, kind in enumerate(self.kinds) if kind in kinds]


def vocabulary_of(header: Header) -> Vocabulary | None:
    """The vocabulary, or None if the file has none; ValueError if an entry has the wrong type or size."""
    entries = header.metadata
    tokens, kind = entries.get(_KEY + "tokens"), entries.get(_KEY + "model")
    if tokens is None or kind in (None, "none", "no_vocab"):
        return None
    if not isinstance(tokens, Strings) or not isinstance(kind, str):
        raise _wrong("tokens", "must be strings, and its model a name")
    merges = entries.get(_KEY + "merges", ())
    if not isinstance(merges, Strings | tuple):
        raise _wrong("merges", "must be strings")
    kinds = _numbers(entries, "token_type", len(tokens))
    special = {name: _token(entries, name, len(tokens)) for name in (*_IDS, *_END_KEYS)}
    return Vocabulary(
        kind=kind,
        pre=_text(entries, _KEY + "pre") or "",
        tokens=tokens,
        kinds=[int(one) for one in kinds],
        scores=_numbers(entries, "scores", len(tokens)),
        merges=merges,
        bos=special["bos_token_id"], eos=special["eos_token_id"],
        unk=special["unknown_token_id"], pad=special["padding_token_id"],
        ends=_ends([special[name] for name in _END_KEYS], tokens, kinds),
        add_bos=_flag(entries, "add_bos_token"), add_eos=_flag(entries, "add_eos_token"),
        add_space_prefix=_flag(entries, "add_space_prefix"),
        chat_template=_text(entries, "tokenizer.chat_template"),
    )


_IDS = ("bos_token_id", "unknown_token_id", "padding_token_id")


def _ends(named: list[int | None], tokens: Strings, kinds: Sequence[float]) -> list[int]:
    known = [token for token, kind in enumerate(kinds) if kind == CONTROL and tokens[token] in _ENDS]
    return list(dict.fromkeys([*(token for token in named if token is not None), *known]))


def _numbers(entries: Mapping[str, object], name: str, count: int) -> Sequence[float]:
    found = entries.get(_KEY + name)
    if found is None:
        return ()
    if not isinstance(found, memoryview) or len(found) != count:
        raise _wrong(name, f"must be {count} numbers, one per token")
    return found


def _token(entries: Mapping[str, object], name: str, count: int) -> int | None:
    found = entries.get(_KEY + name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < count:
        raise _wrong(name, f"is {found!r:.80}; it must be a token id, 0 to {count - 1}")
    return found


def _flag(entries: Mapping[str, object], name: str) -> bool | None:
    found = entries.get(_KEY + name)
    if found is not None and not isinstance(found, bool):
        raise _wrong(name, f"is {found!r:.80}; it must be true or false")
    return found


def _text(entries: Mapping[str, object], name: str) -> str | None:
    found = entries.get(name)
    if found is not None and not isinstance(found, str):
        raise _wrong(name.removeprefix(_KEY), "must be a string")
    return found


def _wrong(name: str, must: str) -> ValueError:
    return ValueError(f"the GGUF tokenizer's {name} {must}. Convert the model again, or give a tokenizer of your own")
