"""Mixtures of experts on packed layers, in torch and on the kernels: logits and texts are those of the modules."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backends import CPU, packed
from cuts import check_bits, check_near
from drive import gap, prompt
from families import MIXED_RECURRENT, MIXTURES, RECURRENT, tiny
from hybrid_steps import one_by_one
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.model.layers.experts import Mixture, Routing
from shoal.model.packed import build as build_module
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.linear import Dense
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.shape import shape_of
from shoal.model.packed.source import FileSource, TensorSource
from shoal.model.parity import OTHER_ARITHMETIC, check_parity, chunked_logits
from shoal.model.runner import SequenceChunk

LAYERS = 4
ALL = (*MIXTURES, *MIXED_RECURRENT)
NEAR = {torch.float32: 1e-4, torch.float64: 5e-5}
"""Of the largest logit; transformers computes routers and recurrences in float32 in float64 models too."""
kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
pytestmark = pytest.mark.skipif(not RECURRENT, reason="this transformers has other modules for experts")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ALL},
    "qwen3_moe, every second layer": ("qwen3_moe", {"decoder_sparse_step": 2, "attention_bias": True}),
    "qwen3_moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen2_moe, windows": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
                                         "qkv_bias": False}),
    "olmoe, biases": ("olmoe", {"attention_bias": True, "norm_topk_prob": True}),
    "glm4_moe, norms of heads": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}),
    "phimoe, longrope": ("phimoe", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "short_mscale": 1.2,
        "long_mscale": 1.4, "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [4.0] * 4}}),
    "dbrx, weights as they are": ("dbrx", {"ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 6, "moe_top_k": 3,
                                                          "moe_normalize_expert_weights": None}}),
    "dots1, dense before": ("dots1", {"first_k_dense_replace": 2, "attention_bias": True}),
    "cohere2_moe, added": ("cohere2_moe", {
        "shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid", "attention_bias": True,
        "rms_norm_eps": 1e-5, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "prefix_dense_intermediate_size": None, "prefix_dense_sliding_window_pattern": 4}),
    "cohere2_moe, as they are": ("cohere2_moe", {"num_shared_experts": 0, "expert_selection_fn": "sigmoid",
                                                 "norm_topk_prob": False}),
    "solar_open, biases": ("solar_open", {"attention_bias": True}),
    "exaone_moe, dense between": ("exaone_moe", {"mlp_layer_types": ["sparse", "dense"] * 2}),
    "hy_v3, biases": ("hy_v3", {"attention_bias": True}),
    "afmoe, as they are": ("afmoe", {"mup_enabled": False, "attention_bias": True, "num_dense_layers": 0}),
    "gpt_oss, wide": ("gpt_oss", {"intermediate_size": 64, "swiglu_limit": 7.0}),
    "mixtral, windows": ("mixtral8", {"sliding_window": 8}),
    "qwen3_next, dense layers": ("qwen3_next", {"mlp_only_layers": [0, 3]}),
    "lfm2_moe, no bias": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False,
                                       "routed_scaling_factor": 1.3}),
    "jamba_moe, all but the first": ("jamba_moe", {"expert_layer_offset": 0, "expert_layer_period": 1}),
    "nemotron_h_moe, latents": ("nemotron_h_moe", {"moe_latent_size": 20, "n_group": 1, "topk_group": 1}),
    "granite4_moe, rotation": ("granite4_moe", {"position_embedding_type": "rope", "residual_multiplier": 0.7}),
}


def model_of(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model whose routers have biases that count, where its type has any."""
    family, changes = VARIANTS[variant]
    model, generator = tiny(family, dtype=dtype, layers=LAYERS, **changes), torch.Generator().manual_seed(1)
    held = dict([*model.named_buffers(), *model.named_parameters()])
    biases = [name for name in sorted(held) if name.endswith(("e_score_correction_bias", "expert_bias"))]
    if not biases:
        return model
    model = copy.deepcopy(model)
    held = dict([*model.named_buffers(), *model.named_parameters()])
    for name in biases:
        held[name].copy_(0.2 * torch.randn(held[name].shape, generator=generator))
    return model


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_modules(variant: str, dtype: torch.dtype) -> None:
    model, ids = model_of(variant, dtype), prompt(30)
    wanted, runner = one_by_one(model, ids), packed(model)
    check_near(runner, ids, wanted, NEAR[dtype])
    assert check_parity(runner, model, {torch.float32: 1e-4, torch.float64: 1e-4}) < 1e-2


@kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_the_kernels_are_those_of_the_modules_however_the_text_is_cut(variant: str) -> None:
    model, ids = model_of(variant), prompt(40)
    check_bits(model, ids, one_by_one(model, ids), NEAR[torch.float32])


