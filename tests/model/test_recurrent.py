"""Recurrent layers on modules and packed: whatever is fed, taken back, forked or moved, the text decides."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import PreTrainedModel

from backends import packed
from drive import gap, path_to, prompt, stack_of
from families import MIXTURES, PACKED_RECURRENT, RECURRENT, VOCAB, tiny
from kv_peaks import run as run_watched
from shoal import compat
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods.aded import ADED
from shoal.methods.base import Method, lost_kind
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.double_sparsity import DoubleSparsity
from shoal.methods.draft_model import DraftModel
from shoal.methods.early_exit import EarlyExit
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.snapkv import SnapKV
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.model.kv.cache import KVCache, copy_in, look, restorable, usable
from shoal.model.packed import native
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal.model.state.layer import MOST_SNAPSHOTS, StateLayer

pytestmark = pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states")
LAYERS = 4
Way = Literal["singly", "together", "packed", "kernels"]
"""How recurrent layers run: modules that are given one token at a time or several, or packed layers in torch, or on
the kernels."""
NEAR: dict[Way, float] = {"singly": 2e-5, "together": 0.02, "packed": 1e-4, "kernels": 1e-4}
"""Of the largest logit. Modules compute several tokens in chunks, in float32, which loses digits where decays are
steep; packed layers round at other places."""
ENLARGED: dict[tuple[str, Way], float] = {
    **{("minimax", way): 1e-3 for way in ("singly", "packed", "kernels")},
    ("mamba", "packed"): 1e-3, ("mamba", "kernels"): 1e-3,
    ("granite4_moe", "packed"): 5e-4, ("granite4_moe", "kernels"): 5e-4,
    **{(family, way): 3e-3 for family in ("qwen3_5", "qwen3_next", "qwen3_5_moe") for way in ("packed", "kernels")}}
"""Of models whose random weights enlarge rounding: several times what was seen. Where a text of Qwen3.5 differs most,
the modules are 3e-4 of the largest logit from float64, packed layers and kernels 6e-4 and 4e-4; where one of MiniMax
does, 2e-4, 3e-4 and 1e-4."""
KERNELS = native.available()
each_way = pytest.mark.parametrize("way", ["singly", "packed", *["kernels"] * KERNELS])
OWN_LAYERS = (*PACKED_RECURRENT, "recurrent_gemma") if PACKED_RECURRENT else ()
"""Those that Shoal's own layers run; the modules of RecurrentGemma keep their states to themselves."""
EACH = [*((family, "singly") for family in RECURRENT), *((family, "packed") for family in OWN_LAYERS),
        *((family, "kernels") for family in OWN_LAYERS if KERNELS)]
each_family = pytest.mark.parametrize(("family", "way"), EACH)


def runner_for(model: PreTrainedModel, way: Way) -> ModelRunner:
    if way in ("packed", "kernels"):
        return packed(model, kernels=way == "kernels")
    runner = stack_of(model)
    runner.singly = way == "singly"
    return runner


