"""Checkpoints in the numbers of other tools: the tools' own matrices, blocks of the same numbers, refusals."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

import shoal
from shoal.errors import Unsupported
from shoal.model.gguf.header import GgmlType
from shoal.model.packed import native
from shoal.model.packed.source import FileSource, TensorSource
from shoal.model.parity import chunked_logits
from shoal.model.quantised.levels import GroupScaled, unpack
from shoal.model.quantised.source import QuantisedSource

FOLDER = Path(__file__).parents[1] / "fixtures" / "quantised"
TYPES = {
    "gptq-4": "Q4_0", "gptq-4-order": None, "gptq-8": "Q8_0", "gptq-3": "Q4_1", "gptq-2": "Q4_1", "awq": "Q4_1",
    "packed-4": "Q4_0", "packed-4-zeros": "Q4_1", "packed-8": "Q8_0", "int-8": "Q8_0", "float-8": None,
    "mxfp4": "MXFP4", "nvfp4": None, "fp8-blocks": None, "fp8": None, "nf4": None, "fp4": None, "int8": None,
}
"""What the kernels hold of each form; None for numbers of the model's dtype."""
forms = pytest.mark.parametrize("form", TYPES)
MATRIX = "model.layers.0.self_attn.q_proj"


def said(form: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / form / "config.json").read_text("utf-8"))["quantization_config"]
    return found


def opened(form: str) -> QuantisedSource:
    return QuantisedSource(FileSource(FOLDER / form), said(form))


def expected(form: str) -> dict[str, Tensor]:
    return load_file(FOLDER / form / "expected.safetensors")


def dequantised(form: str) -> LlamaForCausalLM:
    """The modules with the dequantised matrices, in float32."""
    config = LlamaConfig.from_pretrained(FOLDER / form)
    del config.quantization_config
    plain = LlamaForCausalLM(config).eval()
    source = opened(form)
    plain.load_state_dict({name: source[name].float() for name in source.names()})
    return plain


@forms
def test_the_matrices_are_those_of_the_tool(form: str) -> None:
    source = opened(form)
    for name, matrix in expected(form).items():
        assert source.has(name) and torch.equal(source[name].to(matrix.dtype), matrix), name
    shapes = {name: tuple(one.shape) for name, one in LlamaForCausalLM(LlamaConfig(
        **{key: value for key, value in LlamaConfig.from_pretrained(FOLDER / form).to_dict().items()
           if key != "quantization_config"})).state_dict().items()}
    assert {name: tuple(source[name].shape) for name in source.names()} == shapes


