"""Decoders beside encoders of text, on the kernels and in plain torch: against transformers' modules, and by rows."""

from __future__ import annotations

import json
from functools import cache, partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaRMSNorm

import families
import shoal
from encoder_decoders import END, KINDS, LAYERS, START, likeliest, logits_of, model_of, tokenizer, write
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.model.layers.relative_bias import both_ways, by_distance
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import ModelSource
from shoal.model.runner import SequenceChunk

FULL, NEW = DepthPlan.full(LAYERS), 12
SOURCES = ([5, 6, 7, 8, 9, 9, 30, END], [90, 40, END], [33, 34, 33, 34, 99, *range(60, 90), END], [7, END])
PROMPT = [START, *range(20, 45), 30, 31, 30, 31]
OTHERS = ("bart", "mbart", "marian", "t5", "umt5", "t5gemma")
"""One of each form of layers."""
needs_kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")


@cache
def known(kind: str) -> Any:
    return model_of(kind)


def in_double(kind: str) -> Any:
    """A model in float64, T5's and Gemma's norms too, which transformers computes in float32."""
    model = model_of(kind).double()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(rms_norm, normalized_shape=(32,), weight=module.weight,
                                     eps=module.variance_epsilon)
        elif isinstance(module, T5GemmaRMSNorm):
            module.forward = partial(rms_norm, normalized_shape=module.weight.shape, weight=1 + module.weight,
                                     eps=module.eps)
    if "t5gemma" in kind:  # whose softmax, too
        for config in (model.config, model.config.encoder, model.config.decoder):
            config._attn_implementation = families._ATTENTION["gemma2"]
    return model


@cache
def home() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def engine_of(kind: str) -> Engine:
    """The engine of files, as a user has it."""
    return shoal.load(write(Path(home().name) / kind, known(kind)), tokenizer())


@cache
def torch_engine(kind: str) -> Engine:
    """The same in plain torch."""
    model, engine = known(kind), engine_of(kind)
    runner = build(model.config, ModelSource(model), torch.float32, torch.device("cpu"), kernels=False)
    other = Engine(runner, model_name="torch", eos_token_ids=engine.eos_token_ids)
    other.encoder = engine.encoder
    return other


def logits(engine: Engine, source: list[int], tokens: list[int], cuts: int = 0) -> Tensor:
    """Logits of all tokens, of which the first ones may be run before the others."""
    assert engine.encoder is not None
    cache, found = engine.runner.new_cache(1), []
    cache.attach(0, engine.encoder.read(source))
    for part in filter(None, (tokens[:cuts], tokens[cuts:])):
        found.append(engine.runner.forward([SequenceChunk(0, part, [1] * len(part), FULL, wanted=len(part))], cache))
        cache.commit(0, range(len(part)))
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str) -> None:
    """Beyond 1e-5 only where transformers' own float32 is as far from float64: T5's scores are not scaled."""
    exact = in_double(kind)
    for source in SOURCES[:3]:
        wanted = logits_of(exact, source, PROMPT)
        most = 1e-5 * wanted.abs().max() + 4 * (logits_of(known(kind), source, PROMPT) - wanted).abs().max()
        for engine in (engine_of(kind), torch_engine(kind)):
            assert (logits(engine, source, PROMPT) - wanted).abs().max() < most


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_double_are_those_of_transformers(kind: str) -> None:
    exact = in_double(kind)
    early = "t5" in kind and "cache_position" in signature(T5Attention.compute_bias).parameters
    close = 1e-3 if early else 1e-8  # early T5s take softmax in float32
    engine = shoal.load(exact)
    for source in SOURCES[:3]:
        wanted = logits_of(exact, source, PROMPT)
        assert torch.allclose(logits(engine, source, PROMPT), wanted, rtol=close, atol=close)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_transformers(kind: str) -> None:
    for source in SOURCES[:2]:
        found = engine_of(kind).generate(source, max_new_tokens=NEW, ignore_eos=True)
        assert list(found.tokens) == likeliest(known(kind), source, NEW)
        assert found.stats.prompt_tokens == 1 + (0 if kind == "marian-apart" else len(source))


