"""The components that decide what is kept of the KV, in what form, and what is read of it, on every executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_oracle import Reading, reading_model
from backends import HF, NATIVE, TORCH, Backend, each_backend, on_backends, reference
from chat_tokenizer import chat_tokenizer
from drive import SHORT, Run, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.decode.sequence import SequenceState
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.engine.request import chat_ids
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.kv_int4 import KVInt4
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.topk_oracle import TopKOracle
from shoal.model.kv.blocks import Int8
from shoal.model.kv.form import KVForm, Store
from shoal.model.kv.layer import KVLayer
from shoal.model.runner import QueryHook, SequenceChunk
from shoal.types import ModelInfo

NEW, LAYERS = 24, 6
PROMPTS = [*SHORT, prompt(37, 3)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW, shows_queries=True)
D3_PLAN = D3(alpha=0.9, core=2).recipe(INFO).plan
FAMILIES = ("gemma2", "hybrid", "olmo2")


@dataclass(frozen=True)
class Ends(Reading):
    """StreamingLLM, from positions alone: what a query sees of a text that was cut at each multiple of `every`."""

    method: StreamingLLM
    sliding: tuple[int, ...]

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        window, sinks, every = self.method.window, self.method.sinks, self.method.every
        if layer in self.sliding or window is None:
            return seen
        query, key = torch.arange(len(seen))[:, None], torch.arange(len(seen))
        cut = query // every * every
        return (cut <= sinks + window) | (key < sinks) | (key >= cut - window)


@dataclass(frozen=True)
class Top(Reading):
    """The k largest scores, by sorting them all; from position `begin` on."""

    method: TopKOracle
    begin: int

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        if layer < self.method.first:
            return seen
        best = scores.log_softmax(-1).amax(1)
        best.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        rank = best.masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True).argsort(dim=-1)
        late = torch.arange(len(seen))[:, None] >= self.begin
        return (rank < self.method.k) | ~late


@dataclass(frozen=True)
class Rounded(Reading):
    """Each block of 32 numbers of each head's key and value, in steps of a 127th of its largest number."""

    first: int

    def found(self, layer: int, values: Tensor, side: int) -> Tensor:
        if layer < self.first:
            return values
        blocks = values.float().split(32, -1)
        return torch.cat([self._steps(block) for block in blocks], -1).to(values.dtype)

    def _steps(self, block: Tensor) -> Tensor:
        step = (block.abs().amax(-1, keepdim=True) / 127).half().float()
        return (block / step).round().clamp(-127, 127) * step


@dataclass(frozen=True)
class Halved(Reading):
    """Each block of 32 numbers in 16 steps, of which the one of largest magnitude is the lowest; or of values alone."""

    first: int
    keys: int = 4

    def found(self, layer: int, values: Tensor, side: int) -> Tensor:
        if layer < self.first:
            return values
        if self.keys == 8 and side == 0:
            return Rounded(self.first).found(layer, values, side)
        blocks = values.float().split(32, -1)
        return torch.cat([self._steps(block) for block in blocks], -1).to(values.dtype)

    def _steps(self, block: Tensor) -> Tensor:
        most, least = block.amax(-1, keepdim=True), block.amin(-1, keepdim=True)
        step = torch.where(most > -least, -most / 8, -least / 8).half().float()
        return (block / step).round().clamp(-8, 7) * step


def sliding(name: str) -> tuple[int, ...]:
    kinds = getattr(reference(name).config, "layer_types", None) or ["full_attention"] * LAYERS
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def check(run: Run, readings: Sequence[Reading], name: str, most: float) -> None:
    """Each sequence's logits are those of the model that reads so."""
    for number, (seq, reading) in enumerate(zip(run.seqs, readings, strict=True)):
        model = reading_model(reference(name), reading)
        ids, tokens = seq.tokens[: seq.prompt_length], seq.tokens[seq.prompt_length :]
        expected = oracle_logits(model, ids, seq.plan, tokens)
        assert gap(run.logits(number).to(expected.dtype), expected) <= most, number


def run_of(backend: Backend, name: str, recipes: Any, **options: Any) -> Run:
    return decode(None, PROMPTS, recipes, NEW, runner=backend.runner(name), **options)


plans = pytest.mark.parametrize("plan", [DepthPlan.full(LAYERS), D3_PLAN], ids=["full", "d3"])