@forms
def test_blocks_are_the_same_numbers(form: str) -> None:
    source = opened(form)
    for name in expected(form):
        blocks = source.blocks([name])
        assert (None if blocks is None else blocks.type.name) == TYPES[form]
        if blocks is None:
            continue
        found, wanted = blocks.dequantise(), source[name]
        if blocks.type is GgmlType.Q4_1:
            heads = blocks.data.view(len(wanted), -1, 20)[..., :2].contiguous().view(torch.float16).float()
            assert ((found - wanted).abs().unflatten(1, (-1, 32)) <= heads / 136).all()
        else:
            assert torch.equal(found, wanted)
    q, k, v = (name for name in expected(form) if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"))
    joined = source.blocks([q, k, v])
    assert (joined is None) == (TYPES[form] is None)
    if joined is not None:
        assert torch.equal(joined.dequantise(), torch.cat([source.blocks([one]).dequantise() for one in (q, k, v)]))


@forms
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_it_runs_like_the_dequantised_model(form: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels and not native.available():
        pytest.skip("the kernels cannot run here")
    if not kernels:
        monkeypatch.setattr(native, "available", lambda: False)
    engine = shoal.load(str(FOLDER / form), dtype="float32", backend="packed")
    ids = [5, 17, 80, 3, 41, 60, 2, 33]
    with torch.no_grad():
        wanted = dequantised(form)(torch.tensor([ids])).logits[0]
    found = chunked_logits(engine.runner, ids, (5, 3))
    error = (found - wanted).norm() / wanted.norm()
    assert error < (0.02 if kernels and TYPES[form] else 1e-4)  # kernels round inputs to 8 bits beside blocks
    plain = engine.generate(ids, max_new_tokens=24, ignore_eos=True)
    for method in ("auto", "prompt_lookup"):
        assert engine.generate(ids, method=method, max_new_tokens=24, ignore_eos=True).tokens == plain.tokens


def test_what_was_dequantised_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        shoal.load(str(FOLDER / "fp8"), dtype="float32", backend="packed")
    assert "matrices that fp8 has quantised are held in another form: 7 as torch.float32, into which" in caplog.text


def test_levels_of_any_bits_are_unpacked() -> None:
    drawn = random.Random(0)
    for bits in range(1, 9):
        numbers = [drawn.randrange(1 << bits) for _ in range(32)]
        stream = sum(number << place * bits for place, number in enumerate(numbers))
        words = [stream >> 32 * place & 0xFFFFFFFF for place in range(bits)]
        signed = [word - (1 << 32) if word >> 31 else word for word in words]
        assert unpack(torch.tensor([signed], dtype=torch.int32), bits).tolist() == [numbers]


def test_scales_that_float16_lacks_have_no_blocks() -> None:
    levels, zeros = torch.full((32, 32), 3, dtype=torch.uint8), torch.full((32, 1), 8, dtype=torch.int16)
    assert GroupScaled(levels, torch.full((32, 1), 0.5), zeros).blocks() is not None
    assert GroupScaled(levels, torch.full((32, 1), 0.1), zeros).blocks() is None
    assert GroupScaled(levels, torch.full((32, 1), 1e9), zeros).blocks() is None


def changed(tmp_path: Path, form: str, tensors: dict[str, Tensor | None], **config: Any) -> Path:
    """A copy of a folder with some tensors and settings changed."""
    copy = Path(shutil.copytree(FOLDER / form, tmp_path / form))
    held: dict[str, Any] = load_file(copy / "model.safetensors") | tensors
    save_file({name: one for name, one in held.items() if one is not None}, copy / "model.safetensors")
    entries = json.loads((copy / "config.json").read_text("utf-8"))
    entries["quantization_config"] |= config
    (copy / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    return copy


NAN = torch.full((64, 64), float("nan")).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("form", "tensors", "config", "why"), [
    ("gptq-4", {f"{MATRIX}.scales": None}, {}, f"without '{MATRIX}.scales'.*mean nothing"),
    ("awq", {f"{MATRIX}.qzeros": torch.zeros(2, 4, dtype=torch.int32)}, {}, "contradicts itself: levels .*zeros"),
    ("gptq-4", {}, {"bits": 5}, "gptq with bits 5: it must be one of 2, 3, 4, 8"),
    ("gptq-4", {f"{MATRIX}.g_idx": torch.full((64,), 9, dtype=torch.int32)}, {}, "g_idx names 64 groups, up to 9"),
    ("awq", {}, {"version": "gemv_fast"}, "AWQ of version 'gemv_fast'"),
    ("packed-4", {f"{MATRIX}.weight_shape": torch.tensor([64, 4096])}, {}, "hold no matrix"),
    ("packed-4", {}, {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ("fp8", {f"{MATRIX}.weight": NAN}, {}, "holds NaN"),
    ("fp8", {f"{MATRIX}.weight_scale_inv": None}, {}, "without .*weight_scale"),
    ("fp8-blocks", {}, {"weight_block_size": [128, 128]}, "scales .* in blocks of"),
    ("nf4", {f"{MATRIX}.weight.nested_absmax": None}, {}, "without .*nested_absmax"),
    ("int8", {f"{MATRIX}.SCB": torch.ones(3)}, {}, "cannot be read"),
])
def test_bad_checkpoints_are_refused(
    form: str, tensors: dict[str, Tensor | None], config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(Unsupported, match=why) as found:
        shoal.load(str(changed(tmp_path, form, tensors, **config)), backend="packed")
    assert "\n" not in str(found.value)


def test_plain_weights_that_a_config_calls_quantised(tmp_path: Path) -> None:
    copy = changed(tmp_path, "fp8", {})
    plain = {name: tensor.to(torch.bfloat16) for name, tensor in dequantised("fp8").state_dict().items()}
    save_file(plain, copy / "model.safetensors")
    with pytest.raises(Unsupported, match="quantised by 'fp8': its weights are plain"):
        shoal.load(str(copy), backend="packed")


@pytest.mark.parametrize("tries", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_parts_are_refused_or_read(tries: int) -> None:
    drawn = random.Random(tries)
    held = {form: load_file(FOLDER / form / "model.safetensors") for form in TYPES}
    refused = 0
    for _ in range(tries):
        form = drawn.choice(list(TYPES))
        tensors, settings = dict(held[form]), said(form)
        parts = [name for name in tensors if name.startswith(MATRIX)]
        for name in drawn.sample(parts, drawn.randrange(1, 1 + len(parts))):
            damage(tensors, name, drawn)
        if drawn.random() < 0.2:
            odd = drawn.choice([-1, 0, 3, 7, [1], [0, 9], None])
            settings[drawn.choice(["bits", "group_size", "weight_block_size"])] = odd
        source = QuantisedSource(Typed(tensors), settings)
        try:
            if source.has(f"{MATRIX}.weight"):
                assert source[f"{MATRIX}.weight"].dim() >= 0
                source.blocks([f"{MATRIX}.weight"])
        except Unsupported as error:
            refused += 1
            assert any(what in str(error) for what in (MATRIX, "with bits", "group_size", "weight_block_size"))
    assert tries / 4 < refused < tries


class Typed(TensorSource):
    """Tensors in memory with the types of safetensors."""

    CODES: Mapping[torch.dtype, str] = {
        torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16",
        torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
    }

    def types(self) -> dict[str, str]:
        return {name: self.CODES[self[name].dtype] for name in self.names()}


def damage(tensors: dict[str, Tensor], name: str, drawn: random.Random) -> None:
    """Drop, reshape, cut or retype a tensor, or overwrite its bytes."""
    one = tensors[name]
    kind = drawn.randrange(5)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = one.flatten()
    elif kind == 2:
        tensors[name] = one[: drawn.randrange(len(one) + 1)] if one.dim() else one.unsqueeze(0)
    elif kind == 3:
        tensors[name] = one.float().to(drawn.choice([torch.int32, torch.float16, torch.uint8, torch.int64]))
    elif one.numel():
        raw = one.contiguous().flatten().view(torch.uint8).clone()
        raw[drawn.randrange(len(raw))] = drawn.randrange(256)
        tensors[name] = raw.view(one.dtype).view(one.shape)


def test_the_config_names_the_method() -> None:
    methods = {AutoConfig.from_pretrained(FOLDER / form).quantization_config["quant_method"] for form in TYPES}
    assert methods == {"gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes"}
