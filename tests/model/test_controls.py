"""Negative controls: what the tests of this folder call equal would not be, were anything off by one or stale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.model.hf as hf
import shoal.model.kv.layer as kv_layer
import shoal.model.masks as masks
import shoal.model.runner as stack_module
from drive import decode, gap, make_run, oracle_logits, prompt, stack_of
from families import fingerprint, tiny
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer
from shoal.model.runner import SequenceChunk, SequenceView

D3 = DepthPlan.whole_layers([NEVER, 9, 2, 4, 6, NEVER])
FULL = DepthPlan.full(6)
IDS, NEW, FAR = prompt(9, 3), 12, 1e-6


def error(name: str, plan: DepthPlan = D3, draft: Planted | None = None) -> float:
    """How far the logits are from the oracle's, for the tokens that came out."""
    run = decode(tiny(name), [IDS], Recipe(plan, draft), NEW)
    return gap(run.logits(0)[:NEW], oracle_logits(tiny(name), IDS, plan, run.tokens[0]))


def truth(name: str, plan: DepthPlan = D3) -> Planted:
    return Planted({0: decode(tiny(name), [IDS], plan, NEW).tokens[0]}, 0.2, tree=True)


@pytest.mark.parametrize("name", ["llama", "hybrid", "gpt2", "gemma2"])
def test_the_intact_engine_is_exact(name: str) -> None:
    assert error(name) <= 1e-10
    assert error(name, draft=truth(name)) <= 1e-10


def _without_window(original: Any) -> Any:
    return lambda seqs, window, device, square=True: original(seqs, None, device, square)


def _window_of(change: int) -> Any:
    return lambda original: lambda seqs, window, device, square=True: original(
        seqs, window and window + change, device, square
    )


def _blind_to_the_last_key(original: Any) -> Any:
    def seen(seqs: Sequence[SequenceView], window: int | None, device: Any, square: bool = True) -> Tensor | None:
        table = original(seqs, window, device, square)
        if table is None:
            table = torch.ones(len(seqs), 1, 1, seqs[0].slots, dtype=torch.bool)
        return table.index_fill(-1, torch.tensor([seqs[0].base - seqs[0].start - 1]).clamp(min=0), False)

    return seen


def _looks_ahead(original: Any) -> Any:
    def seen(seqs: Sequence[SequenceView], window: int | None, device: Any, square: bool = True) -> Tensor | None:
        table = original(seqs, window, device, False)
        return table if table is None else torch.ones_like(table)

    return seen


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hybrid", _without_window),
        ("hybrid", _window_of(1)),
        ("hybrid", _window_of(-1)),
        ("gemma2", _window_of(-1)),
        ("llama", _blind_to_the_last_key),
        ("llama", _looks_ahead),
        ("gemma2", _looks_ahead),
    ],
)
def test_a_wrong_mask_is_seen(name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "mask", change(hf.mask))
    assert error(name) > FAR


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_siblings_that_see_each_other_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = truth(name)
    monkeypatch.setattr(masks, "ancestors", lambda parents, _: torch.ones(len(parents), len(parents)).tril().bool())
    assert error(name, draft=draft) > FAR


