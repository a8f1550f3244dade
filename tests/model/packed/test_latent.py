"""Latent attention, absorbed: against formulas that expand keys and values head by head, and with what reads the KV."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from backends import CPU, packed
from drive import gap, prompt
from families import MIXED_RECURRENT, RECURRENT, tiny
from hybrid_steps import one_by_one
from shoal.engine.engine import Engine
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods.base import Method
from shoal.methods.double_sparsity import DoubleSparsity
from shoal.methods.kv_int4 import KVInt4
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.snapkv import SnapKV
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.model.packed import build as build_module
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.latent import LatentRows
from shoal.model.packed.source import FileSource, TensorSource
from shoal.model.parity import chunked_logits

LAYERS = 4
KERNELS = native.available()
kernels = pytest.mark.skipif(not KERNELS, reason=f"no native kernels: {native.why_not()}")
pytestmark = pytest.mark.skipif(not RECURRENT, reason="this transformers has other modules for latent attention")
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128,
         "mscale": 0.7, "mscale_all_dim": 0.9}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "minicpm3": ("minicpm3", {}),
    "minicpm3, longrope": ("minicpm3", {"max_position_embeddings": 256, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
        "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [4.0] * 4}}),
    "youtu": ("youtu", {}),
    "youtu, biases": ("youtu", {"attention_bias": True}),
    "deepseek_v2": ("deepseek_v2", {"first_k_dense_replace": LAYERS}),
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": LAYERS}),
    "deepseek_v3, biases": ("deepseek_v3", {"first_k_dense_replace": LAYERS, "attention_bias": True}),
    "deepseek_v3, halves": ("deepseek_v3", {"first_k_dense_replace": LAYERS, "rope_interleave": False}),
    "deepseek_v3, one matrix, yarn": ("deepseek_v3", {"first_k_dense_replace": LAYERS, "q_lora_rank": None,
                                                      "rope_parameters": _YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * LAYERS}),
    "kimi_linear": ("kimi_linear", {"layer_types": ["full_attention"] * LAYERS, "mlp_layer_types": ["dense"] * LAYERS}),
    "bailing_hybrid": ("bailing_hybrid", {"layer_types": ["full_attention"] * LAYERS,
                                          "mlp_layer_types": ["dense"] * LAYERS}),
}
"""Variants without experts and recurrences."""


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


class Formula:
    """One token after another in float64, with keys and values of every head, as the papers have them."""

    def __init__(self, model: Any) -> None:
        self.config, self.held = model.config, dict(model.named_parameters())
        self.pairs = self.config.model_type != "minicpm3" and getattr(self.config, "rope_interleave", True)
        self.rotates = self.config.model_type != "kimi_linear"
        rotary = getattr(model.model, "rotary_emb", None)
        self.angles, self.factor = (rotary.inv_freq, rotary.attention_scaling) if rotary is not None else (None, 1.0)
        self.seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(LAYERS)]

    def __call__(self, ids: list[int]) -> Tensor:
        return torch.stack([self.token(token, place) for place, token in enumerate(ids)])

    def token(self, token: int, place: int) -> Tensor:
        own = self.config
        x = self.held["model.embed_tokens.weight"][token] * getattr(own, "scale_emb", 1)
        depth = getattr(own, "scale_depth", math.sqrt(LAYERS)) / math.sqrt(LAYERS)
        for layer in range(LAYERS):
            name = f"model.layers.{layer}."
            inner = normed(x, self.held[f"{name}input_layernorm.weight"], own.rms_norm_eps)
            x = x + depth * self.attention(layer, f"{name}self_attn.", inner, place)
            inner = normed(x, self.held[f"{name}post_attention_layernorm.weight"], own.rms_norm_eps)
            gate, up = (self.held[f"{name}mlp.{part}_proj.weight"] @ inner for part in ("gate", "up"))
            x = x + depth * (self.held[f"{name}mlp.down_proj.weight"] @ (silu(gate) * up))
        x = normed(x, self.held["model.norm.weight"], own.rms_norm_eps) / getattr(own, "logits_scaling", 1)
        return self.held["lm_head.weight"] @ x

    def attention(self, layer: int, name: str, x: Tensor, place: int) -> Tensor:
        own, heads = self.config, self.config.num_attention_heads
        plain, turned, rank = own.qk_nope_head_dim, own.qk_rope_head_dim, own.kv_lora_rank
        if getattr(own, "q_lora_rank", None):
            low = normed(self.times(f"{name}q_a_proj", x), self.held[f"{name}q_a_layernorm.weight"], 1e-6)
            q = self.times(f"{name}q_b_proj", low).view(heads, -1)
        else:
            q = self.times(f"{name}q_proj", x).view(heads, -1)
        stored = self.times(f"{name}kv_a_proj_with_mqa", x)
        latent = normed(stored[:rank], self.held[f"{name}kv_a_layernorm.weight"], 1e-6)
        both = (self.held[f"{name}kv_b_proj.weight"] @ latent).view(heads, -1)
        shared = self.turned(stored[rank:], place)
        keys = torch.stack([torch.cat([one[:plain], shared]) for one in both])
        self.seen[layer].append((keys, both[:, plain:]))
        scale = (plain + turned) ** -0.5 * self.enlarged() ** 2
        out = []
        for head in range(heads):
            query = torch.cat([q[head, :plain], self.turned(q[head, plain:], place)])
            scores = torch.stack([(query @ key[head]) * scale for key, _ in self.seen[layer]]).softmax(0)
            mixed = sum(share * value[head] for share, (_, value) in zip(scores, self.seen[layer], strict=True))
            if own.model_type == "bailing_hybrid":
                mixed = mixed * torch.sigmoid(self.held[f"{name}g_proj.weight"][head] @ x)
            out.append(mixed)
        return self.times(f"{name}o_proj", torch.cat(out))

    def times(self, name: str, x: Tensor) -> Tensor:
        found = self.held[f"{name}.weight"] @ x
        return found + self.held[f"{name}.bias"] if f"{name}.bias" in self.held else found

    def turned(self, x: Tensor, place: int) -> Tensor:
        """Rotated by complex numbers; the angles are those of transformers, in float32."""
        if not self.rotates:
            return x
        angle = (torch.tensor(float(place)) * self.angles.float())
        by = torch.complex((angle.cos() * self.factor).double(), (angle.sin() * self.factor).double())
        first, second = (x[::2], x[1::2]) if self.pairs else x.chunk(2)
        found = torch.complex(first, second) * by
        return torch.cat([found.real, found.imag])

    def enlarged(self) -> float:
        rope = getattr(self.config, "rope_parameters", None) or {}
        return 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1 if rope.get("rope_type") == "yarn" else 1.0


def model_of(variant: str, dtype: torch.dtype = torch.float64) -> Any:
    """With biases that count."""
    family, changes = DENSE[variant]
    model = tiny(family, dtype=dtype, layers=LAYERS, **changes)
    if not changes.get("attention_bias"):
        return model
    model, draw = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias") or name.endswith("mqa.bias"):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


@torch.no_grad()
@pytest.mark.parametrize("variant", DENSE)
def test_logits_are_those_of_the_formulas(variant: str) -> None:
    model, ids = model_of(variant), prompt(24)
    wanted, runner = Formula(model)(ids), packed(model)
    for sizes in ((24,), (5, 1, 14, 4)):
        assert gap(chunked_logits(runner, ids, sizes), wanted) < 1e-10 * float(wanted.abs().max())


@kernels
@torch.no_grad()
@pytest.mark.parametrize("variant", DENSE)
def test_kernels_give_them_however_the_text_is_cut(variant: str) -> None:
    ids, runner = prompt(40), packed(model_of(variant, torch.float32), kernels=True)
    wanted, whole = Formula(model_of(variant))(ids), chunked_logits(runner, ids, (40,))
    assert gap(whole, wanted) < 1e-4 * float(wanted.abs().max())
    for sizes in ((5, 25, 1, 9), (17, 23), (1,) * 40):
        assert torch.equal(chunked_logits(runner, ids, sizes), whole)


@torch.no_grad()
@pytest.mark.parametrize("wrong", [{"attention_scale": 0.2}, {"rotary": (None,) * LAYERS}, {"residual_scale": 1.0}],
                         ids=str)
def test_the_comparison_has_power(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("minicpm3"), prompt(16)
    shape = build_module.shape_of(model.config, torch.float64)
    monkeypatch.setattr(build_module, "shape_of", lambda *_: replace(shape, **wrong))
    wanted = Formula(model)(ids)
    assert gap(chunked_logits(packed(model), ids, (16,)), wanted) > 1e-3 * float(wanted.abs().max())


def test_recurrences_with_matrices_of_the_same_names_and_sizes_keep_their_rows() -> None:
    """Queries of latent attention and of Kimi Delta Attention of 32 rows each."""
    sizes = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
    model, ids = tiny("kimi_linear", dtype=torch.float32, layers=LAYERS, **sizes), prompt(16)
    assert len(model.model.layers[0].self_attn.q_proj.weight) == len(model.model.layers[1].self_attn.q_proj.weight)
    wanted = one_by_one(model, ids)
    assert gap(chunked_logits(packed(model), ids, (16,)), wanted) < 1e-3 * float(wanted.abs().max())


def test_rows_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, order = model_of("deepseek_v3"), prompt(16), LatentRows._order
    monkeypatch.setattr(LatentRows, "_order", lambda self, name, rows, source: None if "kv_a" in name else (
        order(self, name, rows, source)))
    with torch.no_grad():
        wanted = Formula(model)(ids)
    assert gap(chunked_logits(packed(model), ids, (16,)), wanted) > 1e-3 * float(wanted.abs().max())


@pytest.mark.parametrize("on", [False, pytest.param(True, marks=kernels)], ids=["torch", "kernels"])
def test_a_token_is_stored_once(on: bool) -> None:
    runner = packed(tiny("deepseek_v3", dtype=torch.float32, layers=LAYERS), kernels=on)
    assert runner.position_bytes == (4 * (16 + 8),) * LAYERS
    cache = Engine(runner).generate(prompt(9), max_new_tokens=2)
    assert len(cache.tokens) == 2
    held = runner.new_cache(1)
    runner.forward([build_chunk(prompt(9))], held)
    held.commit(0, range(9))
    keys, values = held.layers[0].read(0, 9, torch.float32)
    assert keys is values and keys.shape == (1, 9, 24)
    with pytest.raises(ValueError, match="lie in its keys"):
        held.layers[0].rewrite(0, keys, keys + 1)


def build_chunk(ids: list[int]) -> Any:
    from shoal.depth.plan import DepthPlan
    from shoal.model.runner import SequenceChunk

    return SequenceChunk(0, ids, [0] * len(ids), DepthPlan.full(LAYERS))


CHANNELS = (((*range(24),),),) * LAYERS
READERS: list[Method] = [KVInt8(), KVInt4(), SnapKV(budget=12, window=4, pool=3), Tidal(k=6), TopKOracle(k=6, first=0),
                         DoubleSparsity(CHANNELS, k=6, width=3, first=0)]


@pytest.mark.parametrize("method", READERS, ids=lambda method: type(method).__name__)
def test_methods_read_and_store_it_on_kernels_as_in_torch(method: Method) -> None:
    model, ids, found = tiny("deepseek_v3", dtype=torch.float32, layers=LAYERS), prompt(40, 3), list[tuple[int, ...]]()
    for on in (False, *[True] * KERNELS):
        engine = Engine(packed(model, kernels=on))
        found.append(tuple(engine.generate(ids, method=method, max_new_tokens=16).tokens))
    assert found == [found[0]] * len(found)
    if not isinstance(method, KVInt8):
        assert found[0] != tuple(engine.generate(ids, max_new_tokens=16).tokens)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear", "bailing_hybrid"])
@pytest.mark.parametrize("on", [False, pytest.param(True, marks=kernels)], ids=["torch", "kernels"])
def test_prefixes_are_read_in_place(on: bool, family: str) -> None:
    """In torch in float64, since its matrices round by the number of their inputs."""
    engine = Engine(packed(tiny(family, dtype=torch.float32 if on else torch.float64, layers=LAYERS), kernels=on))
    first, more = [*range(5, 45)], [60, 61, 62]
    options: Any = {"method": PromptLookup(min_ngram=1), "max_new_tokens": 8, "ignore_eos": True}
    with Scheduler(engine, prefix_bytes=1 << 20) as scheduler:
        answered(scheduler, first, options)
        tokens, cached = answered(scheduler, [*first, *more], options)
        assert cached == len(first)
    assert tokens == engine.generate([*first, *more], **options).tokens


def answered(scheduler: Scheduler, ids: list[int], options: Any) -> tuple[Any, int]:
    handle = scheduler.submit(ids, **options)
    assert len([*handle]) > 0
    return handle.results[0].tokens, handle.entries[0].seq.cached


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid", "deepseek_v3", "deepseek_v2", "glm4_moe_lite"])
def test_saved_folders_are_read_by_the_names_of_published_checkpoints(family: str, tmp_path: Any) -> None:
    model, ids = tiny(family, dtype=torch.float32, layers=LAYERS), prompt(20)
    model.save_pretrained(tmp_path)
    names = set(FileSource(tmp_path).names())
    if family in ("kimi_linear", *MIXED_RECURRENT):
        assert any(name.endswith("q_conv1d.weight") for name in names)
    found = build(model.config, FileSource(tmp_path), torch.float32, CPU)
    assert torch.equal(chunked_logits(found, ids, (20,)), chunked_logits(packed(model, kernels=KERNELS), ids, (20,)))


@pytest.mark.parametrize("change", [lambda held: held.pop("model.layers.1.self_attn.kv_b_proj.weight"),
                                    lambda held: held.update({"model.layers.1.self_attn.kv_c.weight": torch.ones(2, 2)
                                                              }),
                                    lambda held: held.update({"model.layers.0.self_attn.kv_b_proj.weight":
                                                              torch.ones(3, 16)})])
def test_tensors_that_do_not_fit_are_refused(change: Callable[[dict[str, Tensor]], Any]) -> None:
    model = tiny("deepseek_v3", dtype=torch.float32, layers=LAYERS)
    held = dict(model.state_dict())
    change(held)
    with pytest.raises(ValueError, match="kv_b_proj|kv_c"):
        build(model.config, TensorSource(held), torch.float32, CPU, kernels=False)
