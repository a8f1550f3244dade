"""Blocks with LayerNorms, plain MLPs, parallel residuals, learned positions, ALiBi or fused q, k and v of any order."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import packed
from cuts import check_bits, check_near
from drafts import draft_of
from drive import decode, gap, oracle_logits, prompt
from families import tiny
from shoal.depth.budget import PowerLaw, lay_out
from shoal.depth.order import removal_order
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.aded import ADED
from shoal.methods.d3_spec import D3Spec
from shoal.methods.draft_model import DraftModel
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.snapkv import SnapKV
from shoal.methods.streaming_llm import StreamingLLM
from shoal.model.packed import build as build_module
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.classics import rows_of
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.shape import shape_of
from shoal.model.packed.source import FileSource, TensorSource
from shoal.model.parity import check_parity, chunked_logits
from shoal.model.runner import SequenceChunk

LAYERS = 4
NEAR = {torch.float32: 1e-4, torch.float64: 5e-5}
"""Of the largest logit; some of transformers' norms and rotations compute in float32 in float64 models too."""
kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
on_both = pytest.mark.parametrize("on", [False, pytest.param(True, marks=kernels)], ids=["torch", "kernels"])
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("phi", {}),
    "phi, norms of heads": ("phi", {"qk_layernorm": True, "num_key_value_heads": 1}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False, "sliding_window": None}),
    "gpt2": ("gpt2", {}),
    "gpt2, relu": ("gpt2", {"n_inner": 41, "activation_function": "relu"}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode, heads": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neo": ("gpt_neo", {}),
    "gpt_neo, odd sizes": ("gpt_neo", {"intermediate_size": 41, "activation_function": "relu"}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, one after another": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "falcon": ("falcon", {}),
    "falcon, one after another": ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon40": ("falcon40", {}),
    "falcon40, one norm": ("falcon40", {"num_ln_in_parallel_attn": 1, "bias": True}),
    "cohere": ("cohere", {}),
    "cohere, norms of heads": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {}),
    "stablelm": ("stablelm", {}),
    "stablelm, side by side": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "opt": ("opt", {}),
    "opt, no biases": ("opt", {"enable_bias": False}),
    "persimmon": ("persimmon", {}),
    "persimmon, no norms of heads": ("persimmon", {"qk_layernorm": False}),
    "nemotron": ("nemotron", {}),
    "nemotron, biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "olmo": ("olmo", {}),
    "olmo, limited": ("olmo", {"clip_qkv": 0.3, "attention_bias": True}),
    "bloom": ("bloom", {}),
    "bloom, six heads": ("bloom", {"n_head": 6, "hidden_size": 48}),
    "mpt": ("mpt", {}),
    "mpt, six heads": ("mpt", {"n_heads": 6, "d_model": 48, "attn_config": {"clip_qkv": 0.4}}),
    "gptj": ("gptj", {}),
    "codegen": ("codegen", {}),
    **{near: (near, {}) for near in ("internlm3", "cwm", "arcee", "apertus", "bitnet", "hyperclovax",
                                 "ministral3")},
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_dense, stretched": ("hunyuan_v1_dense", {"rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 100.0, "factor": 1.0}}),
}
FAMILIES = sorted({family for family, _ in VARIANTS.values()})