@pytest.mark.parametrize("name", ["llama", "hybrid", "gpt2", "opt"])
def test_positions_off_by_one_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those after the prompt: rotary embeddings do not notice when all are shifted together."""
    right = hf.positions

    def wrong(chunk: SequenceChunk, cache: KVCache, *rest: int) -> list[int]:
        return [place + (cache.positions[chunk.seq] > 0) for place in right(chunk, cache, *rest)]

    monkeypatch.setattr(hf, "positions", wrong)
    assert error(name) > FAR


def test_tree_positions_by_node_number_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, right = truth("llama"), hf.positions

    def wrong(chunk: SequenceChunk, *rest: Any) -> list[int]:
        return right(SequenceChunk(chunk.seq, chunk.tokens, chunk.steps, chunk.plan), *rest)

    monkeypatch.setattr(hf, "positions", wrong)
    assert error("llama", draft=draft) > FAR


@pytest.mark.parametrize("layer", range(6))
def test_a_stale_entry_is_seen(layer: int) -> None:
    """In any layer that still runs, at the first, a middle or the last prompt position."""
    for position in (0, 4, len(IDS) - 1):
        run = make_run(tiny("llama"), [IDS], D3, NEW)
        steps = run.steps()
        next(steps)
        store = run.cache.layers[layer]
        assert store.keys is not None
        store.keys[0, :, position] = store.keys[0, :, (position + 1) % len(IDS)]
        for _ in steps:
            pass
        expected = oracle_logits(tiny("llama"), IDS, D3, run.tokens[0])
        assert gap(run.logits(0), expected) > FAR


def test_a_commit_that_keeps_the_wrong_nodes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, right = truth("llama"), KVLayer.commit
    monkeypatch.setattr(KVLayer, "commit", lambda self, seq, path: right(self, seq, range(len(path))))
    assert error("llama", draft=draft) > FAR


def test_a_window_that_drops_one_position_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVLayer._evict

    def wrong(self: KVLayer, seq: int) -> None:
        with pytest.MonkeyPatch.context() as narrower:
            narrower.setattr(self, "window", (self.window or 0) - 1)
            right(self, seq)

    monkeypatch.setattr(KVLayer, "_evict", wrong)
    ids = prompt(5)
    run = decode(tiny("mistral"), [ids], FULL, 40)
    assert gap(run.logits(0), oracle_logits(tiny("mistral"), ids, FULL, run.tokens[0])) > FAR


def test_growth_that_forgets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(store: torch.Tensor, held: Any, firsts: Any, slots: int, capacity: int) -> torch.Tensor:
        return store.new_zeros(slots, store.shape[1], capacity, store.shape[3])

    monkeypatch.setattr(kv_layer, "_moved", forgets)
    assert error("llama") > FAR


def grown_feed() -> tuple[SequenceChunk, KVCache]:
    """A cache whose layer 2 skipped a token, and a feed that wants layer 2 back."""
    runner = stack_of(tiny("llama"))
    cache = KVCache(runner.windows, 1)
    shallow = DepthPlan.whole_layers([NEVER, NEVER, 1, NEVER, NEVER, NEVER])
    for tokens, steps, plan in ((IDS, [0] * 9, FULL), ([4], [1], shallow)):
        runner.forward([SequenceChunk(0, tokens, steps, plan)], cache)
        cache.commit(0, range(len(tokens)))
    return SequenceChunk(0, [5], [2], FULL), cache


def test_a_plan_that_grows_is_refused_and_nothing_is_harmed() -> None:
    runner, before = stack_of(tiny("llama")), fingerprint(tiny("llama"))
    chunk, cache = grown_feed()
    with pytest.raises(RuntimeError, match="layer 2 holds the KV of 9 positions of sequence 0, but 10 .*not nested"):
        runner.forward([chunk], cache)
    cache.rollback(0)
    shallow = DepthPlan.whole_layers([NEVER, NEVER, 1, NEVER, NEVER, NEVER])
    logits = runner.forward([SequenceChunk(0, [5], [2], shallow)], cache)
    assert gap(logits, oracle_logits(tiny("llama"), IDS, shallow, [4, 5, 0])[-1:]) <= 1e-10
    assert fingerprint(tiny("llama")) == before


def test_a_grown_attention_is_refused_but_a_lone_mlp_may_return() -> None:
    runner = stack_of(tiny("llama"))
    chunk, cache = grown_feed()
    mlp_only = DepthPlan((NEVER, NEVER, 1, NEVER, NEVER, NEVER), (NEVER,) * 6)
    runner.forward([SequenceChunk(0, [5], [2], mlp_only)], cache)
    cache.rollback(0)
    attention_only = DepthPlan((NEVER,) * 6, (NEVER, NEVER, 1, NEVER, NEVER, NEVER))
    with pytest.raises(RuntimeError, match="not nested"):
        runner.forward([SequenceChunk(0, [5], [2], attention_only)], cache)


def test_without_the_check_a_grown_plan_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is needed: what the layer would compute is silently different."""
    runner = stack_of(tiny("llama"))
    chunk, cache = grown_feed()
    monkeypatch.setattr(stack_module, "check_lengths", lambda *_: None)
    monkeypatch.setattr(hf.HFRunner, "attention_mask", lambda *_: None)
    logits = runner.forward([chunk], cache)
    right = oracle_logits(tiny("llama"), IDS, FULL, [4, 5, 0])[-1:]
    assert gap(logits, right) > FAR


def test_a_released_layer_refuses_to_run() -> None:
    runner = stack_of(tiny("llama"))
    cache = KVCache(runner.windows, 1)
    runner.forward([SequenceChunk(0, IDS, [0] * 9, FULL)], cache)
    cache.commit(0, range(9))
    cache.release(0, [3])
    with pytest.raises(RuntimeError, match="released"):
        runner.forward([SequenceChunk(0, [5], [1], FULL)], cache)
