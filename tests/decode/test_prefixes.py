"""KV that a later prompt takes over: what it saves, that it changes no token, and what must not be taken over."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.model.kv.memory as kv_memory
from backends import packed
from drive import prompt
from families import RECURRENT, tiny
from method_matrix import LAGGING, MATRIX
from shoal.decode.prefixes import Prefixes, common, places_of_states
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.kv.cache import KVCache, SequenceCopy, copy_in, look
from shoal.model.kv.layer import oldest_seen
from shoal.model.packed import native
from shoal.model.runner import SequenceChunk
from test_matrix import engine_of

METHODS: dict[str, Any] = {
    "full": "full",
    "d3": D3(alpha=0.7, core=2),
    "d3_spec": D3Spec(mean=0.5, core=1, length=3),
}


@functools.cache
def engine(family: str = "llama") -> Engine:
    return engine_for(tiny(family, layers=4))


def answer(scheduler: Scheduler, ids: Sequence[int], **options: Any) -> Any:
    handle = scheduler.submit(list(ids), **options)
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    return handle


@pytest.mark.parametrize("family", ["llama", "hybrid"])
@pytest.mark.parametrize("method", METHODS)
def test_the_next_turn_of_a_chat_reads_only_what_is_new(family: str, method: str) -> None:
    scheduler = Scheduler(engine(family), start=False)
    options = {"method": METHODS[method], "max_new_tokens": 6}
    talk, known = prompt(11, 5), 0
    for turn in range(3):
        handle = answer(scheduler, talk, **options)
        seq, result = handle.entries[0].seq, handle.results[0]
        assert result.tokens == engine(family).generate(talk, **options).tokens
        assert seq.ledger.prefill_tokens == len(talk) - seq.cached
        if turn:
            # of an answer at full depth all is there but the last token, whose KV was never made
            assert seq.cached == (known if method == "d3" else known + 5)
        known = len(talk)
        talk = [*talk, *result.tokens, *prompt(4, 20 + turn)]


@pytest.mark.parametrize("method", MATRIX, ids=repr)
def test_turns_are_found_again_whatever_decodes(method: Method) -> None:
    """All of a turn that ran everything but its last token, else its prompt, and nothing of a KV of its own."""
    made = engine_of("llama")
    scheduler, recipe = Scheduler(made, start=False), made.recipe(method, 6)
    own = any(part is not None for part in (recipe.keep, recipe.store, recipe.select))
    deep = recipe.plan.first_shallow_step > 6 and recipe.experts is None
    talk, known = prompt(11, 5), 0
    for turn in range(3):
        handle = answer(scheduler, talk, method=method, max_new_tokens=6)
        (result,), seq = handle.results, handle.entries[0].seq
        assert result.tokens == made.generate(talk, method=method, max_new_tokens=6).tokens
        if method in LAGGING:
            assert seq.cached <= known
        else:
            assert seq.cached == (0 if own else known)
        talk = [*talk, *result.tokens, *prompt(4, 20 + turn)]
        known = len(talk) - 4 - 1 if deep else len(talk) - 4 - 6


def test_a_common_beginning_serves_those_who_go_on_otherwise() -> None:
    scheduler = Scheduler(engine(), start=False)
    common = prompt(20, 7)
    answer(scheduler, [*common, 5], max_new_tokens=3)
    ids = [*common, 9, 8]
    handle = answer(scheduler, ids, max_new_tokens=5)
    assert handle.entries[0].seq.cached == 20
    assert handle.results[0].tokens == engine().generate(ids, max_new_tokens=5).tokens
    again = answer(scheduler, common, max_new_tokens=2)
    assert again.entries[0].seq.cached == 19, "the last token is run for its logits"


def test_what_was_generated_with_fewer_layers_is_not_taken_over() -> None:
    shallow = D3(alpha=0.5, core=2, order="low_first")
    scheduler = Scheduler(engine(), start=False)
    first = answer(scheduler, prompt(9, 3), method=shallow, max_new_tokens=8)
    ids = [*prompt(9, 3), *first.results[0].tokens]
    handle = answer(scheduler, ids, max_new_tokens=6)
    assert handle.entries[0].seq.cached == 9
    assert handle.results[0].tokens == engine().generate(ids, max_new_tokens=6).tokens


def test_an_answer_that_became_shallow_is_kept_as_far_as_it_was_deep() -> None:
    method = PromptLookup(length=2, inner=D3(alpha=0.6, core=2, start=4))  # guesses need the KV of dropped layers
    scheduler = Scheduler(engine(), start=False)
    first = answer(scheduler, prompt(9, 3), method=method, max_new_tokens=10)
    ids = [*prompt(9, 3), *first.results[0].tokens]
    handle = answer(scheduler, ids, max_new_tokens=6)
    shallow = engine().recipe(method, 10).plan.first_shallow_step
    assert 1 < shallow < 9
    assert handle.entries[0].seq.cached == 9 + shallow - 1
    assert handle.results[0].tokens == engine().generate(ids, max_new_tokens=6).tokens


def test_memory_is_bounded_and_the_last_used_stays() -> None:
    scheduler = Scheduler(engine(), start=False)
    answer(scheduler, prompt(10, 1), max_new_tokens=2)
    one = scheduler.prefixes.bytes
    scheduler = Scheduler(engine(), prefix_bytes=2 * one, start=False)
    for seed in (1, 2, 1, 3):
        answer(scheduler, prompt(10, seed), max_new_tokens=2)
        assert scheduler.prefixes.bytes <= 2 * one
    assert [answer(scheduler, prompt(10, seed), max_new_tokens=2).entries[0].seq.cached for seed in (3, 1)] == [9, 9]
    assert answer(scheduler, prompt(10, 2), max_new_tokens=2).entries[0].seq.cached == 0
    assert answer(scheduler, prompt(90, 2), max_new_tokens=2).entries[0].seq.cached <= 10
    assert scheduler.prefixes.bytes <= 2 * one


def test_memory_is_given_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr("shoal.decode.prefixes.give_back", lambda: given.append(1))
    scheduler = Scheduler(engine(), start=False)
    answer(scheduler, prompt(10, 1), max_new_tokens=2)
    scheduler = Scheduler(engine(), prefix_bytes=8 * scheduler.prefixes.bytes, start=False)
    for seed in range(2):
        answer(scheduler, prompt(10, seed), max_new_tokens=2)
    assert not given, "little was kept"
    for seed in range(2, 20):
        answer(scheduler, prompt(10, seed), max_new_tokens=2)
    assert 3 <= len(given) <= 9


def test_a_longer_text_takes_the_place_of_its_beginning() -> None:
    scheduler = Scheduler(engine(), start=False)
    handle = answer(scheduler, prompt(10, 1), max_new_tokens=4)
    assert scheduler.prefixes.bytes == 13 * sum(engine().runner.position_bytes)
    answer(scheduler, prompt(6, 1), max_new_tokens=1)
    assert scheduler.prefixes.bytes == 13 * sum(engine().runner.position_bytes)
    assert [text for text, _ in texts(scheduler.prefixes)] == [[*prompt(10, 1), *handle.results[0].tokens[:3]]]


def test_what_texts_have_in_common_is_kept_once() -> None:
    scheduler, common = Scheduler(engine(), start=False), prompt(20, 7)
    for number in range(6):
        answer(scheduler, [*common, 30 + number, 3], max_new_tokens=1)
    assert scheduler.prefixes.bytes == (20 + 6 * 2) * sum(engine().runner.position_bytes)
    assert len(texts(scheduler.prefixes)) == 6
    check(scheduler.prefixes)


@pytest.mark.parametrize("family", ["llama", "hybrid", *["qwen3_5"] * bool(RECURRENT)])
def test_requests_that_come_together_read_what_they_share_once(family: str) -> None:
    """The first one reads it; with recurrent layers the second one, too, for the state of where they part."""
    scheduler, shared = Scheduler(engine(family), start=False, prefill_chunk=8), prompt(40, 7)
    asked = [[*shared, 30 + number, 3, 4] for number in range(5)]
    handles = [scheduler.submit(ids, max_new_tokens=3) for ids in asked]
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    assert [one.results[0].tokens for one in handles] == [
        engine(family).generate(ids, max_new_tokens=3).tokens for ids in asked]
    read = [one.entries[0].seq.ledger.prefill_tokens for one in handles]
    assert read == ([43, 43, 8 + 3, 3, 3] if family == "qwen3_5" else [43, 5 + 3, 3, 3, 3]), "beside room left"


def test_texts_of_another_salt_are_not_found() -> None:
    scheduler, ids = Scheduler(engine(), start=False), prompt(12, 3)
    salts = ["", "a", "", "a", "b"]
    cached = [answer(scheduler, ids, max_new_tokens=2, cache_salt=salt).entries[0].seq.cached for salt in salts]
    assert cached == [0, 0, 11, 11, 0]
    scheduler.prefixes.limit = 13 * sum(engine().runner.position_bytes)
    answer(scheduler, prompt(12, 4), max_new_tokens=2, cache_salt="c")
    assert list(scheduler.prefixes._roots) == [("c", None, "")], "nothing is left of salts of which nothing is kept"
    with pytest.raises(ValueError, match="cache_salt is 3; it must be text"):
        scheduler.submit(ids, cache_salt=3)


@pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states")
def test_recurrent_layers_keep_a_state_of_where_texts_part() -> None:
    """The second of several prompts reads the common part once more; the third one does not."""
    scheduler, common = Scheduler(engine("qwen3_5"), start=False), prompt(20, 7)
    cached = []
    for number in range(4):
        ids = [*common, 30 + number, 3, 4]
        handle = answer(scheduler, ids, max_new_tokens=3)
        cached.append(handle.entries[0].seq.cached)
        assert handle.results[0].tokens == engine("qwen3_5").generate(ids, max_new_tokens=3).tokens
    assert cached == [0, 0, 20, 20]
    check(scheduler.prefixes)


@pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states")
def test_the_end_of_a_chats_first_message_is_found_by_the_second_chat() -> None:
    """Token 9 begins messages; the system message has 20 tokens."""
    chat = engine("qwen3_5")
    scheduler, system = Scheduler(chat, start=False), [9, *[one for one in prompt(60, 7) if one != 9][:19]]
    asked = [[*system, 9, 30 + number, 3, 9, 4] for number in range(3)]
    handles = []
    for ids in asked:
        handles.append(scheduler.submit(ids, max_new_tokens=3))
        handles[-1].entries[0].seq.marks = places_of_states(ids, {9})
        while scheduler.running or scheduler.waiting:
            scheduler.turn()
    assert [one.entries[0].seq.cached for one in handles] == [0, 20, 21]
    assert [one.results[0].tokens for one in handles] == [chat.generate(ids, max_new_tokens=3).tokens for ids in asked]


def test_where_states_are_kept() -> None:
    assert places_of_states([5, *[1] * 99], {5}) == ()
    assert places_of_states([7, 5, 1, 1, 5, 1, 5], {7, 5}) == (4,), "7 begins the text, 5 each message"
    assert places_of_states([1] * 5000, {5}) == (2048, 4096)
    assert all(len(places_of_states([1] * size, ())) <= 3 for size in range(1, 9000, 7))
    assert places_of_states([1] * 512, ()) == (), "the end is kept in any case"
    assert places_of_states([1] * 513, ()) == (512,)


def texts(prefixes: Prefixes) -> list[tuple[list[int], Any]]:
    """The tokens on the way to each leaf, and the leaf."""
    found = []
    for leaf in prefixes._order:
        if not leaf.children:
            tokens, node = list[int](), leaf
            while node is not None:
                tokens, node = [*node.tokens, *tokens], node.parent
            found.append((tokens, leaf))
    return found


def check(prefixes: Prefixes) -> None:
    """Whether nodes fit each other, are in order of use, and are counted."""
    places = {node: place for place, node in enumerate(prefixes._order)}
    for node, place in places.items():
        assert node.tokens and len(node.tokens) == node.piece.last - node.piece.first
        assert node.parent is not None and node.parent.children[node.tokens[0]] is node
        assert node.piece.first == node.parent.piece.last and places.get(node.parent, len(places)) > place
    assert sum(node.piece.bytes for node in places) == prefixes.bytes <= prefixes.limit


def same_kv(cache: KVCache, cold: KVCache, length: int, most: float) -> None:
    """Whether both hold the same of the positions that the next query sees, up to `most`. Logits tell of states."""
    for one, other in zip(cache.layers, cold.layers, strict=True):
        assert one.lengths[0] == other.lengths[0] == length
        first = oldest_seen(one.window, length)
        assert one.starts[0] <= first
        if other.keys is None:
            continue
        sides = [layer.read(0, length - layer.starts[0], other.keys.dtype) for layer in (one, other)]
        for pair in zip(*sides, strict=True):
            seen = [side[:, first - layer.starts[0] :] for side, layer in zip(pair, (one, other), strict=True)]
            assert torch.allclose(*seen, rtol=0, atol=most)


@pytest.mark.parametrize("family", ["llama", "hybrid", *["qwen3_5"] * bool(RECURRENT)])
@pytest.mark.parametrize("seed", range(3))
def test_random_texts_are_what_they_would_be_cold(family: str, seed: int, rounds: int = 60) -> None:
    runner = engine(family).runner
    random_texts(runner, seed, rounds, 1 if runner.state_bytes else 6, 1e-9)  # modules sum up several tokens otherwise


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("family", ["llama", "gemma3", *["qwen3_5", "lfm2", "mamba2"] * bool(RECURRENT)])
def test_random_texts_have_the_bits_of_cold_reading_on_the_kernels(family: str) -> None:
    """In whatever pieces prompts are read and kept."""
    random_texts(packed(tiny(family, dtype=torch.float32, layers=4), "int8", kernels=True), 5, 60, 6, 0.0)


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_texts_in_pieces_have_the_bits_of_cold_reading(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces begin anywhere within the vectors and chunks of slots that the kernels read at once."""
    monkeypatch.setattr(kv_memory, "_TOGETHER", 1)  # each piece is mapped, as those of large models are
    random_texts(packed(tiny("llama", dtype=dtype, layers=2), "int8", kernels=True), 6, 60, 40, 0.0, 300)


