"""The vocabulary in a GGUF file: its tokens, their kinds, the special ones, and where an answer ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.model.gguf.header import Header, Strings

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens."""

_KEY = "tokenizer.ggml."
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
})
"""Control tokens that end an answer wherever a model has them."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class Vocabulary:
    """What the file says about text.

    Attributes:
        kind: "gpt2" for byte-level BPE, "llama" for SentencePiece BPE, or another name.
        pre: name of the pre-tokenizer, "" where the file gives none.
        tokens: by id.
        kinds: of the tokens, by id; empty where the file does not say.
        scores: of the tokens, by id; empty where the file has none.
        merges: pairs separated by a space, best first; empty where the file has none.
        bos, eos, unk, pad: ids or None.
        ends: ids that end an answer, the end-of-sequence id first.
        add_bos, add_eos: whether they stand around a text, None where the file does not say.
        add_space_prefix: whether a text begins with a space that is not written, None where the file does not say.
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
        """Ids of the tokens of these kinds."""
        return [token for token, kind in enumerate(self.kinds) if kind in kinds]


def vocabulary_of(header: Header) -> Vocabulary | None:
    """The vocabulary, or None where the file has none.

    Raises:
        ValueError: what it has is not of the right type or size.
    """
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
        bos=special["bos_token_id"],
        eos=special["eos_token_id"],
        unk=special["unknown_token_id"],
        pad=special["padding_token_id"],
        ends=_ends([special[name] for name in _END_KEYS], tokens, kinds),
        add_bos=_flag(entries, "add_bos_token"),
        add_eos=_flag(entries, "add_eos_token"),
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
