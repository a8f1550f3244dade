"""Small tokenizers of each kind, built here, and those of the shared models: what text handling is tested with."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from shared_models import load_tokenizer

SHARED_NAMES = ("shoal-reference", "stories260K", "babyllama361")
SPECIALS = ["<unk>", "<s>", "</s>"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz.,!\n\ufffdé世")


def _wrap(tokens: list[str], decoder: object, pre_tokenizer: object | None = None) -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate(SPECIALS + tokens)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoder
    if pre_tokenizer is not None:
        core.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte and a few longer ones that begin or end in the middle of a character (GPT-2 style)."""
    pieces = [b" ab", b"ab", b"a b", b"\xf0\x9f", b"\x98\x80", b"a\xf0", b"\x80b", b"\x9f\xf0", b"\xff\xff"]
    tokens = [bytes([byte]) for byte in range(256)] + pieces
    names = ["".join(_gpt2_symbol(byte) for byte in token) for token in tokens]
    return _wrap(names, decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False))


def _gpt2_symbol(byte: int) -> str:
    """How GPT-2's byte table shows a byte: as itself if printable, else as code point 256 and up in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte if byte in printable else 256 + [b for b in range(256) if b not in printable].index(byte))


def byte_fallback() -> PreTrainedTokenizerFast:
    """Words with a leading-space mark and a token per byte for the rest (Llama 2 style)."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words = ["", "▁", "▁▁", "▁a", "▁ab", "ab", "▁the"]
    return _wrap([f"<0x{byte:02X}>" for byte in range(256)] + words + LETTERS, decoders.Sequence(steps))


def metaspace() -> PreTrainedTokenizerFast:
    """Words with a leading-space mark that only the first token of a text loses."""
    return _wrap(["▁", "▁▁", "▁a", "▁ab", "ab", "▁the", *LETTERS], decoders.Metaspace())


def word_piece() -> PreTrainedTokenizerFast:
    """Words, and continuations that begin with ## (BERT style)."""
    return _wrap(["the", "a", "##b", "##ab", "!", ".", "n't", *LETTERS[:5]], decoders.WordPiece())


BUILDERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "word_piece": word_piece}
NAMES = (*BUILDERS, *SHARED_NAMES)


@functools.cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer `name` of NAMES; skips the test where a shared model is absent."""
    return BUILDERS[name]() if name in BUILDERS else load_tokenizer(name)


def whole(tok: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    """What the tokenizer itself makes of all tokens."""
    return tok.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def split_characters() -> PreTrainedTokenizerFast:
    """Of 97 tokens: letters, and parts of characters that begin and end anywhere (GPT-2 style)."""
    parts = [bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz \n.,!?\xf0\x9f\x98\x80\xc3\xa9\xe2\x82\xac\xff"]
    pieces = [b" a", b" the", b"the", b"\xf0\x9f", b"\x98\x80", b"a\xf0", b"\x80b", b"\x9f\x98", b"\xe2\x82", b"\xac ",
              b"\xc3\xa9t", b"\x80\x80", b"\xff\xc3"]
    tokens = parts + pieces + [bytes([byte]) for byte in range(48, 58)] + [bytes([byte]) for byte in range(65, 91)]
    names = ["".join(_gpt2_symbol(byte) for byte in token) for token in tokens][:94]
    made = _wrap(names, decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def marked_words() -> PreTrainedTokenizerFast:
    """Of fewer than 97 tokens: words with and without a mark for a space, and bytes (Llama 2 style)."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words = ["▁", "▁a", "a", "▁ab", "ab", "▁the", "the", "é", *"bcdefghijklmnop.,!?", *"ABCDEFGHIJ"]
    names = [f"<0x{byte:02X}>" for byte in b"\xf0\x9f\x98\x80\xc3\xa9A "] + words
    made = _wrap(names, decoders.Sequence(steps))
    made.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made
