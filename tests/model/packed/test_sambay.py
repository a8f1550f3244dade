"""SambaY in torch against the paper's formulas: logits, texts, drafts, prefixes, plans, and what prompts do not run."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig

import shoal
from backends import CPU
from drive import gap, prompt
from hybrid_steps import unpacked
from sambay import JOBS, LAYERS, SIZES, WINDOW, Oracle, random_tensors, role, shapes, write
from schedules import Action, actions, follow
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.cards.divergence import Judged
from shoal.engine.engine import Engine
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.early_exit import EarlyExit
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.unified_layer_skipping import UnifiedLayerSkipping
from shoal.model.packed import block
from shoal.model.packed.build import build
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.shape import shape_of
from shoal.model.packed.source import TensorSource
from shoal.model.packed.weights import tensors as named
from shoal.model.parity import chunked_logits, ragged_logits
from shoal.model.runner import SequenceChunk, Start
from shoal.model.sambay import Phi4FlashConfig

NEW, EXACT = 16, 1e-10
KEEPING, READ = LAYERS // 2 + 2, LAYERS // 2 + 1.5
"""Layers that keep something, and layers that a token of a prompt runs: of the last one keys and values alone."""
SCHEDULES = int(os.environ.get("SHOAL_SCHEDULES", "8"))
PROMPTS = [prompt(30), prompt(9, 1), prompt(1, 2)]
REPEATING = [*prompt(6, 3), *prompt(6, 3), *prompt(3, 3)]
LATE = DepthPlan.whole_layers([NEVER] * KEEPING + [3, 9, 1, NEVER, 5, 7])


@functools.cache
def tensors() -> dict[str, Tensor]:
    return random_tensors(SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sambay"), SIZES, tensors())


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return shoal.load(folder, dtype="float64")


@functools.cache
def formulas(ids: tuple[int, ...], plan: DepthPlan | None = None, new: int = NEW) -> tuple[list[int], Tensor]:
    """The oracle's greedy text and logits; under a plan, layers drop out as its steps go by."""
    if plan is None:
        return Oracle(SIZES, tensors()).greedy(ids, new)
    runs = lambda layer, at: plan.attention[layer] > max(0, at + 1 - len(ids))  # noqa: E731
    return Oracle(SIZES, tensors(), runs).greedy(ids, new)


def texts(prompts: Sequence[Sequence[int]], plan: DepthPlan | None = None, new: int = NEW) -> list[list[int]]:
    return [formulas(tuple(ids), plan, new)[0] for ids in prompts]


