"""A transformers tokenizer from the vocabulary of a GGUF file.

Byte-level BPE ("gpt2") takes the merges of the file; the name in `tokenizer.ggml.pre` says how text is split before.
The file of a SentencePiece BPE ("llama") has no merges. They follow from the vocabulary and its scores, since
SentencePiece joins the neighbours whose union has the best score (Kudo and Richardson, 2018, arXiv 1808.06226); for
Gemma they follow the order of the tokens. A large vocabulary has half a million merges, so they are kept on disk. T5's
unigram model has none.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

from shoal.errors import Unsupported
from shoal.heap import give_back, uncollected
from shoal.model.gguf.header import Header
from shoal.model.gguf.metadata import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Metadata, Vocabulary, vocabulary_of
from shoal.user_cache import cache_folder, write_whole

log = logging.getLogger(__name__)

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHED = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)

GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
DIGITS = (r"\p{N}", *GPT2)
LLAMA3 = (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",)
QWEN2 = (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",)
_MARKED = _REST.replace(r"\p{L}", r"\p{L}\p{M}", 1)
QWEN35 = (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{_MARKED}",)
TEKKEN = (rf"{_CASED % ('', '')}|\p{{N}}|{_SLASHED}",)
GPT4O = (rf"{_CASED % (_ENDINGS + '?', _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_SLASHED}",)
BLOOM = (r" ?[^(\s|.,!?…。，、।۔،)]+",)
HUNYUAN = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
           r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
           r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *GPT2, "[0-9][0-9][0-9]")
SPACE = "\u2581"
"""SentencePiece's character for a space."""
_REMEDY = "Give the model's own tokenizer, shoal.load(file, tokenizer=FOLDER_OR_HUB_ID)"
_IN_ORDER = ("gemma", "gemma2", "gemma3", "gemma3n")
_STRIPPING = ("phi3",)
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before byte-level BPE.

    Attributes:
        cuts: regular expressions. Each splits the pieces that the one before has left, into its matches and the rest.
        whole_words: whether a piece that is a token is taken whole, ignoring merges.
        nfc: whether text is first brought to Unicode's normal form C.
        add_bos: whether a text begins with the beginning-of-sequence token if the file does not say.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    add_bos: bool = False


def _named(names: str, one: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), one)


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_named("default", PreTokenizer(DEFAULT)),
    **_named("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en exaone4 "
             "jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling", PreTokenizer(GPT2)),
    **_named("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer(DIGITS)),
    **_named("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
             PreTokenizer(LLAMA3, whole_words=True, add_bos=True)),
    **_named("dbrx smaug-bpe", PreTokenizer(LLAMA3)),
    **_named("glm4 chatglm-bpe", PreTokenizer(LLAMA3, whole_words=True)),
    **_named("qwen2", PreTokenizer(QWEN2, nfc=True)),
    **_named("qwen35", PreTokenizer(QWEN35, nfc=True)),
    **_named("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open", PreTokenizer(QWEN2)),
    **_named("tekken", PreTokenizer(TEKKEN, whole_words=True, add_bos=True)),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(GPT4O)),
    **_named("falcon", PreTokenizer(FALCON)),
    **_named("bloom poro-chat gpt3-finnish", PreTokenizer(BLOOM)),
    **_named("viking", PreTokenizer((*BLOOM, r"\p{N}"))),
    **_named("hunyuan-dense", PreTokenizer(HUNYUAN)),
}
"""Pre-tokenizers by name: facts of the models' own tokenizers, collected in llama.cpp (src/llama-vocab.cpp)."""


