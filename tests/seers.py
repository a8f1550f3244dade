"""Tiny models of each kind that sees, with random weights, their processors, and pictures for them."""

from __future__ import annotations

import base64
import inspect
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.models.gemma import modeling_gemma

import shoal
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.picture_processors import by_pillow
from shoal.model.kv.cache import KVCache
from shoal.model.layers.pictures import Pictures
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import ModelRunner, SequenceChunk

SPECIAL = ("<pad>", "<s>", "</s>", "<image>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
           "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
           "<IMG_CONTEXT>", "<img>", "</img>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>",
           *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PICTURE"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}")
_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024}
_READ = inspect.signature(hf.Qwen3VLForConditionalGeneration.forward).parameters
_SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 32, "patch_size": 8}


def tokenizer(picture: str, token: str = "<image>") -> Any:
    """Bytes and special tokens, with a chat template in which `picture` stands for a picture, which holds `token`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    named = {"image_token": token, "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
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
        by_pillow("CLIPImageProcessor")(**size), tokenizer("<image>"), patch_size=8, num_additional_image_tokens=1,
        vision_feature_select_strategy="default")


def _gemma3(ids: Mapping[str, int], text: dict[str, Any]) -> tuple[Any, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(
            **text, head_dim=16, query_pre_attn_scalar=16, sliding_window=12, layer_types=kinds),
        vision_config=hf.SiglipVisionConfig(**_SIGHT, vision_use_head=False), mm_tokens_per_image=16,
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"], eoi_token_index=ids["<end_of_image>"])
    return config, hf.Gemma3Processor(by_pillow("Gemma3ImageProcessor")(size={"height": 32, "width": 32}),
                                      tokenizer("<start_of_image>", "<image_soft_token>"), image_seq_length=16)


def _idefics3(ids: Mapping[str, int], text: dict[str, Any]) -> tuple[Any, Any]:
    config = hf.Idefics3Config(text_config=hf.LlamaConfig(**text).to_dict(), vision_config=_SIGHT,
                               image_token_id=ids["<image>"], scale_factor=2, pad_token_id=ids["<pad>"])
    pictures = by_pillow("Idefics3ImageProcessor")(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return config, hf.Idefics3Processor(pictures, tokenizer("<image>"), image_seq_len=4)


def _smolvlm(ids: Mapping[str, int], text: dict[str, Any]) -> tuple[Any, Any]:
    config = hf.SmolVLMConfig(text_config=hf.LlamaConfig(**text).to_dict(), vision_config=_SIGHT,
                              image_token_id=ids["<image>"], scale_factor=2, pad_token_id=ids["<pad>"])
    pictures = by_pillow("Idefics3ImageProcessor")(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return config, hf.Idefics3Processor(pictures, tokenizer("<image>"), image_seq_len=4)


def _qwen(ids: Mapping[str, int], text: dict[str, Any], kind: str) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    patches = {"depth": 3, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2}
    own = {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
           "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"]}
    if kind == "qwen2_vl":
        config = hf.Qwen2VLConfig(text_config={**text, "rope_parameters": rope}, **own, vision_config={
            **patches, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2})
    elif kind == "qwen2_5_vl":
        config = hf.Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, **own, vision_config={
            **patches, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 32,
            "fullatt_block_indexes": [1]})
    else:
        rope["mrope_interleaved"], mixed = True, kind.endswith("moe")
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if mixed else {}
        more = {**text, "head_dim": 16, "rope_parameters": rope, **experts}
        sight = {**patches, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
                 "num_position_embeddings": 16}
        if kind.startswith("qwen3_5"):
            rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
            more |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4 if mixed else 2, "shared_expert_intermediate_size": 32,
                     "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        else:
            sight["deepstack_visual_indexes"] = [0, 1]
        config = hf.AutoConfig.for_model(kind, text_config=more, vision_config=sight, **own)
    size = {"shortest_edge": 256, "longest_edge": 4096}
    pictures = by_pillow("Qwen2VLImageProcessor")(patch_size=8, merge_size=2, size=size)
    return config, Patched(pictures, tokenizer("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"))


class Patched:
    """Does what Qwen's processor does for pictures, which itself needs torchvision."""

    def __init__(self, pictures: Any, tokens: Any) -> None:
        self.pictures, self.tokenizer = pictures, tokens

    def save_pretrained(self, folder: Path) -> None:
        self.pictures.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def __call__(self, text: list[str], images: list[list[Any]], **how: Any) -> Any:
        seen, (told,), pad = self.pictures(images=images[0], return_tensors="pt"), text, "<|image_pad|>"
        for time, rows, columns in seen["image_grid_thw"].tolist():
            told = told.replace(pad, "<pad>" * (time * rows * columns // 4), 1)
        found = self.tokenizer([told.replace("<pad>", pad)], **how)
        types = (found["input_ids"] == self.tokenizer.convert_tokens_to_ids(pad)).int()
        kinds = {"mm_token_type_ids": types} if "mm_token_type_ids" in _READ else {}  # not by transformers 5.0
        return hf.BatchFeature({**found, **seen, **kinds})


def _gemma4(ids: Mapping[str, int], text: dict[str, Any], small: bool) -> tuple[Any, Any]:
    """As 31B, or as E2B, whose layers have inputs of their own and share keys and values."""
    kinds = ["sliding_attention", "full_attention"] * 2
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": text["vocab_size"],
           "num_kv_shared_layers": 2} if small else {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                                                     "use_bidirectional_attention": "vision"}
    config = hf.Gemma4Config(
        text_config=hf.Gemma4TextConfig(**{**text, "num_hidden_layers": 4}, **own, head_dim=16, global_head_dim=32,
                                        sliding_window=24, layer_types=kinds, final_logit_softcapping=2.0),
        vision_config=hf.Gemma4VisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            head_dim=8, patch_size=4, position_embedding_size=64, standardize=small),
        audio_config=hf.Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                          output_proj_dims=32, subsampling_conv_channels=[8, 4]) if small else None,
        image_token_id=ids["<IMG_CONTEXT>"], boi_token_id=ids["<start_of_image>"], eoi_token_id=ids["<end_of_image>"],
        video_token_id=ids["<global-img>"], audio_token_id=ids["[IMG]"])
    pictures = by_pillow("Gemma4ImageProcessor")(patch_size=4, max_soft_tokens=70)
    return config, Expanded(pictures, "<IMG_CONTEXT>", _soft, True)