@dataclass
class Schedule:
    """Random forwards, commits, rollbacks, forks and moves of up to four sequences, and what their texts are."""

    family: str
    dice: random.Random
    way: Way = "singly"
    texts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = tiny(self.family, dtype=torch.float32, layers=LAYERS)
        self.runner, self.plan = runner_for(self.model, self.way), DepthPlan.full(LAYERS)
        self.placed = "position_ids" in inspect.signature(self.model.forward).parameters
        self.known: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {}
        self.cache = self.runner.new_cache(0)

    def step(self) -> None:
        """Do something that may be done."""
        if len(self.texts) < 2 or (len(self.texts) < 4 and self.dice.random() < 0.1):
            self.join()
        elif self.dice.random() < 0.12:
            self.leave()
        else:
            self.feed()

    def join(self) -> None:
        """A new sequence, empty or a copy of another."""
        source = self.dice.randrange(len(self.texts)) if self.texts and self.dice.random() < 0.6 else None
        if source is None:
            self.cache.extend(1)
            self.texts.append([])
        elif self.dice.random() < 0.5:
            self.cache.fork(source, 1)
            self.texts.append([*self.texts[source]])
        elif (seen := look(self.cache, source)) is not None:
            held = seen.copied()
            self.cache.extend(1)
            copy_in(self.cache, len(self.texts), [held], held.last)
            self.texts.append([*self.texts[source]])

    def leave(self) -> None:
        """One sequence goes, and another may take its number."""
        gone = self.dice.randrange(len(self.texts))
        order = self.cache.select([seq for seq in range(len(self.texts)) if seq != gone])
        self.texts = [self.texts[seq] for seq in order]

    def feed(self) -> None:
        """Chains and trees for some sequences, of which a path is kept, or nothing."""
        seqs = sorted(self.dice.sample(range(len(self.texts)), self.dice.randint(1, len(self.texts))))
        chunks = [self.chunk(seq) for seq in seqs]
        logits = self.runner.forward(chunks, self.cache).split([len(chunk.tokens) for chunk in chunks])
        for chunk, found in zip(chunks, logits, strict=True):
            leaf = self.dice.randrange(len(chunk.tokens))
            path = path_to(chunk, leaf)
            text = [*self.texts[chunk.seq], *(chunk.tokens[node] for node in path)]
            wanted = self.expected(text)[-len(path) :]
            near = ENLARGED.get((self.family, self.way), NEAR[self.way])
            assert gap(found[path], wanted) < near * float(wanted.abs().max()), (self.family, chunk, leaf)
            if self.dice.random() < 0.15:
                self.cache.rollback(chunk.seq)
            else:
                self.cache.commit(chunk.seq, path)
                self.texts[chunk.seq] = text

    def chunk(self, seq: int) -> SequenceChunk:
        """Tokens of a chain or a tree, all of whose logits are wanted."""
        count = self.dice.choice((1, 1, 2, 5, 9)) if self.texts[seq] or self.way != "singly" else 1
        tokens = [self.dice.randrange(3, VOCAB) for _ in range(count)]
        parents = depths = None
        if self.dice.random() < 0.5:
            parents = [-1, *(self.dice.randrange(node) for node in range(1, count))]
            depths = [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
        return SequenceChunk(seq, tokens, [0] * count, self.plan, parents, depths, wanted=count)

    @torch.no_grad()
    def expected(self, text: list[int]) -> torch.Tensor:
        """The model's own logits of a whole text, token by token with its own cache."""
        if self.family == "recurrent_gemma":  # token by token in any case; in float32 its gates lose digits
            model = tiny(self.family, layers=LAYERS) if self.way == "kernels" else self.model
            return model(torch.tensor([text]), use_cache=False).logits[0].to(torch.float32)
        done = next(end for end in range(len(text), -1, -1) if not end or tuple(text[:end]) in self.known)
        for end in range(done + 1, len(text) + 1):
            before = self.known[tuple(text[: end - 1])][0] if end > 1 else {}
            kept = {name: copy.deepcopy(one) for name, one in before.items()}
            if self.placed:
                kept["position_ids"] = torch.tensor([[end - 1]])
            out = self.model(input_ids=torch.tensor([[text[end - 1]]]), use_cache=True, **kept)
            self.known[tuple(text[:end])] = {n: one for n, one in out.items() if compat.is_cache(one)}, out.logits[0, 0]
        return torch.stack([self.known[tuple(text[:end])][1] for end in range(1, len(text) + 1)])


def run(family: str, steps: int, seed: int, way: Way = "singly") -> Schedule:
    """A schedule of so many steps."""
    schedule = Schedule(family, random.Random(f"{family} {seed}"), way)
    for _ in range(steps):
        schedule.step()
    return schedule


@each_family
def test_random_schedules_give_each_text_its_own_logits(family: str, way: Way) -> None:
    run(family, 40, 0, way)


@pytest.mark.parametrize("family", [family for family in RECURRENT if family != "mamba"])
def test_several_tokens_at_a_time_do_too(family: str) -> None:
    run(family, 25, 3, "together")  # Mamba's own modules forget the state there, and are never run so


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@each_family
def test_long_random_schedules_give_each_text_its_own_logits(family: str, way: Way, seed: int) -> None:
    run(family, 150, seed, way)


@each_way
def test_no_byte_is_left_behind(way: Way) -> None:
    schedule = run("qwen3_5", 40, 0, way)
    schedule.cache.select([])
    assert schedule.cache.bytes().allocated == 0


ACCEPT = StateLayer.accept
FAULTS: dict[str, Callable[[StateLayer, int, Sequence[int]], None]] = {
    "one token too many": lambda layer, seq, path: ACCEPT(layer, seq, range(min(len(path) + 1, layer.scratch[seq]))),
    "one token too few": lambda layer, seq, path: ACCEPT(layer, seq, path[:-1]),
    "the end of the forward": lambda layer, seq, path: ACCEPT(layer, seq, range(layer.scratch[seq]) if path else ()),
}


@each_way
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_put_in_by_hand_are_noticed(fault: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateLayer, "accept", FAULTS[fault])
    with pytest.raises(AssertionError):
        run("qwen3_5", 40, 0, way)


@each_way
def test_a_copy_serves_its_own_length_alone(way: Way) -> None:
    runner = runner_for(tiny("qwen3_5", dtype=torch.float32, layers=LAYERS), way)
    cache = runner.new_cache(1)
    runner.forward([SequenceChunk(0, [5, 6, 7], [0] * 3, DepthPlan.full(LAYERS))], cache)
    cache.commit(0, range(3))
    held = look(cache, 0)
    assert held is not None and restorable([held], 3) and not restorable([held], 2)
    assert held.bytes == sum(layer.seq_bytes(0) for layer in cache.recurrent) + 3 * sum(runner.position_bytes)
    assert cache.truncate(0, 2) == 0  # a state cannot be cut back


@each_way
def test_decoding_goes_back_to_snapshots(way: Way) -> None:
    runner, full = runner_for(tiny("qwen3_5", dtype=torch.float32, layers=LAYERS), way), DepthPlan.full(LAYERS)
    text, cache, fresh = [5, 6, 7, 8, 9, 10, 11], runner.new_cache(1), runner.new_cache(1)
    for place, token in enumerate(text):
        if place in (3, 5):
            cache.mark(0)
        runner.forward([SequenceChunk(0, [token], [0], full)], cache)
        cache.commit(0, [0])
    seen = look(cache, 0)
    assert seen is not None and [usable([seen], most) for most in (7, 6, 5, 4, 3, 2, 0)] == [7, 5, 5, 3, 3, 0, 0]
    held = seen.copied()
    assert cache.truncate(0, 4) == 3 and cache.recurrent[0].seq_bytes(0) == runner.state_bytes[min(runner.state_bytes)]
    for other in (cache, fresh):
        if other is fresh:
            copy_in(other, 0, [held], 3)
        assert other.positions == [3]
    found = [runner.forward([SequenceChunk(0, [20], [0], full)], other) for other in (cache, fresh)]
    cold = runner.new_cache(1)
    for token in text[:3]:
        runner.forward([SequenceChunk(0, [token], [0], full)], cold)
        cold.commit(0, [0])
    wanted = runner.forward([SequenceChunk(0, [20], [0], full)], cold)
    assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted)


