"""A transformers tokenizer from the vocabulary of a GGUF file.

Byte-level BPE ("gpt2") takes the file's merges. SentencePiece BPE ("llama") has none in the file: they follow from the
vocabulary and its scores, since SentencePiece joins the neighbours whose union has the best score (Kudo and
Richardson, 2018, arXiv 1808.06226). Gemma's are in the order of its tokens, as in its own tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from shoal.errors import Unsupported
from shoal.heap import give_back, uncollected
from shoal.model.gguf.header import Header
from shoal.model.gguf.merges import merges_of
from shoal.model.gguf.metadata import Metadata
from shoal.model.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from shoal.model.gguf.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, vocabulary_of

SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_REMEDY = "Give the model's own tokenizer, shoal.load(file, tokenizer=FOLDER_OR_HUB_ID)"
_IN_ORDER = ("gemma", "gemma2", "gemma3")
_STRIPPING = ("phi3",)
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_of(header: Header) -> Any | None:
    """The tokenizer, a `PreTrainedTokenizerFast`, or None where the file has none.

    Raises:
        Unsupported: the tokenizer or its pre-tokenizer is of a kind that is not known here.
        ValueError: the vocabulary is damaged.
    """
    with uncollected():
        made = _made(header)
    give_back()
    return made


def _made(header: Header) -> Any | None:
    words = vocabulary_of(header)
    if words is None:
        return None
    metadata = Metadata(header)
    if words.kind == "gpt2":
        rules = _rules(words.pre)
        tokens = _distinct(words)
        backend, add_bos = _byte_level(tokens, words, rules), rules.add_bos
    elif words.kind == "llama":
        tokens = _spelled(_distinct(words))
        backend, add_bos = _sentencepiece(tokens, words, metadata.architecture), True
    else:
        raise Unsupported(f"a GGUF tokenizer of model {words.kind!r}", "Shoal reads gpt2 and llama", _REMEDY)
    _add_special(backend, tokens, words, metadata.architecture)
    return _wrapped(backend, tokens, words, add_bos, metadata)


def _rules(name: str) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        what = f"a GGUF tokenizer with the pre-tokenizer {name!r}" if name else "a GGUF tokenizer without pre-tokenizer"
        raise Unsupported(what, f"a wrong one would cut text wrongly; known are {', '.join(PRE_TOKENIZERS)}", _REMEDY)
    return PRE_TOKENIZERS[name]


def _distinct(words: Vocabulary) -> list[str]:
    """The tokens; empty ones, which no text can hold, get a name of their own."""
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(words.tokens)]
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        double = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise ValueError(f"the GGUF tokenizer has the token {double!r:.80} twice; each must occur once. {_REMEDY}")
    return tokens


def _spelled(tokens: list[str]) -> list[str]:
    """Tokens of spaces alone as SentencePiece writes them; some files hold real spaces."""
    return [SPACE * len(token) if token.isspace() and not token.strip(" ") else token for token in tokens]


def _byte_level(tokens: list[str], words: Vocabulary, rules: PreTokenizer) -> Tokenizer:
    backend = _bpe(tokens, _pairs(words.merges), ignore_merges=rules.whole_words)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in rules.cuts]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in merges]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        found = f"the GGUF tokenizer has the merge {wrong[0]!r:.80}"
        raise ValueError(f"{found}; it must be two tokens with a space between. {_REMEDY}")
    return pairs


def _sentencepiece(tokens: list[str], words: Vocabulary, architecture: str) -> Tokenizer:
    in_order = architecture in _IN_ORDER
    keys: Sequence[float] = range(len(tokens)) if in_order else [-score for score in words.scores]
    if len(keys) < len(tokens):
        raise ValueError(f"the GGUF tokenizer of model 'llama' has no scores; they must be there. {_REMEDY}")
    options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": True}
    if words.unk is not None:
        options["unk_token"] = tokens[words.unk]
    backend = _bpe(tokens, merges_of(tokens, words.kinds, keys), **options)
    prefixed = words.add_space_prefix if words.add_space_prefix is not None else True
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges, **options))
    except Exception as error:  # tokenizers raises plain exceptions
        raise ValueError(f"the GGUF tokenizer's merges do not fit its tokens: {error}. {_REMEDY}") from None


def _add_special(backend: Tokenizer, tokens: list[str], words: Vocabulary, architecture: str) -> None:
    """Tokens that are matched in the text before anything else; control ones leave no text of their own."""
    stripping = architecture in _STRIPPING and words.kind == "llama"
    named = {number for number in (words.bos, words.eos, words.unk, words.pad) if number is not None}
    control = named | set(words.of_kind(CONTROL, UNKNOWN))
    backend.add_special_tokens([
        AddedToken(tokens[n], special=True, normalized=False, rstrip=stripping and tokens[n] not in _NOT_STRIPPING)
        for n in sorted(control) if words.kinds[n : n + 1] != [BYTE]
    ])
    plain = [n for n in words.of_kind(USER_DEFINED) if n not in control]
    backend.add_tokens([AddedToken(tokens[n], special=False, normalized=False) for n in plain])


class _Handed:
    """Hands a tokenizer over as it is: transformers would copy it by way of JSON, seconds for a large one."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self._backend


def _wrapped(backend: Tokenizer, tokens: list[str], words: Vocabulary, add_bos: bool, metadata: Metadata) -> Any:
    named = {"bos_token": words.bos, "eos_token": words.eos, "unk_token": words.unk, "pad_token": words.pad}
    special = {name: None if number is None else tokens[number] for name, number in named.items()}
    begins = words.add_bos if words.add_bos is not None else add_bos
    return PreTrainedTokenizerFast(
        tokenizer_object=_Handed(backend),
        **special,
        add_bos_token=begins and words.bos is not None,
        add_eos_token=bool(words.add_eos) and words.eos is not None,
        chat_template=words.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=metadata.whole("context_length"),
    )
