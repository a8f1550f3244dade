"""Weights that lack a tensor, or hold one that has no place, are refused by name on every way a model is loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

import shoal
from chat_tokenizer import chat_tokenizer
from drive import prompt
from eagle_part import eagle_part, target
from families import FAMILIES, RELATIVES, tiny
from gguf_models import ARCHITECTURES, tiny_model, write_model
from gguf_words import byte_level
from packed_variants import VARIANTS
from shoal.errors import Unsupported
from shoal.model.modules import check_quantised, expected
from shoal.model.packed.kinds import LLAMA as PACKED
from shoal.model.packed.shape import shape_of
from shoal.model.packed.weights import tensors
from shoal.model.transform import DropLayers
from shoal.speculative.draft_head_file import CARD, TENSORS, TOKENS

IDS = prompt(9, 2)
DOWN = "model.layers.1.mlp.down_proj.weight"
Change = Callable[[dict[str, Tensor]], None]


def folder(place: Path, family: str = "llama", shards: str = "50MB", **changes: Any) -> Path:
    """A saved tiny model."""
    tiny(family, dtype=torch.float32, **changes).save_pretrained(place, max_shard_size=shards)
    return place


def edit(place: Path, change: Change) -> Path:
    """The same folder with other tensors in its one file."""
    file = place / "model.safetensors"
    held = load_file(file)
    change(held)
    save_file(held, file, {"format": "pt"})
    return place


def without(*names: str) -> Change:
    def change(held: dict[str, Tensor]) -> None:
        for name in names:
            del held[name]

    return change


def having(**named: Tensor) -> Change:
    return lambda held: held.update({name.replace("__", "."): tensor for name, tensor in named.items()})


def loads(place: Path, backend: str, **options: Any) -> list[int]:
    engine = shoal.load(place, dtype="float32", backend=backend, **options)  # type: ignore[arg-type]
    return list(engine.generate(IDS, max_new_tokens=4, ignore_eos=True).tokens)


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
def test_a_missing_tensor(tmp_path: Path, backend: str) -> None:
    edit(folder(tmp_path), without(DOWN))
    with pytest.raises(Unsupported, match=rf"without '{DOWN}'"):
        loads(tmp_path, backend)


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
@pytest.mark.parametrize(("family", "name"), [
    ("qwen2", "model.layers.2.self_attn.k_proj.bias"), ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
    ("gemma3", "model.layers.5.pre_feedforward_layernorm.weight"), ("llama", "lm_head.weight"),
    ("phi3", "model.layers.1.self_attn.qkv_proj.weight"), ("llama", "model.norm.weight"),
    ("gpt_neox", "gpt_neox.layers.1.mlp.dense_4h_to_h.bias"),
])  # fmt: skip
def test_tensors_that_a_loader_may_take_for_optional(tmp_path: Path, family: str, name: str, backend: str) -> None:
    edit(folder(tmp_path, family), without(name))
    with pytest.raises(Unsupported, match=name.replace(".", r"\.")):
        loads(tmp_path, backend)


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
@pytest.mark.parametrize("name", [
    "model.layers.0.self_attn.q_proj.bias", "model.layers.6.mlp.down_proj.weight", "adapter.weight",
    "model.layers.3.mlp.gate_proj.lora_A", "model.layers.2.self_attn.q_norm.weight",
])  # fmt: skip
def test_a_tensor_without_a_place(tmp_path: Path, name: str, backend: str) -> None:
    edit(folder(tmp_path), lambda held: held.update({name: torch.ones(32)}))
    with pytest.raises(Unsupported, match=rf"with '{name}'.*no place"):
        loads(tmp_path, backend)


def test_many_are_named_and_counted(tmp_path: Path) -> None:
    edit(folder(tmp_path), lambda held: [held.pop(name) for name in list(held) if "down_proj" in name])  # type: ignore[func-returns-value]
    with pytest.raises(Unsupported, match=r"without 'model.layers.0.mlp.down_proj.weight', .* and 2 more"):
        loads(tmp_path, "packed")


@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_what_changes_nothing_is_no_fault(tmp_path: Path, backend: str) -> None:
    """Frequencies that follow from the config, scales of a KV that is not kept in 8 bits, biases of zeros."""
    clean = loads(folder(tmp_path), backend)
    edit(tmp_path, having(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
                          model__layers__0__self_attn__k_scale=torch.ones(1),
                          model__layers__2__mlp__down_proj__bias=torch.zeros(32)))
    assert loads(tmp_path, backend) == clean


@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_a_tied_head_may_be_there_or_not(tmp_path: Path, backend: str) -> None:
    clean = loads(folder(tmp_path, tie_word_embeddings=True), backend)
    edit(tmp_path, lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}))
    assert loads(tmp_path, backend) == clean


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
def test_shards(tmp_path: Path, backend: str) -> None:
    """A tensor that the index names and its file lacks, and a file that is not there."""
    folder(tmp_path, shards="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))
    file = tmp_path / index["weight_map"][DOWN]
    held = load_file(file)
    save_file({name: tensor for name, tensor in held.items() if name != DOWN}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"(names the tensor|without) '{DOWN}'"):
        loads(tmp_path, backend)
    file.unlink()
    with pytest.raises((ValueError, OSError), match=file.name):
        loads(tmp_path, backend)


def test_a_shard_holds_more_than_the_index_says(tmp_path: Path) -> None:
    folder(tmp_path, shards="20KB")
    place = tmp_path / "model.safetensors.index.json"
    index = json.loads(place.read_text("utf-8"))
    file = tmp_path / index["weight_map"][DOWN]
    save_file({**load_file(file), "more.weight": torch.ones(2)}, file, {"format": "pt"})
    for backend in ("packed", "hf"):
        with pytest.raises(Unsupported, match=r"with 'more\.weight'"):
            loads(tmp_path, backend)


@pytest.mark.parametrize("found", ["[]", "{}", '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../b"}}', "{"])
def test_an_index_that_is_none(tmp_path: Path, found: str) -> None:
    (folder(tmp_path, shards="20KB") / "model.safetensors.index.json").write_text(found, encoding="utf-8")
    with pytest.raises(ValueError, match=r"index.*Fetch the model again"):
        loads(tmp_path, "packed")


def config_of(place: Path, **changes: Any) -> None:
    file = place / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **changes}), encoding="utf-8")


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
def test_quantised_tensors_that_the_config_says_nothing_of(tmp_path: Path, backend: str) -> None:
    def quantise(held: dict[str, Tensor]) -> None:
        for name in [name for name in held if "_proj" in name]:
            held[name.replace("weight", "qweight")] = held.pop(name).to(torch.int32)
            held[name.replace("weight", "scales")] = torch.ones(4)

    edit(folder(tmp_path), quantise)
    config_of(tmp_path, quantization_config=None)
    with pytest.raises(Unsupported, match=r"without 'model\.layers\.0\.mlp\.down_proj\.weight'"):
        loads(tmp_path, backend)


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
@pytest.mark.parametrize("said", [
    {"quant_method": "gptq", "bits": 4}, {"quant_method": "nobody_knows"}, {"quant_method": "fp8"}, {},
    {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "compressed-tensors"},
])  # fmt: skip
def test_plain_weights_under_a_config_that_calls_them_quantised(
    tmp_path: Path, said: dict[str, Any], backend: str
) -> None:
    config_of(folder(tmp_path), quantization_config=said)
    with pytest.raises(Unsupported, match="quantised by") as caught:
        loads(tmp_path, backend)
    assert "\n" not in str(caught.value)
    assert backend == "packed" or "Take quantization_config out of config.json" in str(caught.value)


@pytest.mark.parametrize("types", [
    {"a.qweight": "I32", "a.scales": "F16"}, {"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"},
    {"a.weight": "U8", "a.weight.absmax": "F32"}, {"a.weight_packed": "I32", "a.weight_scale": "BF16"},
    {"a.down_proj_blocks": "U8", "a.down_proj_scales": "U8"}, {"a.weight": "I8"}, {"a.weight_scale": "BF16"},
])  # fmt: skip
def test_quantised_weights_are_left_to_transformers(types: dict[str, str]) -> None:
    check_quantised(LlamaConfig(quantization_config={"quant_method": "some"}), {"b.weight": "BF16", **types})
    check_quantised(LlamaConfig(), {"b.weight": "BF16"})


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
def test_a_draft_model(tmp_path: Path, backend: str) -> None:
    edit(folder(tmp_path / "draft"), without(DOWN))
    engine = shoal.load(folder(tmp_path / "whole"), dtype="float32", backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"the draft model .* without '{DOWN}'"):
        engine.generate(IDS, method=shoal.DraftModel(draft=str(tmp_path / "draft")), max_new_tokens=2)


def test_a_transform_hides_nothing(tmp_path: Path) -> None:
    edit(folder(tmp_path), lambda held: held.update({"model.layers.6.mlp.down_proj.weight": torch.ones(2)}))
    with pytest.raises(Unsupported, match=r"with 'model\.layers\.6\.mlp\.down_proj\.weight'"):
        loads(tmp_path, "packed", transform=DropLayers((2,)))


def test_an_adapter_is_not_left_out(tmp_path: Path) -> None:
    (folder(tmp_path) / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(Unsupported, match="adapter.*by --lora"):
        loads(tmp_path, "auto")


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
@pytest.mark.parametrize(("old", "new", "said"), [
    (b"blk.2.attn_v.", b"blk.2.attn_x.", r"without 'model\.layers\.2\.self_attn\.v_proj\.weight'"),
    (b"blk.0.ffn_norm.", b"blk.9.ffn_norm.", r"without 'model\.layers\.0\.post_attention_layernorm\.weight'"),
])  # fmt: skip
def test_a_gguf_file_without_a_tensor(tmp_path: Path, backend: str, old: bytes, new: bytes, said: str) -> None:
    write_model("llama", tmp_path / "tiny.gguf")
    raw = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(raw.replace(old, new))
    with pytest.raises(Unsupported, match=said):
        loads(tmp_path / "tiny.gguf", backend)


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
def test_a_gguf_file_with_more(tmp_path: Path, backend: str) -> None:
    """Qwen2's biases under another architecture, and one of Qwen2's biases that is not there."""
    write_model("qwen2", tmp_path / "tiny.gguf")
    raw = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "less.gguf").write_bytes(raw.replace(b"blk.3.attn_k.bias", b"blk.3.attn_k.bios"))
    with pytest.raises(Unsupported, match=r"without 'model\.layers\.3\.self_attn\.k_proj\.bias'"):
        loads(tmp_path / "less.gguf", backend)
    write_model("llama", tmp_path / "tiny.gguf")
    raw = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "more.gguf").write_bytes(raw.replace(b"llama.block_count\x04\x00\x00\x00\x04",
                                                     b"llama.block_count\x04\x00\x00\x00\x03"))
    with pytest.raises(Unsupported, match=r"with 'blk\.3\."):
        loads(tmp_path / "more.gguf", backend)


@pytest.mark.parametrize("kind", ["adapter", "mmproj"])
def test_a_gguf_file_that_is_no_model(tmp_path: Path, kind: str) -> None:
    write_model("llama", tmp_path / "tiny.gguf", extra={"general.type": kind})
    with pytest.raises(ValueError, match=f"of type '{kind}' and no model"):
        loads(tmp_path / "tiny.gguf", "auto")


def for_transformers(place: Path, old: bytes, new: bytes) -> Path:
    """A file with a type that Shoal does not read, and one change."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="transformers reads GGUF files through gguf and accelerate")
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[3].mlp.down_proj.weight.zero_()
    write_model("llama", place / "tiny.gguf", model=model)
    raw = bytearray((place / "tiny.gguf").read_bytes().replace(old, new))
    at = raw.index(b"blk.3.ffn_down.weight") + len(b"blk.3.ffn_down.weight") + 4 + 16
    raw[at : at + 4] = (10).to_bytes(4, "little")  # Q2_K takes less room than F32
    (place / "tiny.gguf").write_bytes(raw)
    return place / "tiny.gguf"