def merges_of(tokens: Sequence[str], kinds: Sequence[int], keys: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens whose union is a token that text can hold, ordered by the key of the union, smallest first.

    They are cached in `shoal/merges` of $XDG_CACHE_HOME (by default ~/.cache), under the SHA-256 of the arguments.
    """
    kept = cache_folder() / "merges" / f"{_digest(tokens, kinds, keys)}.npy"
    pairs = _read(kept, len(tokens))
    if pairs is None:
        pairs = implied_merges(tokens, kinds, keys)
        found = np.asarray(pairs, dtype=np.int32).reshape(-1, 2)
        write_whole(kept, lambda file: np.save(file, found, allow_pickle=False))
    return [(tokens[first], tokens[second]) for first, second in pairs]


def implied_merges(tokens: Sequence[str], kinds: Sequence[int], keys: Sequence[float]) -> list[tuple[int, int]]:
    """The merges as pairs of ids, computed anew."""
    ids = {token: number for number, token in enumerate(tokens)}
    joined = [n for n, token in enumerate(tokens)
              if len(token) > 1 and (not kinds or kinds[n] in (NORMAL, USER_DEFINED))]
    joined.sort(key=keys.__getitem__)
    known, find = ids.keys(), ids.__getitem__
    merges: list[tuple[int, int]] = []
    for number in joined:
        token = tokens[number]
        merges += sorted((find(first), find(second)) for cut in range(1, len(token))
                         if (first := token[:cut]) in known and (second := token[cut:]) in known)
    return merges


def _digest(tokens: Sequence[str], kinds: Sequence[int], keys: Sequence[float]) -> str:
    digest = hashlib.sha256("\0".join(tokens).encode("utf-8", "surrogatepass"))
    digest.update(array("q", kinds).tobytes())
    digest.update(array("d", keys).tobytes())
    return digest.hexdigest()[:32]


def _read(path: Path, tokens: int) -> list[tuple[int, int]] | None:
    """The cached pairs; None if the file is missing or damaged."""
    try:
        pairs = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if pairs.dtype != np.int32 or pairs.ndim != 2 or pairs.shape[1] != 2 or not np.all((pairs >= 0) & (pairs < tokens)):
        return None
    found: list[tuple[int, int]] = pairs.tolist()
    return found


def tokenizer_of(header: Header) -> Any | None:
    """The tokenizer, a `PreTrainedTokenizerFast`, or None if the file has none.

    Raises:
        Unsupported: Shoal does not know the kind of the tokenizer or its pre-tokenizer.
        ValueError: the vocabulary is damaged.
    """
    with uncollected():
        made = _made(header)
    give_back()
    return made


def _made(header: Header) -> Any | None:
    vocabulary = vocabulary_of(header)
    if vocabulary is None:
        return None
    metadata = Metadata(header)
    if vocabulary.kind == "gpt2":
        rules = _rules(vocabulary.pre)
        tokens = _distinct(vocabulary)
        backend, add_bos = _byte_level(tokens, vocabulary, rules), rules.add_bos
    elif vocabulary.kind == "llama":
        # Some files write tokens of spaces alone with real ones in place of SentencePiece's character.
        tokens = [SPACE * len(token) if token.isspace() and not token.strip(" ") else token
                  for token in _distinct(vocabulary)]
        backend, add_bos = _sentencepiece(tokens, vocabulary, metadata.architecture), True
    elif vocabulary.kind == "gemma4":
        tokens = _distinct(vocabulary)
        backend, add_bos = _spaced(tokens, _pairs(vocabulary.merges), vocabulary, prefixed=False), True
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    elif vocabulary.kind == "t5":
        tokens = _distinct(vocabulary)
        backend, add_bos = _unigram(tokens, vocabulary, header), False
    else:
        known = "known are gpt2, llama, gemma4, t5"
        raise Unsupported(f"a GGUF tokenizer of model {vocabulary.kind!r}", known, _REMEDY)
    _add_special(backend, tokens, vocabulary, metadata.architecture)
    return _wrapped(backend, tokens, vocabulary, add_bos, metadata)


def _rules(name: str) -> PreTokenizer:
    if not name:
        log.warning("the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), so text is cut by the default "
                    "one, as llama.cpp does; answers may be worse. %s", _REMEDY)
        return PRE_TOKENIZERS["default"]
    if name not in PRE_TOKENIZERS:
        raise Unsupported(f"a GGUF tokenizer with the pre-tokenizer {name!r}",
                          f"a wrong one would cut text wrongly; known are {', '.join(PRE_TOKENIZERS)}", _REMEDY)
    return PRE_TOKENIZERS[name]


def _distinct(vocabulary: Vocabulary) -> list[str]:
    """The tokens, checked for duplicates; empty ones, which occur in no text, get names of their own."""
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(vocabulary.tokens)]
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        double = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise ValueError(f"the GGUF tokenizer has the token {double!r:.80} twice; each must occur once. {_REMEDY}")
    return tokens


def _byte_level(tokens: list[str], vocabulary: Vocabulary, rules: PreTokenizer) -> Tokenizer:
    backend = _bpe(tokens, _pairs(vocabulary.merges), ignore_merges=rules.whole_words)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in rules.cuts]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in merges]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        found = f"the GGUF tokenizer has the merge {wrong[0]!r:.80}"
        raise ValueError(f"{found}; it must be two tokens with a space between. {_REMEDY}")
    return pairs


def _sentencepiece(tokens: list[str], vocabulary: Vocabulary, architecture: str) -> Tokenizer:
    in_order = architecture in _IN_ORDER
    keys: Sequence[float] = range(len(tokens)) if in_order else [-score for score in vocabulary.scores]
    if len(keys) < len(tokens):
        raise ValueError(f"the GGUF tokenizer of model 'llama' has no scores; they must be there. {_REMEDY}")
    prefixed = vocabulary.add_space_prefix if vocabulary.add_space_prefix is not None else True
    return _spaced(tokens, merges_of(tokens, vocabulary.kinds, keys), vocabulary, prefixed)


def _spaced(tokens: list[str], merges: list[tuple[str, str]], vocabulary: Vocabulary, prefixed: bool) -> Tokenizer:
    """BPE of characters with SentencePiece's one for spaces, and bytes for characters that no token has."""
    options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": True}
    if vocabulary.unk is not None:
        options["unk_token"] = tokens[vocabulary.unk]
    backend = _bpe(tokens, merges, **options)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _unigram(tokens: list[str], vocabulary: Vocabulary, header: Header) -> Tokenizer:
    """SentencePiece's unigram model (Kudo, 2018, arXiv 1804.10959), with the file's table of characters."""
    if len(vocabulary.scores) < len(tokens):
        raise ValueError(f"the GGUF tokenizer of model 't5' has no scores; they must be there. {_REMEDY}")
    pairs = list(zip(tokens, map(float, vocabulary.scores), strict=True))
    backend = Tokenizer(Unigram(pairs, unk_id=vocabulary.unk, byte_fallback=False))
    table = header.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if isinstance(table, memoryview) and len(table):
        backend.normalizer = normalizers.Precompiled(table.tobytes())
    spaced = pre_tokenizers.Metaspace(SPACE, "always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaced])
    backend.decoder = decoders.Metaspace(SPACE, "always")
    return backend


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges, **options))
    except Exception as error:  # tokenizers raises plain exceptions
        raise ValueError(f"the GGUF tokenizer's merges do not fit its tokens: {error}. {_REMEDY}") from None