@plans
@on_backends(*FAMILIES)
def test_what_is_kept_is_what_positions_say(backend: Backend, name: str, plan: DepthPlan) -> None:
    method = StreamingLLM(window=9, sinks=2, every=5)
    recipe = replace(method.recipe(INFO), plan=plan)
    run = run_of(backend, name, recipe)
    check(run, [Ends(method, sliding(name))] * len(PROMPTS), name, backend.exact)
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 0.1, "the window was too wide to matter"


@plans
@on_backends(*FAMILIES)
def test_what_is_read_is_what_scores_most(backend: Backend, name: str, plan: DepthPlan) -> None:
    method = TopKOracle(k=7, first=1)
    recipe = replace(method.recipe(INFO), plan=plan)
    run = run_of(backend, name, recipe)
    check(run, [Top(method, len(ids)) for ids in PROMPTS], name, backend.exact)
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 0.1, "k was too large to matter"


@plans
@on_backends(*FAMILIES)
def test_what_is_stored_is_rounded(backend: Backend, name: str, plan: DepthPlan) -> None:
    """A number that lies between two steps may round the other way where it was computed in another order."""
    recipe = replace(KVInt8(first=1).recipe(INFO), plan=plan)
    run = run_of(backend, name, recipe)
    check(run, [Rounded(1)] * len(PROMPTS), name, max(backend.exact, 1e-10) if backend != NATIVE else 0.2)
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 1e-3, "rounding was too fine to matter"


@pytest.mark.parametrize("keys", [4, 8])
@plans
@on_backends(*FAMILIES)
def test_what_is_stored_is_in_sixteen_steps(backend: Backend, name: str, plan: DepthPlan, keys: int) -> None:
    recipe = replace(KVInt4(first=1, keys=keys).recipe(INFO), plan=plan)
    run = run_of(backend, name, recipe)
    check(run, [Halved(1, keys)] * len(PROMPTS), name, max(backend.exact, 1e-10) if backend != NATIVE else 0.2)
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 1e-2, "rounding was too fine to matter"


def whole(method: Method) -> Recipe:
    return method.recipe(INFO)


NEUTRAL = {
    "keep": whole(StreamingLLM(window=64, sinks=1, every=4)),
    "select": whole(TopKOracle(k=64, first=0)),
}
"""Components that are there and change nothing, since texts here have fewer than 64 tokens."""


@dataclass(frozen=True)
class AsItIs(Store, KVForm):
    """A form that stores what it is given."""

    def form(self, layer: int) -> AsItIs:
        return self

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values,)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]


@pytest.mark.parametrize("component", NEUTRAL)
@on_backends("llama", "hybrid")
def test_a_part_that_changes_nothing_is_the_identity(backend: Backend, name: str, component: str) -> None:
    for ids in PROMPTS:
        recipes = (DepthPlan.full(LAYERS), NEUTRAL[component])
        plain, parted = (decode(None, [ids], recipe, NEW, runner=backend.runner(name)) for recipe in recipes)
        assert torch.equal(plain.logits(0), parted.logits(0))