@pytest.mark.parametrize("on", [False, pytest.param(True, marks=kernels)], ids=["torch", "kernels"])
@pytest.mark.parametrize("family", ALL)
def test_rounding_that_sends_tokens_elsewhere_is_no_wrong_model(
    family: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family, torch.bfloat16)
    assert check_parity(packed(model, kernels=on), model, OTHER_ARITHMETIC) < 0.2
    monkeypatch.setattr(build_module, "shape_of", lambda *_: replace(shape_of(model.config), rotary=(None,) * LAYERS,
                                                                     eps=1.0))
    with pytest.raises(Unsupported, match="its logits differ"):
        check_parity(packed(model, kernels=on), model, OTHER_ARITHMETIC)


@kernels
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral8", "glm4_moe", "granite4_moe", "jamba_moe",
                                    "nemotron_h_moe", "nemotron_h_moe, latents"])
def test_rows_and_long_prompts_have_the_bits_of_one_row(family: str, dtype: torch.dtype, quant: Any) -> None:
    """Lots of many sizes: rows of several texts beside a prompt that takes a whole call."""
    runner = packed(model_of(family, dtype), quant, kernels=True)
    texts = [prompt(size, seed) for seed, size in enumerate((256, 7, 1, 30, 12))]
    plan, cache = DepthPlan.full(LAYERS), runner.new_cache(5)
    for cut in (slice(0, 1), slice(1, 6), slice(6, None)):
        chunks = [SequenceChunk(seq, text[cut], [0] * len(text[cut]), plan, wanted=len(text[cut]))
                  for seq, text in enumerate(texts) if text[cut]]
        found = runner.forward(chunks, cache).split([len(chunk.tokens) for chunk in chunks])
        for chunk, logits in zip(chunks, found, strict=True):
            alone = chunked_logits(runner, texts[chunk.seq], (1,) * min(40, len(texts[chunk.seq])))
            own = alone[cut]
            assert torch.equal(logits[: len(own)], own)
            cache.commit(chunk.seq, range(len(chunk.tokens)))


def dense(experts: Any) -> Any:
    """The same with every matrix dequantised."""
    if isinstance(experts, Mixture):
        return replace(experts, router=dense(experts.router), gate_up=tuple(map(dense, experts.gate_up)),
                       down=tuple(map(dense, experts.down)))
    return Dense(experts(torch.eye(experts.columns)).t().contiguous(), indexed=True) if experts.rows else experts