def generated(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return [list(result.tokens) for result in engine.generate(prompts, max_new_tokens=NEW, **options)]


@pytest.mark.parametrize("sizes", [(40,), (5, 20, 1, 14), (1,) * 40], ids=str)
def test_logits_are_those_of_the_formulas(engine: Engine, sizes: tuple[int, ...]) -> None:
    ids = prompt(40)
    wanted = Oracle(SIZES, tensors()).read(ids)
    assert gap(chunked_logits(engine.runner, ids, sizes), wanted) < EXACT


def test_in_trees_and_beside_others(engine: Engine) -> None:
    ids = prompt(9, 4)
    wanted = Oracle(SIZES, tensors()).read(ids)
    assert gap(ragged_logits(engine.runner, ids), torch.cat([wanted, wanted[:4]])) < EXACT


def in_torch(dtype: torch.dtype, quant: Any = None) -> PackedRunner:
    return build(Phi4FlashConfig(**SIZES), TensorSource(tensors()), dtype, CPU, quant, kernels=False)


def test_in_float32() -> None:
    runner, ids = in_torch(torch.float32), prompt(30)
    wanted = Oracle(SIZES, tensors()).read(ids)
    assert gap(chunked_logits(runner, ids, (7, 23)).double(), wanted) < 1e-4 * float(wanted.abs().max())


def test_in_bfloat16() -> None:
    """Against the formulas on the rounded weights; activations are rounded besides."""
    rounded = {name: tensor.bfloat16().double() for name, tensor in tensors().items()}
    runner, ids = in_torch(torch.bfloat16), prompt(30)
    wanted = Oracle(SIZES, rounded).read(ids)
    found = chunked_logits(runner, ids, (7, 23)).double()
    assert float((found - wanted).abs().mean()) < 0.03 * float(wanted.abs().max())


@pytest.mark.parametrize("change", [
    {"num_key_value_heads": 8}, {"num_key_value_heads": 2}, {"num_hidden_layers": 8}, {"num_hidden_layers": 4},
    {"sliding_window": [None if role(layer) != "window" else 5 for layer in range(LAYERS)], "window": 5},
], ids=str)
def test_other_sizes(change: dict[str, Any], tmp_path: Path) -> None:
    window = change.pop("window", WINDOW)
    sizes = {**SIZES, **change}
    own, ids = random_tensors(sizes, 1), prompt(21, 5)
    runner = shoal.load(write(tmp_path / "model", sizes, own), dtype="float64").runner
    assert gap(chunked_logits(runner, ids, (13, 8)), Oracle({**sizes, "sliding_window": window}, own).read(ids)) < EXACT


def test_texts_of_prompts_of_three_lengths_together_and_alone(engine: Engine) -> None:
    assert generated(engine, PROMPTS) == texts(PROMPTS)
    assert [generated(engine, [ids])[0] for ids in PROMPTS] == texts(PROMPTS)


SELF = {"method": "swift", "method_args": {"ratio": 0.5}}, "draft_and_verify", "layerskip", "aded"
"""Those of the lab, where it is installed, draft with any sublayers of the model's own."""


@pytest.mark.parametrize("method", [PromptLookup(min_ngram=1, length=5), D3Spec(length=3), "auto", *(
    one for one in SELF if one == "aded" or find_spec("shoal_lab"))], ids=str)
def test_guesses_change_no_token(engine: Engine, method: Any) -> None:
    prompts = [REPEATING, *PROMPTS]
    found = engine.generate(prompts, max_new_tokens=NEW, method=method)
    assert [list(result.tokens) for result in found] == texts(prompts)
    assert method in ("auto", "aded") or any(result.stats.drafted > result.stats.accepted for result in found)


def test_the_prompt_runs_the_self_decoder_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, the tokens that ran are counted; the ledger says the same."""
    assert isinstance(engine.runner, PackedRunner)
    layers, ran, real = engine.runner.weights.layers, [0] * LAYERS, block.mlp

    def counted(x: Tensor, layer: Any, *args: Any, **more: Any) -> Tensor:
        ran[next(number for number, one in enumerate(layers) if one is layer)] += len(x)
        return real(x, layer, *args, **more)

    monkeypatch.setattr(block, "mlp", counted)
    (result,) = engine.generate([PROMPTS[0]], max_new_tokens=5)
    assert ran == [30 + 4] * (KEEPING - 1) + [1 + 4] * (LAYERS - KEEPING + 1)
    assert result.stats.extras["skipped_layer_tokens"] == 29 * (LAYERS - READ)
    assert result.stats.mean_layers == LAYERS


def test_a_prompt_attends_beyond_windows_from_its_last_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the time of a prompt grows with its length, not with its square."""
    queries, layers = Counter[int](), {0.8 - 0.6 * math.exp(-0.3 * layer): layer for layer in range(LAYERS)}
    real = block.differential_attention

    def counted(q: Tensor, *args: Any, own: Any, **more: Any) -> Tensor:
        queries[layers[own.start]] += q.shape[2]
        return real(q, *args, own=own, **more)

    monkeypatch.setattr(block, "differential_attention", counted)
    engine.generate([PROMPTS[0]], max_new_tokens=1)
    assert queries == {layer: 30 if role(layer) == "window" else 1 for layer in range(1, LAYERS, 2)}


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prompts_in_pieces_run_the_cross_decoder_on_the_last_token_alone(engine: Engine, chunk: int) -> None:
    scheduler = Scheduler(engine, prefill_chunk=chunk, start=False)
    handles = [scheduler.submit(ids, max_new_tokens=NEW) for ids in PROMPTS]
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    assert [list(handle.results[0].tokens) for handle in handles] == texts(PROMPTS)
    for handle, ids in zip(handles, PROMPTS, strict=True):
        ledger = handle.entries[0].seq.ledger
        assert ledger.prefill_layer_tokens == (len(ids) - 1) * READ + LAYERS
        assert ledger.decode_layer_tokens == (NEW - 1) * LAYERS


def test_hooks_see_all_layers_at_all_tokens(engine: Engine) -> None:
    ids, seen = prompt(7), list[Tensor]()
    chunk = SequenceChunk(0, ids, [0] * 7, DepthPlan.full(LAYERS), wanted=1)
    logits = engine.runner.forward([chunk], engine.runner.new_cache(1), lambda _, hidden: seen.append(hidden))
    wanted = Oracle(SIZES, tensors()).read(ids)
    assert gap(logits, wanted[-1:]) < EXACT and gap(engine.runner.exit_logits(seen[-1][0]), wanted) < EXACT
    bare = engine.runner.forward([chunk], engine.runner.new_cache(1))
    assert gap(bare, logits) < EXACT


@pytest.mark.parametrize("plan", [LATE, DepthPlan.whole_layers([2, 4] + [NEVER] * 14),
                                  DepthPlan.whole_layers([NEVER] * 9 + [6] * 7)], ids=["late", "early", "exit"])
def test_plans_are_the_formulas_with_layers_left_out(engine: Engine, plan: DepthPlan) -> None:
    """The first two prompts and a third alone; the logits too, from guesses as well as without."""
    cache, oracle = engine.runner.new_cache(1), formulas(tuple(PROMPTS[1]), plan)
    fed, logits = [PROMPTS[1], *([token] for token in oracle[0][:-1])], list[Tensor]()
    for step, tokens in enumerate(fed):
        chunk = SequenceChunk(0, tokens, [step] * len(tokens), plan)
        logits.append(engine.runner.forward([chunk], cache)[0])
        cache.commit(0, range(len(tokens)))
        cache.release(0, plan.dropped(step + 1))
    assert gap(torch.stack(logits), oracle[1]) < EXACT


def test_attention_and_mlp_may_be_dropped_apart(engine: Engine) -> None:
    """Token by token and as one block of guesses."""
    plan = DepthPlan((NEVER,) * KEEPING + (2, 5, 1, 4, 3, NEVER), (NEVER,) * 8 + (3, 1, 5, 2, NEVER, 6, 1, NEVER))
    ids, tokens = prompt(6), prompt(7, 1)
    found = []
    for pieces in ([tokens], [[token] for token in tokens]):
        cache = engine.runner.new_cache(1)
        engine.runner.forward([SequenceChunk(0, ids, [0] * 6, plan)], cache)
        cache.commit(0, range(6))
        logits, step = [], 1
        for piece in pieces:
            steps = range(step, step + len(piece))
            logits.append(engine.runner.forward([SequenceChunk(0, piece, steps, plan, wanted=len(piece))], cache))
            cache.commit(0, range(len(piece)))
            step += len(piece)
        found.append(torch.cat(logits))
    assert gap(*found) < EXACT


@pytest.mark.parametrize("order", ["auto", "low_first", "high_first", "spread"])
def test_d3_drops_the_cross_decoder(engine: Engine, order: str) -> None:
    method = D3(alpha=0.9, order=order)
    plan = engine.recipe(method, NEW).plan
    assert not plan.is_full and plan.first_drop(KEEPING) == NEVER
    assert generated(engine, PROMPTS, method=method) == texts(PROMPTS, plan)
    mean = engine.generate(PROMPTS[0], max_new_tokens=NEW, method=method).stats.mean_layers
    assert mean == plan.mean_depth(NEW) < LAYERS


def test_a_layer_that_others_read_stays_as_long_as_they(engine: Engine) -> None:
    with pytest.raises(ValueError, match=f"core is 6 layers; it must be in {KEEPING}..{LAYERS}.*later ones read"):
        engine.recipe(D3(alpha=0.9, core=6), NEW)
    for source in (KEEPING - 2, KEEPING - 1):
        plan = DepthPlan.skipping(LAYERS, [source], [source])
        with pytest.raises(Unsupported, match=f"drops layer {source} at step 1: layer {source + 2}, which runs longer"):
            engine.runner.forward([SequenceChunk(0, [1], [0], plan)], engine.runner.new_cache(1))
    with pytest.raises(Unsupported, match="drops layer 9 at step 1: layer 13, which runs longer"):
        engine.recipe(UnifiedLayerSkipping(speedup=1.6), NEW)
    with pytest.raises(Unsupported, match="a forward from layer 9 on"):
        chunk = SequenceChunk(0, [1], [0], DepthPlan.full(LAYERS))
        engine.runner.forward([chunk], engine.runner.new_cache(1), start=Start(9, torch.zeros(1, 1, 32).double()))
    plan = engine.recipe(EarlyExit(exit_layer=KEEPING - 1), NEW).plan  # nothing is left that would read it
    assert generated(engine, PROMPTS, method=EarlyExit(exit_layer=KEEPING - 1)) == texts(PROMPTS, plan)


@pytest.mark.parametrize("method", ["full", D3(alpha=0.9)], ids=str)
def test_the_next_turn_reads_only_what_is_new(engine: Engine, method: Any) -> None:
    """Under D3 too: what the cross-decoder left out was stored nowhere, so that nothing is to be read again."""
    scheduler, talk, known = Scheduler(engine, start=False), prompt(11, 5), 0
    for turn in range(3):
        handle = scheduler.submit(talk, method=method, max_new_tokens=6)
        while scheduler.running or scheduler.waiting:
            scheduler.turn()
        (result,), seq = handle.results, handle.entries[0].seq
        plan = None if method == "full" else engine.recipe(method, 6).plan
        assert list(result.tokens) == formulas(tuple(talk), plan, 6)[0]
        assert seq.cached == known
        assert seq.ledger.prefill_tokens == len(talk) - known
        known = len(talk) + 5
        talk = [*talk, *result.tokens, *prompt(4, 20 + turn)]


def test_sessions_go_back(engine: Engine) -> None:
    """A cache cut back to a snapshot goes on as the formulas do."""
    ids, more, runner = prompt(12), prompt(9, 7), engine.runner
    cache, plan = runner.new_cache(1), DepthPlan.full(LAYERS)
    for tokens in (ids, more):
        runner.forward([SequenceChunk(0, tokens, [0] * len(tokens), plan)], cache)
        cache.commit(0, range(len(tokens)))
        cache.mark(0)
    assert cache.truncate(0, 15) == 12
    other = prompt(5, 9)
    logits = runner.forward([SequenceChunk(0, other, [0] * 5, plan, wanted=5)], cache)
    assert gap(logits, Oracle(SIZES, tensors()).read([*ids, *other])[12:]) < EXACT
    cache.rollback(0)
    again = runner.forward([SequenceChunk(0, other, [0] * 5, plan, wanted=5)], cache)
    assert torch.equal(again, logits)


def test_the_shared_keys_and_values_may_be_quantised(engine: Engine) -> None:
    """Lossy, near, and used: the cross-decoder reads them in the form in which they are stored."""
    found = engine.generate(PROMPTS[0], max_new_tokens=NEW, method=KVInt8())
    assert found.tokens[:3] == tuple(texts(PROMPTS[:1])[0][:3])
    assert found.stats.kv_bytes_used < engine.generate(PROMPTS[0], max_new_tokens=NEW).stats.kv_bytes_used


def test_only_what_is_kept_is_stored(engine: Engine) -> None:
    """One layer holds all of the text; the windows hold theirs, and the cross-decoder nothing."""
    runner = engine.runner
    whole = [layer for layer in range(LAYERS) if runner.position_bytes[layer] and runner.windows[layer] is None]
    assert whole == [KEEPING - 1] and not any(runner.position_bytes[KEEPING:]) and not any(runner.kv_sizes[KEEPING])
    assert sorted(runner.state_bytes) == [0, 2, 4, 6, 8]


@settings(max_examples=SCHEDULES, deadline=None)
@given(todo=actions(len(JOBS), 16), rows=st.integers(1, 4), chunk=st.sampled_from((1, 3, 8, 64)),
       kept=st.sampled_from((0, 1 << 16, 1 << 24)))
def test_every_sequence_gives_what_it_gives_alone(todo: list[Action], rows: int, chunk: int, kept: int) -> None:
    scheduler = Scheduler(shared(), max_seqs=rows, prefix_bytes=kept, prefill_chunk=chunk, start=False)

    def alone(job: int) -> list[tuple[int, ...]]:
        ids, options = JOBS[job]
        plan = shared().recipe(options["method"], options["max_new_tokens"]).plan
        text = formulas(tuple(ids), None if plan.is_full else plan, options["max_new_tokens"])[0]
        return [tuple(text)] * options["n"]

    follow(scheduler, JOBS, todo, alone)


@functools.cache
def shared() -> Engine:
    """The engine once more, for tests that take no fixtures."""
    with tempfile.TemporaryDirectory() as home:
        return shoal.load(write(Path(home) / "model", SIZES, tensors()), dtype="float64")


def test_measured_layers_say_what_the_order_is(engine: Engine) -> None:
    judged = Judged(engine.runner, (PROMPTS[1], texts(PROMPTS)[1]))
    judged.without(0)
    for layer in range(LAYERS):
        assert judged.without(layer).mean > 0
    source, reader = (judged.without(layer).mean for layer in (KEEPING - 1, LAYERS - 1))
    assert source != reader


def test_the_folder_loads_without_the_code_that_it_names(folder: Path) -> None:
    assert isinstance(shoal.load(folder, dtype="float32").runner, PackedRunner)
    with pytest.raises(ValueError):
        AutoConfig.from_pretrained(folder, trust_remote_code=False)


def test_the_published_config_describes_the_published_tensors() -> None:
    """Phi-4-mini-flash-reasoning's index says total_size 7,706,608,640: bfloat16, but for decays and lambdas."""
    config = Phi4FlashConfig()
    sizes = {name: getattr(config, name) for name in SIZES if hasattr(config, name)}
    ours = {name for forms in named(config, shape_of(config), "model.", True) for name in forms[0]}
    theirs = shapes(sizes)
    assert ours == set(theirs)
    size = sum((4 if "A_log" in name or "lambda" in name else 2) * math.prod(shape) for name, shape in theirs.items())
    assert size == 7_706_608_640
    assert Counter(config.own_layer_types) == {"linear_attention": 9, "sliding_attention": 8, "full_attention": 1,
                                           "gated_memory": 7, "cross_attention": 7}


def test_a_saved_config_is_read_again(tmp_path: Path) -> None:
    config = Phi4FlashConfig(num_hidden_layers=8, sliding_window=7)
    config.save_pretrained(tmp_path)
    again = Phi4FlashConfig.from_pretrained(tmp_path)
    assert (again.num_hidden_layers, again.sliding_window, again.mamba_dt_rank) == (8, 7, 160)


@pytest.mark.parametrize(("change", "message"), [
    ({"num_hidden_layers": 20}, "a checkpoint without 'model.layers.10.attn.A_log'"),
    ({"num_hidden_layers": 12}, "a checkpoint (with|without) 'model.layers"),
    ({"num_hidden_layers": 14}, "num_hidden_layers is 14; it must be a multiple of 4"),
    ({"mb_per_layer": 3}, "mb_per_layer is 3; it must be 2"),
    ({"num_key_value_heads": 1}, "num_key_value_heads 1 .*both must be even"),
    ({"sliding_window": [8] * LAYERS}, "sliding_window is .*null for the others"),
    ({"mamba_d_state": 6}, "A_log' is \\[64, 5\\]: its config asks for \\[64, 6\\]"),
    ({"hidden_act": "relu"}, "activation"),
], ids=str)
def test_a_config_that_does_not_fit_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    home = write(tmp_path / "model", {**SIZES, **change}, tensors())
    with pytest.raises(ValueError, match=message) as caught:
        shoal.load(home, dtype="float32")
    assert "\n" not in str(caught.value)


def test_what_needs_modules_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="backend 'hf' of model type 'phi4flash': transformers has no modules"):
        shoal.load(folder, backend="hf")
    with pytest.raises(Unsupported, match="building the modules of model type 'phi4flash'"):
        shoal.load(folder, transform=shoal.DropLayers((3,)))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
    with pytest.raises(Unsupported, match="weights of model type 'phi4flash'.*safetensors"):
        shoal.load(empty)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_matrices_are_what_they_stand_for(quant: Any) -> None:
    runner, ids = in_torch(torch.float32, quant), prompt(12)
    plain = PackedRunner(runner.shape, unpacked(runner.weights), runner.rotary, runner.dtype, runner.device)
    wanted = chunked_logits(plain, ids, (12,))
    assert gap(chunked_logits(runner, ids, (5, 7)), wanted) < 1e-4 * float(wanted.abs().max())
    assert gap(wanted.double(), Oracle(SIZES, tensors()).read(ids)) > 1e-3 * float(wanted.abs().max())


