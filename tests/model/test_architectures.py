"""Architectures beyond the test bench's families: run as transformers runs them, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import shoal
from backends import Backend, on_backends
from drive import prompt, stack_of
from families import fingerprint, tiny
from oracle import hf_greedy
from shoal import compat
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.model.hf import HFRunner
from shoal.model.kv.cache import KVCache
from shoal.model.parity import check_parity, settle_layout
from shoal.model.runner import ModelRunner, SequenceChunk

_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
_NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GROUPED = {"num_key_value_heads": 1}
_OLD = {"n_embd": 16, "n_layer": 4, "n_head": 2}
_LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 2,
    "topk_group": 1,
}
_DECODER = {"d_model": 16, "decoder_layers": 4, "decoder_attention_heads": 2, "decoder_ffn_dim": 24,
            "encoder_attention_heads": 2, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
RUN: dict[str, tuple[str, dict[str, Any]]] = {
    "latent attention, values narrower than keys": ("deepseek_v3", _LATENT),
    "attention sinks, eager, experts that return two values": (
        "gpt_oss",
        {**_GROUPED, "head_dim": 8, "num_local_experts": 4, "sliding_window": 6},
    ),
    "sliding layers with rotary embeddings, full ones without": ("cohere2", {**_GROUPED, "sliding_window": 6}),
    "post-norm and windows": ("olmo3", {**_GROUPED, "sliding_window": 6}),
    "parallel attention and MLP, one KV head": ("falcon", {}),
    "rotary embedding inside the attention": ("gptj", {**_OLD, "rotary_dim": 4}),
    "global attention that masks by itself": ("gpt_neo", {"attention_types": [[["global"], 4]], "num_layers": 4,
                                                          "num_heads": 2, "max_position_embeddings": 64}),
    "one KV head in an old cache layout": ("gpt_bigcode", _OLD),
    "attention that returns three values": ("gpt_neox_japanese", {"intermediate_multiple_size": 2}),
    "attention within chunks, queries scaled by place": (
        "llama4_text", {**_GROUPED, "head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 3,
                        "floor_scale": 4}),
    "more layers than its encoder": ("marian", {**_DECODER, "encoder_layers": 6, "forced_eos_token_id": None}),
    "scaled embeddings and learned positions in a module": ("biogpt", {"max_position_embeddings": 64}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "alibi": ("falcon", {"alibi": True}, "is given a tensor 'alibi'"),
    "local attention by column": (
        "gpt_neo",
        {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 2},
        "local attention of gpt_neo",
    ),
    "an encoder": ("bert", {}, "BertLayer is given no KV cache"),
    "an encoder made a decoder": ("bert", {"is_decoder": True}, "prepares its embeddings in a way"),
    "no KV at all": ("openai-gpt", _OLD, "is given no KV cache"),
}


def build(model_type: str, others: dict[str, Any]) -> Any:
    sizes = {} if "n_embd" in others else _SIZES
    config = AutoConfig.for_model(model_type, **{"vocab_size": 50, **sizes, **_NO_SPECIAL, **others})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5
    return model


def stored_bytes(runner: ModelRunner) -> tuple[int, ...]:
    """Of a position of each layer, once something is stored."""
    cache = KVCache(runner.windows, 1)
    runner.forward([SequenceChunk(0, [1, 2], [0, 0], DepthPlan.full(runner.num_layers))], cache)
    return tuple(layer.bytes_per_position for layer in cache.layers)


@on_backends("llama", "qwen3", "gemma3", "hybrid")
def test_the_bytes_of_a_position_are_known_beforehand(backend: Backend, name: str) -> None:
    runner = backend.runner(name)
    assert runner.position_bytes == stored_bytes(runner)


@pytest.mark.parametrize("case", RUN)
def test_run_as_transformers_runs_them(case: str) -> None:
    model = build(*RUN[case])
    before, ids = fingerprint(model), [prompt(11, 1, 50), prompt(3, 2, 50), prompt(7, 3, 50)]
    engine = engine_for(model)
    batch = engine.generate(ids, max_new_tokens=12, ignore_eos=True)
    assert [list(result.tokens) for result in batch] == hf_greedy(model, ids, 12)
    shallow = engine.generate(ids, method=D3(alpha=0.8, core=2), max_new_tokens=8, ignore_eos=True)
    for index, result in enumerate(shallow):
        alone = engine.generate(ids[index], method=D3(alpha=0.8, core=2), max_new_tokens=8, ignore_eos=True)
        assert result.tokens == alone.tokens
        assert result.stats.mean_layers < 4
    assert fingerprint(model) == before
    assert engine.runner.position_bytes == stored_bytes(engine.runner)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case: str) -> None:
    model_type, others, message = REFUSED[case]
    model = build(model_type, others)
    before = fingerprint(model)
    with pytest.raises(Unsupported, match=message):
        engine_for(model)
    assert fingerprint(model) == before


def test_a_rotary_table_that_changes_with_the_length_bounds_the_context() -> None:
    """Else a long sequence would change the table of its mates."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=16, max_position_embeddings=64)
    engine = engine_for(model)
    with pytest.raises(ValueError, match="the model's context 16"):
        engine.generate(prompt(16), max_new_tokens=2)
    ids = [prompt(3, 1), prompt(12, 2)]
    results = engine.generate(ids, max_new_tokens=30)
    assert [len(r.tokens) for r in results] == [13, 4]
    assert [list(r.tokens) for r in results] == [hf_greedy(model, [i], 16 - len(i))[0] for i in ids]


