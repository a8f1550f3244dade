"""Tiny models of each kind that sees, with random weights, their processors, and pictures for them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>", "<image>", "<start_of_image>", "<end_of_image>", "<row>", "[IMG]", "[IMG_BREAK]",
           "[IMG_END]", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<IMG_CONTEXT>", "<img>",
           "</img>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PICTURE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}")
_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024}
_SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 32, "patch_size": 8}


def tokenizer(picture: str) -> Any:
    """Bytes and special tokens, with a chat template in which `picture` stands for a picture."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    named = {"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
             "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.replace("PICTURE", picture), extra_special_tokens=named)


def _llava(ids: Mapping[str, int], text: dict[str, Any]) -> tuple[Any, Any]:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**text), vision_config=hf.CLIPVisionConfig(**_SIGHT, projection_dim=32),
        image_token_index=ids["<image>"], vision_feature_layer=-2, vision_feature_select_strategy="default")
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    return config, hf.LlavaProcessor(
        hf.CLIPImageProcessorPil(**size), tokenizer("<image>"), patch_size=8, num_additional_image_tokens=1,
        vision_feature_select_strategy="default")


def _gemma3(ids: Mapping[str, int], text: dict[str, Any]) -> tuple[Any, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(**text, head_dim=16, sliding_window=24, layer_types=kinds),
        vision_config=hf.SiglipVisionConfig(**_SIGHT), mm_tokens_per_image=16, image_token_index=ids["<image>"],
        boi_token_index=ids["<start_of_image>"], eoi_token_index=ids["<end_of_image>"])
    return config, hf.Gemma3Processor(hf.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
                                      tokenizer("<start_of_image>"), image_seq_length=16)


def _idefics3(ids: Mapping[str, int], text: dict[str, Any]) -> tuple[Any, Any]:
    config = hf.Idefics3Config(text_config=hf.LlamaConfig(**text).to_dict(), vision_config=_SIGHT,
                               image_token_id=ids["<image>"], scale_factor=2, pad_token_id=ids["<pad>"])
    pictures = hf.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return config, hf.Idefics3Processor(pictures, tokenizer("<image>"), image_seq_len=4)


def _smolvlm(ids: Mapping[str, int], text: dict[str, Any]) -> tuple[Any, Any]:
    config = hf.SmolVLMConfig(text_config=hf.LlamaConfig(**text).to_dict(), vision_config=_SIGHT,
                              image_token_id=ids["<image>"], scale_factor=2, pad_token_id=ids["<pad>"])
    pictures = hf.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return config, hf.Idefics3Processor(pictures, tokenizer("<image>"), image_seq_len=4)


MAKERS: Mapping[str, Callable[[Mapping[str, int], dict[str, Any]], tuple[Any, Any]]] = {
    "llava": _llava, "gemma3": _gemma3, "idefics3": _idefics3, "smolvlm": _smolvlm,
}


def seer(kind: str) -> tuple[Any, Any]:
    """A model in float32 whose words vary, and its processor."""
    torch.manual_seed(0)
    known = tokenizer("").get_vocab()
    ends = {"pad_token_id": known["<pad>"], "bos_token_id": known["<s>"], "eos_token_id": known["</s>"]}
    config, processor = MAKERS[kind](known, {**_TEXT, "vocab_size": len(known), **ends})
    model = hf.AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, processor


def write(folder: Path, kind: str) -> tuple[Any, Any]:
    """A checkpoint with all of its files; the model and its processor."""
    model, processor = seer(kind)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def picture(seed: int, width: int = 40, height: int = 40) -> Image.Image:
    """Coloured noise."""
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def part(image: Image.Image) -> dict[str, Any]:
    """A picture as a part of a message."""
    url = f"data:image/png;base64,{base64.b64encode(file_of(image)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def said(*parts: str | Image.Image) -> dict[str, Any]:
    """A user's message of texts and pictures."""
    return {"role": "user", "content": [{"type": "text", "text": one} if isinstance(one, str) else part(one)
                                        for one in parts]}


def bare(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as transformers' templates take them."""
    told = json.loads(json.dumps(messages))
    for message in told:
        if isinstance(message["content"], list):
            message["content"] = [one if one["type"] == "text" else {"type": "image"} for one in message["content"]]
    return told
