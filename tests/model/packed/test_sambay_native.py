"""SambaY on the kernels: against the paper's formulas in float64, and against themselves token by token, to the bit."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shoal
from drive import gap, path_to, prompt
from hybrid_steps import unpacked
from sambay import JOBS, LAYERS, SIZES, VOCAB, Oracle, random_tensors, write
from schedules import Action, actions, follow
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.native.library import LayerStruct
from shoal.model.packed.native.spans import Spans
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.recurrent import MixerState
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import TensorSource
from shoal.model.parity import chunked_logits, ragged_logits
from shoal.model.runner import SequenceChunk
from shoal.model.sambay import Phi4FlashConfig
from shoal.model.state.layer import StateLayer

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
NEAR, NEW = 1e-4, 16
FULL, KEEPING = DepthPlan.full(LAYERS), LAYERS // 2 + 2
WIDE = {**SIZES, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "mamba_d_state": 16}
"""Heads of 32 dimensions, three pairs of queries for one of keys."""
PROMPTS = [prompt(30), prompt(9, 1), prompt(1, 2)]
SCHEDULES = int(os.environ.get("SHOAL_SCHEDULES", "8"))


@cache
def made(change: tuple[tuple[str, Any], ...] = (), dtype: str = "float32", quant: Any = None) -> NativeRunner:
    sizes = {**SIZES, **dict(change)}
    with tempfile.TemporaryDirectory() as home:
        folder = write(Path(home) / "model", sizes, random_tensors(sizes))
        runner = shoal.load(folder, dtype=dtype, quant=quant).runner
    assert isinstance(runner, NativeRunner)
    return runner


@cache
def formulas(ids: tuple[int, ...], change: tuple[tuple[str, Any], ...] = ()) -> Tensor:
    sizes = {**SIZES, **dict(change)}
    return Oracle(sizes, random_tensors(sizes)).read(ids).float()


CHANGES: list[dict[str, Any]] = [
    {}, {"num_key_value_heads": 8}, {"num_key_value_heads": 2}, {"num_hidden_layers": 8}, {"num_hidden_layers": 4},
    {"sliding_window": 3}, WIDE]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str({key: change[key] for key in sorted(change)
                                                                   if change[key] != SIZES.get(key)}))
def test_logits_are_those_of_the_formulas_however_the_text_is_cut(change: dict[str, Any]) -> None:
    own, ids = tuple(sorted((key, one) for key, one in change.items() if one != SIZES.get(key))), prompt(40)
    runner, wanted = made(own), formulas(tuple(ids), own)
    whole = chunked_logits(runner, ids, (40,))
    assert gap(whole, wanted) < NEAR * float(wanted.abs().max())
    for sizes in ((5, 25, 1, 9), (17, 23), (1,) * 40):
        assert torch.equal(chunked_logits(runner, ids, sizes), whole)


def test_in_trees_and_beside_others() -> None:
    ids = prompt(9, 4)
    wanted = formulas(tuple(ids))
    found = ragged_logits(made(), ids)
    assert gap(found, torch.cat([wanted, wanted[:4]])) < NEAR * float(wanted.abs().max())


def test_states_keys_and_values_are_those_of_the_formulas() -> None:
    runner, ids, oracle = made(), prompt(30), Oracle(SIZES, random_tensors(SIZES))
    oracle.read(ids)
    cache_ = runner.new_cache(1)
    for tokens in (ids[:19], ids[19:]):
        runner.forward([SequenceChunk(0, tokens, [0] * len(tokens), FULL)], cache_)
        cache_.commit(0, range(len(tokens)))
    for layer, wanted in oracle.states.items():
        store, mixer = cache_.layers[layer], runner.weights.layers[layer].mixer
        assert isinstance(store, StateLayer) and mixer is not None
        (state,) = store.states
        assert isinstance(state, MixerState)
        window, matrix = mixer.views(state.flat)
        assert gap(matrix, wanted.t().float()) < NEAR * float(wanted.abs().max())
        assert gap(window, torch.stack(oracle.inputs[layer][-3:]).float()) < 1e-3
    full = cache_.layers[KEEPING - 1]
    keys, values = full.read(0, 30, torch.float32)
    for side, found in ((1, keys), (2, values)):
        wanted = torch.stack([one[side].flatten() for one in oracle.keys[KEEPING - 1]]).float()
        assert gap(found.transpose(0, 1).flatten(1), wanted) < NEAR * float(wanted.abs().max())


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_of_three_lengths_have_the_bits_of_one_alone(dtype: str, quant: Any) -> None:
    """The longest takes several calls."""
    runner = made((), dtype, quant)
    texts = [prompt(size, seed) for seed, size in enumerate((300, 1, 40))]
    found: list[list[Tensor]] = [[], [], []]
    cache_ = runner.new_cache(3)
    for cut in (slice(0, 1), slice(1, 30), slice(30, None)):
        chunks = [SequenceChunk(seq, text[cut], [0] * len(text[cut]), FULL, wanted=len(text[cut]))
                  for seq, text in enumerate(texts) if text[cut]]
        parts = runner.forward(chunks, cache_).split([len(chunk.tokens) for chunk in chunks])
        for chunk, logits in zip(chunks, parts, strict=True):
            found[chunk.seq].append(logits)
            cache_.commit(chunk.seq, range(len(chunk.tokens)))
    for text, logits in zip(texts, found, strict=True):
        assert torch.equal(torch.cat(logits), chunked_logits(runner, text, (1,) * len(text)))


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_matrices_are_what_they_stand_for(quant: Any) -> None:
    runner, ids = made((), "float32", quant), prompt(12)
    plain = PackedRunner(runner.shape, unpacked(runner.weights), runner.rotary, runner.dtype, runner.device)
    wanted = chunked_logits(plain, ids, (12,))
    change = (wanted - formulas(tuple(ids))).abs().mean()
    assert (chunked_logits(runner, ids, (12,)) - wanted).abs().mean() < 2 * change


def test_bfloat16_rounds_no_worse_than_in_torch() -> None:
    errors = {True: 0.0, False: 0.0}
    rounded = {name: tensor.bfloat16().double() for name, tensor in random_tensors(SIZES).items()}
    runner, source = made((), "bfloat16"), TensorSource(random_tensors(SIZES))
    plain = build(Phi4FlashConfig(**SIZES), source, torch.bfloat16, runner.device, kernels=False)
    for seed in range(4):
        ids = prompt(30, seed)
        wanted = Oracle(SIZES, rounded).read(ids).float()
        for on, one in ((True, runner), (False, plain)):
            errors[on] += float((chunked_logits(one, ids, (30,)).float() - wanted).abs().mean())
    assert errors[True] < 1.5 * errors[False]


class Rows:
    """Random chains, trees, commits of a part, rollbacks, forks and leaves of up to four texts."""

    def __init__(self, seed: int, quant: Any = None, dtype: str = "float32") -> None:
        self.dice, self.runner = random.Random(seed), made((), dtype, quant)
        self.cache, self.texts = self.runner.new_cache(1), [list[int]()]

    def turn(self) -> None:
        """Join or leave, or run some tokens and keep some of them."""
        chance = self.dice.random()
        if len(self.texts) < 4 and chance < 0.08:
            self.cache.extend(1)
            self.texts.append([])
        elif len(self.texts) < 4 and chance < 0.18:
            source = self.dice.randrange(len(self.texts))
            self.cache.fork(source, 1)
            self.texts.append([*self.texts[source]])
        elif len(self.texts) > 1 and chance < 0.23:
            gone = self.dice.randrange(len(self.texts))
            order = self.cache.select([seq for seq in range(len(self.texts)) if seq != gone])
            self.texts = [self.texts[seq] for seq in order]
        else:
            self.feed()

    def feed(self) -> None:
        """Nodes of trees have the bits of their paths, alone and in one piece, whatever else is wanted."""
        chunks = [self.chunk(seq) for seq in sorted(self.dice.sample(range(len(self.texts)),
                                                                     self.dice.randint(1, len(self.texts))))]
        logits = self.runner.forward(chunks, self.cache).split([chunk.wanted for chunk in chunks])
        for chunk, found in zip(chunks, logits, strict=True):
            path = path_to(chunk, self.dice.randrange(len(chunk.tokens)))
            text = [*self.texts[chunk.seq], *(chunk.tokens[node] for node in path)]
            first, shown = len(chunk.tokens) - chunk.wanted, [node for node in path
                                                             if node >= len(chunk.tokens) - chunk.wanted]
            whole = SequenceChunk(0, text, [0] * len(text), FULL, wanted=len(path))
            alone = self.runner.forward([whole], self.runner.new_cache(1))
            if shown:
                assert torch.equal(found[[node - first for node in shown]], alone[-len(shown) :])
            if self.dice.random() < 0.15:
                self.cache.rollback(chunk.seq)
            else:
                self.cache.commit(chunk.seq, path)
                self.texts[chunk.seq] = text

    def chunk(self, seq: int) -> SequenceChunk:
        """A chain or a tree; of a chain not all logits may be wanted."""
        count = self.dice.choice((1, 1, 2, 5, 9, 20))
        tokens = [self.dice.randrange(3, VOCAB) for _ in range(count)]
        if self.dice.random() < 0.5:
            return SequenceChunk(seq, tokens, [0] * count, FULL, wanted=self.dice.randint(0, count))
        parents = [-1, *(self.dice.randrange(node) for node in range(1, count))]
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        return SequenceChunk(seq, tokens, [0] * count, FULL, parents, depths, wanted=count)


@pytest.mark.parametrize(("seed", "quant", "dtype"), [(0, None, "float32"), (1, "int8", "float32"),
                                                      (2, "int4", "bfloat16"), (3, None, "bfloat16")])
def test_random_schedules_have_the_bits_of_each_text_alone(seed: int, quant: Any, dtype: str) -> None:
    rows = Rows(seed, quant, dtype)
    for _ in range(60):
        rows.turn()
    assert max(map(len, rows.texts)) > 10
    rows.cache.select([])
    assert rows.cache.bytes().allocated == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_long_random_schedules_have_the_bits_of_each_text_alone(seed: int) -> None:
    rows = Rows(seed)
    for _ in range(250):
        rows.turn()


def test_prompts_pass_the_cross_decoder_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens whose logits nobody wants run the self-decoder, and leave keys and values in its last layer."""
    runner, text, seen = made(), prompt(20), list[Any]()
    real = NativeRunner._batch

    def watched(self: NativeRunner, chunks: Any, work: Any, *more: Any) -> Any:
        seen.append(work)
        return real(self, chunks, work, *more)

    monkeypatch.setattr(NativeRunner, "_batch", watched)
    every = runner.forward([SequenceChunk(0, text, [0] * 20, FULL, wanted=20)], runner.new_cache(1))
    some = runner.forward([SequenceChunk(0, text, [0] * 20, FULL)], runner.new_cache(1))
    cache_ = runner.new_cache(1)
    runner.forward([SequenceChunk(0, text[:-3], [0] * 17, FULL, wanted=0)], cache_)
    cache_.commit(0, range(17))
    rest = runner.forward([SequenceChunk(0, text[-3:], [0] * 3, FULL, wanted=2)], cache_)
    assert torch.equal(some, every[-1:]) and torch.equal(rest, every[-2:])
    both, store = native.ATTENTION | native.MLP, native.STORE
    assert [*seen[1].layers] == [*range(LAYERS)] and [*seen[2].layers] == [*range(KEEPING)]
    for layer, flags in zip(seen[1].layers, seen[1].active, strict=True):
        late = [store if layer == KEEPING - 1 else 0] * 19
        assert flags == [*([both] * 19 if layer < KEEPING - 1 else late), both]
    assert seen[2].active[-1] == [store] * 17


