"""A tokenizer of single characters with a chat template, for tiny models with a vocabulary of 97."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
SPECIALS = ["<unk>", "<s>", "</s>", *ROLES]
_MARKS = " .,:;!?'\"()+-*/=<>%&#@_~^{}[]\n"
_LETTERS = string.ascii_letters + string.digits + _MARKS
MARKS_FIRST = _MARKS + string.digits + string.ascii_lowercase + string.ascii_uppercase
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def chat_tokenizer(letters: str = _LETTERS) -> PreTrainedTokenizerFast:
    """Ids 0..6 are special and have no text; every other id is one character."""
    vocab = {token: index for index, token in enumerate([*SPECIALS, *letters][:97])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # of which llguidance knows the first
    words = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", additional_special_tokens=ROLES
    )
    words.chat_template = _TEMPLATE
    return words
