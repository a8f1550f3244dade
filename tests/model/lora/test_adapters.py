"""Adapters beside a model's layers, on each backend: what they compute, and for whom."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters import drawn, merged, write_gguf_adapter, write_peft
from backends import HF, NATIVE, on_backends, reference
from drive import prompt
from families import tiny
from gguf_models import INTERLEAVED, tiny_model, write_model
from llama_cpp_oracle import Oracle
from shoal import load
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.adapters import AdapterWish
from shoal.engine.loading.load import engine_for
from shoal.model.lora.adapter import FittedAdapter
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import ModelRunner, SequenceChunk

FUSED = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
TARGETS: dict[str, dict[str, Any]] = {"phi3": {"targets": FUSED}, "glm": {"targets": (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")}, "gemma3": {"targets": ("k_proj", "up_proj")}}
ROTATES_ROUNDED = {"ernie4_5": 1e-4}
"""Modules that rotate in float32 whatever their dtype."""
LENGTHS = (5, 9, 3, 20)


def fitted(runner: ModelRunner, folder: Path, pairs: Any, scale: float = 1.0, **settings: Any) -> FittedAdapter:
    """An adapter that was written and read."""
    return runner.fit(AdapterWish(write_peft(folder, pairs, **settings), "x", scale).load())


def forward(
    runner: ModelRunner, texts: list[list[int]], adapters: list[FittedAdapter | None], piece: int = 1000
) -> list[Tensor]:
    """The logits of all tokens of each text, read in pieces."""
    cache, plan = runner.new_cache(len(texts)), DepthPlan.full(runner.num_layers)
    found: list[list[Tensor]] = [[] for _ in texts]
    for seq, adapter in enumerate(adapters):
        cache.adapt(seq, adapter)
    for first in range(0, max(map(len, texts)), piece):
        some = [(seq, text[first : first + piece]) for seq, text in enumerate(texts) if len(text) > first]
        chunks = [SequenceChunk(seq, tokens, [0] * len(tokens), plan, wanted=len(tokens)) for seq, tokens in some]
        logits = runner.forward(chunks, cache).split([len(tokens) for _, tokens in some])
        for (seq, tokens), own in zip(some, logits, strict=True):
            found[seq].append(own.clone())
            cache.commit(seq, range(len(tokens)))
    return [torch.cat(own) for own in found]


def shared_float(family: str) -> Any:
    """The tiny model of a family in float32."""
    return tiny(family, dtype=torch.float32)


@torch.no_grad()
def expected(model: Any, text: list[int]) -> Tensor:
    """What transformers' own forward gives."""
    logits: Tensor = model(torch.tensor([text])).logits[0]
    return logits


@on_backends("llama", "qwen2", "phi3", "glm", "gemma3", "qwen3", "olmo2", "granite", "smollm3", "ernie4_5", "cohere")
def test_tokens_with_different_adapters_and_none_share_a_forward(backend, name, tmp_path):
    model, runner = reference(name), backend.runner(name)
    pairs = [drawn(model, seed=seed, **TARGETS.get(name, {})) for seed in (1, 2)]
    one, two = (fitted(runner, tmp_path / str(seed), some) for seed, some in enumerate(pairs))
    texts = [prompt(length, seed=length) for length in LENGTHS]
    whole = [merged(model, some) for some in pairs]
    models = [whole[0], model, whole[1], whole[0]]
    near = ROTATES_ROUNDED.get(name, backend.exact)
    for piece in (1000, 4):
        found = forward(runner, texts, [one, None, two, one], piece)
        for own, text, changed in zip(found, texts, models, strict=True):
            true = expected(changed, text)
            assert float((own - true).abs().max()) < max(near, backend.exact) * max(1.0, float(true.abs().max()) / 20)
    assert float((expected(whole[0], texts[0]) - expected(model, texts[0])).abs().max()) > 0.5


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_a_rows_bits_depend_on_no_other_on_the_kernels(piece, tmp_path):
    runner, model = NATIVE.runner("llama"), reference("llama")
    one, two = (fitted(runner, tmp_path / str(seed), drawn(model, seed=seed)) for seed in (1, 2))
    texts, adapters = [prompt(length, seed=length) for length in (3, 40, 7, 18)], [one, two, None, one]
    together = forward(runner, texts, adapters, piece)
    for text, adapter, own in zip(texts, adapters, together, strict=True):
        assert torch.equal(forward(runner, [text], [adapter])[0], own)