def model_of(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model whose biases all count."""
    family, changes = VARIANTS[variant]
    return tiny(family, dtype=dtype, layers=LAYERS, **changes)


@torch.no_grad()
def own(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_modules(variant: str, dtype: torch.dtype) -> None:
    model, ids = model_of(variant, dtype), prompt(30)
    wanted, runner = own(model, ids), packed(model)
    check_near(runner, ids, wanted, NEAR[dtype])
    assert check_parity(runner, model, {torch.float32: 1e-4, torch.float64: 1e-4}) < 1e-2


@kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_the_kernels_are_those_of_the_modules_however_the_text_is_cut(variant: str) -> None:
    model, ids = model_of(variant), prompt(40)
    check_bits(model, ids, own(model, ids), NEAR[torch.float32])


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["phi", "gpt2", "falcon40", "cohere", "stablelm", "bloom"])
def test_rows_and_long_prompts_have_the_bits_of_one_row(family: str, quant: Any, dtype: torch.dtype) -> None:
    runner = packed(model_of(family, dtype), quant, kernels=True)
    texts = [prompt(size, seed) for seed, size in enumerate((250, 7, 1, 30, 12))]
    plan, cache = DepthPlan.full(LAYERS), runner.new_cache(5)
    for cut in (slice(0, 1), slice(1, 6), slice(6, None)):
        chunks = [SequenceChunk(seq, text[cut], [0] * len(text[cut]), plan, wanted=len(text[cut]))
                  for seq, text in enumerate(texts) if text[cut]]
        found = runner.forward(chunks, cache).split([len(chunk.tokens) for chunk in chunks])
        for chunk, logits in zip(chunks, found, strict=True):
            alone = chunked_logits(runner, texts[chunk.seq], (1,) * min(40, len(texts[chunk.seq])))[cut]
            assert torch.equal(logits[: len(alone)], alone)
            cache.commit(chunk.seq, range(len(chunk.tokens)))


PLANS = {
    "whole layers": lay_out(PowerLaw(0.8), removal_order("center_out", LAYERS, 1, 1, {}), LAYERS, 12, 12),
    "halves": DepthPlan((NEVER, 3, 1, NEVER), (NEVER, 9, 4, 2)),
}


WHOLE = ("falcon", "falcon40", "opt", "bloom", "mpt")
"""Families whose modules name their sublayers otherwise, or add states inside of one, so that the oracle knows no
halves of their layers."""


@on_both
@pytest.mark.parametrize(("family", "plan"), [(family, plan) for family in FAMILIES for plan in PLANS
                                              if plan != "halves" or family not in WHOLE])
def test_depth_plans_are_those_of_the_oracle(family: str, plan: str, on: bool) -> None:
    """Uncached passes of transformers' modules, in which sublayers process prefixes, are the reference."""
    model, ids = model_of(family, torch.float64), prompt(9)
    runner = packed(model_of(family), kernels=True) if on else packed(model)
    run = decode(model, [ids], PLANS[plan], 12, runner=runner)
    wanted = oracle_logits(model, ids, PLANS[plan], run.tokens[0])
    assert gap(run.logits(0), wanted) < NEAR[torch.float32] * float(wanted.abs().max())


def continued(model: Any, ids: list[int], new: int) -> list[int]:
    """Greedy tokens, each from a forward over the whole text."""
    for _ in range(new):
        ids = [*ids, int(own(model, ids)[-1].argmax())]
    return ids[-new:]


@kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_the_modules_and_drafts_change_none(family: str) -> None:
    model, prompts = model_of(family), [prompt(9), prompt(4, 1) * 3, prompt(30, 2)]
    engine = engine_for(model, None, backend="packed")
    assert isinstance(engine.runner, NativeRunner)
    plain = [result.tokens for result in engine.generate(prompts, max_new_tokens=24)]
    if family in ("bloom", "mpt", "gpt_neo"):  # whose modules Shoal does not run
        assert plain[0] == tuple(continued(model, prompts[0], 24))
    else:
        other = engine_for(model, None, backend="hf")
        assert plain == [result.tokens for result in other.generate(prompts, max_new_tokens=24)]
    assert plain == [engine.generate([one], max_new_tokens=24)[0].tokens for one in prompts]
    for method in (PromptLookup(min_ngram=1), D3Spec(alpha=0.8), ADED(), DraftModel(draft_of("llama"))):
        assert [result.tokens for result in engine.generate(prompts, method=method, max_new_tokens=24)] == plain


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "residuals": ("phi", {"parallel": False}),
    "queries scaled by place": ("ministral3", {"warmth": None}),
    "the place that they are scaled from": ("ministral3", {"warmth": (0.3, 16.0, 1.0)}),
    "an activation": ("gpt_neox", {"activation": "relu"}),
    "the bias of the head": ("phi", {"head_biased": False}),
    "the factor of logits": ("cohere", {"logit_scale": 1.0}),
    "the order of rows": ("gpt_neox", {"qkv_order": "parts"}),
    "limits": ("olmo, limited", {"qkv_limit": None}),
    "rotation after norms": ("hunyuan_v1_dense", {"rotates_first": False}),
    "rotated neighbours": ("cohere", {"interleaved": False}),
    "windows": ("gpt_neo", {"windows": (None,) * LAYERS}),
    "unscaled scores": ("gpt_neo", {"attention_scale": 0.35}),
    "positions": ("opt", {"positions": (1, 512)}),
    "distances": ("bloom", {"slopes": (0.25, 0.0625, 0.015625, 0.0)}),
    "no distances": ("mpt", {"slopes": ()}),
    "centred norms": ("starcoder2, no biases", {"layer_norms": False}),
}