@pytest.mark.parametrize("kind", ["bart", "marian", "m2m_100"])
def test_what_a_generation_config_forces_is_forced(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    forced = {"forced_bos_token_id": 44, "forced_eos_token_id": END, "no_repeat_ngram_size": 2,
              "encoder_no_repeat_ngram_size": 1, "min_length": NEW - 2, "eos_token_id": list(range(10, 200))}
    for name, value in forced.items():
        setattr(model.generation_config, name, value)
    engine = shoal.load(write(tmp_path / "model", model), tokenizer())
    for source in SOURCES[:3]:
        wanted = model.generate(torch.tensor([source]), max_new_tokens=NEW, do_sample=False, num_beams=1)
        found = engine.generate(source, max_new_tokens=NEW)
        assert [START, *found.tokens] == wanted[0].tolist() and found.tokens[0] == 44


@needs_kernels
@pytest.mark.parametrize("kind", OTHERS)
def test_a_text_may_be_cut_anywhere_to_the_bit(kind: str) -> None:
    whole = logits(engine_of(kind), SOURCES[2], PROMPT)
    for cut in (1, 6, 29):
        assert torch.equal(logits(engine_of(kind), SOURCES[2], PROMPT, cut), whole)


@needs_kernels
@pytest.mark.parametrize("kind", OTHERS)
def test_a_node_of_a_tree_has_the_bits_of_its_path(kind: str) -> None:
    engine, runner = engine_of(kind), engine_of(kind).runner
    assert engine.encoder is not None
    parents, depths, tokens = [-1, 0, 0, 1, 2, 3], [0, 1, 1, 2, 2, 3], [9, 20, 30, 21, 31, 22]
    cache = runner.new_cache(1)
    cache.attach(0, engine.encoder.read(SOURCES[0]))
    runner.forward([SequenceChunk(0, PROMPT, [0] * len(PROMPT), FULL)], cache)
    cache.commit(0, range(len(PROMPT)))
    tree = SequenceChunk(0, tokens, [1] * len(tokens), FULL, parents, depths, wanted=len(tokens))
    found = runner.forward([tree], cache)
    for path in ([0, 1, 3, 5], [0, 2, 4]):
        alone = logits(engine, SOURCES[0], [*PROMPT, *(tokens[node] for node in path)], len(PROMPT))
        assert torch.equal(found[path], alone[len(PROMPT) :])


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_sources_together_are_as_each_alone(kind: str) -> None:
    engine, asked = engine_of(kind), {"max_new_tokens": NEW, "ignore_eos": True}
    together = engine.generate([*SOURCES, SOURCES[0]], **asked)
    assert [one.tokens for one in together] == [engine.generate(one, **asked).tokens for one in (*SOURCES, SOURCES[0])]
    assert together[0].tokens == together[4].tokens


@pytest.mark.parametrize("method", ["prompt_lookup", "d3_spec", "auto", {"method": "aded"}])
@pytest.mark.parametrize("kind", OTHERS)
def test_exact_methods_change_no_token(kind: str, method: Any) -> None:
    for engine in (engine_of(kind), torch_engine(kind)):
        asked = {"max_new_tokens": 30, "ignore_eos": True}
        plain, found = engine.generate([*SOURCES], **asked), engine.generate([*SOURCES], method=method, **asked)
        assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
def test_guesses_are_quoted_from_the_source(method: str) -> None:
    source = [*range(60, 90), END]

    def quoting(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, source[min(ids.shape[1] - 1, len(source) - 1)]] += 1e4
        return scores

    found = engine_of("bart").generate(source, method=method, max_new_tokens=len(source), logits_processor=[quoting])
    assert list(found.tokens) == source and found.finish_reason == "stop"
    if method != "auto":  # which goes by measured times
        assert found.stats.accepted > 10 and found.stats.target_forwards < len(source) / 2


@pytest.mark.parametrize("method", ["d3", {"method": "early_exit", "method_args": {"exit_layer": 2}}])
@pytest.mark.parametrize("kind", OTHERS)
def test_plans_are_the_same_in_plain_torch(kind: str, method: Any) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "method": method}
    for source in SOURCES[:2]:
        found, wanted = (engine.generate(source, **asked) for engine in (engine_of(kind), torch_engine(kind)))
        assert found.tokens == wanted.tokens and found.stats.mean_layers == wanted.stats.mean_layers


def test_beams_are_missed_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("bart")
    model.generation_config.num_beams = 4
    shoal.load(write(tmp_path / "model", model))
    assert "asks for 4 beams (num_beams), which Shoal does not have" in caplog.text


def test_text_is_the_source_and_its_answer_is_text() -> None:
    engine = engine_of("mbart")
    found = engine.generate("translate", max_new_tokens=NEW)
    ids = list(engine.tokenizer("translate")["input_ids"])
    assert ids[-1] == END and found.tokens == engine.generate(ids, max_new_tokens=NEW).tokens
    assert found.text == engine.tokenizer.decode(found.tokens, skip_special_tokens=True)
    assert "".join(step.text for step in engine.stream("translate", max_new_tokens=NEW)) == found.text


def test_an_answer_may_be_begun_beside_a_source() -> None:
    engine, begun = engine_of("m2m_100"), [START, 44, 45]
    assert engine.encoder is not None
    source = engine.encoder.read(SOURCES[0])
    found = engine.generate(begun, source=source, max_new_tokens=1)
    assert found.tokens[0] == int(logits_of(known("m2m_100"), SOURCES[0], begun)[-1].argmax())


def test_what_is_kept_serves_its_own_source_alone() -> None:
    engine, found, cached = engine_of("marian"), [], []
    assert engine.encoder is not None
    asked = [{"max_new_tokens": NEW, "ignore_eos": True, "source": engine.encoder.read(source)}
             for source in (*SOURCES[:2], SOURCES[0])]
    with Scheduler(engine, prefix_bytes=1 << 24) as scheduler:
        for options in asked:
            handle = scheduler.submit(PROMPT, **options)
            found.append(tuple(step.token for step in handle))
            cached.append(handle.entries[0].seq.cached)
    assert found == [engine.generate(PROMPT, **options).tokens for options in asked]
    assert cached == [0, 0, len(PROMPT) - 1] and found[0] != found[1]


