"""Plain steps, whose call is kept from step to step, beside calls that are written anew: same bits, same storage."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from backends import packed
from families import RECURRENT, tiny
from native_reference import Case, make_reference, storage
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.packed.native.library import StepsStruct
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.native_steps import PlainSteps
from shoal.model.runner import SequenceChunk, greedy

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
CASE = Case(layers=3)


@contextmanager
def anew() -> Iterator[None]:
    """Forwards never take a call that was kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainSteps, "run", lambda *given: None)
        yield


@pytest.fixture(params=["llama", "gemma3"])
def runner(request: pytest.FixtureRequest) -> NativeRunner:
    """gemma3 has layers with a window of 8, which stop storing the first positions."""
    made = packed(tiny(request.param, dtype=torch.float32), "int8", kernels=True)
    assert isinstance(made, NativeRunner)
    return made


class Twice:
    """Two caches that take the same operations; forwards of the second one are written anew."""

    def __init__(self, runner: NativeRunner, seqs: int) -> None:
        self.runner, self.caches = runner, [KVCache(runner.windows, seqs) for _ in range(2)]
        self.kept = 0

    def forward(self, chunks: list[SequenceChunk], argmax: bool = False) -> None:
        run: Any = self.runner.argmax if argmax else self.runner.forward
        known = self.runner._plain._struct
        found = run(chunks, self.caches[0])
        self.kept += known is not None and self.runner._plain._struct is known
        with anew():
            expected = run(chunks, self.caches[1])
            logits = self.runner.forward(chunks, self.again()) if argmax else None
        assert (found == expected == greedy(logits)) if logits is not None else torch.equal(found, expected)
        self.check()

    def again(self) -> KVCache:
        """The second cache before its last forward."""
        for seq in range(self.caches[1].seqs):
            self.caches[1].rollback(seq)
        return self.caches[1]

    def each(self, name: str, *given: Any) -> None:
        for cache in self.caches:
            getattr(cache, name)(*given)

    def check(self) -> None:
        for one, other in zip(*(cache.layers for cache in self.caches), strict=True):
            assert (one.lengths, one.scratch, one.starts) == (other.lengths, other.scratch, other.starts)
            for seq, (length, start) in enumerate(zip(one.lengths, one.starts, strict=True)):
                end = length - start + one.scratch[seq]
                for a, b in ((one.keys, other.keys), (one.values, other.values)):
                    assert (a is None) == (b is None) and (a is None or torch.equal(a[seq, :, :end], b[seq, :, :end]))


def chunk(
    runner: NativeRunner, cache: KVCache, seq: int, plan: DepthPlan, size: int = 1, step: int = 0
) -> SequenceChunk:
    at = cache.positions[seq]
    tokens = [(11 + 5 * seq + 7 * place) % runner.vocab_size for place in range(at, at + size)]
    return SequenceChunk(seq, tokens, [step] * size, plan)


def shallower(runner: NativeRunner) -> DepthPlan:
    """One layer from step 6 on, another one from step 12 on, are dropped."""
    count = runner.num_layers
    return DepthPlan.from_counts([count] * 6 + [count - 1] * 6 + [count - 2], list(range(1, count)), count)


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules(runner: NativeRunner, seed: int) -> None:
    """Sequences join, leave, are released, cut, rolled back and given guesses between plain steps."""
    drawn, full = random.Random(seed), DepthPlan.full(runner.num_layers)
    both, steps = Twice(runner, 2), [0, 0]
    plans = [full, shallower(runner)]
    for seq in range(2):
        both.forward([chunk(runner, both.caches[0], seq, plans[seq], 3 + 9 * seq)])
        both.each("commit", seq, range(3 + 9 * seq))
    for _ in range(60):
        cache, what = both.caches[0], drawn.random()
        if what < 0.06:
            both.each("extend", 1)
            plans.append(drawn.choice([full, shallower(runner)]))
            steps.append(0)
            seq = cache.seqs - 1
            both.forward([chunk(runner, cache, seq, plans[seq], 5)])
            both.each("commit", seq, range(5))
        elif what < 0.12 and cache.seqs > 1:
            gone = drawn.randrange(cache.seqs)
            order = cache.select([seq for seq in range(cache.seqs) if seq != gone])
            both.caches[1].select([seq for seq in range(len(order) + 1) if seq != gone])
            plans, steps = [plans[seq] for seq in order], [steps[seq] for seq in order]
        elif what < 0.2:
            seq = drawn.randrange(cache.seqs)
            both.forward([chunk(runner, cache, seq, plans[seq], 4, steps[seq])])
            both.each("commit", seq, range(drawn.randrange(5)))
        else:
            alike = [seq for seq in range(cache.seqs) if drawn.random() < 0.8] or [0]
            both.forward([chunk(runner, cache, seq, plans[seq], 1, steps[seq]) for seq in alike], drawn.random() < 0.5)
            for seq in alike:
                both.each(*(("rollback", seq) if drawn.random() < 0.1 else ("commit", seq, (0,))))
                steps[seq] += 1
    assert both.kept > 5, "no call was kept"


def test_what_is_not_one_token_each_in_plain_storage_is_written_anew(runner: NativeRunner) -> None:
    full = DepthPlan.full(runner.num_layers)
    cache = KVCache(runner.windows, 1, [16] * runner.num_layers)
    runner.forward([chunk(runner, cache, 0, full, 4)], cache)
    cache.commit(0, range(4))
    plain = chunk(runner, cache, 0, full)
    run = partial(runner._plain.run, bind=runner._binding)
    for other in (chunk(runner, cache, 0, full, 2), SequenceChunk(0, plain.tokens, [0], full, mutual=True),
                  SequenceChunk(0, plain.tokens, [0], full, wanted=0),
                  SequenceChunk(0, plain.tokens, [1], DepthPlan.skipping(runner.num_layers, [1], []))):
        assert run([other], cache, 0) is None
    assert run([plain], cache, 1) is not None
    assert run([plain], cache, 1) is None, "its token awaits a commit"
    cache.rollback(0)
    cache.release(0, [0])
    assert run([plain], cache, 1) is None
    with pytest.raises(RuntimeError, match="released"):
        runner.forward([plain], cache)