@on_both
@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_has_power(wrong: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, changes = WRONG[wrong]
    model, ids = model_of(variant), prompt(20)
    if wrong == "positions":
        model = copy.deepcopy(model)
        model.model.decoder.embed_positions.weight = torch.nn.Parameter(
            model.model.decoder.embed_positions.weight[:-1].clone(), requires_grad=False)
    shape = shape_of(model.config)
    monkeypatch.setattr(build_module, "shape_of", lambda *_: replace(shape, **changes))
    wanted = own(model, ids)
    assert gap(chunked_logits(packed(model, kernels=on), ids, (20,)), wanted) > 1e-3 * float(wanted.abs().max())


@kernels
def test_gelu_is_the_exact_one_for_large_numbers_too() -> None:
    model = copy.deepcopy(model_of("gpt_neox"))
    for layer in model.gpt_neox.layers:
        layer.mlp.dense_h_to_4h.weight *= 5
    ids = prompt(60)
    runner = packed(model, kernels=True)
    wanted = own(copy.deepcopy(model).double(), ids)
    assert runner.shape.activation == "gelu"
    assert gap(chunked_logits(runner, ids, (60,)), wanted) < 1e-4 * float(wanted.abs().max())


def test_orders_of_rows_by_hand() -> None:
    assert rows_of("parts", 4, 2, 3) is None
    grouped = rows_of("heads", 4, 2, 1)
    assert grouped is not None and grouped.tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    quarters = rows_of("quarters", 4, 4, 1)
    assert quarters is not None and quarters.tolist() == [0, 3, 6, 9, 2, 5, 8, 11, 1, 4, 7, 10]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi"])
def test_a_saved_checkpoint_is_read(family: str, tmp_path: Any) -> None:
    model, ids = model_of(family), prompt(12)
    model.save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    runner = build(model.config, FileSource(tmp_path), torch.float32, cpu, kernels=False)
    assert torch.equal(chunked_logits(runner, ids, (12,)), chunked_logits(packed(model), ids, (12,)))


def test_gpt2_checkpoints_without_a_prefix_and_with_masks_are_read() -> None:
    """As published ones are."""
    model, ids = model_of("gpt2"), prompt(12)
    held = {name.removeprefix("transformer."): one for name, one in model.state_dict().items()
            if not name.startswith("lm_head")}
    held |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(LAYERS)}
    runner = build(model.config, TensorSource(held), torch.float32, torch.device("cpu"), kernels=False)
    assert torch.equal(chunked_logits(runner, ids, (12,)), chunked_logits(packed(model), ids, (12,)))
    del held["wpe.weight"]
    with pytest.raises(Unsupported, match="wpe"):
        build(model.config, TensorSource(held), torch.float32, torch.device("cpu"), kernels=False)


@kernels
def test_positions_beyond_the_learned_ones_are_refused() -> None:
    runner = packed(tiny("gpt2", dtype=torch.float32, layers=1, n_positions=16), kernels=True)
    assert runner.max_positions == 16
    with pytest.raises(ValueError, match=r"learned positions in \[0, 15\]"):
        chunked_logits(runner, prompt(17), (17,))


@kernels
def test_distances_in_trees_and_long_texts() -> None:
    """Nodes of a tree stand at the depth of their paths; texts are longer than a chunk and a task of the kernels."""
    model = model_of("bloom")
    runner, twin = packed(model, kernels=True), packed(model)
    text, plan = prompt(700), DepthPlan.full(LAYERS)
    found = []
    for one in (runner, twin):
        cache = one.new_cache(1)
        one.forward([SequenceChunk(0, text, [0] * len(text), plan)], cache)
        cache.commit(0, range(len(text)))
        tree = SequenceChunk(0, [5, 6, 7, 8, 9], [0] * 5, plan, parents=[-1, 0, 0, 1, 2], depths=[0, 1, 1, 2, 2],
                             wanted=5)
        found.append(one.forward([tree], cache))
    assert gap(*found) < NEAR[torch.float32] * float(found[1].abs().max())
    straight = chunked_logits(runner, [*text, 5, 7, 9], (700, 3))[-1]
    assert torch.equal(found[0][4], straight)
    assert gap(straight, own(model, [*text, 5, 7, 9])[-1]) < NEAR[torch.float32] * float(straight.abs().max())


def test_slots_between_others_stay_where_distances_count() -> None:
    engine = engine_for(model_of("bloom"), None, backend="packed")
    with pytest.raises(Unsupported, match="ALiBi"):
        engine.generate([prompt(9)], method=StreamingLLM(window=8), max_new_tokens=4)
    with pytest.raises(Unsupported, match="does not show its queries"):
        engine.generate([prompt(9)], method=SnapKV(64), max_new_tokens=4)
    plain = engine.generate([prompt(9)], max_new_tokens=8)[0].tokens
    assert engine.generate([prompt(9)], method=KVInt8(), max_new_tokens=8)[0].tokens[:1] == plain[:1]


@pytest.mark.parametrize(("family", "changes", "why"), [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("gpt_bigcode", {"scale_attn_weights": False}, "scale_attn_weights"),
])
def test_what_does_not_fit_is_refused(family: str, changes: dict[str, Any], why: str) -> None:
    config = tiny(family, layers=LAYERS).config
    with pytest.raises(Unsupported, match=why):
        shape_of(type(config)(**{**config.to_dict(), **changes}))