def random_texts(runner: Any, seed: int, rounds: int, longest: int, most: float, shared: int = 0) -> None:
    """Texts that branch often are kept, found, and dropped where memory is short; all is as cold, up to `most`.

    Args:
        longest: most tokens that are read at once.
        shared: most tokens that texts begin with and have in common.
    """
    drawn = random.Random(seed)
    full, window = DepthPlan.full(runner.num_layers), max([one or 0 for one in runner.windows])
    begun = [[drawn.randrange(9) for _ in range(shared)] for _ in range(2)]
    limit = (30 + 3 * shared) * sum(runner.position_bytes) + 6 * sum(runner.state_bytes.values())
    prefixes, found, used = Prefixes(limit), 0, set()

    def read(cache: KVCache, tokens: Sequence[int], marks: Sequence[int] = ()) -> None:
        while (at := cache.positions[0]) < len(tokens):
            end = min([at + 1 + drawn.randrange(longest), len(tokens), *(mark for mark in marks if mark > at)])
            runner.forward([SequenceChunk(0, tokens[at:end], [0] * (end - at), full)], cache)
            cache.commit(0, range(end - at))
            if end in marks:
                cache.mark(0)

    for _ in range(rounds):
        ids = drawn.choice(begun)[: drawn.randrange(shared + 1)]
        ids = [*ids, *[drawn.randrange(2) for _ in range(drawn.randrange(2, 14 + 2 * window))]]
        cache, cold, salt = runner.new_cache(1), runner.new_cache(1), drawn.choice(["", "", "b"])
        length, known = prefixes.fill(cache, 0, ids, salt)
        assert length <= known < len(ids) and length == cache.positions[0]
        if length:
            found += 1
            read(cold, ids[:length])
            same_kv(cache, cold, length, most)
        read(cache, ids, [known] if known > length else [])
        cold = runner.new_cache(1)
        read(cold, ids)
        logits = [runner.forward([SequenceChunk(0, [5], [0], full)], one) for one in (cache, cold)]
        assert torch.allclose(*logits, rtol=0, atol=most)
        cache.rollback(0)
        prefixes.keep(cache, 0, [*ids, 7], salt)
        check(prefixes)
        after = runner.forward([SequenceChunk(0, [5], [0], full)], cache)
        assert torch.equal(after, logits[0]), "a text that is read in place was changed"
        used |= {id(node) for node in prefixes._order}
    assert found > rounds / 10 and len(used) > len(prefixes._order), "nothing was found, or nothing was dropped"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "hybrid", *["qwen3_5"] * bool(RECURRENT)])
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_random_texts(family: str, seed: int) -> None:
    test_random_texts_are_what_they_would_be_cold(family, seed, 170)


