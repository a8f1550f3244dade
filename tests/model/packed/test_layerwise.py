"""Decoders whose layers differ, have inputs of their own or read each other's keys: Gemma 4, Gemma 3n, Llama 4."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import CPU, packed
from cuts import check_bits, check_near
from drive import decode, gap, oracle_logits, path_to, prompt, stack_of
from families import LAYERWISE, tiny
from method_matrix import CORE, LAB
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.kv_int8 import KVInt8
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.source import FileSource, ModelSource, TensorSource
from shoal.model.parity import check_parity, chunked_logits, ragged_logits
from shoal.model.runner import SequenceChunk

LAYERS = 6
PACKED = tuple(LAYERWISE)
CASTS = {"gemma4_moe": 5e-5, "llama4": 5e-5}
"""How far float64 logits may be off, as shares of the largest, where modules compute in float32: routers, rotations."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in PACKED},
    "gemma4, values of their own": ("gemma4", {"attention_k_eq_v": False, "attention_bias": True}),
    "gemma4, inputs of layers": ("gemma4", {"hidden_size_per_layer_input": 20, "vocab_size_per_layer_input": 101}),
    "gemma4_small, one width": ("gemma4_small", {"use_double_wide_mlp": False, "num_key_value_heads": 2,
                                                 "hidden_size_per_layer_input": 48}),
    "gemma4_small, alone": ("gemma4_small", {"num_kv_shared_layers": 0}),
    "gemma4_small, odd sizes": ("gemma4_small", {"hidden_size": 36, "intermediate_size": 41, "global_head_dim": 22,
                                                 "num_kv_shared_layers": 2}),
    "gemma3n, odd sizes": ("gemma3n", {"hidden_size": 36, "intermediate_size": [41, 41, 50, 33, 48, 48],
                                       "laurel_rank": 5, "hidden_size_per_layer_input": 20, "attention_bias": True,
                                       "vocab_size_per_layer_input": 61}),
    "gemma3n, two streams": ("gemma3n", {"altup_num_inputs": 2, "altup_active_idx": 1, "altup_correct_scale": False,
                                         "num_kv_shared_layers": 0, "laurel_rank": 48}),
    "gemma3n, dense": ("gemma3n", {"activation_sparsity_pattern": [0.0] * LAYERS, "altup_num_inputs": 5}),
    "gemma4_moe, all at once": ("gemma4_moe", {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 97,
                                               "num_kv_shared_layers": 2, "attention_k_eq_v": True,
                                               "num_global_key_value_heads": 1}),
}
kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
FULL = DepthPlan.full(LAYERS)
PLANS = {"gemma4_small": (NEVER, NEVER, NEVER, 6, 2, 9),
         **dict.fromkeys(("gemma3n", "gemma4_unified"), (NEVER, NEVER, NEVER, NEVER, 2, 7))}
"""Plans that drop only layers which nobody reads; of other families any."""


