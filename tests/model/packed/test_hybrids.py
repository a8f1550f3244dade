"""Models with recurrences on packed layers: their logits and texts are those of transformers' modules."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
import shoal.model.packed.build as build_module
from backends import CPU, packed
from cuts import check_near
from drive import gap, prompt
from families import PACKED_RECURRENT, tiny
from hybrid_steps import one_by_one, unpacked
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.model.packed import native
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.shape import shape_of
from shoal.model.packed.source import FileSource, TensorSource
from shoal.model.parity import check_parity, chunked_logits

LAYERS = 4
NEAR = {torch.float32: 1e-4, torch.float64: 5e-5}
"""Of the largest logit; transformers' recurrences compute in float32 in float64 models too."""
ENLARGED = 5
"""Of Mamba, whose random weights enlarge rounding."""
pytestmark = pytest.mark.skipif(not PACKED_RECURRENT, reason="this transformers has no common cache of states")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in PACKED_RECURRENT},
    "falcon_h1, its factors": ("falcon_h1", {
        "key_multiplier": 0.7, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8],
        "mlp_multipliers": [1.4, 0.5], "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5}),
    "falcon_h1, a norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 2}),
    "falcon_h1, a norm after the gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "granite4, factors and rotation": ("granite4", {
        "residual_multiplier": 0.7, "logits_scaling": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.4,
        "position_embedding_type": "rope"}),
    "lfm2, biases": ("lfm2", {"conv_bias": True}),
    "mamba, biases": ("mamba", {"use_bias": True, "use_conv_bias": False}),
    "jamba, biases": ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    "mamba2, biases": ("mamba2", {"use_bias": True}),
    "nemotron_h, biases": ("nemotron_h", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}),
    "olmo_hybrid, rotation": ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
                                              "linear_allow_neg_eigval": False}),
    "bamba, biases": ("bamba", {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}),
    "qwen3_5, biases": ("qwen3_5", {"attention_bias": True}),
}


kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_modules(variant: str, dtype: torch.dtype) -> None:
    family, changes = VARIANTS[variant]
    model = tiny(family, dtype=dtype, layers=LAYERS, **changes)
    ids, runner = prompt(30), packed(model)
    wanted, near = one_by_one(model, ids), NEAR[dtype] * (ENLARGED if family == "mamba" else 1)
    check_near(runner, ids, wanted, near)
    assert check_parity(runner, model, {torch.float32: 1e-4, torch.float64: 1e-4}) < 1e-2


@pytest.mark.parametrize("family", PACKED_RECURRENT)
def test_texts_are_those_of_the_modules(family: str) -> None:
    engines = [engine_for(tiny(family, dtype=torch.float32, layers=LAYERS), None, backend=backend)
               for backend in ("packed", "hf")]
    engines[1].runner.singly = True  # type: ignore[attr-defined]
    prompts = [prompt(9), prompt(4, 1)]
    one, other = ([result.tokens for result in engine.generate(prompts, max_new_tokens=24)] for engine in engines)
    assert one == other


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("family", PACKED_RECURRENT)
def test_quantised_matrices_are_what_they_stand_for(family: str, quant: Any) -> None:
    model, ids = tiny(family, dtype=torch.float32, layers=LAYERS), prompt(12)
    runner = packed(model, quant)
    plain = PackedRunner(runner.shape, unpacked(runner.weights), runner.rotary, runner.dtype, runner.device)
    found, wanted = (chunked_logits(one, ids, (5, 7)) for one in (runner, plain))
    near = 1e-4 * (ENLARGED if family == "mamba" else 1)
    assert gap(found, wanted) < near * float(wanted.abs().max())
    assert gap(found, chunked_logits(packed(model), ids, (5, 7))) > 1e-4 * float(wanted.abs().max())


@kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_the_kernels_are_those_of_torch_however_the_text_is_cut(variant: str) -> None:
    family, changes = VARIANTS[variant]
    model, ids = tiny(family, dtype=torch.float32, layers=LAYERS, **changes), prompt(30)
    runner = packed(model, kernels=True)
    assert isinstance(runner, NativeRunner)
    wanted, whole = one_by_one(model, ids), chunked_logits(runner, ids, (30,))
    assert gap(whole, wanted) < NEAR[torch.float32] * float(wanted.abs().max())
    assert torch.equal(chunked_logits(runner, ids, (5, 20, 1, 4)), whole)
    assert torch.equal(chunked_logits(runner, ids, (1,) * 30), whole)