def _add_special(backend: Tokenizer, tokens: list[str], vocabulary: Vocabulary, architecture: str) -> None:
    """Add tokens that are matched before anything else; control tokens are skipped in decoded text."""
    stripping = architecture in _STRIPPING and vocabulary.kind == "llama"
    ids = vocabulary.bos, vocabulary.eos, vocabulary.unk, vocabulary.pad
    named = {number for number in ids if number is not None}
    control = named | set(vocabulary.of_kind(CONTROL, UNKNOWN))
    backend.add_special_tokens([
        AddedToken(tokens[n], special=True, normalized=False, rstrip=stripping and tokens[n] not in _NOT_STRIPPING)
        for n in sorted(control) if vocabulary.kinds[n : n + 1] != [BYTE]
    ])
    plain = [n for n in vocabulary.of_kind(USER_DEFINED) if n not in control]
    backend.add_tokens([AddedToken(tokens[n], special=False, normalized=False) for n in plain])


class _Handed:
    """Keeps transformers from copying a tokenizer by way of JSON, which takes seconds for a large one."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self._backend


def _wrapped(backend: Tokenizer, tokens: list[str], vocabulary: Vocabulary, add_bos: bool, metadata: Metadata) -> Any:
    named = {
        "bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "unk_token": vocabulary.unk,
        "pad_token": vocabulary.pad,
    }
    special = {name: None if number is None else tokens[number] for name, number in named.items()}
    begins = vocabulary.add_bos if vocabulary.add_bos is not None else add_bos
    return PreTrainedTokenizerFast(
        tokenizer_object=_Handed(backend),
        **special,
        add_bos_token=begins and vocabulary.bos is not None,
        add_eos_token=bool(vocabulary.add_eos) and vocabulary.eos is not None,
        chat_template=vocabulary.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=metadata.whole("context_length"),
    )
