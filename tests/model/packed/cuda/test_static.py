"""Forwards in pieces, run by Triton's interpreter, compute what the flat forward computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from backends import PACKED, packed
from drive import gap, prompt
from families import tiny
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.packed.cuda.form import ForwardForm
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import SequenceChunk

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here; tests/gpu has its twin")

LAYERS = 3
QUICK = ("llama",)
OTHER = ("apertus", "arcee", "bitnet", "ministral3", "minicpm3", "youtu")
"""Families with another block than the one that runs in pieces."""
FULL = DepthPlan.full(LAYERS)
SHALLOW = DepthPlan.whole_layers([NEVER, 2, NEVER])
EXACT = 2e-3
"""Of logits of up to 20, in float32."""
ROWS = [prompt(5, 1), prompt(7, 2), prompt(3, 3)]


@pytest.fixture(autouse=True)
def _few_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other."""
    from shoal.model.packed.cuda import static

    monkeypatch.setattr(static, "SHARES", (2, 2))


def pair(name: str, **changes: Any) -> tuple[PackedRunner, PackedRunner]:
    """A runner that runs all flat, and one that runs what it can in pieces."""
    model = tiny(name, dtype=torch.float32, layers=LAYERS, **changes)
    flat, runner = packed(model), packed(model)
    runner.use_graphs(capture=False)
    return flat, runner


def forms(runner: PackedRunner) -> list[ForwardForm]:
    assert runner.graphs is not None
    return list(runner.graphs.forms)


def feed(
    runners: Sequence[PackedRunner], caches: Sequence[KVCache], sizes: Sequence[int], plan: DepthPlan = FULL,
    step: int = 1, every: bool = True, seed: int = 0,
) -> None:
    """Run chains of these sizes on all runners, compare with the first one's logits and KV, commit."""
    chunks = [
        SequenceChunk(seq, prompt(size, seed + seq), [step] * size, plan, wanted=size if every else 1)
        for seq, size in enumerate(sizes) if size
    ]  # fmt: skip
    expected = runners[0].forward(chunks, caches[0])
    for runner, cache in zip(runners[1:], caches[1:], strict=True):
        assert gap(runner.forward(chunks, cache), expected) <= EXACT
    for cache in caches:
        for chunk in chunks:
            cache.commit(chunk.seq, range(len(chunk.tokens)))
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert one.lengths == other.lengths and one.starts == other.starts
        for seq, length in enumerate(one.lengths):
            count = length - one.starts[seq]
            if count and one.keys is not None and not one.released[seq]:
                assert gap(one.keys[seq, :, :count], other.keys[seq, :, :count]) <= EXACT
                assert gap(one.values[seq, :, :count], other.values[seq, :, :count]) <= EXACT


def empty(runners: Sequence[PackedRunner], seqs: int, reserve: int = 64) -> list[KVCache]:
    return [KVCache(runner.windows, seqs, [reserve] * LAYERS) for runner in runners]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PACKED
                                  if n not in OTHER])
def test_pieces_are_the_flat_forward(name: str) -> None:
    """Prompts, a token for each, drafts of other lengths, a shallower plan."""
    runners = pair(name)
    caches = empty(runners, 2)
    feed(runners, caches, [3, 4], step=0, every=False)
    feed(runners, caches, [1, 1])
    feed(runners, caches, [2, 1])
    feed(runners, caches, [1, 1], SHALLOW, step=3)
    assert forms(runners[1]) == [ForwardForm(2, 4, False), ForwardForm(2, 2, True), ForwardForm(2, 1, True)]


def test_other_blocks_are_never_run_in_pieces() -> None:
    shapes = {name: packed(tiny(name, dtype=torch.float32, layers=LAYERS)).shape for name in PACKED}
    assert {name for name, shape in shapes.items() if not shape.plain} == {*OTHER}


@pytest.mark.slow
def test_rows_that_decode_beside_prompts_of_other_lengths() -> None:
    """Each kind runs in a form of its own; the logits come in the order of the chunks, of a piece that goes on none."""
    runners = pair("llama")
    caches = empty(runners, 5)
    feed(runners, caches, [3, 4], step=0, every=False)
    kinds = [(0, 1, 1, SHALLOW), (1, 1, 1, FULL), (2, 9, 0, FULL), (3, 2, 1, FULL), (4, 8, 1, FULL)]
    chunks = [SequenceChunk(seq, prompt(size, seq), [3 * (seq < 2)] * size, plan, wanted=wanted)
              for seq, size, wanted, plan in kinds]  # fmt: skip
    expected, logits = (runner.forward(chunks, cache) for runner, cache in zip(runners, caches, strict=True))
    assert len(logits) == 4 and gap(logits, expected) <= EXACT
    assert forms(runners[1])[1:] == [ForwardForm(3, 10, False), ForwardForm(1, 1, True)]
    for cache in caches:
        for chunk in chunks:
            cache.commit(chunk.seq, range(len(chunk.tokens)))
    feed(runners, caches, [0, 1, 1, 1, 1])