@kernels
@pytest.mark.parametrize("family", PACKED_RECURRENT)
def test_the_kernels_round_no_worse_in_bfloat16(family: str) -> None:
    model, errors = tiny(family, dtype=torch.bfloat16, layers=LAYERS), {True: 0.0, False: 0.0}
    for ids in (prompt(30, seed) for seed in range(4)):
        wanted = one_by_one(copy.deepcopy(model).float(), ids)
        for on in errors:
            errors[on] += float((chunked_logits(packed(model, kernels=on), ids, (30,)) - wanted).abs().mean())
    assert errors[True] < 1.5 * errors[False]


@kernels
@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("family", PACKED_RECURRENT)
def test_quantised_matrices_on_the_kernels(family: str, quant: Any) -> None:
    model, ids = tiny(family, dtype=torch.float32, layers=LAYERS), prompt(12)
    runner = packed(model, quant, kernels=True)
    plain = PackedRunner(runner.shape, unpacked(runner.weights), runner.rotary, runner.dtype, runner.device)
    wanted, unquantised = chunked_logits(plain, ids, (12,)), chunked_logits(packed(model), ids, (12,))
    found = chunked_logits(runner, ids, (12,))
    assert gap(found, wanted) < 2 * gap(wanted, unquantised)  # the kernels round activations as well, to 8 bits
    assert torch.equal(chunked_logits(runner, ids, (5, 7)), found)


def test_automatic_packing_takes_what_the_kernels_have(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [tiny(name, dtype=torch.float32, layers=LAYERS).config for name in PACKED_RECURRENT]
    for config in configs:
        if native.available():
            build_module.worth_packing(config, torch.float32, CPU)
    monkeypatch.setattr(native, "available", lambda: False)
    for config in configs:
        with pytest.raises(Unsupported, match="no kernels"):
            build_module.worth_packing(config, torch.float32, CPU)


@pytest.mark.parametrize("family", ["olmo_hybrid", "nemotron_h", "jamba"])
def test_saved_folders_are_read_by_their_own_names(family: str, tmp_path: Path) -> None:
    """transformers saves models by the names of published checkpoints."""
    model, ids = tiny(family, dtype=torch.float32, layers=LAYERS), prompt(20)
    model.save_pretrained(tmp_path)
    names = set(FileSource(tmp_path).names())
    if family == "olmo_hybrid":
        layer = "model.layers.0."
        assert {f"{layer}attention_layer_norm.weight", f"{layer}feedforward_layer_norm.weight",
                f"{layer}linear_attn.q_conv1d.weight"} <= names
        assert f"{layer}linear_attn.conv1d.weight" not in names
    engine = shoal.load(str(tmp_path), backend="packed", dtype="float32")
    assert isinstance(engine.runner, PackedRunner)
    assert torch.equal(chunked_logits(engine.runner, ids, (20,)), chunked_logits(packed(
        model, kernels=native.available()), ids, (20,)))


@pytest.mark.parametrize("change", [{"use_attention_gate": False}, {"use_sandwich_norm": False},
                                    {"attention_bias": True}], ids=str)
def test_other_forms_of_lfm3_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="'lfm3': it lacks gates"):
        shape_of(tiny("lfm3", dtype=torch.float32, layers=LAYERS, **change).config)


@pytest.mark.parametrize("family", PACKED_RECURRENT)
def test_missing_and_surplus_tensors_are_refused(family: str) -> None:
    model = tiny(family, dtype=torch.float32, layers=LAYERS)
    held = dict(model.state_dict())
    build_module.build(model.config, TensorSource(held), torch.float32, CPU, kernels=False)
    name = next(name for name in held if name.endswith(("conv1d.weight", "conv.conv.weight", "output_gate.weight")))
    for wrong in ({key: value for key, value in held.items() if key != name}, {**held, f"{name}s": held[name]}):
        with pytest.raises(Unsupported):
            build_module.build(model.config, TensorSource(wrong), torch.float32, CPU, kernels=False)


@pytest.mark.parametrize("wrong", [{"gate_scale": 0.9}, {"out_scales": (1.0, 0.9, 1.0)}, {"rotary": (None,) * LAYERS},
                                   {"attention_scale": 0.5}], ids=str)
def test_the_comparison_has_power(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("falcon_h1", dtype=torch.float32, layers=LAYERS)
    right, ids = shape_of(model.config), prompt(20)
    monkeypatch.setattr(build_module, "shape_of", lambda *_: replace(right, **wrong))
    wanted = one_by_one(model, ids)
    assert gap(chunked_logits(packed(model), ids, (20,)), wanted) > 1e-3 * float(wanted.abs().max())
