"""Tokenizers in GGUF files, for tests: small vocabularies trained on a few sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from gguf_models import tiny_model, write_model

TEXT = ["The quick brown fox jumps over the lazy dog. It's 12345 o'clock!", "def f(x):\n    return x**2  # ok\n\n",
        "la café naïve, straße; 日本語 текст", "don't stop, we'll see what they've done in 2024"] * 3
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def byte_level(split: str, size: int = 400) -> tuple[Any, dict[str, Any]]:
    """A byte-level BPE tokenizer cutting by `split`, and its metadata in a GGUF file."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=CONTROL, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    pairs = json.loads(backend.to_str())["model"]["merges"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    return backend, {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE,
    }


def sentencepiece(prefix: bool) -> dict[str, Any]:
    """Metadata of a SentencePiece BPE vocabulary: control tokens, bytes, pieces with scores."""
    pieces = ["▁the", "▁t", "he", "▁", "t", "h", "e", "▁q", "qu", "q", "u", "ick", "ic", "i", "c", "k", "▁a", "a", "n",
              "d", "an", "▁an", "▁and", "\n",
              "▁▁"]
    order = ["he", "▁t", "▁the", "qu", "▁q", "ic", "ick", "an", "▁an", "▁and", "▁a", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<table>"]
    scores = [-float(order.index(token)) if token in order else -100.0 for token in tokens]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_space_prefix": prefix,
    }


def spoken(folder: Path, kind: str = "Q8_0", **changes: Any) -> Path:
    """A model in a file with a tokenizer, whose vocabulary is the model's."""
    _, facts = byte_level(r"\s+|\S+")
    facts |= {"tokenizer.ggml.pre": "gpt-2", **changes}
    model = tiny_model("llama", vocab_size=len(facts["tokenizer.ggml.token_type"]))
    write_model("llama", folder / "spoken.gguf", kind, extra=facts, model=model)
    return folder / "spoken.gguf"
