"""RecurrentGemma on packed layers and the kernels, which alone run it: its modules keep their states to themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from backends import packed
from cuts import check_bits, check_near
from drive import gap, prompt
from families import RECURRENT, fingerprint, tiny
from hybrid_steps import unpacked
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.methods.aded import ADED
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.packed import native
from shoal.model.packed.native.recurrence import NativeRecurrence
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.shape import shape_of
from shoal.model.packed.source import TensorSource
from shoal.model.packed.weights import check_names
from shoal.model.parity import chunked_logits
from shoal.model.runner import SequenceChunk

LAYERS = 5
pytestmark = pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states")


def of_modules(model: Any, ids: list[int]) -> Tensor:
    """The module's logits of a whole text. It computes its recurrence token after token, in float32."""
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found


def exact(ids: list[int], **changes: Any) -> Tensor:
    """The same of the model in float64. In float32 its modules lose digits of 1 - a^2, a hundred times the kernels'."""
    return of_modules(tiny("recurrent_gemma", layers=LAYERS, **changes), ids).float()


kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
each_change = pytest.mark.parametrize("changes", [
    {}, {"attention_bias": True, "logits_soft_cap": 3.0, "lru_width": None},
    {"block_types": ["attention", "recurrent"], "num_key_value_heads": 2}], ids=str)


@each_change
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_are_those_of_the_modules_however_the_text_is_cut(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    model, ids = tiny("recurrent_gemma", dtype=dtype, layers=LAYERS, **changes), prompt(30)
    runner, wanted = packed(model), of_modules(model, ids)
    check_near(runner, ids, wanted, 1e-5)


@kernels
@each_change
def test_logits_of_the_kernels_are_those_of_the_modules_however_the_text_is_cut(changes: dict[str, Any]) -> None:
    model, ids = tiny("recurrent_gemma", dtype=torch.float32, layers=LAYERS, **changes), prompt(40)
    check_bits(model, ids, exact(ids, **changes), 1e-4)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_prompts_of_three_lengths_have_the_bits_of_one_alone(dtype: torch.dtype, quant: Any) -> None:
    runner = packed(tiny("recurrent_gemma", dtype=dtype, layers=LAYERS), quant, kernels=True)
    texts, plan = [prompt(size, seed) for seed, size in enumerate((70, 1, 12))], DepthPlan.full(LAYERS)
    chunks = [SequenceChunk(seq, text, [0] * len(text), plan, wanted=len(text)) for seq, text in enumerate(texts)]
    found = runner.forward(chunks, runner.new_cache(3)).split([len(text) for text in texts])
    for text, logits in zip(texts, found, strict=True):
        assert torch.equal(logits, chunked_logits(runner, text, (1,) * len(text)))


@kernels
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_matrices_on_the_kernels(quant: Any) -> None:
    model, ids = tiny("recurrent_gemma", dtype=torch.float32, layers=LAYERS), prompt(12)
    runner = packed(model, quant, kernels=True)
    plain = PackedRunner(runner.shape, unpacked(runner.weights), runner.rotary, runner.dtype, runner.device)
    wanted, unquantised = chunked_logits(plain, ids, (12,)), chunked_logits(packed(model), ids, (12,))
    assert gap(chunked_logits(runner, ids, (12,)), wanted) < 2 * gap(wanted, unquantised)


@kernels
def test_the_comparison_has_power(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("recurrent_gemma", dtype=torch.float32, layers=LAYERS), prompt(20)
    wanted, real = exact(ids), NativeRecurrence._unit
    for changed in (lambda mixer: replace(mixer, gates=mixer.gates[::-1]),
                    lambda mixer: replace(mixer, scale=mixer.scale + 1)):
        monkeypatch.setattr(NativeRecurrence, "_unit", lambda self, mixer, changed=changed: real(self, changed(mixer)))
        assert gap(chunked_logits(packed(model, kernels=True), ids, (20,)), wanted) > 1e-3 * float(wanted.abs().max())


@pytest.mark.parametrize("method", [PromptLookup(), ADED()], ids=lambda method: type(method).__name__)
def test_it_is_packed_by_itself_and_drafted_for(method: Any) -> None:
    model = tiny("recurrent_gemma", layers=LAYERS)
    before = fingerprint(model)
    engine = engine_for(model, None, backend="auto")
    assert type(engine.runner) is PackedRunner and fingerprint(model) == before
    prompts = [prompt(9) * 2, prompt(4, 1)]
    plain = [engine.generate([one], max_new_tokens=24)[0].tokens for one in prompts]
    texts = [result.tokens for result in engine.generate(prompts, method=method, max_new_tokens=24)]
    assert texts == plain
    for ids, text in zip(prompts, plain, strict=True):
        assert of_modules(model, [*ids, *text]).argmax(-1)[len(ids) - 1 : -1].tolist() == list(text)


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    model, ids = tiny("recurrent_gemma", dtype=torch.float32, layers=LAYERS), prompt(20)
    model.save_pretrained(tmp_path)
    runner = shoal.load(str(tmp_path), dtype="float32").runner
    assert isinstance(runner, NativeRunner if native.available() else PackedRunner)
    wanted = exact(ids)
    assert gap(chunked_logits(runner, ids, (20,)), wanted) < (1e-4 if native.available() else 2e-3) * wanted.abs().max()


def test_missing_tensors_are_refused() -> None:
    model = tiny("recurrent_gemma", dtype=torch.float32, layers=LAYERS)
    held = dict(model.state_dict())
    check_names(model.config, shape_of(model.config), TensorSource(held))
    for name in ("model.layers.0.temporal_block.rg_lru.input_gate_bias", "model.layers.2.temporal_block.o_proj.bias",
                 "model.layers.0.mlp_block.down_proj.bias"):
        with pytest.raises(shoal.Unsupported, match="without"):
            check_names(model.config, shape_of(model.config), TensorSource(
                {key: one for key, one in held.items() if key != name}))