def model_of(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    family, changes = VARIANTS.get(variant, (variant, {}))
    return tiny(family, dtype=dtype, **changes)


def exactly(model: Any) -> Any:
    """A copy whose norms compute in the model's own dtype, as formulas do; transformers' own ones are in float32."""
    copied = copy.deepcopy(model)
    for norm in copied.modules():
        if type(norm).__name__.endswith(("RMSNorm", "L2Norm")):
            norm.forward = lambda x, own=norm: own._norm(x) * (own.weight if hasattr(own, "weight") else 1)
        if type(norm).__name__ == "Gemma3nTextAltUp":
            norm.compute_router_modalities = lambda x, own=norm: torch.tanh(
                own.modality_router(own.router_norm(x) * own.router_input_scale))
    return copied


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_modules(variant: str, dtype: torch.dtype) -> None:
    model, ids = exactly(model_of(variant, dtype)), prompt(30)
    wanted, runner = logits_of(model, ids), packed(model)
    near = 1e-4 if dtype == torch.float32 else next((CASTS[one] for one in CASTS if variant.startswith(one)), 1e-10)
    check_near(runner, ids, wanted, near)


@kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_the_kernels_are_those_of_the_modules_however_the_text_is_cut(variant: str) -> None:
    model, ids = model_of(variant), prompt(40)
    check_bits(model, ids, logits_of(model, ids), 1e-4)


@kernels
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", PACKED)
def test_trees_rows_and_prompts_have_the_bits_of_one_text_alone(
    family: str, dtype: torch.dtype, quant: Any
) -> None:
    runner, dice = packed(model_of(family, dtype), quant, kernels=True), random.Random(3)
    cache, texts = runner.new_cache(3), [prompt(200), prompt(7, 1), prompt(1, 2)]
    runner.forward([SequenceChunk(seq, text, [0] * len(text), FULL) for seq, text in enumerate(texts)], cache)
    for seq, text in enumerate(texts):
        cache.commit(seq, range(len(text)))
    for _ in range(3):
        chunks = [_tree(dice, seq) for seq in range(3)]
        found = runner.forward(chunks, cache).split([len(chunk.tokens) for chunk in chunks])
        for chunk, logits in zip(chunks, found, strict=True):
            path = path_to(chunk, dice.randrange(len(chunk.tokens)))
            text = [*texts[chunk.seq], *(chunk.tokens[node] for node in path)]
            alone = chunked_logits(runner, text, (len(texts[chunk.seq]), *[1] * len(path)))
            assert torch.equal(logits[path], alone[-len(path) :])
            cache.commit(chunk.seq, path)
            texts[chunk.seq] = text


def _tree(dice: random.Random, seq: int) -> SequenceChunk:
    count = dice.choice((1, 5, 20))
    parents = [-1, *(dice.randrange(node) for node in range(1, count))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = [dice.randrange(97) for _ in range(count)]
    return SequenceChunk(seq, tokens, [0] * count, FULL, parents, depths, wanted=count)


def exact_methods(engine: Any) -> list[Method]:
    """The methods of the matrix that draft, or otherwise promise the full model's tokens, and that the model runs."""
    found, info = [], engine.info(60)
    for method in (*CORE, *LAB):
        try:
            if method.recipe(info).exact_to == "full":
                found.append(method)
        except (Unsupported, ValueError):
            continue
    return found


@pytest.mark.parametrize(("family", "backend"), [
    *(pytest.param(family, "packed", marks=kernels) for family in PACKED),
    *(pytest.param(family, "hf", marks=pytest.mark.slow) for family in PACKED)])
def test_exact_methods_give_the_tokens_of_plain_decoding(family: str, backend: Any) -> None:
    dtype = torch.float64 if backend != "packed" else torch.float32
    engine = engine_for(model_of(family, dtype), None, backend=backend)
    prompts = [prompt(12), [5, 6, 7, 5, 6, 7, 5, 6], prompt(1, 2)]
    plain = [result.tokens for result in engine.generate(prompts, max_new_tokens=14)]
    assert plain == [engine.generate(one, max_new_tokens=14).tokens for one in prompts]
    methods = exact_methods(engine)
    assert len(methods) > 6
    for method in methods:
        drafted = engine.generate(prompts, method=method, max_new_tokens=14)
        assert [result.tokens for result in drafted] == plain, method


@pytest.mark.parametrize("backend", ["hf", "packed", pytest.param("native", marks=kernels)])
@pytest.mark.parametrize("family", LAYERWISE)
def test_depth_plans_are_those_of_the_oracle(family: str, backend: str) -> None:
    """An uncached pass of transformers' own forward, in which each layer runs only its share of the positions."""
    model = exactly(tiny(family))
    drops = PLANS.get(family, (NEVER, 5, 2, 9, 3, NEVER))
    plan, ids = DepthPlan(drops, drops), prompt(11)
    runner: Any = stack_of(model) if backend == "hf" else packed(model)
    if backend == "native":
        runner = packed(tiny(family, dtype=torch.float32), kernels=True)
    near = 2e-3 if backend == "native" else 1e-4 if family.startswith(tuple(CASTS)) else 1e-10
    run = decode(model, [ids], plan, 12, runner=runner)
    wanted = oracle_logits(model, ids, plan, run.tokens[0])
    assert gap(run.logits(0).double(), wanted) < near * max(1, float(wanted.abs().max()))


@pytest.mark.parametrize("family", PACKED)
def test_texts_under_a_schedule_are_those_of_the_modules(family: str) -> None:
    model = tiny(family)
    engines = [engine_for(model, None, backend=backend) for backend in ("packed", "hf")]
    core = 1 + max((one for one in engines[0].runner.sources if one is not None), default=0)
    for method in (D3(alpha=0.9, core=core + 1), D3(alpha=0.8, core=core)):
        one, other = (engine.generate([prompt(9), prompt(4, 1)], method=method, max_new_tokens=16)
                      for engine in engines)
        assert [result.tokens for result in one] == [result.tokens for result in other]
        assert one[0].stats.mean_layers < LAYERS


@pytest.mark.parametrize("family", [family for family in LAYERWISE if family in PLANS])
def test_a_plan_without_a_layer_that_others_read_is_refused(family: str) -> None:
    runner = stack_of(tiny(family))
    source = max(one for one in runner.sources if one is not None)
    drops = tuple(1 if layer == source else NEVER for layer in range(LAYERS))
    with pytest.raises(Unsupported, match=str(source)):
        decode(None, [prompt(5)], DepthPlan(drops, drops), 4, runner=runner)


@kernels
@pytest.mark.parametrize("family", PACKED)
def test_chats_sequences_and_small_keys(family: str) -> None:
    """Turns go on from what is stored, batches of unequal texts give those of one, and bytes can be stored instead."""
    engine = engine_for(model_of(family), None, backend="packed")
    assert isinstance(engine.runner, NativeRunner)
    alone = [chunked_logits(engine.runner, prompt(20)[:size], (size,)) for size in (9, 4)]
    assert torch.equal(ragged_logits(engine.runner, prompt(20)), torch.cat(alone))
    small = engine.generate([prompt(40), prompt(9, 1)], method=KVInt8(), max_new_tokens=16)
    each = [engine.generate(one, method=KVInt8(), max_new_tokens=16).tokens for one in (prompt(40), prompt(9, 1))]
    assert [result.tokens for result in small] == each


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints_are_read_and_wrong_ones_refused(variant: str, tmp_path: Any) -> None:
    model, ids = model_of(variant), prompt(12)
    model.save_pretrained(tmp_path)
    source = FileSource(tmp_path)
    found = chunked_logits(build(model.config, source, torch.float32, CPU, kernels=False), ids, (12,))
    assert torch.equal(found, chunked_logits(packed(model), ids, (12,)))
    tensors = {name: source[name] for name in source.names()}
    for name in tensors:
        if "lm_head" not in name:
            with pytest.raises(Unsupported, match="without"):
                build(model.config, TensorSource({one: tensors[one] for one in tensors if one != name}),
                      torch.float32, CPU, kernels=False)
    with pytest.raises(Unsupported, match="surplus"):
        build(model.config, TensorSource({**tensors, "model.layers.0.surplus.weight": torch.ones(1)}), torch.float32,
              CPU, kernels=False)


@kernels
@pytest.mark.parametrize("family", PACKED)
def test_parity_finds_a_wrong_model(family: str) -> None:
    model = model_of(family)
    assert check_parity(packed(model, kernels=True), model) < 1e-2
    wrong = copy.deepcopy(model)
    name, tensor = list(wrong.named_parameters())[-3]
    tensor.data = tensor.flip(0)
    with pytest.raises(Unsupported, match="differ"):
        check_parity(build(model.config, ModelSource(wrong), torch.float32, CPU), model)
    assert name