def _soft(seen: Any) -> list[str]:
    return [f"<start_of_image>{'<IMG_CONTEXT>' * int(count)}<end_of_image>"
            for count in seen.pop("num_soft_tokens_per_image")]


def _paligemma(ids: Mapping[str, int], text: dict[str, Any], second: bool) -> tuple[Any, Any]:
    sight = {**_SIGHT, "vision_use_head": False}
    own = hf.Gemma2Config(**text, head_dim=16, query_pre_attn_scalar=16, sliding_window=24, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"]) if second else hf.GemmaConfig(**text, head_dim=16)
    config = hf.PaliGemmaConfig(text_config=own, vision_config=hf.SiglipVisionConfig(**sight), projection_dim=64,
                                hidden_size=64, image_token_index=ids["<image>"], vocab_size=text["vocab_size"])
    pictures = by_pillow("SiglipImageProcessor")(size={"height": 32, "width": 32})
    pictures.image_seq_length = 16
    tokens = tokenizer("")
    tokens.chat_template = None
    return config, hf.PaliGemmaProcessor(pictures, tokens)


Makers = Mapping[str, Callable[[Mapping[str, int], dict[str, Any]], tuple[Any, Any]]]


def _mistral3(ids: Mapping[str, int], text: dict[str, Any]) -> tuple[Any, Any]:
    config = hf.Mistral3Config(
        text_config=hf.MistralConfig(**text, head_dim=16), image_token_index=ids["[IMG]"], vision_feature_layer=-1,
        vision_config=hf.PixtralVisionConfig(**{**_SIGHT, "num_hidden_layers": 4}, head_dim=8), spatial_merge_size=2)
    pictures = by_pillow("PixtralImageProcessor")(size={"longest_edge": 32}, patch_size=16)
    return config, Expanded(pictures, "[IMG]", _rows)


def _internvl(ids: Mapping[str, int], text: dict[str, Any]) -> tuple[Any, Any]:
    sight = {**_SIGHT, "num_hidden_layers": 4, "image_size": (32, 32), "patch_size": (8, 8), "attention_bias": True}
    config = hf.InternVLConfig(text_config=hf.Qwen2Config(**text), vision_config=hf.InternVLVisionConfig(**sight),
                               image_token_id=ids["<IMG_CONTEXT>"])
    pictures = by_pillow("GotOcr2ImageProcessor")(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=4)
    return config, Expanded(pictures, "<IMG_CONTEXT>", _crops)


class Expanded:
    """Does what a processor that itself needs torchvision does for pictures: each becomes what `written` says."""

    def __init__(self, pictures: Any, mark: str, written: Callable[[Any], list[str]], typed: bool = False) -> None:
        self.pictures, self.tokenizer, self._mark, self._written = pictures, tokenizer(mark), mark, written
        self._typed = typed

    def save_pretrained(self, folder: Path) -> None:
        self.pictures.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def __call__(self, text: list[str], images: list[list[Any]], **how: Any) -> Any:
        seen, (first, *rest) = self.pictures(images=images[0], return_tensors="pt"), text[0].split(self._mark)
        told = first + "".join(part + piece for part, piece in zip(self._written(seen), rest, strict=True))
        seen.pop("num_patches", None)
        found = self.tokenizer([told], **how)
        if self._typed:
            found["mm_token_type_ids"] = (found["input_ids"] == self.tokenizer.convert_tokens_to_ids(self._mark)).int()
        return hf.BatchFeature({**found, **seen})


def _crops(seen: Any) -> list[str]:
    return [f"<img>{'<IMG_CONTEXT>' * (4 * int(crops))}</img>" for crops in seen["num_patches"]]


def _rows(seen: Any) -> list[str]:
    rows = [["[IMG]" * (int(width) // 16)] * (int(height) // 16) for height, width in seen["image_sizes"]]
    return ["[IMG_BREAK]".join(one) + "[IMG_END]" for one in rows]


FURTHER: Makers = {"mistral3": _mistral3, "internvl": _internvl}
"""Those whose processor is not saved with them here."""
_ALL: Makers = {
    "llava": _llava, "gemma3": _gemma3, "idefics3": _idefics3, "smolvlm": _smolvlm,
    "gemma4": partial(_gemma4, small=False), "gemma4_small": partial(_gemma4, small=True),
    "paligemma": partial(_paligemma, second=False), "paligemma2": partial(_paligemma, second=True),
    **{kind: partial(_qwen, kind=kind) for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
                                                  "qwen3_5_moe")},
}
_TYPES = {"gemma4_small": "gemma4", "paligemma2": "paligemma"}
SCALED = hasattr(modeling_gemma, "GemmaTextScaledWordEmbedding")
"""Whether Gemma's embeddings are scaled where they are looked up, as PaliGemma's pictures need it."""
MAKERS: Makers = {kind: make for kind, make in _ALL.items() if (known := _TYPES.get(kind, kind)) in hf.CONFIG_MAPPING
                  and (SCALED or known != "paligemma")}


def among(*kinds: str) -> list[str]:
    """Those kinds that the installed transformers has."""
    return [kind for kind in kinds if kind in MAKERS]


def seer(kind: str, makers: Makers = MAKERS) -> tuple[Any, Any]:
    """A model in float32 whose words vary, and its processor."""
    torch.manual_seed(0)
    known = tokenizer("").get_vocab()
    ends = {"pad_token_id": known["<pad>"], "bos_token_id": known["<s>"], "eos_token_id": known["</s>"]}
    config, processor = makers[kind](known, {**_TEXT, "vocab_size": len(known), **ends})
    model = hf.AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, processor


def _bare(kind: str) -> tuple[Any, dict[str, Tensor]]:
    """A config whose picture's token is 99, and what its encoder reads of a picture."""
    text = {**_TEXT, "vocab_size": 100, "pad_token_id": 0}
    pixels = torch.randn(1, 3, 32, 32)
    if kind == "internvl":
        sight = hf.InternVLVisionConfig(**{**_SIGHT, "image_size": (32, 32), "patch_size": (8, 8)})
        config = hf.InternVLConfig(text_config=hf.Qwen2Config(**text), vision_config=sight, image_token_id=99)
        return config, {"pixel_values": pixels}
    if kind == "mistral3":
        config = hf.Mistral3Config(
            text_config=hf.MistralConfig(**text, head_dim=16), image_token_index=99,
            vision_config=hf.PixtralVisionConfig(**_SIGHT, head_dim=8), spatial_merge_size=2, vision_feature_layer=-1)
        return config, {"pixel_values": pixels, "image_sizes": torch.tensor([[32, 16]])}
    if kind == "llama4":
        sight = {**_SIGHT, "intermediate_size": 128, "vision_output_dim": 48, "projector_input_dim": 48,
                 "projector_output_dim": 48}
        config = hf.Llama4Config(text_config=hf.Llama4TextConfig(
            **text, head_dim=16, attention_chunk_size=8, no_rope_layer_interval=3, num_local_experts=4, moe_layers=[1],
            intermediate_size_mlp=40), vision_config=hf.Llama4VisionConfig(**sight), image_token_index=99)
        return config, {"pixel_values": torch.randn(2, 3, 32, 32)}
    if kind == "llava_next":
        config = hf.LlavaNextConfig(
            text_config=hf.LlamaConfig(**text), vision_config=hf.CLIPVisionConfig(**_SIGHT, projection_dim=32),
            image_token_index=99, vision_feature_layer=-2, image_grid_pinpoints=[[32, 64], [64, 32]])
        return config, {"pixel_values": torch.randn(1, 3, 3, 32, 32), "image_sizes": torch.tensor([[30, 60]])}
    sight = {**{name: size for name, size in _SIGHT.items() if name != "image_size"}, "num_patches": 16}
    config = hf.Lfm2VlConfig(
        text_config=hf.Lfm2Config(**text, layer_types=["conv", "full_attention", "conv"]), image_token_id=99,
        vision_config=hf.Siglip2VisionConfig(**sight), downsample_factor=2, projector_hidden_size=48)
    return config, {"pixel_values": torch.randn(1, 16, 192), "spatial_shapes": torch.tensor([[4, 4]]),
                    "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int64)}


BARE = ("internvl", "lfm2_vl", "llama4", "llava_next", "mistral3")


def bare_seer(kind: str) -> tuple[Any, dict[str, Tensor], int]:
    """A model in float32, what its encoder reads of a picture, and the token that stands for one."""
    torch.manual_seed(0)
    config, inputs = _bare(kind)
    model = hf.AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, inputs, 99


def write(folder: Path, kind: str) -> tuple[Any, Any]:
    """A checkpoint with all of its files; the model and its processor."""
    model, processor = seer(kind)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def engine(folder: Path, kind: str = "llava") -> shoal.Engine:
    """Shoal's engine of such a checkpoint, which is written to a folder."""
    write(folder, kind)
    return shoal.load(str(folder), dtype="float32")


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


def asked(*parts: str | Image.Image) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [said(*parts)]


def inputs_of(processor: Any, messages: list[dict[str, Any]], images: list[Any]) -> Any:
    """What transformers' model takes of a conversation and its pictures."""
    if processor.tokenizer.chat_template is None:  # as PaliGemma's
        parts = messages[0]["content"]
        text = "<image>" * len(images) + "".join(part["text"] for part in parts if part["type"] == "text")
    else:
        text = processor.tokenizer.apply_chat_template(bare(messages), tokenize=False, add_generation_prompt=True)
    return processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")


def logits_of(engine: Any, ids: list[int], pictures: Pictures, most: int) -> Tensor:
    """The logits of `read`."""
    return read(engine, ids, pictures, most)[0]


def read(engine: Any, ids: list[int], pictures: Pictures, most: int) -> tuple[Tensor, KVCache]:
    """Read a prompt in pieces of at most `most` tokens, but for whole pictures: logits [tokens, V], and the cache."""
    runner, plan, found, at = engine.runner, DepthPlan.full(engine.runner.num_layers), list[Tensor](), 0
    laid, cache = pictures.laid(ids), runner.new_cache(1)
    cache.attach(0, laid)
    while at < len(ids):
        size, mutual = laid.piece(at, min(most, len(ids) - at))
        piece = SequenceChunk(0, ids[at : at + size], [0] * size, plan, wanted=size, mutual=mutual)
        found.append(runner.forward([piece], cache))
        cache.commit(0, range(size))
        at += size
    return torch.cat(found), cache


def asked_of_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward that CUDA graphs are asked for, by a runner which a graphics processor would have."""
    runner, found = engine.runner, list[int]()
    assert isinstance(runner, PackedRunner)

    class Graphs:
        def forward(self, chunks: Any, cache: Any) -> None:
            found.append(sum(len(chunk.tokens) for chunk in chunks))

    monkeypatch.setattr(runner, "graphs", Graphs())
    monkeypatch.setattr(type(runner), "forward", PackedRunner.forward)
    monkeypatch.setattr(type(runner), "argmax", ModelRunner.argmax)
    monkeypatch.setattr(type(runner), "argmax_steps", ModelRunner.argmax_steps)
    return found