@pytest.mark.skipif(not KERNELS, reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("family", OWN_LAYERS)
def test_nodes_of_trees_have_the_bits_of_their_paths(family: str, quant: Any) -> None:
    """Beside other sequences, after prompts in pieces, behind partial commits; the path is read in one piece, alone."""
    schedule = Schedule(family, random.Random(family), "kernels")
    runner = packed(schedule.model, quant, kernels=True)
    cache, schedule.texts = runner.new_cache(3), [[], [], []]
    for _ in range(12):
        chunks = [schedule.chunk(seq) for seq in range(3)]
        logits = runner.forward(chunks, cache).split([len(chunk.tokens) for chunk in chunks])
        for chunk, found in zip(chunks, logits, strict=True):
            path = path_to(chunk, schedule.dice.randrange(len(chunk.tokens)))
            text = [*schedule.texts[chunk.seq], *(chunk.tokens[node] for node in path)]
            whole = SequenceChunk(0, text, [0] * len(text), schedule.plan, wanted=len(path))
            assert torch.equal(found[path], runner.forward([whole], runner.new_cache(1)))
            cache.commit(chunk.seq, path)
            schedule.texts[chunk.seq] = text


@pytest.mark.parametrize("way", ["packed", *["kernels"] * KERNELS])
def test_sequences_at_different_depths_share_a_forward(way: Way) -> None:
    runner = runner_for(tiny("qwen3_5", dtype=torch.float32, layers=LAYERS), way)
    plans = DepthPlan.full(LAYERS), DepthPlan.skipping(LAYERS, [1, 3], [0, 1])
    together, alone = runner.new_cache(2), [runner.new_cache(1) for _ in plans]
    for tokens, steps in (([5, 6, 7], [0, 0, 0]), ([8], [1]), ([9, 10, 11], [1, 2, 2]), ([12, 13], [2, 2])):
        chunks = [SequenceChunk(seq, tokens, steps, plan, wanted=len(tokens)) for seq, plan in enumerate(plans)]
        found = runner.forward(chunks, together).split(len(tokens))
        for seq, (chunk, cache) in enumerate(zip(chunks, alone, strict=True)):
            wanted = runner.forward([replace(chunk, seq=0)], cache)
            assert torch.equal(found[seq], wanted) if way == "kernels" else gap(found[seq], wanted) < 1e-4
            together.commit(seq, range(len(tokens)))
            cache.commit(0, range(len(tokens)))


def test_only_the_last_snapshots_stay() -> None:
    runner = stack_of(tiny("qwen3_5", dtype=torch.float32, layers=LAYERS))
    cache = runner.new_cache(1)
    for _ in range(MOST_SNAPSHOTS + 3):
        runner.forward([SequenceChunk(0, [5], [0], DepthPlan.full(LAYERS))], cache)
        cache.commit(0, [0])
        cache.mark(0)
    assert sorted(cache.recurrent[0].snapshots[0]) == [*range(4, MOST_SNAPSHOTS + 4)]


@pytest.mark.parametrize("method", ["full", PromptLookup(min_ngram=1), D3(alpha=0.8, core=2)], ids=repr)
@each_way
def test_a_prompt_that_goes_on_from_another_reads_the_rest_alone(method: Any, way: Way) -> None:
    engine = engine_of("qwen3_5", way)
    first, more = [*range(5, 25)], [60, 61, 62]
    options: Any = {"method": method, "max_new_tokens": 8, "ignore_eos": True}
    with Scheduler(engine, prefix_bytes=1 << 20) as scheduler:
        answer, _ = answered(scheduler, first, options)
        whole = [*first, *answer.tokens]
        for prompt, cached in (([*first, 3, *more], 20), ([*whole, *more], 20 if isinstance(method, D3) else 27),
                               ([*first[:9], 3], 0)):
            result, found = answered(scheduler, prompt, options)
            assert result.tokens == engine.generate(prompt, **options).tokens and found == cached


def engine_of(family: str, way: Way) -> Engine:
    """An engine whose texts rounding does not change: packed matrices in torch round by the number of their inputs."""
    if way == "packed":
        return engine_for(tiny(family, layers=LAYERS), None, backend="packed")
    if way == "kernels":
        return engine_for(tiny(family, dtype=torch.float32, layers=LAYERS), None, backend="packed")
    engine = engine_for(tiny(family, dtype=torch.float32, layers=LAYERS), None, backend="hf")
    engine.runner.singly = True  # type: ignore[attr-defined]
    return engine


def answered(scheduler: Scheduler, prompt: list[int], options: Any) -> tuple[Any, int]:
    """The result of a request, and how much of its prompt was not read."""
    handle = scheduler.submit(prompt, **options)
    assert len([*handle]) > 0
    return handle.results[0], handle.entries[0].seq.cached


@each_way
def test_a_released_layer_forgets_its_state(way: Way) -> None:
    runner = runner_for(tiny("qwen3_5", dtype=torch.float32, layers=LAYERS), way)
    cache: KVCache = runner.new_cache(2)
    runner.forward([SequenceChunk(seq, [5, 6, 7], [0] * 3, DepthPlan.full(LAYERS)) for seq in (0, 1)], cache)
    cache.commit(0, range(3))
    cache.commit(1, range(2))
    number = min(runner.state_bytes)
    assert cache.layers[number].seq_bytes(0) == runner.state_bytes[number]
    cache.release(0, [number])
    assert cache.layers[number].seq_bytes(0) == 0 < cache.layers[number].seq_bytes(1)


@pytest.mark.parametrize("method", ["full", D3(alpha=0.8, core=2), PromptLookup(min_ngram=1), KVInt8()], ids=repr)
@each_way
def test_the_peak_of_memory_is_known_before(method: Any, way: Way) -> None:
    engine, found = Engine(runner_for(tiny("qwen3_5", dtype=torch.float32, layers=LAYERS), way)), list[int]()
    predicted = run_watched(engine, [20, 9], 12, method, lambda cache: found.append(cache.bytes().allocated))
    assert predicted.counted >= max(found) and predicted.resident >= predicted.counted
    assert predicted.counted == max(found) or isinstance(method, D3 | PromptLookup)


METHODS: list[Any] = [PromptLookup(min_ngram=1), ADED(), DraftModel(branching=(3, 2, 2)), D3Spec(mean=0.5, core=1),
                      [D3(alpha=0.95, core=2), PromptLookup(min_ngram=1)], [KVInt8(), ADED()]]
"""The last of a list is the drafter."""


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize(("family", "way"), [
    *EACH, *((family, way) for family in MIXTURES for way in ("packed", *["kernels"] * KERNELS))])
def test_drafts_do_not_change_a_text(family: str, way: Way, method: Any, tmp_path: Path) -> None:
    engine = engine_of(family, way)
    if isinstance(method, DraftModel):
        draft: Any = tiny(family, dtype=engine.runner.dtype, layers=LAYERS)
        if family == "recurrent_gemma":  # a loaded model would run its modules
            draft.save_pretrained(tmp_path)
            draft = str(tmp_path)
        method = replace(method, draft=draft)
    plain = method[:-1] or "full" if isinstance(method, list) else "full"
    prompts = [[5, 9, 13, 5, 9, 13, 40, 41, 5, 9], [7, 8, 9, 10, 7, 8]]
    for options in ({}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}):
        drafted = engine.generate(prompts, method=method, max_new_tokens=24, **options)
        alone = [engine.generate([one], method=plain, max_new_tokens=24, **options)[0] for one in prompts]
        assert drafted[0].tokens == alone[0].tokens
        assert "seed" in options or drafted[1].tokens == alone[1].tokens  # draws are keyed by the place in the batch
        assert sum(one.stats.accepted for one in drafted) > 0 or not isinstance(method, DraftModel)


