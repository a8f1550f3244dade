"""Shapes: their sizes, and the same weights for any reader in any order."""

from __future__ import annotations

import pickle

import pytest
import torch
from transformers import LlamaForCausalLM

from shoal.errors import Unsupported
from shoal_lab.bench import shapes
from shoal_lab.bench.model import MeasuredModel

BILLIONS = {"135m": 0.1345, "1b": 1.2358, "7b": 6.7384, "13b": 13.0157, "70b": 68.9765}


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_names_and_sizes_are_those_of_a_checkpoint(name: str) -> None:
    config = shapes.config_of(name)
    hidden, ffn = config.hidden_size, config.intermediate_size
    narrow = config.num_key_value_heads * hidden // config.num_attention_heads
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden), "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn),
    }
    expected = {f"model.layers.{index}.{key}.weight": shape for index in range(config.num_hidden_layers)
                for key, shape in layer.items()}
    expected |= {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if name in ("7b", "13b", "70b"):
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    assert shapes.weight_shapes(config) == expected


@pytest.mark.parametrize("name", BILLIONS)
def test_parameter_counts(name: str) -> None:
    sizes = [torch.Size(shape).numel() for shape in shapes.weight_shapes(shapes.config_of(name)).values()]
    assert sum(sizes) / 1e9 == pytest.approx(BILLIONS[name], abs=2e-4)


def test_a_tensor_depends_on_its_name_and_the_seed_alone() -> None:
    config = shapes.config_of("tiny")
    first, again, other = (shapes.RandomWeights(config, torch.float32, seed=seed) for seed in (0, 0, 1))
    names = [name for name in first.names() if "norm" not in name]
    backwards = {name: again[name] for name in reversed(names)}
    assert all(torch.equal(first[name], backwards[name]) for name in names)
    assert not any(torch.equal(first[name], other[name]) for name in names)
    k, v = (first[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "kv")
    assert k.shape == v.shape and not torch.equal(k, v)


def test_rows_of_a_matrix_that_is_larger_than_the_block_differ() -> None:
    weights = shapes.RandomWeights(shapes.config_of("135m"), torch.bfloat16)
    table = weights["model.embed_tokens.weight"]
    assert table.numel() > 10 * 2**20 and table.dtype == torch.bfloat16
    rows = table[:: 49152 // 512]
    assert len(torch.unique(rows, dim=0)) == len(rows)
    assert table.float().std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(table.float().mean().item()) < 1e-3


def test_other_number_formats_hold_the_same_weights_rounded() -> None:
    config = shapes.config_of("tiny")
    wide, narrow = (shapes.RandomWeights(config, dtype) for dtype in (torch.float32, torch.bfloat16))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(wide[name].bfloat16(), narrow[name])


def test_a_model_takes_the_weights_as_they_are() -> None:
    model = shapes.make("tiny", torch.float64)
    weights = shapes.RandomWeights(shapes.config_of("tiny"), torch.float64)
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight and not model.training
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    plain = LlamaForCausalLM(shapes.config_of("tiny")).double().eval()
    plain.load_state_dict({name: weights[name] for name in weights.names()}, strict=False)
    ids = torch.arange(20)[None]
    assert torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_an_engine_of_a_shape_runs_the_weights_of_the_shape(backend: str) -> None:
    model = MeasuredModel(shape="tiny")
    engine = model.engine(torch.float32, "cpu", backend, None)
    ids = list(range(3, 20))
    tokens = engine.generate(ids, max_new_tokens=12).tokens
    hf_model, expected = model.hf_model(torch.float32), list(ids)
    for _ in range(12):
        expected.append(int(hf_model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert list(tokens) == expected[len(ids) :]


def test_a_subject_counts_its_weights() -> None:
    for name, billions in BILLIONS.items():
        model = MeasuredModel(shape=name)
        shape = shapes.weight_shapes(model.config)
        matrices = sum(torch.Size(size).numel() for size in shape.values() if len(size) > 1)
        assert model.weights() == matrices == pytest.approx(1e9 * billions, rel=1e-3)
    llama = MeasuredModel(shape="7b")
    assert llama.kv_entries() == 2 * 32 * 128 and llama.layer_weights() == 4 * 4096**2 + 3 * 4096 * 11008


def test_a_subject_travels_to_another_process() -> None:
    model = MeasuredModel(shape="tiny")
    assert model.text.hidden_size == 64
    assert pickle.loads(pickle.dumps(model)) == model


def test_a_subject_is_a_shape_or_a_model() -> None:
    for options in ({}, {"shape": "1b", "model": "somewhere"}):
        with pytest.raises(ValueError, match="exactly one"):
            MeasuredModel(**options)
    with pytest.raises(ValueError, match="unknown shape '2b'"):
        MeasuredModel(shape="2b")


def test_quantised_weights_need_the_packed_backend() -> None:
    with pytest.raises(Unsupported, match="runs the model's own weights"):
        MeasuredModel(shape="tiny").engine(torch.float32, "cpu", "hf", "int8")
