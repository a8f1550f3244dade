"""Tiny models of Whisper's kind with random weights, and sounds for them."""

from __future__ import annotations

import io
import json
import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration

from shoal.audio import RATE

BINS, FRAMES, LAYERS, VOCAB = 8, 3000, 3, 1800
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
           "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
SIZES = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1,
         "decoder_layers": LAYERS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "num_mel_bins": BINS,
         "max_target_positions": 96, "vocab_size": VOCAB}


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, Whisper's special tokens, and its timestamps."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    times = [f"<|{place * 0.02:.2f}|>" for place in range(1501)]
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    core.add_tokens([AddedToken(name, special=False) for name in times])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[0], clean_up_tokenization_spaces=False)


def whisper(seed: int = 0, **sizes: Any) -> WhisperForConditionalGeneration:
    """A model in float32, whose words vary."""
    torch.manual_seed(seed)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 256)
    config = WhisperConfig(**{**SIZES, "max_source_positions": FRAMES // 2, "init_std": 0.3, **ends, **sizes},
                           suppress_tokens=None, begin_suppress_tokens=None)
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def write(folder: Path, model: WhisperForConditionalGeneration) -> Path:
    """A checkpoint with all of its files."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": model.config.num_mel_bins,
        "sampling_rate": RATE, "n_fft": 400, "hop_length": 160, "chunk_length": 30}), "utf-8")
    return folder


@cache
def features(seed: int = 0, bins: int = BINS, frames: int = FRAMES) -> Tensor:
    """Features [bins, frames] of no sound in particular."""
    return torch.randn(bins, frames, generator=torch.Generator().manual_seed(seed))


def tone(seconds: float, hertz: float = 440.0) -> NDArray[np.int16]:
    """A sound, int16 [samples]."""
    times = np.arange(int(seconds * RATE)) / RATE
    return (8000 * np.sin(2 * np.pi * hertz * times)).astype(np.int16)


def wav(samples: NDArray[np.int16], rate: int = RATE, channels: int = 1) -> bytes:
    """A WAV file."""
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(samples, channels).tobytes())
    return held.getvalue()
