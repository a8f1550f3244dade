"""How a text is cut before byte-level BPE, by the name that a GGUF file gives in `tokenizer.ggml.pre`.

The names and their expressions are facts of the models' own tokenizers, collected in llama.cpp (src/llama-vocab.cpp).
Each expression cuts the pieces that the one before has left, into its matches and what lies between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHED = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)

GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
DIGITS = (r"\p{N}", *GPT2)
LLAMA3 = (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",)
QWEN2 = (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",)
TEKKEN = (rf"{_CASED % ('', '')}|\p{{N}}|{_SLASHED}",)
GPT4O = (rf"{_CASED % (_ENDINGS + '?', _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_SLASHED}",)
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *GPT2, "[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """How byte-level BPE of this name begins.

    Attributes:
        cuts: expressions, one after the other.
        whole_words: whether a piece that is a token is taken whole, whatever the merges say.
        nfc: whether the text is brought to Unicode's normal form C before.
        add_bos: whether a text begins with the beginning-of-sequence token where the file does not say.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    add_bos: bool = False


def _named(names: str, one: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), one)


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_named("default", PreTokenizer(DEFAULT)),
    **_named("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en "
             "jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling", PreTokenizer(GPT2)),
    **_named("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer(DIGITS)),
    **_named("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
             PreTokenizer(LLAMA3, whole_words=True, add_bos=True)),
    **_named("dbrx smaug-bpe", PreTokenizer(LLAMA3)),
    **_named("glm4 chatglm-bpe", PreTokenizer(LLAMA3, whole_words=True)),
    **_named("qwen2", PreTokenizer(QWEN2, nfc=True)),
    **_named("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open", PreTokenizer(QWEN2)),
    **_named("tekken", PreTokenizer(TEKKEN, whole_words=True, add_bos=True)),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(GPT4O)),
    **_named("falcon", PreTokenizer(FALCON)),
}
"""Pre-tokenizers by name."""