class _Off:
    """A runner whose logits are off by a relative error in one place."""

    def __init__(self, runner: Any, call: int, seq: int) -> None:
        self._runner, self._call, self._seq = runner, call, seq
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, *args: Any) -> Any:
        logits = self._runner.forward(*args)
        if self._calls == self._call:
            logits[self._seq] += 1e-6 * logits.abs().max()
        self._calls += 1
        return logits


@pytest.mark.parametrize(("call", "seq"), [(0, 4), (1, 0), (2, 2), (3, 0), (3, 5), (4, 2), (5, 0), (5, 3), (5, 4)])
def test_the_check_at_load_sees_every_logit(call: int, seq: int) -> None:
    """In chunks, in a ragged batch, in a tree; the tree's wrong guess alone is free."""
    model = tiny("llama")
    assert check_parity(stack_of(model), model) < 1e-12
    with pytest.raises(Unsupported, match="differ from the model's own by .*e-0. of the largest logit"):
        check_parity(_Off(stack_of(model), call, seq), model)
    check_parity(_Off(stack_of(model), 5, 1), model)


GLOBAL = RUN["global attention that masks by itself"]


def test_attention_that_tells_positions_by_columns_has_each_row_alone() -> None:
    """Beside a longer sequence with fewer new tokens, padding would hide a sequence's own tokens from it."""
    model = build(*GLOBAL)
    runner = HFRunner(model)
    runner.prepacks = False
    with pytest.raises(Unsupported, match="differ from the model's own"):
        check_parity(runner, model)
    assert settle_layout(runner, model) < 1e-5
    assert runner.alone and not runner.prepacks


def test_what_a_model_rounds_itself_it_may_differ_by() -> None:
    """Its weights are float64, its attention computes in float32: so it does with a cache and without."""
    model = build(*GLOBAL).double()
    runner = HFRunner(model)
    assert 1e-9 < settle_layout(runner, model) < 1e-6
    engine = engine_for(model)
    ids = [prompt(11, 1, 50), prompt(3, 2, 50)]
    results = engine.generate(ids, method="prompt_lookup", max_new_tokens=12, ignore_eos=True)
    assert [list(result.tokens) for result in results] == hf_greedy(model, ids, 12)


class _Forgetful:
    """A model that computes something else once it has a cache."""

    def __init__(self, model: Any) -> None:
        self._model, self.config = model, model.config

    def __call__(self, **options: Any) -> Any:
        out = self._model(**options)
        out.logits = out.logits * 1.01 if any(map(compat.is_cache, options.values())) else out.logits
        return out


def test_a_model_that_generates_something_else_than_its_forward_is_refused() -> None:
    model = tiny("llama")
    with pytest.raises(Unsupported, match="with its cache transformers computes other logits than without, by .*e-0"):
        check_parity(stack_of(model), _Forgetful(model))


class _Scaled(LlamaForCausalLM):
    """Divides what its head reads, as MiniCPM3 does."""

    def forward(self, input_ids: Any, **options: Any) -> Any:
        out = self.model(input_ids, **options)
        hidden = out.last_hidden_state / self.config.divisor + self.config.shift
        kept = {name: value for name, value in out.items() if compat.is_cache(value)}
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), **kept)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_factor_before_the_head(shift: float) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=50, **_SIZES, **_NO_SPECIAL, divisor=2.5, shift=shift)
    model = _Scaled(config).double().eval()
    if shift:
        with pytest.raises(Unsupported, match="changes its hidden states before the LM head"):
            HFRunner(model)
    else:
        assert check_parity(HFRunner(model), model) < 1e-12


def test_what_transformers_cannot_run_is_named() -> None:
    model = build("llama", {})
    model.config.model_type = "llama"
    model.model.layers[1].self_attn.o_proj = torch.nn.Linear(5, 16)
    said = "model type 'llama': transformers itself cannot run it as configured, and says RuntimeError: mat1 and mat2"
    with pytest.raises(Unsupported, match=said):
        engine_for(model)


def test_what_transformers_cannot_build_is_named(tmp_path: Path) -> None:
    build("llama", {}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "no_such_act"}))
    with pytest.raises(Unsupported, match="model type 'llama': transformers itself cannot .* KeyError.*no_such_act"):
        shoal.load(str(tmp_path))