def test_a_model_that_has_an_adapter_is_itself_without_it(tmp_path):
    model = reference("qwen2")
    for backend in (HF, NATIVE):
        runner, texts = backend.runner("qwen2"), [prompt(12)]
        before = forward(runner, texts, [None])[0]
        fitted(runner, tmp_path, drawn(model))
        assert torch.equal(forward(runner, texts, [None])[0], before)


def test_the_kernels_compute_what_their_twin_does(tmp_path):
    """A twin in plain torch reads the same adapter, in the same numbers."""
    runner, model = NATIVE.runner("phi3"), reference("phi3")
    adapter = fitted(runner, tmp_path, drawn(model, FUSED))
    texts = [prompt(20), prompt(3, seed=4)]
    fast = forward(runner, texts, [adapter, None])
    cache, plan = runner.new_cache(2), DepthPlan.full(runner.num_layers)
    cache.adapt(0, adapter)
    chunks = [SequenceChunk(seq, text, [0] * len(text), plan, wanted=len(text)) for seq, text in enumerate(texts)]
    slow = PackedRunner.forward(runner, chunks, cache)
    assert float((torch.cat(fast) - slow).abs().max()) < 1e-3


def test_sequences_take_their_adapters_along(tmp_path):
    """As they move, are copied and come; another adapter's keys and values are forgotten."""
    runner, model = NATIVE.runner("llama"), reference("llama")
    one, two = (fitted(runner, tmp_path / str(seed), drawn(model, seed=seed)) for seed in (1, 2))
    cache, plan, text = runner.new_cache(3), DepthPlan.full(runner.num_layers), prompt(6)
    cache.adapt(0, one)
    cache.adapt(2, two)
    assert cache.fork(2, 1) == range(3, 4) and cache.adapters == [one, None, two, two]
    assert cache.select([1, 3]) == [3, 1] and cache.adapters == [two, None]
    runner.forward([SequenceChunk(0, text, [0] * 6, plan)], cache)
    cache.commit(0, range(6))
    cache.adapt(0, two)
    assert cache.positions == [6, 0] and cache.adapted
    cache.adapt(0, None)
    assert cache.positions == [0, 0] and not cache.adapted
    cache.extend(1)
    assert cache.adapters == [None] * 3


def test_plain_steps_follow_a_change_of_adapter(tmp_path):
    """A place of the same cache that gets another adapter, its text read token by token."""
    runner, model = NATIVE.runner("llama"), reference("llama")
    one, two = (fitted(runner, tmp_path / str(seed), drawn(model, seed=seed)) for seed in (1, 2))
    cache, plan, text = runner.new_cache(1, [16] * runner.num_layers), DepthPlan.full(runner.num_layers), prompt(6)
    order = (one, two, None, two)
    wanted = [forward(runner, [text], [adapter], piece=1)[0] for adapter in order]  # no other cache in between
    for adapter, alone in zip(order, wanted, strict=True):
        cache.adapt(0, adapter)
        found = []
        for token in text:
            found.append(runner.forward([SequenceChunk(0, [token], [0], plan)], cache).clone())
            cache.commit(0, range(1))
        assert torch.equal(torch.cat(found), alone)