@each_way
def test_a_cache_of_another_model_is_refused(way: Way) -> None:
    hybrid = runner_for(tiny("qwen3_5", dtype=torch.float32), way)
    dense = runner_for(tiny("llama", dtype=torch.float32), way)
    for one, other in ((hybrid, dense), (dense, hybrid)):
        cache = other.new_cache(1)
        chunk = SequenceChunk(0, [1, 2], [0, 0], DepthPlan.full(one.num_layers))
        with pytest.raises(ValueError, match=r"the cache is for a model of \d layers, 0 with a window and \d with a"):
            one.forward([chunk], cache)
        assert cache.positions == [0]


def test_a_plan_that_leaves_no_layer_of_a_kind_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine_for(tiny("qwen3_5")).generate([1, 2], method=EarlyExit(exit_layer=2), max_new_tokens=4)
    assert "early_exit leaves out all attention layers (3) from token 1 on" in caplog.text
    gone, info = Recipe(DepthPlan.skipping(6, [0, 1, 2, 4, 5], [])), engine_for(tiny("qwen3_5")).info(60)
    assert "x leaves out all recurrent layers (0, 1, 2, 4, 5) from token 1 on" in str(lost_kind("x", gone, info))
    assert lost_kind("x", gone, engine_for(tiny("llama")).info(60)) is None
    assert lost_kind("x", Recipe(DepthPlan.skipping(6, [0, 1], [])), info) is None


CHANNELS = tuple(((*range(8),),) * 2 if layer % 4 == 3 else () for layer in range(10))
SELECTS = [Tidal(k=6), TopKOracle(k=6, first=0), SnapKV(budget=12, window=4, pool=3),
           DoubleSparsity(CHANNELS, k=6, width=3, first=0)]


@pytest.mark.parametrize("method", SELECTS, ids=repr)
def test_attention_beside_recurrences_reads_some_slots(method: Method) -> None:
    """On the kernels as in torch; with room for all slots as without the method; recurrent layers are left alone."""
    model = tiny("qwen3_5", dtype=torch.float32, layers=10)
    ids, found = prompt(40, 3), list[tuple[int, ...]]()
    for kernels in (False, *[True] * KERNELS):
        engine = Engine(packed(model, kernels=kernels))
        found.append(engine.generate(ids, method=method, max_new_tokens=20).tokens)
        whole = replace(method, **{"budget" if isinstance(method, SnapKV) else "k": 80})
        assert engine.generate(ids, method=whole, max_new_tokens=20).tokens == engine.generate(
            ids, max_new_tokens=20).tokens != found[-1]
    assert found == [found[0]] * len(found)