@pytest.mark.parametrize(("old", "new", "said"), [
    (b"blk.2.attn_v.", b"blk.2.attn_x.", r"without 'model\.layers\.2\.self_attn\.v_proj\.weight'"),
    (b"llama.block_count\x04\x00\x00\x00\x04", b"llama.block_count\x04\x00\x00\x00\x03", r"with 'blk\.3\."),
])  # fmt: skip
def test_a_gguf_file_that_transformers_reads(tmp_path: Path, old: bytes, new: bytes, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        shoal.load(for_transformers(tmp_path, old, new), chat_tokenizer(), dtype="float32")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whole_gguf_files_are_taken(tmp_path: Path, architecture: str) -> None:
    write_model(architecture, tmp_path / "tiny.gguf")
    assert loads(tmp_path / "tiny.gguf", "packed") == loads(tmp_path / "tiny.gguf", "hf")


def test_a_trained_part(tmp_path: Path) -> None:
    place = Path(eagle_part("llama"))
    held = load_file(place / TENSORS)
    name = min(name for name in held if name != TOKENS)
    engine = target("llama")
    for change, said in ((without(name), f"the tensor '{name}' .* is not there"),
                         (having(more=torch.ones(2)), "holds 'more', which")):
        changed = dict(held)
        change(changed)
        other = tmp_path / f"changed{len(changed)}"
        other.mkdir()
        (other / CARD).write_bytes((place / CARD).read_bytes())
        save_file(changed, other / TENSORS)
        with pytest.raises(ValueError, match=said):
            engine.generate(IDS, method={"method": "eagle", "method_args": {"part": str(other)}}, max_new_tokens=4)


CASES = {**{name: (name, {}) for name in (*FAMILIES, *RELATIVES)}, **VARIANTS,
         **{f"{name}, all biases": (name, {"attention_bias": True, "mlp_bias": True, "attention_out_bias": True})
            for name in ("llama", "qwen3", "granite", "smollm3", "seed_oss", "glm", "glm4", "helium", "olmo2", "gemma",
                         "gemma3", "mistral")}}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_names_are_those_of_transformers_modules(case: str) -> None:
    family, changes = CASES[case]
    config = tiny(family, **changes).config
    if config.model_type not in PACKED:
        pytest.skip("it does not fit the packed block")
    try:
        shape = shape_of(config)
    except Unsupported:
        pytest.skip("it does not fit the packed block")
    own = {name for forms in tensors(config, shape, "model.", shape.tied) for name in forms[0]}
    assert own == {name for name in expected(config) if not (shape.tied and name == "lm_head.weight")}


def with_metadata(place: Path, **entries: Any) -> Path:
    """A file that transformers reads, with a tokenizer and other metadata."""
    _, words = byte_level(r"\s+|\S+")
    words |= {"tokenizer.ggml.pre": "gpt-2", **entries}
    model = copy.deepcopy(tiny_model("llama", vocab_size=len(byte_level(r"\s+|\S+")[1]["tokenizer.ggml.token_type"])))
    model.model.layers[3].mlp.down_proj.weight.zero_()
    write_model("llama", place / "tiny.gguf", model=model, extra=words)
    raw = bytearray((place / "tiny.gguf").read_bytes())
    at = raw.index(b"blk.3.ffn_down.weight") + len(b"blk.3.ffn_down.weight") + 4 + 16
    raw[at : at + 4] = (10).to_bytes(4, "little")
    (place / "tiny.gguf").write_bytes(raw)
    return place / "tiny.gguf"


@pytest.mark.parametrize(("key", "value", "said"), [
    ("tokenizer.ggml.tokens", 2147483647, "tokens must be strings"),
    ("tokenizer.ggml.merges", 0.0, "merges must be strings"),
    ("tokenizer.ggml.scores", "x", "scores must be"),
    ("tokenizer.ggml.bos_token_id", 1_000_000_000, "bos_token_id is 1000000000"),
    ("tokenizer.ggml.eos_token_id", "x", "eos_token_id is 'x'"),
    ("tokenizer.chat_template", 5, "chat_template must be a string"),
    ("llama.attention.head_count", 1_000_000, "head_count 1000000"),
    ("llama.attention.head_count", 0, "head_count|does not read it either"),
    ("llama.block_count", 1_000_000, "1000000 layers and has 39 tensors"),
    ("llama.embedding_length", 1_000_000_000, "embedding_length 1000000000"),
    ("llama.embedding_length", "x", "embedding_length is 'x'"),
    ("llama.rope.freq_base", "z", "freq_base is 'z'; it must be a positive number"),
    ("llama.feed_forward_length", [1, 2], r"feed_forward_length is \[1, 2\]; it must be 4 whole numbers"),
    ("general.architecture", [1, 2], r"general.architecture is \[1, 2\]; it must be a string"),
])  # fmt: skip
def test_metadata_of_a_wrong_kind(tmp_path: Path, key: str, value: Any, said: str) -> None:
    path = with_metadata(tmp_path, **{key: value})
    with pytest.raises(ValueError, match=said) as caught:
        shoal.load(path, dtype="float32")
    assert "\n" not in str(caught.value)