def test_the_tokenizer_cuts_text_as_its_file_says(tmp_path: Path) -> None:
    """The published one names GPT-2's class, which would cut by GPT-2's rules."""
    vocabulary = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    vocabulary |= {"12": len(vocabulary), "123": len(vocabulary) + 1}
    made = Tokenizer(models.BPE(vocabulary, [("1", "2"), ("12", "3")]))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,2}|[^\p{N}]+"), "isolated"),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    sizes = {**SIZES, "vocab_size": len(vocabulary), "num_hidden_layers": 4}
    home = write(tmp_path / "model", sizes, random_tensors(sizes))
    made.save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}', encoding="utf-8")
    assert shoal.load(home).tokenizer.tokenize("12345") == ["12", "3", "4", "5"]


@pytest.mark.parametrize("name", ["lambda_q1", "subln.weight", "conv1d.bias", "layers.9.attn.Wqkv.bias", "attn.D",
                                  "layers.10.attn.in_proj", "final_layernorm.bias"])
def test_the_comparison_has_power(name: str, engine: Engine) -> None:
    wrong = {key: 1.02 * tensor if name in key else tensor for key, tensor in tensors().items()}
    assert gap(chunked_logits(engine.runner, prompt(12), (12,)), Oracle(SIZES, wrong).read(prompt(12))) > 1e-4