def test_hooks_see_all_layers_at_all_tokens() -> None:
    runner, ids, seen = made(), prompt(7), list[Tensor]()
    chunk = SequenceChunk(0, ids, [0] * 7, FULL)
    logits = runner.forward([chunk], runner.new_cache(1), lambda _, hidden: seen.append(hidden))
    assert len(seen) == LAYERS + 1 and torch.equal(runner.forward([chunk], runner.new_cache(1)), logits)
    wanted = formulas(tuple(ids))
    assert gap(runner.exit_logits(seen[-1][0]), wanted) < NEAR * float(wanted.abs().max())


@cache
def engine() -> Engine:
    with tempfile.TemporaryDirectory() as home:
        return shoal.load(write(Path(home) / "model", SIZES, random_tensors(SIZES)), dtype="float32")


def generated(prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    return [list(result.tokens) for result in engine().generate([list(ids) for ids in prompts], max_new_tokens=NEW,
                                                                **options)]


def test_texts_are_those_of_the_formulas_together_and_alone() -> None:
    wanted = [Oracle(SIZES, random_tensors(SIZES)).greedy(ids, NEW)[0] for ids in PROMPTS]
    assert generated(PROMPTS) == wanted and [generated([ids])[0] for ids in PROMPTS] == wanted


SELF = {"method": "swift", "method_args": {"ratio": 0.5}}, "draft_and_verify", "layerskip"
"""Those of the lab, where it is installed, draft with any sublayers of the model's own."""


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("method", [PromptLookup(min_ngram=1, length=5), D3Spec(length=3), "auto", "aded", *(
    one for one in SELF if find_spec("shoal_lab"))], ids=str)
def test_guesses_change_no_token(method: Any, options: dict[str, Any]) -> None:
    prompts = [[*prompt(6, 3), *prompt(6, 3), *prompt(3, 3)], *PROMPTS]
    assert generated(prompts, method=method, **options) == generated(prompts, **options)


@pytest.mark.parametrize("method", [D3(alpha=0.9), D3(alpha=0.8, order="spread")], ids=str)
def test_plans_drop_the_cross_decoder(method: Any) -> None:
    plan = engine().recipe(method, NEW).plan
    runs = lambda ids: lambda layer, at: plan.attention[layer] > max(0, at + 1 - len(ids))  # noqa: E731
    wanted = [Oracle(SIZES, random_tensors(SIZES), runs(ids)).greedy(ids, NEW)[0] for ids in PROMPTS]
    assert generated(PROMPTS, method=method) == wanted
    assert generated(PROMPTS, method=PromptLookup(min_ngram=1, inner=method)) == wanted


def test_attention_and_mlp_may_be_dropped_apart() -> None:
    """Token by token and as one block of guesses."""
    plan = DepthPlan((NEVER,) * KEEPING + (2, 5, 1, 4, 3, NEVER), (NEVER,) * 8 + (3, 1, 5, 2, NEVER, 6, 1, NEVER))
    runner, ids, tokens, found = made(), prompt(6), prompt(7, 1), list[Tensor]()
    for pieces in ([tokens], [[token] for token in tokens]):
        cache_ = runner.new_cache(1)
        runner.forward([SequenceChunk(0, ids, [0] * 6, plan)], cache_)
        cache_.commit(0, range(6))
        logits, step = [], 1
        for piece in pieces:
            steps = range(step, step + len(piece))
            logits.append(runner.forward([SequenceChunk(0, piece, steps, plan, wanted=len(piece))], cache_))
            cache_.commit(0, range(len(piece)))
            step += len(piece)
        found.append(torch.cat(logits))
    assert torch.equal(*found)


def test_the_next_turn_reads_only_what_is_new() -> None:
    scheduler, talk, known = Scheduler(engine(), start=False), prompt(11, 5), 0
    for turn in range(3):
        handle = scheduler.submit(talk, method=D3(alpha=0.9), max_new_tokens=6)
        while scheduler.running or scheduler.waiting:
            scheduler.turn()
        seq = handle.entries[0].seq
        assert seq.cached == known and seq.ledger.prefill_tokens == len(talk) - known
        known = len(talk) + 5
        talk = [*talk, *handle.results[0].tokens, *prompt(4, 20 + turn)]


def test_a_layer_that_others_read_stays_as_long_as_they() -> None:
    for source in (KEEPING - 2, KEEPING - 1):
        plan = DepthPlan.skipping(LAYERS, [source], [source])
        for steps in ([0], [1]):
            with pytest.raises(Unsupported, match=f"drops layer {source} at step 1: layer {source + 2}"):
                made().forward([SequenceChunk(0, [1], steps, plan)], made().new_cache(1))


def test_a_batch_without_the_layer_that_another_reads_is_refused() -> None:
    runner = made()
    batch = native.NativeBatch([1], [0], [0], [0], [0], [1], [0], layers=[0, KEEPING + 1])
    kv = runner.decoder.bind([None] * LAYERS, [None] * LAYERS, seqs=1)
    state = torch.zeros(runner.decoder.recurrences[0].floats)
    with pytest.raises(ValueError, match=f"layer {KEEPING + 1} reads layer {KEEPING - 1}, which does not run before"):
        runner.decoder.forward(batch, kv, spans=Spans([1], [[(None, state)], [(None, None)]], [None, None]))


def test_the_shared_keys_and_values_may_be_quantised() -> None:
    """Lossy, near, and used: the cross-decoder reads them in the form in which they are stored."""
    found, plain = (engine().generate(PROMPTS[0], max_new_tokens=NEW, method=method) for method in (KVInt8(), "full"))
    assert found.tokens[:3] == plain.tokens[:3] and found.stats.kv_bytes_used < plain.stats.kv_bytes_used


@cache
def alone(job: int) -> list[tuple[int, ...]]:
    ids, options = JOBS[job]
    method = options["method"] if isinstance(options["method"], D3) else "full"
    text = engine().generate(ids, method=method, max_new_tokens=options["max_new_tokens"])
    return [tuple(text.tokens)] * options["n"]


@settings(max_examples=SCHEDULES, deadline=None)
@given(todo=actions(len(JOBS), 16), rows=st.integers(1, 4), chunk=st.sampled_from((1, 3, 8, 64)),
       kept=st.sampled_from((0, 1 << 16, 1 << 24)))
def test_every_sequence_gives_what_it_gives_alone(todo: list[Action], rows: int, chunk: int, kept: int) -> None:
    scheduler = Scheduler(engine(), max_seqs=rows, prefix_bytes=kept, prefill_chunk=chunk, start=False)
    follow(scheduler, JOBS, todo, alone)


def broken(name: str, monkeypatch: pytest.MonkeyPatch) -> NativeRunner:
    """A runner with something wrong in what the kernels are told."""
    real = LayerStruct.__setattr__

    def changed(self: LayerStruct, key: str, value: Any) -> None:
        real(self, key, value * 1.02 if key == name and isinstance(value, float) else None if key == name else value)

    monkeypatch.setattr(LayerStruct, "__setattr__", changed)
    return made.__wrapped__()


@pytest.mark.parametrize("name", ["pair_share", "attention_norm_bias", "mlp_norm_bias", "qkv_bias", "out_bias"])
def test_the_comparison_has_power(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(12)
    wanted = formulas(tuple(ids))
    assert gap(chunked_logits(broken(name, monkeypatch), ids, (12,)), wanted) > 10 * NEAR * float(wanted.abs().max())


def test_keys_that_a_passed_token_did_not_leave_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "STORE", 0)
    with pytest.raises(ValueError, match=f"token 19 runs layer {KEEPING - 1}, but an earlier node of its row does not"):
        made().forward([SequenceChunk(0, prompt(20), [0] * 20, FULL)], made().new_cache(1))
