"""GGUF models that see by a file beside them: equal to transformers, and to the same weights in safetensors."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmproj_files
import seers
import shoal
from folders import lasting
from gguf_models import fuzzed
from seers import asked, inputs_of
from shoal.engine.chats import read_chat
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.errors import Unsupported
from shoal.model.gguf.mmproj import sight_beside
from shoal.serve.facts import ModelFacts

KINDS = mmproj_files.KINDS
_IDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@cache
def made(kind: str, form: str = "F32") -> tuple[shoal.Engine, Any, Any]:
    """An engine of a GGUF file with an encoder beside it, transformers' model and its processor."""
    folder = lasting("mmproj")
    model, processor = mmproj_files.write(folder, kind, form)
    return shoal.load(str(folder / "model.gguf"), dtype="float32"), model, processor


@torch.no_grad()
def features(kind: str, image: Any, form: str) -> Tensor:
    """States [tokens, hidden] of a picture, by transformers' modules."""
    _, model, _ = made(kind, form)
    inputs = inputs_of(made(kind, form)[2], asked(image), [image])
    found = model.model.get_image_features(**{key: one for key, one in inputs.items() if key not in _IDS}).pooler_output
    return torch.cat([one.flatten(0, -2) for one in ([found] if isinstance(found, Tensor) else found)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["F32", "F16", "BF16", "Q8_0"])
def test_states_of_a_picture_are_those_of_transformers(kind: str, form: str) -> None:
    engine, _, _ = made(kind, form)
    for image in (seers.picture(1), seers.picture(2, 90, 50)):
        _, pictures = read_chat(engine, asked(image, "What?"))
        assert pictures is not None
        wanted = features(kind, image, form)
        torch.testing.assert_close(pictures.states, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_transformers(kind: str) -> None:
    engine, model, _ = made(kind)
    images = [seers.picture(1), seers.picture(2, 90, 50)]
    messages = asked("See ", images[0], " and ", images[1], ". What?")
    ids, pictures = read_chat(engine, messages)
    inputs = inputs_of(made(kind)[2], messages, images)
    assert ids == inputs["input_ids"][0].tolist()
    ends = sorted(engine.eos_token_ids)  # transformers 5.0 knows none of some kinds
    wanted = model.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=ends)[0, len(ids) :].tolist()
    assert list(engine.generate(messages, max_new_tokens=24, temperature=0.0).tokens) == wanted
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    assert pictures is not None
    torch.testing.assert_close(seers.logits_of(engine, ids, pictures, 7), logits, rtol=0, atol=1e-5)


def refused(folder: Path) -> str:
    """What a model of that folder says to a picture; text it reads as before."""
    engine = shoal.load(str(folder / "model.gguf"), dtype="float32")
    assert len(engine.generate("Hello", max_new_tokens=2, ignore_eos=True).tokens) == 2
    with pytest.raises((Unsupported, ValueError)) as error:
        read_chat(engine, asked(seers.picture(1)))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.skipif("qwen3_5" not in seers.MAKERS, reason="of later transformers")
@pytest.mark.parametrize(("more", "metadata", "said"), [
    ({"qwen35.rope.dimension_sections": [1, 1, 1, 0]}, {}, "does not say how tokens of pictures turn"),
    ({}, {"clip.vision.is_deepstack_layers": [True, False, False]}, "it adds states behind layers of qwen3_vl"),
])
def test_a_hybrid_says_how_pictures_turn(more: Any, metadata: Any, said: str, tmp_path: Path) -> None:
    model, processor = seers.seer("qwen3_5")
    mmproj_files.write_decoder(tmp_path / "model.gguf", model, "qwen3_5", processor.tokenizer, more)
    mmproj_files.write_mmproj(tmp_path / "mmproj-F32.gguf", model, "qwen3_5", metadata=metadata)
    assert said in refused(tmp_path)


def written(folder: Path, kind: str = "idefics3", **changes: Any) -> Path:
    """A model whose encoder has such changes."""
    model, processor = seers.seer(kind)
    mmproj_files.write_decoder(folder / "model.gguf", model, kind, processor.tokenizer)
    mmproj_files.write_mmproj(folder / "mmproj-F32.gguf", model, kind, **changes)
    return folder


@pytest.mark.parametrize(("changes", "said"), [
    ({"without": "mm.model.fc.weight"}, "'mmproj-F32.gguf' without mm.model.fc.weight: its encoder of pictures needs"),
    ({"without": "v.blk.1.ln2.weight"}, "'mmproj-F32.gguf' without v.blk.1.ln2.weight"),
    ({"without": "v.blk.0.attn_q.bias"}, "without model.vision_model.encoder.layers.0.self_attn.q_proj.bias"),
    ({"more": {"v.other.weight": ("F32", (1,), bytes(4))}}, "with v.other.weight: its encoder has no place for it"),
    ({"metadata": {"clip.projector_type": "resampler"}}, "of projector type 'resampler': Shoal reads gemma3, idefics3"),
    ({"metadata": {"clip.projector_type": "qwen3vl_merger"}}, "without mm.2.weight"),
    ({"metadata": {"clip.vision.block_count": 1}}, "with v.blk.1.attn_k.bias"),
    ({"metadata": {"clip.vision.block_count": 1 << 30}}, "announces 1073741824 layers and has 38 tensors"),
    ({"metadata": {"clip.vision.image_size": None}}, "clip.vision.image_size is absent; it must be a whole number"),
    ({"metadata": {"clip.vision.image_size": 64}}, "with places for 16 patches: its pictures have 8 by 8"),
    ({"metadata": {"clip.vision.preproc_image_size": 9000}}, "is 9000; it must be a whole number from 1 to 8192"),
    ({"metadata": {"clip.vision.patch_size": 256, "clip.vision.image_size": 1024}}, "numbers: the checkpoint"),
    ({"metadata": {"clip.vision.image_size": 1 << 22}}, "is 4194304; it must be a whole number from 1 to 8192"),
    ({"kind": "qwen2_vl", "metadata": {"clip.vision.image_min_pixels": 1 << 30}}, "from 1 to 67108864"),
    ({"kind": "qwen2_vl", "metadata": {"clip.vision.spatial_merge_size": 4}}, "numbers: the checkpoint has"),
    ({"more": {"v.position_embd.weight": ("F32", (512,), bytes(2048))}}, "without v.position_embd.weight"),
    ({"kind": "qwen2_vl", "more": {"v.patch_embd.weight.1": ("F32", (4,), bytes(16))}}, "RuntimeError: stack expects"),
    ({"more": {"v.blk.0.ln1.bias": ("F32", (16,), bytes(64))}}, "layer_norm1.bias is of another shape"),
    ({"metadata": {"clip.vision.attention.head_count": 5}}, "embed_dim must be divisible by num_heads"),
    ({"metadata": {"clip.vision.image_mean": [0.5]}}, "clip.vision.image_mean is [0.5]; it must be 3"),
    ({"metadata": {"clip.vision.projector.scale_factor": 99}}, "clip.vision.projector.scale_factor is 99"),
    ({"metadata": {"general.architecture": "llama"}}, "is no encoder of pictures"),
])
def test_an_encoder_that_cannot_be_read_is_told_in_a_line(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refused(written(tmp_path, **changes))


def test_an_encoder_of_another_model_is_left_alone(tmp_path: Path) -> None:
    folder = written(tmp_path)
    model, _ = seers.seer("gemma3")
    mmproj_files.write_mmproj(folder / "mmproj-F32.gguf", model, "gemma3")
    assert "it is for model type gemma3_text, and this is llama" in refused(folder)
    model.model.multi_modal_projector.mm_input_projection_weight.data = torch.ones(32, 128)
    mmproj_files.write_mmproj(folder / "mmproj-F32.gguf", model, "gemma3")
    assert "'mmproj-F32.gguf' for this model: its states have size 128, and the model's 64" in refused(folder)
    (folder / "mmproj-F32.gguf").write_bytes(b"GGUF")
    assert "mmproj-F32.gguf" in refused(folder)


def test_of_several_encoders_the_usual_one_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path)
    model, _ = seers.seer("idefics3")
    for form in ("Q8_0", "F16"):
        mmproj_files.write_mmproj(folder / f"mmproj-{form}.gguf", model, "idefics3", form)
    engine = shoal.load(str(folder / "model.gguf"), dtype="float32")
    assert "3 files read pictures for one model; taking 'mmproj-F16.gguf'" in caplog.text
    assert read_chat(engine, asked(seers.picture(1)))[1] is not None


def test_mlps_of_old_files_are_turned_round(tmp_path: Path) -> None:
    """llama.cpp's first converter called the upper matrix `ffn_down`."""
    model, processor = seers.seer("llava")
    mmproj_files.write_decoder(tmp_path / "model.gguf", model, "llava", processor.tokenizer)
    turned = {name: one for name, one in mmproj_files.tensors_of(model, "llava").items() if ".ffn_" in name}
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    other = {name.replace(part, swap[part]): mmproj_files.encoded(one, "F32")
             for name, one in turned.items() if (part := name.split(".")[3])}
    mmproj_files.write_mmproj(tmp_path / "mmproj-F32.gguf", model, "llava", more=other)
    engine = shoal.load(str(tmp_path / "model.gguf"), dtype="float32")
    _, pictures = read_chat(engine, asked(seers.picture(1), "What?"))
    assert pictures is not None
    torch.testing.assert_close(pictures.states, features("llava", seers.picture(1), "F32"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_model(kind: str) -> None:
    engine, model, _ = made(kind)
    assert engine.vision is not None
    found, wanted = engine.vision.module.state_dict(), model.state_dict()
    for name in filter(mmproj_files.sees, wanted):
        if kind != "llava" or "post_layernorm" not in name:  # which files leave out, as nobody reads it
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-6)


def test_what_is_told_of_a_model_that_is_not_in_memory(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert ModelFacts.of_files(Checkpoint(str(folder / "model.gguf"), None, False)).sees
    (folder / "mmproj-F32.gguf").unlink()
    assert not ModelFacts.of_files(Checkpoint(str(folder / "model.gguf"), None, False)).sees


@pytest.mark.parametrize("count", [pytest.param(60, id="60"), pytest.param(5_000, id="5000", marks=pytest.mark.slow)])
def test_changed_files_end_in_a_line_or_an_encoder(count: int, tmp_path: Path) -> None:
    path, rng, refused = written(tmp_path) / "mmproj-F32.gguf", random.Random(count), 0
    raw, tokens = path.read_bytes(), dict.fromkeys(seers.SPECIAL, 7)
    config = Checkpoint(str(tmp_path / "model.gguf"), None, False).config()
    for _ in range(count):
        path.write_bytes(fuzzed(raw, rng, raw.index(b"v.blk.") + 400))
        found, why = sight_beside(tmp_path, config, lambda: tokens)
        assert (found is None) == bool(why) and "\n" not in why
        refused += found is None
    assert count / 3 < refused < count


def test_sections_of_the_rotation_must_fill_a_head(tmp_path: Path) -> None:
    model, processor = seers.seer("qwen2_vl")
    sections = {"qwen2vl.rope.dimension_sections": [3, 3, 3, 0]}
    mmproj_files.write_decoder(tmp_path / "model.gguf", model, "qwen2_vl", processor.tokenizer, sections)
    with pytest.raises(ValueError, match=r"dimension_sections is \[3, 3, 3, 0\]; three of them must be 8 together"):
        shoal.load(str(tmp_path / "model.gguf"))