@kernels
@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("family", MIXTURES)
def test_quantised_experts_are_what_they_stand_for(family: str, quant: Any) -> None:
    model, ids = model_of(family), prompt(12)
    runner = packed(model, quant, kernels=True)
    layers = [replace(layer, experts=layer.experts and dense(layer.experts), **{
        name: dense(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")})
        for layer in runner.weights.layers]
    table, head = dense(runner.weights.embedding), dense(runner.weights.head)
    weights = replace(runner.weights, layers=layers, embedding=table, head=head)
    plain = PackedRunner(runner.shape, weights, runner.rotary, runner.dtype, CPU)
    wanted, unquantised = chunked_logits(plain, ids, (12,)), chunked_logits(packed(model), ids, (12,))
    assert gap(chunked_logits(runner, ids, (12,)), wanted) < 2 * gap(wanted, unquantised)


@kernels
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "qwen3_next", "lfm2_moe"])
def test_a_draft_that_goes_to_other_experts_is_verified_right(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = model_of(family), prompt(12)
    seen: list[torch.Tensor] = []

    def watched(self: Routing, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        chosen, weights = REAL(self, logits, bias)
        seen.append(chosen)
        return chosen, weights

    draft = [text[-1], *prompt(7, 5)]  # the last token, and guesses that are wrong
    with monkeypatch.context() as patch:
        patch.setattr(Routing, "__call__", watched)
        chunked_logits(packed(model), [*text, *draft[1:]], (len(text) + 7,))
    of_text, of_draft = (set(map(tuple, part.tolist())) for part in (seen[0][: len(text)], seen[0][len(text) :]))
    assert of_draft - of_text
    runner, plan = packed(model, kernels=True), DepthPlan.full(LAYERS)
    cache, more = runner.new_cache(1), prompt(5, 9)
    wanted = chunked_logits(runner, [*text, *more], (1,) * (len(text) + 5))
    runner.forward([SequenceChunk(0, text[:-1], [0] * (len(text) - 1), plan)], cache)
    cache.commit(0, range(len(text) - 1))
    found = runner.forward([SequenceChunk(0, draft, [0] * 8, plan, wanted=8)], cache)
    assert torch.equal(found, chunked_logits(runner, [*text, *draft[1:]], (len(text) + 7,))[-8:])
    cache.commit(0, [0])
    assert torch.equal(runner.forward([SequenceChunk(0, more, [0] * 5, plan, wanted=5)], cache), wanted[-5:])


@pytest.mark.parametrize("family", ALL)
def test_depth_plans_give_the_texts_of_the_modules(family: str) -> None:
    engines = [engine_for(model_of(family), None, backend=backend) for backend in ("packed", "hf")]
    if engines[1].runner.state_bytes:
        engines[1].runner.singly = True  # type: ignore[attr-defined]
    for method in (D3(alpha=0.9, core=2), D3(alpha=0.8, core=1)):
        one, other = (engine.generate([prompt(9), prompt(4, 1)], method=method, max_new_tokens=16)
                      for engine in engines)
        assert [result.tokens for result in one] == [result.tokens for result in other]
        assert one[0].stats.mean_layers < LAYERS


@pytest.mark.parametrize("family", ALL)
def test_texts_are_those_of_the_modules(family: str) -> None:
    engines = [engine_for(model_of(family), None, backend=backend) for backend in ("packed", "hf")]
    if engines[1].runner.state_bytes:
        engines[1].runner.singly = True  # type: ignore[attr-defined]
    prompts = [prompt(9), prompt(4, 1)]
    one, other = ([result.tokens for result in engine.generate(prompts, max_new_tokens=24)] for engine in engines)
    assert one == other


def saved(model: Any, folder: Path, apart: bool) -> FileSource:
    """The model as a folder: with one tensor for each expert as checkpoints have them, or as the modules have them."""
    if apart:
        model.save_pretrained(folder)
    else:
        from safetensors.torch import save_file

        folder.mkdir(exist_ok=True)
        held = {name: one.clone() for name, one in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del held["lm_head.weight"]
        save_file(held, folder / "model.safetensors")
    return FileSource(folder)


@pytest.mark.parametrize("apart", [True, False], ids=["as checkpoints", "as modules"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_forms_of_a_checkpoint_are_read(variant: str, apart: bool, tmp_path: Path) -> None:
    model, ids = model_of(variant), prompt(12)
    source = saved(model, tmp_path, apart)
    if apart and "granite" not in variant and not variant.startswith(("gpt_oss", "dbrx")):
        assert any(".experts.4." in name for name in source.names())
    found = chunked_logits(build(model.config, source, torch.float32, CPU, kernels=False), ids, (12,))
    assert torch.equal(found, chunked_logits(packed(model), ids, (12,)))


@pytest.mark.parametrize("family", ALL)
def test_missing_and_surplus_tensors_are_refused(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    source = saved(model, tmp_path, apart=True)
    held = {name: source[name] for name in source.names()}
    name = next(name for name in sorted(held, reverse=True)
                if "experts.4." in name or name.endswith(("input_linear.weight", "experts.down_proj_bias", "mlp.w2")))
    lacking, more = {key: value for key, value in held.items() if key != name}, {**held, f"{name}s": held[name]}
    for wrong, what in ((lacking, r"without '\w+.(layers|blocks).3"), (more, f"with '{name}s'")):
        with pytest.raises(Unsupported, match=what):
            build(model.config, TensorSource(wrong), torch.float32, CPU, kernels=False)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "granitemoe"])
def test_another_number_of_experts_is_refused(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    for apart in (True, False):
        source, config = saved(model, tmp_path / str(apart), apart), copy.deepcopy(model.config)
        for count in (5, 7):
            setattr(config, "num_experts" if hasattr(config, "num_experts") else "num_local_experts", count)
            with pytest.raises(Unsupported, match=r"without|with|\[6, "):
                build(config, source, torch.float32, CPU, kernels=False)


@pytest.mark.parametrize("count", [5, 3])
def test_another_number_of_experts_in_one_matrix_is_refused(count: int, tmp_path: Path) -> None:
    model = model_of("dbrx")
    source, config = saved(model, tmp_path, apart=False), copy.deepcopy(model.config)
    config.ffn_config.moe_num_experts = count
    with pytest.raises(Unsupported, match=r"\[6, "):
        build(config, source, torch.float32, CPU, kernels=False)


def test_rows_that_experts_do_not_share_are_refused(tmp_path: Path) -> None:
    model = model_of("dbrx")
    source, name = saved(model, tmp_path, apart=False), "transformer.blocks.2.ffn.experts.mlp.v1"
    held = {one: source[one] for one in source.names()}
    with pytest.raises(Unsupported, match=rf"'{name}' is \[95, 32\]: its rows must be those of 6 experts"):
        build(model.config, TensorSource(held | {name: held[name][:-1]}), torch.float32, CPU, kernels=False)


def test_more_experts_for_a_token_than_there_are_is_refused() -> None:
    config = copy.deepcopy(model_of("qwen3_moe").config)
    config.num_experts_per_tok = 7
    with pytest.raises(ValueError, match="7 of 6 experts"):
        shape_of(config)


def test_biases_of_experts_are_refused() -> None:
    with pytest.raises(Unsupported, match="'nemotron_h' with experts: its MLPs have biases"):
        shape_of(tiny("nemotron_h_moe", dtype=torch.float32, layers=LAYERS, mlp_bias=True).config)


def test_clipped_queries_are_refused() -> None:
    with pytest.raises(Unsupported, match="clip_qkv"):
        shape_of(tiny("olmoe", dtype=torch.float32, layers=LAYERS, clip_qkv=1.0).config)


def second_best(self: Routing, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    chosen = logits.sort(dim=-1, descending=True).indices[:, 1 : self.top + 1].sort(-1).values
    return chosen, logits.softmax(-1).gather(-1, chosen)


def turned(self: Routing, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    chosen, weights = REAL(self, logits, bias)
    return chosen, weights.flip(-1)


def raw(self: Routing, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    chosen, _ = REAL(self, logits, bias)
    return chosen, logits.softmax(-1).gather(-1, chosen)


REAL = Routing.__call__


@pytest.mark.parametrize("on", [False, pytest.param(True, marks=kernels)], ids=["torch", "kernels"])
@pytest.mark.parametrize("part", ["sinks", "clamped", "router_bias", "gate_up_bias", "down_bias"])
def test_each_part_of_gpt_oss_counts(part: str, on: bool) -> None:
    model, ids = model_of("gpt_oss"), prompt(20)
    wanted, runner = one_by_one(model, ids), packed(model)
    layers = [replace(layer, sinks=None) if part == "sinks" else
              replace(layer, experts=replace(layer.experts, **{part: None})) for layer in runner.weights.layers]
    lacking = replace(runner.weights, layers=layers)
    kind = NativeRunner if on else PackedRunner
    if on:
        whole = packed(model, kernels=True).weights
        layers = [replace(own, sinks=None) if part == "sinks" else
                  replace(own, experts=replace(own.experts, **{part: None})) for own in whole.layers]
        lacking = replace(whole, layers=layers)
    found = chunked_logits(kind(runner.shape, lacking, runner.rotary, runner.dtype, CPU), ids, (20,))
    assert gap(found, wanted) > 1e-2 * float(wanted.abs().max())


def test_blocks_of_a_published_checkpoint_are_read() -> None:
    """MXFP4 as in gpt-oss's own files: bytes of two numbers, the low half first, and exponents."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, ids, generator = copy.deepcopy(model_of("gpt_oss, wide")), prompt(12), torch.Generator().manual_seed(0)
    held, stored = dict(model.named_parameters()), {}
    for name, parameter in held.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = parameter.data
            continue
        count, columns, rows = parameter.shape
        blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, (count, rows, columns // 32), dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    found = build(model.config, TensorSource(stored), torch.float32, CPU, kernels=False)
    wanted = one_by_one(model, ids)
    assert gap(chunked_logits(found, ids, (12,)), wanted) < NEAR[torch.float32] * float(wanted.abs().max())
    if native.available():  # which keep the blocks
        found = build(model.config, TensorSource(stored), torch.float32, CPU)
        experts = found.weights.layers[0].experts
        assert experts is not None and {one.kind for one in (*experts.gate_up, *experts.down)} == {"mxfp4"}
        exact = packed(model, kernels=True).weights.layers[0].experts.gate_up[0].unpack()
        assert torch.equal(experts.gate_up[0].unpack(), exact)
        whole = chunked_logits(found, ids, (12,))
        assert (whole - wanted).norm() < 0.1 * wanted.norm()
        assert torch.equal(chunked_logits(found, ids, (5, 1, 6)), whole)
    name = next(name for name in stored if name.endswith("_scales"))
    with pytest.raises(Unsupported, match=r"scales \[6, .* must be \[experts, rows, n, 16\]"):
        build(model.config, TensorSource({**stored, name: stored[name][:, 1:]}), torch.float32, CPU)


@pytest.mark.parametrize("wrong", [second_best, turned, raw])
def test_the_comparison_has_power(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("qwen3_moe"), prompt(20)
    wanted = one_by_one(model, ids)
    monkeypatch.setattr(Routing, "__call__", wrong)
    assert gap(chunked_logits(packed(model), ids, (20,)), wanted) > 1e-2 * float(wanted.abs().max())