def test_room_is_made_before_there_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a store that is full would hold its limit and one text more."""
    at_once: list[int] = []
    copied = SequenceCopy.copied

    def noted(self: SequenceCopy) -> SequenceCopy:
        at_once.append(scheduler.prefixes.bytes + self.bytes)
        return copied(self)

    monkeypatch.setattr(SequenceCopy, "copied", noted)
    scheduler = Scheduler(engine(), start=False)
    answer(scheduler, prompt(30, 1), max_new_tokens=2)
    scheduler.prefixes.limit = int(2.5 * at_once[0])
    for seed in range(2, 8):
        answer(scheduler, prompt(30, seed), max_new_tokens=2)
    assert len(texts(scheduler.prefixes)) == 2, "there is room for two"
    assert max(at_once) <= scheduler.prefixes.limit


def test_none_is_kept_when_there_is_no_memory_for_it() -> None:
    scheduler = Scheduler(engine(), prefix_bytes=0, start=False)
    for _ in range(2):
        assert answer(scheduler, prompt(10, 1), max_new_tokens=2).entries[0].seq.cached == 0
    assert scheduler.prefixes.bytes == 0
    with pytest.raises(ValueError, match="prefix_bytes is -1"):
        Scheduler(engine(), prefix_bytes=-1, start=False)


def test_a_window_that_has_moved_on_is_not_taken_over_for_a_shorter_beginning() -> None:
    hybrid = engine("hybrid")
    windows = [window for window in hybrid.runner.windows if window is not None]
    assert max(windows) < 200
    scheduler = Scheduler(hybrid, start=False)
    long = prompt(400, 4)
    for ids in (long, [*long[:40], 3], [*long, 5]):
        handle = answer(scheduler, ids, max_new_tokens=3)
        assert handle.results[0].tokens == hybrid.generate(ids, max_new_tokens=3).tokens


def test_a_copy_holds_what_the_row_holds() -> None:
    runner = engine().runner
    scheduler = Scheduler(engine(), prefix_bytes=0, start=False)
    scheduler.submit(prompt(12, 2), max_new_tokens=9)
    for _ in range(4):
        scheduler.turn()
    cache = scheduler._batches.plain.cache
    seen = look(cache, 0)
    assert seen is not None
    held = seen.copied()
    assert held.last == cache.positions[0] > 12
    cache.extend(1)
    copy_in(cache, 1, [held], held.last - 2)
    for layer in cache.layers:
        assert layer.keys is not None and layer.values is not None
        for store in (layer.keys, layer.values):
            assert torch.equal(store[0, :, : held.last - 2], store[1, :, : held.last - 2])
        assert layer.lengths == [held.last, held.last - 2]
    assert held.bytes == 2 * sum(layer.keys.nbytes for layer in held.layers)
    assert len(held.layers) == runner.num_layers


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_the_common_beginning_is_found(one: list[int], other: list[int]) -> None:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    assert common(one, other) == length


def test_an_empty_store_finds_nothing() -> None:
    assert Prefixes(100).fill(KVCache([None], 1), 0, [1, 2, 3]) == (0, 0)