def test_gpt2s_matrices_of_inputs_first(tmp_path):
    """On modules that are no nn.Linear, and on the packed layers, which have rows for outputs."""
    model = tiny("gpt2")
    pairs = drawn(model, ("c_attn", "c_fc", "c_proj"))
    true = expected(merged(model, pairs), text := prompt(11))
    for backend in ("hf", "packed"):
        runner = engine_for(model, backend=backend).runner
        found = forward(runner, [text], [fitted(runner, tmp_path, pairs)])[0]
        assert float((found - true).abs().max()) < 1e-9


def test_scale_ranks_and_alphas(tmp_path):
    """A factor of the user's, rsLoRA, and ranks and alphas by patterns, beside what peft's formula gives."""
    model, runner = reference("llama"), HF.runner("llama")
    pairs = dict(drawn(model, ("q_proj",)))
    text, name = prompt(9), next(iter(pairs))
    other = {name: tuple(one.repeat_interleave(4, side) for side, one in enumerate(pairs[name]))}
    cases = [
        (pairs, {}, 0.5, 0.5), (pairs, {"use_rslora": True}, 1.0, 2.0), (pairs, {"lora_alpha": 2}, 1.0, 0.25),
        (pairs, {"alpha_pattern": {"q_proj": 16}}, 1.0, 2.0), (pairs, {"alpha_pattern": {"proj": 16}}, 1.0, 1.0),
        (other, {"rank_pattern": {"layers.0.self_attn.q_proj": 16}}, 1.0, 1.0),
    ]
    for number, (some, settings, scale, factor) in enumerate(cases):
        adapter = fitted(runner, tmp_path / str(number), some, scale, **settings)
        true = expected(merged(model, some, factor), text)
        assert float((forward(runner, [text], [adapter])[0] - true).abs().max()) < 1e-6, settings