def test_positions_beyond_the_tables(runner: NativeRunner) -> None:
    """The tables of the rotation grow; what was kept goes on with the new ones."""
    both, full = Twice(runner, 1), DepthPlan.full(runner.num_layers)
    reach = runner.decoder.reach
    while both.caches[0].positions[0] < reach + 3:
        size = 1 if both.caches[0].positions[0] >= reach - 3 else min(64, reach - 3 - both.caches[0].positions[0])
        both.forward([chunk(runner, both.caches[0], 0, full, size)])
        both.each("commit", 0, range(size))
    assert runner.decoder.reach > reach and both.kept


@pytest.mark.parametrize("seed", range(6))
def test_steps_in_one_call_are_those_one_by_one(runner: NativeRunner, seed: int) -> None:
    """Same tokens and storage, whatever the plans, room and ends; the call ends with a token that ends a text."""
    drawn, full = random.Random(seed), DepthPlan.full(runner.num_layers)
    both, plans, counts = Twice(runner, 3), [full, full, shallower(runner)], list[int]()
    steps = [0, 0, 0]
    for seq, plan in enumerate(plans):
        both.forward([chunk(runner, both.caches[0], seq, plan, 3 + 5 * seq)])
        both.each("commit", seq, range(3 + 5 * seq))
    for _ in range(12):
        alike = [seq for seq in range(3) if drawn.random() < 0.6] or [2]
        most, ends = drawn.randint(2, 8), drawn.sample(range(runner.vocab_size), drawn.choice([0, 8]))
        chunks = [chunk(runner, both.caches[0], seq, plans[seq], 1, steps[seq]) for seq in alike]
        found = runner.argmax_steps(chunks, both.caches[0], most, ends)
        assert 1 <= len(found) <= most and not any(token in ends for tokens in found[:-1] for token in tokens)
        fed = [one.tokens[0] for one in chunks]
        for place, tokens in enumerate(found):
            single = [SequenceChunk(seq, [token], [steps[seq] + place], plans[seq])
                      for seq, token in zip(alike, fed, strict=True)]
            with anew():
                assert runner.argmax(single, both.caches[1]) == tokens
            for seq in alike:
                both.caches[1].commit(seq, (0,))
            fed = tokens
        for seq in alike:
            both.caches[0].commit(seq, range(len(found)))
            steps[seq] += len(found)
        both.check()
        counts.append(len(found))
    assert max(counts) > 2, "no call ran several steps"


def test_a_call_of_several_steps_ends_with_its_room_and_its_layers(runner: NativeRunner) -> None:
    cache, plan = KVCache(runner.windows, 1, [16] * runner.num_layers), shallower(runner)
    runner.forward([chunk(runner, cache, 0, plan, 4)], cache)
    cache.commit(0, range(4))
    room = min(layer.capacity - layer.lengths[0] + layer.starts[0] for layer in cache.layers)
    assert 1 < room < 100
    whole = chunk(runner, cache, 0, DepthPlan.full(runner.num_layers))
    assert len(runner.argmax_steps([whole], cache, 100, ())) == room
    cache.rollback(0)
    for step, most in ((0, 6), (0, 7), (5, 1), (5, 2), (6, 6), (12, 8)):
        found = runner.argmax_steps([chunk(runner, cache, 0, plan, 1, step)], cache, most, ())
        assert len(found) == (1 if most in (7, 2) else min(most, room)), "these layers run up to step 5, 11 and on"
        cache.rollback(0)
    (first, *_), *_ = found
    assert len(runner.argmax_steps([chunk(runner, cache, 0, plan, 1, 12)], cache, 8, [first])) == 1


@pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states")
def test_recurrences_take_one_step_a_call() -> None:
    """Each must be committed before the next."""
    hybrid = packed(tiny("lfm2", dtype=torch.float32, layers=4), "int8", kernels=True)
    assert isinstance(hybrid, NativeRunner)
    cache, full = hybrid.new_cache(1, [64] * 4), DepthPlan.full(4)
    hybrid.forward([chunk(hybrid, cache, 0, full, 4)], cache)
    cache.commit(0, range(4))
    assert len(hybrid.argmax_steps([chunk(hybrid, cache, 0, full)], cache, 8, ())) == 1


@pytest.mark.parametrize(("change", "reason"), [
    ({"most": 0}, "0 steps were asked for"),
    ({"wanted": [0]}, "1 of 2 tokens are wanted"),
    ({"rows": [0, 0], "nodes": [0, 1], "ancestors": [1, 3], "positions": [2, 3]}, "row 0 has several tokens"),
    ({"active": [[3, 3]] * 3}, "whole layers"),
])
def test_wrong_steps_are_refused(change: dict[str, Any], reason: str) -> None:
    slow, change = make_reference(CASE), dict(change)
    steps = StepsStruct(most=change.pop("most", 2))
    batch = native.NativeBatch(**{"ids": [1, 2], "positions": [2, 2], "rows": [0, 1], "nodes": [0, 0], "bases": [2, 2],
                                  "ancestors": [1, 1], "wanted": [0, 1], **change})
    struct = batch.struct(CASE.layers, slow.native.bind(*storage(CASE, 2, 16)))
    with pytest.raises(ValueError, match=reason):
        slow.native.run(struct, array("i", bytes(4 * len(batch.wanted) * steps.most)), steps=steps)
