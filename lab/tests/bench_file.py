"""A GGUF file of a tiny Llama with a byte tokenizer, for benchmarks of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gguf_file import write_gguf

EOS = 257


def model(seed: int = 0) -> Any:
    """A transformers Llama of 258 tokens: 256 bytes, "th", the end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=258, max_position_embeddings=1024, tie_word_embeddings=False, head_dim=16, initializer_range=0.15,
    )
    return LlamaForCausalLM(config).eval()


def write(path: Path, seed: int = 0) -> Path:
    """Write the file in float32 and return its path."""
    import gguf

    class WithVocabulary(gguf.GGUFWriter):  # type: ignore[misc]
        def write_header_to_file(self, path: Path | None = None) -> None:
            vocabulary = [*_bytes(), "th", "<|end|>"]
            self.add_tokenizer_model("gpt2")
            self.add_tokenizer_pre("gpt-2")
            self.add_token_list(vocabulary)
            self.add_token_types([1] * EOS + [3])
            self.add_token_merges(["t h"])
            self.add_eos_token_id(EOS)
            self.add_bos_token_id(EOS)
            super().write_header_to_file(path)

    with mock.patch("gguf.GGUFWriter", WithVocabulary):
        write_gguf(model(seed), path)
    return path


def _bytes() -> list[str]:
    """The 256 bytes as byte-level BPE writes them, in the order of their code points."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())
