"""Swift's search from text to text, where memory is short, and on layers with recurrences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from families import PACKED_RECURRENT, tiny
from shoal.engine.loading.load import engine_for
from shoal.engine.memory.shorter import shorter
from shoal.methods import make
from shoal_lab.drafts import agreement
from shoal_lab.drafts.skip_search import SkipSearch
from shoal_lab.drafts.skips import Skips
from shoal_lab.methods.swift import FoundSkips, Swift

PROMPTS = [[5, 9, 13, 5, 9, 13, 40, 41, 5, 9], [7, 8, 9, 10, 7, 8]]


def test_a_search_goes_on_from_text_to_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score of a set is planted: the share of its sublayers that a kind of text can do without."""
    engine, kinds = engine_for(tiny("llama")), [{("attention", 1), ("mlp", 2)}, {("attention", 4), ("mlp", 4)}]
    tried, kind = list[Skips](), 0

    def planted(runner: object, cache: object, texts: list[Any]) -> list[float]:
        plan = texts[0][3]
        parts = [plan.attention, plan.mlp]
        left_out = Skips(*(tuple(layer for layer, drop in enumerate(drops) if drop == 1) for drops in parts))
        tried.append(left_out)
        return [len(left_out.parts() & kinds[kind]) / 2]

    monkeypatch.setattr(agreement, "agreements", planted)
    method = Swift(ratio=2 / 12, window=4, rounds=60, patience=60, bayes_every=0)
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "seed": 1}
    plain = engine.generate(PROMPTS[0], **options).tokens

    def searched() -> list[Skips]:
        tried.clear()
        assert engine.generate(PROMPTS[0], method=method, **options).tokens == plain
        return tried.copy()

    first = searched()
    found = engine.info().memory["swift", 2]
    assert len(first) > 2 and found.best.parts() == kinds[0] and found.score == 1.0
    assert searched() == [found.best]  # judged once, and good enough
    kind = 1
    other = searched()
    assert other[0].parts() == kinds[0] and len(other) > 2 and found.best.parts() == kinds[1]
    kinds[1] = {("mlp", 3), ("mlp", 99)}  # of which no set scores enough
    method = replace(method, patience=5)
    assert len(searched()) > 6 and found.since == 5
    assert searched() == [found.best]  # judged once, and there is no patience left


def test_what_was_found_is_kept_and_nothing_of_a_text_that_tried_nothing() -> None:
    found, start = FoundSkips(Skips((1,))), Skips((2,))
    untouched = SkipSearch(6, start)
    found.learn(untouched)
    assert found == FoundSkips(Skips((1,)))
    search = SkipSearch(6, start)
    search.tell(start, 0.5)
    search.tell(Skips((3,)), 0.2)
    found.learn(search)
    assert found == FoundSkips(start, 0.5, 1)


def test_swift_keeps_its_tree_as_large_as_its_longest_path() -> None:
    assert [(one.nodes, one.length) for one in shorter(make("swift")) if isinstance(one, Swift)] == [
        (24, 8), (12, 8), (6, 4), (3, 2), (3, 1)]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("family", PACKED_RECURRENT)
def test_it_leaves_out_parts_of_layers_with_recurrences(family: str, kernels: bool, options: dict[str, Any]) -> None:
    dtype = torch.float32 if kernels else torch.float64
    engine = engine_for(tiny(family, dtype=dtype, layers=4), None, backend="packed")
    drafted = engine.generate(PROMPTS, method="swift", max_new_tokens=24, **options)
    alone = [engine.generate([prompt], max_new_tokens=24, **options)[0] for prompt in PROMPTS]
    assert drafted[0].tokens == alone[0].tokens
    assert "seed" in options or drafted[1].tokens == alone[1].tokens  # draws are keyed by the place in the batch
    assert sum(one.stats.accepted for one in drafted) > 0
