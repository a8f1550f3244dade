"""Tiny models of each kind that hears, with random weights, what transformers makes of sounds, and sounds."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

import shoal
from shoal.audio import RATE, Samples

SPECIAL = ("<pad>", "<s>", "</s>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<sound>", "<|pad|>",
           "<|begin_of_audio|>", "<|end_of_audio|>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
           *(f"<SPECIAL_{number}>" for number in range(14, 24)), "[AUDIO]", "[BEGIN_AUDIO]")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}SOUND"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}")
MARKS = {"qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>", "audioflamingo3": "<sound>",
         "glmasr": "<|begin_of_audio|><|pad|><|end_of_audio|>", "voxtral": "[BEGIN_AUDIO][AUDIO]"}
TOKENS = {"qwen2_audio": "<|AUDIO|>", "audioflamingo3": "<sound>", "glmasr": "<|pad|>", "voxtral": "[AUDIO]"}
KINDS = tuple(MARKS)
SECONDS = 2
"""Of a window of theirs."""
_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024}
_EAR = {"num_mel_bins": 20, "max_source_positions": 50 * SECONDS}
_SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokenizer(mark: str, without: str = "") -> Any:
    """Bytes and special tokens, with a chat template in which `mark` stands for a sound; `without` is missing."""
    letters, special = sorted(pre_tokenizers.ByteLevel.alphabet()), [name for name in SPECIAL if name != without]
    vocabulary = {name: number for number, name in enumerate((*special, *letters))}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.replace("SOUND", mark))


def _config(kind: str, text: dict[str, Any], token: int) -> Any:
    if kind == "qwen2_audio":
        ear = {**_EAR, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
        return hf.Qwen2AudioConfig(audio_config=ear, text_config={**text, "model_type": "qwen2"},
                                   audio_token_index=token)
    if kind == "audioflamingo3":
        return hf.AudioFlamingo3Config(audio_config={**_EAR, **_SIZES}, text_config={**text, "model_type": "qwen2"},
                                       audio_token_id=token)
    if kind == "glmasr":
        return hf.GlmAsrConfig(audio_config={**_EAR, **_SIZES, "head_dim": 8}, audio_token_id=token,
                               text_config={**text, "model_type": "llama"})
    return hf.VoxtralConfig(audio_config={**_EAR, **_SIZES}, audio_token_id=token,
                            text_config={**text, "model_type": "llama", "head_dim": 16})


def extractor() -> Any:
    """What makes features of windows of `SECONDS`."""
    return hf.WhisperFeatureExtractor(feature_size=_EAR["num_mel_bins"], chunk_length=SECONDS, sampling_rate=RATE)


def write(folder: Path, kind: str) -> tuple[Any, Any]:
    """A checkpoint with all of its files; the model in float32, whose answers vary, and its tokenizer."""
    torch.manual_seed(0)
    spoken = tokenizer(MARKS[kind])
    known = spoken.get_vocab()
    ends = {"pad_token_id": known["<pad>"], "bos_token_id": known["<s>"], "eos_token_id": known["</s>"]}
    config = _config(kind, {**_TEXT, "vocab_size": len(known), **ends}, known[TOKENS[kind]])
    model = hf.AutoModelForSeq2SeqLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    extractor().save_pretrained(folder)
    spoken.save_pretrained(folder)
    return model, spoken


def engine(folder: Path, kind: str = "qwen2_audio") -> shoal.Engine:
    """Shoal's engine of such a checkpoint, which is written to a folder."""
    write(folder, kind)
    return shoal.load(str(folder), dtype="float32")


def sound(seed: int, seconds: float = 1.0) -> Samples:
    """A chord and some noise, of whole 16-bit steps."""
    random, times = np.random.default_rng(seed), np.arange(round(seconds * RATE)) / RATE
    found = sum(np.sin(2 * np.pi * hertz * times) for hertz in random.uniform(100, 4000, 3)) / 8
    return (np.round(32768 * (found + 0.05 * random.uniform(-1, 1, len(times)))) / 32768).astype(np.float32)


def file_of(samples: Samples) -> bytes:
    """A WAV file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32768).astype("<i2").tobytes())
    return out.getvalue()


def part(samples: Samples) -> dict[str, Any]:
    """A sound as a part of a message."""
    url = f"data:audio/wav;base64,{base64.b64encode(file_of(samples)).decode()}"
    return {"type": "audio_url", "audio_url": {"url": url}}


def asked(*parts: str | Samples) -> list[dict[str, Any]]:
    """A conversation of one message of texts and sounds."""
    return [{"role": "user", "content": [{"type": "text", "text": one} if isinstance(one, str) else part(one)
                                         for one in parts]}]


def inputs_of(kind: str, spoken: Any, messages: list[dict[str, Any]], sounds: list[Samples]) -> Mapping[str, Any]:
    """What transformers' model takes of a conversation and its sounds, by the code of its processor."""
    told = json.loads(json.dumps(messages))
    for message in told:
        if isinstance(message["content"], list):
            message["content"] = [one if one["type"] == "text" else {"type": "audio"} for one in message["content"]]
    text = spoken.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    options = {"add_special_tokens": False, "return_tensors": "pt"}
    if kind == "qwen2_audio":
        own = hf.Qwen2AudioProcessor(extractor(), spoken)
        return dict(own(text=[text], audio=sounds, sampling_rate=RATE, **options))
    if kind == "voxtral":
        own = VoxtralProcessor(extractor(), spoken)
        features = own._retrieve_input_features(
            sounds, 100 * SECONDS, sampling_rate=RATE, padding=True, truncation=False, return_tensors="pt",
            pad_to_multiple_of=SECONDS * RATE)
        for one in sounds:
            text = text.replace("[AUDIO]", "<pad>" * (-(-len(one) // (SECONDS * RATE)) * 25), 1)
        return {**spoken([text.replace("<pad>", "[AUDIO]")], **options), "input_features": features}
    pieces, made = text.split(TOKENS[kind]), list[Any]()
    own = {"audioflamingo3": hf.AudioFlamingo3Processor, "glmasr": hf.GlmAsrProcessor}[kind](
        extractor(), spoken, audio_token=TOKENS[kind])
    for piece, one in zip(pieces, sounds, strict=False):  # their processors take one sound of a text
        made.append(own(text=[piece + TOKENS[kind]], audio=[one], add_special_tokens=False))
    ids = [one["input_ids"] for one in made] + [spoken([pieces[-1]], **options)["input_ids"]]
    found = {name: torch.cat([one[name] for one in made]) for name in ("input_features", "input_features_mask")}
    return {"input_ids": torch.cat(ids, 1), **found}


def qwen2_audio_template() -> str:
    """The chat template that transformers' processor of Qwen2-Audio brings."""
    return str(hf.Qwen2AudioProcessor(extractor(), tokenizer("")).default_chat_template)


def tekken() -> str:
    """A `tekken.json` of bytes and special tokens, whose ids are those of `tokenizer`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_of = {letter: number for number, letter in bytes_to_unicode().items()}
    vocabulary = [{"rank": rank, "token_bytes": base64.b64encode(bytes([bytes_of[letter]])).decode(), "token_str": None}
                  for rank, letter in enumerate(letters)]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIAL)]
    sizes = {"default_vocab_size": len(SPECIAL) + len(letters), "default_num_special_tokens": len(SPECIAL)}
    return json.dumps({"config": {"pattern": r"\s+|\S+", "version": "v7", **sizes}, "vocab": vocabulary,
                       "special_tokens": special})
