"""Quantised decoders compute what a model with the dequantised weights computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backends import NATIVE, packed, with_exact_norms
from drive import decode, prompt
from families import tiny
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.packed.native import PackedWeight
from shoal.model.packed.runner import PackedRunner
from shoal.model.parity import chunked_logits

LAYERS = 3
CHUNKS = (7, 1, 1, 12, 3)
STATED = {("torch", "fp32"): 1e-5, ("torch", "bf16"): 0.12, ("native", "fp32"): 0.2, ("native", "bf16"): 0.25}
"""Root mean square error of logits, relative. The native kernels quantise activations to int8 as well."""
MEAN = {("torch", "fp32"): 1e-5, ("torch", "bf16"): 0.06, ("native", "fp32"): 0.1, ("native", "bf16"): 0.1}
"""The same in the mean over models; these are more sensitive than trained ones."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, odd sizes": ("llama", {"hidden_size": 36, "intermediate_size": 41, "head_dim": 10, "vocab_size": 101}),
    "llama, even sizes": ("llama", {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}),
    "qwen2": ("qwen2", {}),
    "hybrid": ("hybrid", {}),
    "phi3": ("phi3", {}),
    "granite": ("granite", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "olmo2": ("olmo2", {}),
}
executors = pytest.mark.parametrize("executor", ["torch", "native"])
quants = pytest.mark.parametrize("quant", ["int8", "int4"])


def stack_for(shape: str, dtype: str, quant: Any, executor: str) -> PackedRunner:
    family, changes = SHAPES[shape]
    if executor == "native":
        NATIVE.runner("llama")  # skips where the kernels do not run
    return packed(tiny(family, dtype=DTYPES[dtype], layers=LAYERS, **changes), quant, kernels=executor == "native")


def plain(matrix: Any) -> Tensor:
    """The dequantised matrix."""
    return matrix.unpack(torch.float32) if isinstance(matrix, PackedWeight) else matrix.dequantised()


def dequantised(shape: str, runner: PackedRunner) -> Any:
    """The fp64 transformers model with the weights that the runner holds."""
    family, changes = SHAPES[shape]
    model = with_exact_norms(tiny(family, layers=LAYERS, **changes))
    state = dict(model.state_dict())
    sizes = [runner.shape.heads * runner.shape.head_dim] + [runner.shape.kv_heads * runner.shape.head_dim] * 2
    for index, layer in enumerate(runner.weights.layers):
        name = f"model.layers.{index}."
        fused = f"{name}self_attn.qkv_proj.weight" in state
        qkv, gate_up = plain(layer.qkv), plain(layer.gate_up)
        parts = {"self_attn.qkv_proj": qkv, "mlp.gate_up_proj": gate_up} if fused else {
            **dict(zip((f"self_attn.{x}_proj" for x in "qkv"), qkv.split(sizes), strict=True)),
            **dict(zip(("mlp.gate_proj", "mlp.up_proj"), gate_up.chunk(2), strict=True)),
        }
        parts |= {"self_attn.o_proj": plain(layer.out), "mlp.down_proj": plain(layer.down)}
        state |= {f"{name}{part}.weight": matrix for part, matrix in parts.items()}
    state["model.embed_tokens.weight"] = plain(runner.weights.embedding)
    state["lm_head.weight"] = plain(runner.weights.head)
    model.load_state_dict(state)
    return model


@torch.no_grad()
def error(runner: PackedRunner, model: Any, chunks: tuple[int, ...] = CHUNKS) -> float:
    ids = prompt(sum(chunks), 4)
    expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    return float((chunked_logits(runner, ids, chunks).double() - expected).norm() / expected.norm())


@executors
@quants
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_dequantised_model(shape: str, dtype: str, quant: str, executor: str) -> None:
    runner = stack_for(shape, dtype, quant, executor)
    model = dequantised(shape, runner)
    assert error(runner, model) <= STATED[executor, dtype]
    assert error(runner, model, (40,)) <= STATED[executor, dtype]


@executors
@quants
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_the_mean_the_error_is_small(dtype: str, quant: str, executor: str) -> None:
    runners = {shape: stack_for(shape, dtype, quant, executor) for shape in SHAPES}
    errors = [error(runner, dequantised(shape, runner)) for shape, runner in runners.items()]
    assert sum(errors) / len(errors) <= MEAN[executor, dtype]


@executors
def test_more_bits_are_closer_to_the_model_itself(executor: str) -> None:
    """And the weights do differ from the originals, so the test above compares something."""
    for shape in SHAPES:
        family, changes = SHAPES[shape]
        whole = with_exact_norms(tiny(family, layers=LAYERS, **changes))
        eight, four = (error(stack_for(shape, "fp32", quant, executor), whole) for quant in ("int8", "int4"))
        assert 1e-3 < eight < 0.2 < four < 1.2


@executors
@quants
def test_quantised_models_are_smaller(quant: str, executor: str) -> None:
    changes = "llama, even sizes"
    whole = packed(tiny(SHAPES[changes][0], dtype=torch.bfloat16, layers=LAYERS, **SHAPES[changes][1]))
    small = stack_for(changes, "bf16", quant, executor)
    layers, of_whole = (sum(layer.nbytes for layer in runner.weights.layers) for runner in (small, whole))
    assert layers < of_whole * (0.6 if quant == "int8" else 0.35)
    assert small.weights.head.nbytes < 0.6 * whole.weights.head.nbytes
    low, high = (0.9, 1.1) if quant == "int8" else (1.3, 2.1)  # with int4 the head keeps 8 bits
    assert low < small.head_layers / whole.head_layers < high


@executors
@pytest.mark.parametrize("tied", [True, False])
def test_int4_keeps_the_embedding_and_the_head_in_int8(tied: bool, executor: str) -> None:
    if executor == "native":
        NATIVE.runner("llama")  # skips where the kernels do not run
    model = tiny("llama", dtype=torch.float32, layers=1, tie_word_embeddings=tied)
    four, eight = (packed(model, quant=quant, kernels=executor == "native").weights for quant in ("int4", "int8"))
    assert (four.head is four.embedding) == tied
    some = torch.arange(7)
    assert torch.equal(four.embedding.lookup(some), eight.embedding.lookup(some))
    x = torch.randn(3, four.head.columns)
    assert torch.equal(four.head(x), eight.head(x))
    assert four.layers[0].down.nbytes < 0.8 * eight.layers[0].down.nbytes


@executors
@quants
def test_decoding_under_a_plan(quant: str, executor: str) -> None:
    """Steps, batches and plans of a quantised model agree with one uncached pass of the same runner."""
    runner = stack_for("hybrid", "fp32", quant, executor)
    plan = DepthPlan.whole_layers([NEVER, 4, NEVER])
    seqs = [prompt(5, 1), prompt(11, 2)]
    run = decode(None, seqs, plan, 12, runner=runner)
    for seq, ids in enumerate(seqs):
        alone = decode(None, [ids], plan, 12, runner=runner, chunk=4)
        bound = STATED[executor, "fp32"] * float(alone.logits(0).norm())
        assert alone.tokens[0] == run.tokens[seq] or executor == "native"
        if alone.tokens[0] == run.tokens[seq]:
            assert float((run.logits(seq) - alone.logits(0)).norm()) <= bound