@pytest.mark.slow
def test_windows_before_and_after_they_move() -> None:
    runners = pair("hybrid")
    caches = empty(runners, 1, 0)
    feed(runners, caches, [6], step=0, every=False)
    for seed in range(12):
        feed(runners, caches, [3], seed=seed)
    assert max(layer.starts[0] for layer in caches[1].layers) > 0
    assert forms(runners[1]) == [ForwardForm(1, 6, False), ForwardForm(1, 3, True)]


@pytest.mark.slow
def test_a_long_prompt_and_columns_of_many_chunks() -> None:
    runners = pair("llama")
    caches = empty(runners, 1, 0)
    feed(runners, caches, [130], step=0, every=False)
    feed(runners, caches, [70], step=0, every=False, seed=1)
    feed(runners, caches, [1])
    assert forms(runners[1]) == [ForwardForm(1, 192, False), ForwardForm(1, 96, False), ForwardForm(1, 1, True)]


@pytest.mark.slow
def test_columns_that_were_chosen() -> None:
    """What `snapkv` and its like leave of a sequence: fewer slots than positions."""
    runners = pair("llama")
    caches = empty(runners, 2)
    feed(runners, caches, [9, 7], step=0, every=False)
    for cache in caches:
        for layer in cache.layers:
            layer.keep_slots(0, [0, 2, 3, 8])
    feed(runners, caches, [1, 1])
    assert forms(runners[1])[-1] == ForwardForm(2, 1, True)


@pytest.mark.slow
def test_rows_that_leave_and_join_and_other_storage() -> None:
    runners = pair("llama")
    caches = empty(runners, 3)
    feed(runners, caches, [5, 7, 5], step=0, every=False)
    for seqs in ([2, 0], [1]):
        for cache in caches:
            cache.select(seqs)
        feed(runners, caches, [1] * len(seqs))
    for cache in caches:
        cache.extend(1)
    feed(runners, caches, [1, 4], every=False)
    for layer in caches[1].layers:
        layer.resize(layer.max_seqs, layer.capacity + 40)
    feed(runners, caches, [1, 1])
    other = empty(runners, 2)
    feed(runners, other, [4, 4], step=0, every=False)
    feed(runners, other, [1, 1])
    feed(runners, caches, [1, 1])


@pytest.mark.slow
def test_a_table_of_positions_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.model.packed.cuda import graphs

    monkeypatch.setattr(graphs, "REACH", 0)
    runners = pair("llama", max_position_embeddings=1024)
    caches = empty(runners, 1)
    for runner, cache in zip(runners, caches, strict=True):
        ids = prompt(254)
        graph, runner.graphs = runner.graphs, None
        runner.forward([SequenceChunk(0, ids, [0] * 254, FULL)], cache)
        runner.graphs = graph
        cache.commit(0, range(254))
    feed(runners, caches, [1])
    _, runner = runners
    graph, runner.graphs = runner.graphs, None
    runner.forward([SequenceChunk(0, prompt(300), [0] * 300, FULL)], KVCache(runner.windows, 1))  # grows it
    runner.graphs = graph
    assert runner.rotary.positions > 256
    for seed in range(4):
        feed(runners, caches, [1], seed=seed)
    assert forms(runners[1]) == [ForwardForm(1, 1, True)]


@pytest.mark.slow
def test_shallow_positions_are_known() -> None:
    """The refill of a later turn starts there."""
    _, runner = pair("llama")
    (cache,) = empty([runner], 1)
    runner.forward([SequenceChunk(0, ROWS[0], [0] * 5, FULL)], cache)
    cache.commit(0, range(5))
    for step in range(1, 5):
        runner.forward([SequenceChunk(0, [4], [step], SHALLOW)], cache)
        cache.commit(0, [0])
    assert cache.first_shallow(0) == 6


@pytest.mark.slow
def test_a_plan_that_grows_and_a_released_row_are_refused_as_ever() -> None:
    _, runner = pair("llama")
    (cache,) = empty([runner], 2)
    for seq in range(2):
        runner.forward([SequenceChunk(seq, ROWS[seq], [0] * len(ROWS[seq]), FULL)], cache)
        cache.commit(seq, range(len(ROWS[seq])))
    runner.forward([SequenceChunk(0, [4], [2], SHALLOW)], cache)
    cache.commit(0, [0])
    with pytest.raises(RuntimeError, match="layer 1 holds the KV of 5 positions of sequence 0, but 6 .*not nested"):
        runner.forward([SequenceChunk(0, [5], [3], FULL)], cache)
    cache.rollback(0)
    cache.release(1, [2])
    with pytest.raises(RuntimeError, match="released"):
        runner.forward([SequenceChunk(1, [4], [1], FULL)], cache)


@pytest.mark.slow
def test_a_forward_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.model.packed.cuda import static

    runners = pair("llama")
    caches = empty(runners, 1)
    feed(runners, caches, [5], step=0, every=False)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(static.StaticForward, "leave", fail)
        with pytest.raises(RuntimeError, match="broken"):
            runners[1].forward([SequenceChunk(0, [4], [1], FULL)], caches[1])
    assert all(layer.scratch == [0] for layer in caches[1].layers)
    feed(runners, caches, [1])