@pytest.mark.parametrize("backend", [HF, TORCH], ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_a_form_that_changes_nothing_is_the_identity(backend: Backend, name: str) -> None:
    """Where windows slide, they do so when storage is full, which is not at the same time: sums differ in order."""
    store = Recipe(DepthPlan.full(LAYERS), store=AsItIs())
    for ids in PROMPTS:
        plain, formed = (decode(None, [ids], one, NEW, runner=backend.runner(name)) for one in (store.plan, store))
        assert gap(plain.logits(0), formed.logits(0)) <= (1e-12 if sliding(name) else 0)


MIXED = [
    Recipe(DepthPlan.full(LAYERS)),
    replace(whole(StreamingLLM(window=9, sinks=2, every=5)), store=whole(KVInt8()).store),
    replace(whole(TopKOracle(k=5, first=1)), plan=D3_PLAN, store=whole(KVInt8(first=2)).store),
    replace(whole(StreamingLLM(window=7, sinks=1, every=3)), select=whole(TopKOracle(k=4, first=0)).select),
]


@pytest.mark.slow
@on_backends("llama", "hybrid")
def test_rows_with_parts_share_steps_with_others(backend: Backend, name: str) -> None:
    """Each sequence of a batch, whatever components its mates have and however its prompt is cut, is its own run."""
    runner = backend.runner(name)
    for chunk in (2048, 4):
        together = run_of(backend, name, MIXED, chunk=chunk)
        for number, recipe in enumerate(MIXED):
            alone = decode(None, [PROMPTS[number]], recipe, NEW, runner=runner)
            assert gap(together.logits(number), alone.logits(0)) <= (1e-6 if backend == NATIVE else backend.exact)


@pytest.mark.parametrize("recipe", MIXED[1:], ids=["ends in bytes", "top in bytes", "top of ends"])
@on_backends("llama", "hybrid")
@pytest.mark.quick(4)
def test_guesses_change_nothing(backend: Backend, name: str, recipe: Recipe) -> None:
    """Blocks of guesses are cut where slots are rewritten, and each node reads its own slots."""
    for ids in PROMPTS:
        plain = decode(None, [ids], recipe, NEW, runner=backend.runner(name))
        guesses = Planted({0: plain.tokens[0]}, depth=4, tree=True)
        fast = decode(None, [ids], replace(recipe, proposer=guesses), NEW, runner=backend.runner(name))
        assert plain.tokens == fast.tokens
        assert guesses.met["some"] + guesses.met["all"] > 2, "nothing was guessed right, so nothing was shown"


@dataclass(frozen=True)
class Halve(Reading):
    """At the prompt's end every pair of slots becomes one, their mean, which counts for two."""

    begin: int

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        late, old = torch.arange(len(seen))[:, None] >= self.begin, torch.arange(len(seen)) < self.begin // 2 * 2
        return ~(late & old & (torch.arange(len(seen)) % 2 == 1))

    def bias(self, layer: int, scores: Tensor) -> Tensor | float:
        late = torch.arange(scores.shape[-1])[:, None] >= self.begin
        old = torch.arange(scores.shape[-1]) < self.begin // 2 * 2
        return torch.where(late & old, 0.7, 0.0)


@dataclass(frozen=True)
class Merge(Keep):
    """The same as a component: of every pair the first slot stays, with a bias."""

    def begin(self, runner: Any, cache: Any) -> Merger:
        return Merger()

    def most_slots(self, length: int) -> int:
        return length


class Merger(Keeper):
    def next_length(self, seq: SequenceState, length: int) -> int:
        return seq.prompt_length if length < seq.prompt_length else 1 << 40

    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        for _, layer in layers:
            stored = layer.stored(seq.seq_id)
            kept = torch.tensor([*range(0, stored // 2 * 2, 2), *range(stored // 2 * 2, stored)])
            keys, values = layer.read(seq.seq_id, stored, torch.float64)
            bias = torch.full((len(keys), len(kept)), 0.7)
            bias[:, stored // 2 :] = 0
            layer.rewrite(seq.seq_id, keys[:, kept], values[:, kept], bias)


@on_backends("llama", "qwen3")
def test_columns_with_a_bias(backend: Backend, name: str) -> None:
    """Rewriting with another weight per slot, sequences of other lengths beside it."""
    recipe = Recipe(D3_PLAN, keep=Merge())
    run = run_of(backend, name, recipe)
    check(run, [Halve(len(ids)) for ids in PROMPTS], name, backend.exact)


@each_backend
def test_going_back_ends_where_columns_were_rewritten(backend: Backend) -> None:
    run = make_run(None, [PROMPTS[3]], MIXED[1], NEW, runner=backend.runner("llama"))
    steps = run.steps()
    while len(run.seqs[0].steps) < 5:
        next(steps)
    length = run.cache.positions[0]
    assert length == 37 + 4 and {layer.rewritten[0] for layer in run.cache.layers} == {40}
    assert run.cache.truncate(0, length - 1) == 0, "what was rewritten is no beginning of another text"


Shown = list[tuple[int, Tensor, int]]
"""Layer, queries and slots of each call."""


class Listening(Merger):
    """Also keeps what it is shown."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def query_hooks(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> Sequence[QueryHook | None]:
        return [None if seq.emitted else self._note for seq in seqs]

    def _note(self, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> None:
        self._shown.append((layer, queries, keys.shape[1]))


@dataclass(frozen=True)
class Listen(Merge):
    """A component `keep` that looks at the prompt's queries before it rewrites."""

    shown: Shown

    def begin(self, runner: Any, cache: Any) -> Merger:
        return Listening(self.shown)


@each_backend
def test_a_keeper_is_shown_the_prompts_queries(backend: Backend) -> None:
    """Looking changes nothing; it sees each piece of the prompt in each layer, with all slots up to it."""
    runner, component = backend.runner("llama"), Listen([])
    recipes = [Recipe(D3_PLAN, keep=keep) for keep in (Merge(), component)]
    runs = [decode(None, PROMPTS[3:], recipe, NEW, runner=runner, chunk=20) for recipe in recipes]
    assert gap(runs[0].logits(0), runs[1].logits(0)) <= backend.exact
    calls = [(layer, tuple(queries.shape), end) for layer, queries, end in component.shown]
    assert calls == [(layer, (4, size, 8), end) for size, end in ((20, 20), (17, 37)) for layer in range(LAYERS)]
    other = Listen([])
    decode(None, PROMPTS[3:], Recipe(D3_PLAN, keep=other), NEW, runner=HF.runner("llama"), chunk=20)
    for (_, found, _), (_, expected, _) in zip(component.shown, other.shown, strict=True):
        assert gap(found.to(expected.dtype), expected) <= backend.exact, "what was kept has changed since"


def test_the_room_that_is_set_aside_is_what_is_kept() -> None:
    engine = engine_for(tiny("llama"))
    ids, method = prompt(200, 1), StreamingLLM(window=20, sinks=2, every=8)
    plain, ends = (engine.generate(ids, method=one, max_new_tokens=40).stats for one in ("full", method))
    assert ends.kv_bytes_allocated * 239 <= plain.kv_bytes_allocated * 30
    assert ends.kv_bytes_used * 239 <= plain.kv_bytes_used * 30 and plain.kv_bytes_saved == 0
    assert ends.kv_bytes_used + ends.kv_bytes_saved == plain.kv_bytes_used


def test_the_turns_of_a_chat() -> None:
    """What a turn has altered is no beginning of the next: the second answer is that of a fresh conversation."""
    engine = engine_for(tiny("llama"), chat_tokenizer())
    for method in (StreamingLLM(window=6, sinks=1, every=4), KVInt8(), TopKOracle(k=4, first=0)):
        chat = engine.session(method=method, max_new_tokens=12)
        chat.send("one two three")
        second = chat.send("four five")
        ids = chat_ids(chat.messages[:3], engine.tokenizer)
        assert second.tokens == engine.generate(ids, method=method, max_new_tokens=12).tokens
        third = chat.send("six", method="full")
        ids = chat_ids(chat.messages[:5], engine.tokenizer)
        assert third.tokens == engine.generate(ids, max_new_tokens=12).tokens


def test_bad_rewrites_are_refused() -> None:
    layer = KVLayer(1, window=8)
    layer.append(*torch.ones(2, 1, 2, 4, 8), [0], [4])
    with pytest.raises(ValueError, match="that are not; rewrite after a commit"):
        KVLayer(1).keep_slots(0, torch.arange(3))
    layer.keep(0, 4)
    with pytest.raises(ValueError, match="sliding window of 8 positions"):
        layer.keep_slots(0, torch.arange(3))
    with pytest.raises(ValueError, match="has stored 4 positions; a form is set before"):
        layer.set_form(0, Int8())


def test_new_columns_have_no_bias() -> None:
    """Not even where one stood before slots were moved."""
    layer, entries = KVLayer(1), torch.ones(2, 1, 2, 6, 8)
    layer.append(*entries, [0], [6])
    layer.keep(0, 6)
    layer.rewrite(0, entries[0, 0], entries[1, 0], torch.full((2, 6), 0.5))
    assert not layer.restorable(0, 6), "other slots are no beginning of another text"
    layer.keep_slots(0, [1, 4])
    for count in (3, 6):
        layer.append(*entries[..., :count, :], [0], [count])
        bias = layer.bias[0]
        assert bias is not None and bias[:, : 2 + count].tolist() == [[0.5, 0.5, *[0.0] * count]] * 2
        layer.scratch[0] = 0


TOGETHER = {
    "bias and choice": Recipe(D3_PLAN, keep=Merge(), select=whole(TopKOracle(k=6, first=1)).select),
    "bias and bytes": Recipe(D3_PLAN, keep=Merge(), store=whole(KVInt8()).store),
    "choice of bytes": replace(whole(TopKOracle(k=6, first=1)), store=whole(KVInt8()).store),
}


@pytest.mark.parametrize("recipe", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("backend", [TORCH, NATIVE], ids=lambda backend: backend.name)
def test_parts_together_are_what_they_are_on_modules(backend: Backend, recipe: Recipe) -> None:
    expected = run_of(HF, "qwen3", recipe)
    found = run_of(backend, "qwen3", recipe)
    assert found.tokens == expected.tokens
    most = 0.2 if recipe.store is not None and backend == NATIVE else backend.exact
    for number in range(len(PROMPTS)):
        assert gap(found.logits(number).to(torch.float64), expected.logits(number)) <= most


def test_keys_in_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="keys is 5; it must be 4 or 8 bits"):
        KVInt4(keys=5)