def test_a_scheduler_reads_prompts_as_sources() -> None:
    engine, asked = engine_of("t5"), {"max_new_tokens": NEW, "ignore_eos": True}
    with Scheduler(engine) as scheduler:
        handles = [scheduler.submit(source, n=2, **asked) for source in SOURCES]
        found = [tuple(step.token for step in handle if step.seq == 1) for handle in handles]
    assert found == [engine.generate(source, **asked).tokens for source in SOURCES]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_loaded_model_is_packed_beside_its_own_encoder(kind: str) -> None:
    engine, model = shoal.load(known(kind)), known(kind)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    assert engine.generate(SOURCES[0], max_new_tokens=NEW).tokens == engine_of(kind).generate(
        SOURCES[0], max_new_tokens=NEW).tokens
    assert engine.encoder is not None and engine.encoder.module is model.get_encoder()
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())


def test_a_config_of_umt5_says_whether_the_states_before_the_head_are_scaled(tmp_path: Path) -> None:
    """As those of T5 1.1 and UMT5 do, by `tie_word_embeddings`; transformers 5 forgets UMT5's, and scales them."""
    found = dict[bool, Tensor]()
    for scaled in (True, False):
        folder = write(tmp_path / str(scaled), known("umt5"))
        config = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": scaled}), "utf-8")
        found[scaled] = logits(shoal.load(folder), SOURCES[0], PROMPT)
    torch.testing.assert_close(found[True] * 32**0.5, found[False])


@needs_kernels
def test_kernels_run_them_all() -> None:
    for kind in KINDS:
        runner = engine_of(kind).runner
        assert isinstance(runner, PackedRunner) and type(runner).__name__ == "NativeRunner"


def test_int8_is_near() -> None:
    for kind in OTHERS:
        folder = str(Path(home().name) / kind) if engine_of(kind) else ""
        engine = shoal.load(folder, tokenizer(), quant="int8")
        wanted = logits_of(known(kind), SOURCES[0], PROMPT)
        off = (logits(engine, SOURCES[0], PROMPT) - wanted).pow(2).mean().sqrt() / wanted.std()
        assert off < 0.6  # of logits of large random weights


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    engine = engine_of("bart")
    with pytest.raises(ValueError, match="the source has 97 tokens and the encoder reads 96; shorten it"):
        engine.generate([5] * 97, max_new_tokens=1)
    assert len(engine_of("t5").generate([5] * 600, max_new_tokens=2, ignore_eos=True).tokens) == 2
    with pytest.raises(ValueError, match="token id 270; the model's ids are 0..269"):
        engine.generate([270], max_new_tokens=1)
    with pytest.raises(Unsupported, match="its encoder reads one source. Use engine.generate with the text"):
        engine.session()
    with pytest.raises(ValueError, match="with a chat template, and this model has none; give text"):
        engine.generate([{"role": "user", "content": "a"}])
    with pytest.raises(Unsupported, match="it has an encoder, and would have to read the source too"):
        shoal.load().generate("a", method={"method": "draft_model", "method_args": {"draft": f"{home().name}/bart"}})
    with pytest.raises(Unsupported, match="scores depend on how far apart tokens are"):
        engine_of("t5").generate(SOURCES[0], method="streaming_llm", max_new_tokens=4)
    for model in (f"{home().name}/bart", known("bart")):
        with pytest.raises(Unsupported, match="'bart' on transformers' modules: Shoal runs its decoder packed"):
            shoal.load(model, backend="hf")
    with pytest.raises(Unsupported, match="a transform of a model with an encoder: its files hold two stacks"):
        shoal.load(f"{home().name}/bart", transform=shoal.DropLayers([1]))
    with pytest.raises(Unsupported, match="a card of a model with an encoder: layers are measured on texts"):
        shoal.quick_card(engine)
    model = model_of("mbart", decoder_start_token_id=None, bos_token_id=None)
    model.generation_config.decoder_start_token_id = model.generation_config.bos_token_id = None
    with pytest.raises(Unsupported, match="without a decoder_start_token_id"):
        shoal.load(write(tmp_path / "model", model))


def test_ranges_of_distances_are_those_of_transformers() -> None:
    attention = known("t5").decoder.block[0].layer[0].SelfAttention
    found = by_distance(attention.relative_attention_bias.weight.detach(), 20)
    wanted = attention.compute_bias(64, 64)[0, :, -1].flip(1)
    assert found.shape == (4, 21)
    assert torch.equal(found[:, torch.arange(64).clamp(max=20)], wanted)


@pytest.mark.parametrize("places", [1, 2, 64])
def test_ranges_both_ways_are_those_of_transformers(places: int) -> None:
    attention, place = known("t5").encoder.block[0].layer[0].SelfAttention, torch.arange(places)
    found = both_ways(attention.relative_attention_bias.weight.detach(), 20, places)
    assert torch.equal(found[:, place - place[:, None] + places - 1], attention.compute_bias(places, places)[0])
