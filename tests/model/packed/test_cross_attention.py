"""Attention to a source, on the kernels and in plain torch: against transformers' modules, and row by row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.memory.footprint import weight_bytes
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.model.encoders.kernels import packed_bytes
from shoal.model.layers.cross_attention import Encoded, encoded
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import ModelSource
from shoal.model.runner import SequenceChunk
from whispers import LAYERS, features, whisper, write

PROMPT, NEW, FULL = [257, 260, 264, 7, 8, 9, 8], 12, DepthPlan.full(LAYERS)
SMALL = {"max_source_positions": 20}
WIDE = {"d_model": 96, "decoder_attention_heads": 2, "encoder_attention_heads": 2}
"""Heads of 48 dimensions, which is no multiple of a vector."""
needs_kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")


@cache
def model_of(**sizes: Any) -> Any:
    return whisper(**{**SMALL, **sizes})


@cache
def home() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def engine_of(**sizes: Any) -> Engine:
    """The engine of files, as a user has it."""
    return shoal.load(write(Path(home().name) / repr(sorted(sizes.items())), model_of(**sizes)))


def torch_runner(**sizes: Any) -> PackedRunner:
    model = model_of(**sizes)
    return build(model.config, ModelSource(model), torch.float32, torch.device("cpu"), kernels=False)


def source_of(engine: Engine, seed: int) -> Encoded:
    assert engine.encoder is not None
    return engine.encoder(features(seed, frames=40))


def shorter(engine: Engine, seed: int, places: int) -> Encoded:
    """A source of which the decoder reads fewer places."""
    runner, states = engine.runner, torch.randn(places, 32, generator=torch.Generator().manual_seed(seed))
    assert isinstance(runner, PackedRunner)
    layers = [layer.cross for layer in runner.weights.layers if layer.cross is not None]
    return encoded(layers, states, runner.shape.head_dim, runner.dtype, f"{seed} {places}")


def logits(runner: Any, tokens: list[int], source: Encoded, plan: DepthPlan = FULL, cuts: int = 0) -> Tensor:
    """Logits of all tokens, as those of step 1, of which the first ones may be run before the others."""
    cache, found = runner.new_cache(1), []
    cache.attach(0, source)
    for part in filter(None, (tokens[:cuts], tokens[cuts:])):
        found.append(runner.forward([SequenceChunk(0, part, [1] * len(part), plan, wanted=len(part))], cache))
        cache.commit(0, range(len(part)))
    return torch.cat(found)


@pytest.mark.parametrize("sizes", [{}, WIDE, {"decoder_layers": 1, "encoder_layers": 2}], ids=["plain", "wide", "one"])
def test_logits_are_those_of_transformers(sizes: dict[str, Any]) -> None:
    model, engine = model_of(**sizes), engine_of(**sizes)
    plan = DepthPlan.full(model.config.decoder_layers)
    with torch.no_grad():
        wanted = model(features(3, frames=40)[None], decoder_input_ids=torch.tensor([PROMPT])).logits[0]
    source = source_of(engine, 3)
    assert torch.allclose(logits(engine.runner, PROMPT, source, plan), wanted, atol=2e-4)
    assert torch.allclose(logits(torch_runner(**sizes), PROMPT, source, plan), wanted, atol=2e-4)


def test_greedy_answers_are_those_of_transformers() -> None:
    engine = engine_of()
    for seed in range(4):
        ids = torch.tensor([PROMPT])
        for _ in range(NEW):
            with torch.no_grad():
                after = model_of()(features(seed, frames=40)[None], decoder_input_ids=ids).logits[0, -1]
            ids = torch.cat([ids, after.argmax()[None, None]], 1)
        found = engine.generate(PROMPT, source=source_of(engine, seed), max_new_tokens=NEW, ignore_eos=True)
        assert list(found.tokens) == ids[0, len(PROMPT) :].tolist()


@needs_kernels
def test_a_text_may_be_cut_anywhere_to_the_bit() -> None:
    engine = engine_of()
    tokens = [*PROMPT, *range(20, 60)]
    whole = logits(engine.runner, tokens, source_of(engine, 1))
    for cut in (1, 6, 30, 46):
        assert torch.equal(logits(engine.runner, tokens, source_of(engine, 1), cuts=cut), whole)


@needs_kernels
def test_a_node_of_a_tree_has_the_bits_of_its_path() -> None:
    runner, source = engine_of().runner, source_of(engine_of(), 1)
    parents, depths, tokens = [-1, 0, 0, 1, 2, 3], [0, 1, 1, 2, 2, 3], [9, 20, 30, 21, 31, 22]
    cache = runner.new_cache(1)
    cache.attach(0, source)
    runner.forward([SequenceChunk(0, PROMPT, [0] * len(PROMPT), FULL)], cache)
    cache.commit(0, range(len(PROMPT)))
    tree = SequenceChunk(0, tokens, [1] * len(tokens), FULL, parents, depths, wanted=len(tokens))
    found = runner.forward([tree], cache)
    for path in ([0, 1, 3, 5], [0, 2, 4]):
        alone = logits(runner, [*PROMPT, *(tokens[node] for node in path)], source, cuts=len(PROMPT))
        assert torch.equal(found[path], alone[len(PROMPT) :])


def test_rows_with_sources_of_their_own_are_as_each_alone() -> None:
    engine = engine_of()
    sources = [source_of(engine, 1), shorter(engine, 5, 3), source_of(engine, 2), shorter(engine, 6, 700),
               source_of(engine, 1)]
    prompts = [PROMPT, PROMPT[:2], [*PROMPT, 30, 31], PROMPT, PROMPT]
    together = engine.generate(prompts, source=sources, max_new_tokens=NEW, ignore_eos=True)
    alone = [engine.generate(prompt, source=source, max_new_tokens=NEW, ignore_eos=True)
             for prompt, source in zip(prompts, sources, strict=True)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert together[0].tokens == together[4].tokens != together[2].tokens


@pytest.mark.parametrize("method", ["prompt_lookup", "d3_spec", "auto", {"method": "aded"}])
def test_exact_methods_change_no_token(method: Any) -> None:
    engine = engine_of()
    prompts, sources = [PROMPT * 3, PROMPT], [source_of(engine, 1), source_of(engine, 2)]
    plain = engine.generate(prompts, source=sources, max_new_tokens=40, ignore_eos=True)
    found = engine.generate(prompts, source=sources, max_new_tokens=40, ignore_eos=True, method=method)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.parametrize("method", ["d3", {"method": "early_exit", "method_args": {"exit_layer": 4}}, "full"])
def test_plans_are_the_same_in_plain_torch(method: Any) -> None:
    engine = engine_of(decoder_layers=6)
    other = Engine(torch_runner(decoder_layers=6), model_name="torch")
    other.encoder = engine.encoder
    asked = {"source": source_of(engine, 1), "max_new_tokens": 24, "ignore_eos": True, "method": method}
    found, wanted = engine.generate(PROMPT, **asked), other.generate(PROMPT, **asked)
    assert found.tokens == wanted.tokens and found.stats.mean_layers == wanted.stats.mean_layers


def test_a_dropped_layer_reads_nothing_of_the_source() -> None:
    engine = engine_of()
    plan = DepthPlan.whole_layers([NEVER, 1, NEVER])
    source = source_of(engine, 1)
    changed = Encoded(tuple(keys + (number == 1) for number, keys in enumerate(source.keys)),
                      tuple(values + (number == 1) for number, values in enumerate(source.values)), "changed")
    assert torch.equal(logits(engine.runner, PROMPT, source, plan), logits(engine.runner, PROMPT, changed, plan))
    assert not torch.equal(logits(engine.runner, PROMPT, source), logits(engine.runner, PROMPT, changed))


def test_what_is_kept_of_a_prompt_serves_its_own_source_alone() -> None:
    engine, prompt, asked = engine_of(), [*PROMPT, *range(30, 50)], {"max_new_tokens": NEW, "ignore_eos": True}
    scheduler, found, cached = Scheduler(engine, prefix_bytes=1 << 24), [], []
    try:
        for seed in (1, 2, 1):
            handle = scheduler.submit(prompt, source=source_of(engine, seed), **asked)
            found.append(tuple(step.token for step in handle))
            cached.append(handle.entries[0].seq.cached)
    finally:
        scheduler.close()
    alone = [engine.generate(prompt, source=source_of(engine, seed), **asked).tokens for seed in (1, 2, 1)]
    assert found == alone and alone[0] != alone[1]
    assert cached == [0, 0, len(prompt) - 1]


def test_equal_sources_are_encoded_once() -> None:
    engine = engine_of()
    assert engine.encoder is not None
    calls = list[object]()
    hook = engine.encoder.module.register_forward_hook(lambda *_: calls.append(None))
    try:
        first, again, other = (engine.encoder(features(seed, frames=40).clone()) for seed in (11, 11, 12))
    finally:
        hook.remove()
    assert first is again and first is not other and len(calls) == 2


def test_half_floats_of_a_checkpoint_stay_two_bytes() -> None:
    model = whisper(seed=1, **SMALL).half()
    with TemporaryDirectory() as home:
        engine = shoal.load(write(Path(home) / "model", model))
    runner = engine.runner
    assert isinstance(runner, PackedRunner) and runner.dtype == torch.float32
    if native.available():
        assert {native.as_packed(matrix).kind for matrix in runner.weights.matrices()} == {"fp16"}
    with torch.no_grad():
        wanted = model.float()(features(3, frames=40)[None], decoder_input_ids=torch.tensor([PROMPT])).logits[0]
    assert torch.allclose(logits(runner, PROMPT, source_of(engine, 3)), wanted, atol=2e-4)


def test_what_cannot_be_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match="reads a source; give source"):
        engine.generate(PROMPT)
    with pytest.raises(ValueError, match="source is a list of 1 for 2 prompts"):
        engine.generate([PROMPT, PROMPT], source=[source_of(engine, 1)])
    with pytest.raises(ValueError, match="sequence 0 has no source"):
        engine.runner.forward([SequenceChunk(0, PROMPT, [0] * len(PROMPT), FULL)], engine.runner.new_cache(1))
    drafting = {"method": "draft_model", "method_args": {"draft": f"{home().name}/[]"}}
    with pytest.raises(Unsupported, match="it has an encoder, and would have to read the source too"):
        engine.generate(PROMPT, source=source_of(engine, 1), method=drafting)
    with pytest.raises(Unsupported, match="a source for a model without an encoder"):
        shoal.load().generate("Once", source=source_of(engine, 1), max_new_tokens=1)


@needs_kernels
def test_a_source_of_another_model_is_refused() -> None:
    engine, source = engine_of(), source_of(engine_of(), 1)
    for changed in (replace(source, keys=source.keys[:2]), replace(source, keys=tuple(k[:2] for k in source.keys)),
                    replace(source, values=tuple(v.double() for v in source.values))):
        with pytest.raises(ValueError, match="source"):
            logits(engine.runner, PROMPT, changed)
    assert logits(engine.runner, PROMPT, source).isfinite().all()


def test_memory_counts_an_encoder_and_the_sources_that_it_keeps() -> None:
    engine = engine_of()
    assert engine.encoder is not None and isinstance(engine.runner, PackedRunner)
    for seed in range(5):
        source = source_of(engine, seed)
    weights = packed_bytes(engine.encoder.module) + sum(one.nbytes for one in engine.encoder.module.parameters())
    assert engine.encoder.nbytes == weights + 3 * source.nbytes and len(engine.encoder._known) == 2
    assert weight_bytes(engine) == engine.runner.weights.nbytes + engine.encoder.nbytes