def test_peft_itself_gives_the_same(tmp_path):
    """Peft's own model, unmerged and merged, of the folder that Shoal reads."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, runner = copy.deepcopy(reference("llama")).float(), NATIVE.runner("llama")
    folder = write_peft(tmp_path, drawn(model), alpha_pattern={"k_proj": 3}, use_rslora=True)
    adapter = runner.fit(AdapterWish(folder, "x").load())
    text = prompt(14)
    found = forward(runner, [text], [adapter])[0]
    theirs = peft.PeftModel.from_pretrained(model, folder)
    for one in (theirs, theirs.merge_and_unload()):
        assert float((expected(one, text) - found).abs().max()) < 2e-3


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "of peft's type 'IA3'"), ({"use_dora": True}, "with use_dora"),
    ({"bias": "all"}, "bias 'all'"),
    ({"modules_to_save": ["lm_head"]}, "with modules_to_save"), ({"r": 8}, "its config says 8"),
    ({"lora_alpha": "much"}, "lora_alpha 'much'"), ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[next(iter(one)) for one, _ in WRONG])
def test_what_is_more_than_products_of_low_rank_is_refused(settings, message, tmp_path):
    folder = write_peft(tmp_path, drawn(tiny("llama")), **settings)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        AdapterWish(folder, "x").load()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("backend", [HF, NATIVE], ids=lambda one: one.name)
def test_an_adapter_of_another_model_is_refused(backend, tmp_path):
    runner = backend.runner("llama")
    cases: list[tuple[Any, str]] = [
        (drawn(tiny("llama", intermediate_size=64), ("gate_proj",)),
         "'mlp.gate_proj' of layer 0 is for a matrix [64, 32]"),
        (drawn(tiny("llama", layers=7), ("q_proj",)), "the model has 6 layers"),
        ({"model.layers.0.mixer.in_proj": (torch.ones(4, 32), torch.ones(8, 4))}, "changes 'mixer.in_proj' of layer 0"),
        ({"lm_head": (torch.ones(4, 32), torch.ones(97, 4))}, "in no layer of the decoder"),
        ({"model.layers.0.self_attn.q_proj": (torch.ones(4, 32), torch.ones(32, 5))}, "must be [rank, columns]"),
    ]
    for number, (pairs, message) in enumerate(cases):
        with pytest.raises(ValueError, match=re.escape(message)):
            fitted(runner, tmp_path / str(number), pairs)


def test_half_a_pair_and_what_is_no_adapter(tmp_path):
    folder = Path(write_peft(tmp_path / "half", drawn(tiny("llama"), ("v_proj",))))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    save_file({key: one for key, one in tensors.items() if key != name}, folder / "adapter_model.safetensors")
    (tmp_path / "empty").mkdir()
    for path, message in ((folder, "B is missing"), (tmp_path / "none", "neither a folder nor a file"),
                          (tmp_path / "empty", "it has no adapter_config.json")):
        with pytest.raises(ValueError, match=message):
            AdapterWish(str(path), "x").load()


def test_how_adapters_are_named(tmp_path):
    (tmp_path / "a=b:2").mkdir()
    read = AdapterWish.read
    assert read("sql=some/path:0.5") == AdapterWish("some/path", "sql", 0.5)
    assert read("some/path.gguf") == AdapterWish("some/path.gguf", "path")
    assert read("x=C:/some/path:-1e-1") == AdapterWish("C:/some/path", "x", -0.1)
    assert read(f"x={tmp_path}/a=b:2") == AdapterWish(f"{tmp_path}/a=b:2", "x")
    for wrong in ("=some/path", "x=some/path:1.2.3", "x=p:1e999"):
        with pytest.raises(ValueError, match=r"empty name|no number|must be a number"):
            read(wrong)


@pytest.mark.parametrize("backend", ["hf", "packed"])
def test_gguf_adapters_turn_the_rows_of_llamas_queries_and_keys(backend, tmp_path):
    """Beside a model's file and beside its folder; the same adapter in both forms."""
    model = shared_float("llama")
    pairs, text = drawn(model), prompt(15)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    path = write_gguf_adapter(tmp_path / "adapter.gguf", pairs, "llama", heads)
    runner = engine_for(model, backend=backend).runner
    found = forward(runner, [text], [runner.fit(AdapterWish(path, "x").load())])[0]
    true = expected(merged(model, pairs), text)
    assert float((found - true).abs().max()) < 2e-3


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_llama_cpp_gives_the_same_with_an_adapters_file(architecture, tmp_path):
    model = tiny_model(architecture)
    pairs, text = drawn(model), prompt(15)
    write_model(architecture, tmp_path / "model.gguf", model=model)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    turned = heads if architecture in INTERLEAVED else {}
    path = write_gguf_adapter(tmp_path / "adapter.gguf", pairs, architecture, turned)
    oracle = Oracle(tmp_path / "model.gguf")
    theirs = oracle.logits(text, (path, 0.5))
    oracle.close()
    true, plain = (expected(one, text) for one in (merged(model, pairs, 0.5), model))
    assert float((theirs - true).abs().max()) < 5e-3 < float((theirs - plain).abs().max())
    runner = load(str(tmp_path / "model.gguf"), dtype="float32").runner
    found = forward(runner, [text], [runner.fit(AdapterWish(path, "x", 0.5).load())])[0]
    assert float((theirs - found).abs().max()) < 5e-3


def test_files_that_are_no_adapters(tmp_path):
    pairs = drawn(tiny("llama"), ("q_proj",))
    path = Path(write_gguf_adapter(tmp_path / "a.gguf", pairs, "llama", {}))
    raw = path.read_bytes()
    for wrong, message in ((raw.replace(b"lora_a", b"lora_c", 1), "no A or B"),
                           (raw.replace(b"attn_q", b"attn_x"), "no A or B"),
                           (raw.replace(b"llama", b"lxxma", 1), "Shoal does not know it"), (raw[:40], "GGUF"),
                           (raw.replace(b"lora", b"lorx", 2), "no A or B|adapter.type")):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=message):
            AdapterWish(str(path), "x").load()
