"""Which forwards have a form, and when what is captured. No kernel runs here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends import packed
from drive import prompt
from families import tiny
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.packed.cuda.form import MOST_GROUPS, ForwardForm, fit_of, fits_of, lacking_room
from shoal.model.runner import SequenceChunk

graphs = pytest.importorskip("shoal.model.packed.cuda.graphs", reason="needs Triton")

FULL = DepthPlan.full(6)
D3 = DepthPlan.whole_layers([NEVER, 14, 5, 3, 9, NEVER])
ROWS = [prompt(5, 1), prompt(7, 2), prompt(3, 3)]


def filled() -> KVCache:
    runner = packed(tiny("llama"))
    cache = KVCache(runner.windows, 3, [16] * 6)
    for seq, ids in enumerate(ROWS):
        runner.forward([SequenceChunk(seq, ids, [0] * len(ids), FULL)], cache)
        cache.commit(seq, range(len(ids)))
    return cache


def chains(*sizes: int, plan: DepthPlan = FULL, step: int = 1, **more: Any) -> list[SequenceChunk]:
    return [
        SequenceChunk(seq, prompt(size, seq), [step] * size, plan, **{"wanted": size, **more})
        for seq, size in enumerate(sizes)
    ]


MISFITS: dict[str, list[SequenceChunk]] = {
    "a tree": [SequenceChunk(0, [1, 2, 3], [1, 2, 2], FULL, (-1, 0, 0), (0, 1, 1), wanted=3)],
    "logits of some": chains(3, 3, wanted=2),
    "nodes of different depth": [SequenceChunk(0, [1, 2, 3], [2, 3, 4], D3, wanted=3)],
    "rows of different depth": [*chains(1, 1), *chains(1, 1, 1, plan=D3, step=3)[2:]],
    "a sublayer alone": chains(1, plan=DepthPlan((NEVER,) * 6, (NEVER, 1, *(NEVER,) * 4))),
    "no layer at all": chains(1, plan=DepthPlan.whole_layers([1] * 6)),
    "a masked block": chains(4, mutual=True),
    "nodes that were fed": chains(2, fed=1),
    "one long among short": chains(9, 1, 1),
    "too long a prompt": chains(513),
    "a hook": chains(1, query_hook=lambda *_: None),
    "vectors": chains(1, vectors=torch.zeros(1, 32)),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_has_no_form(misfit: str) -> None:
    assert fit_of(MISFITS[misfit], filled()) is None


def test_forms_are_filled_up() -> None:
    cache = filled()
    fits = [fit_of(chunks, cache) for chunks in (
        chains(1, 1, 1), chains(5, 6, 7), chains(7, 6, wanted=1), chains(1, 1, plan=D3, step=4), chains(1, wanted=1),
    )]  # fmt: skip
    assert [fit and fit.form for fit in fits] == [
        ForwardForm(3, 1, True), ForwardForm(3, 8, True), ForwardForm(2, 8, False), ForwardForm(2, 1, True),
        ForwardForm(1, 1, True),
    ]  # fmt: skip
    assert fits[3] is not None and fits[3].layers == (0, 1, 2, 4, 5)


def test_a_piece_of_a_prompt_that_ends_later_has_a_form() -> None:
    fit = fit_of([*chains(7, wanted=0), *chains(7, 6, wanted=1)[1:]], filled())
    assert fit is not None and fit.form == ForwardForm(2, 8, False)


def groups_of(chunks: list[SequenceChunk], seqs: int) -> list[tuple[list[int], ForwardForm]]:
    found = fits_of(chunks, KVCache([None] * 6, seqs, [600] * 6))
    return [(list(numbers), fit.form) for numbers, fit in found or ()]


def test_what_has_no_form_as_a_whole_runs_in_groups_that_have_one() -> None:
    prompts = [SequenceChunk(seq, prompt(size, seq), [0] * size, FULL) for seq, size in ((1, 200), (3, 90), (4, 180))]
    tokens, shallow = chains(1, 1, 1, 1, 1, 1), chains(*[1] * 7, plan=D3, step=3)
    mixed = [tokens[0], prompts[0], tokens[2], *prompts[1:], tokens[5], shallow[6]]
    assert groups_of(mixed, 7) == [
        ([1, 4], ForwardForm(2, 256, False)), ([3], ForwardForm(1, 96, False)), ([0, 2, 5], ForwardForm(3, 1, True)),
        ([6], ForwardForm(1, 1, True)),
    ]  # fmt: skip
    assert groups_of([*mixed, MISFITS["a tree"][0]], 7) == []
    many = [SequenceChunk(seq, prompt(400, seq), [0] * 400, FULL) for seq in range(MOST_GROUPS + 1)]
    assert groups_of(many, MOST_GROUPS + 1) == [] and len(groups_of(many[1:], MOST_GROUPS + 1)) == MOST_GROUPS


def test_layers_that_store_otherwise_have_no_form() -> None:
    cache = filled()
    cache.layers[2].rewrite(1, *(store[1, :, :7].clone() for store in (cache.layers[2].keys, cache.layers[2].values)),
                            torch.zeros(2, 7))
    assert fit_of(chains(1, 1), cache) is None
    without = DepthPlan.whole_layers([NEVER, NEVER, 1, NEVER, NEVER, NEVER])
    assert fit_of(chains(1, 1, plan=without), cache) is not None


def test_storage_is_made_where_it_lacks() -> None:
    cache = filled()
    assert lacking_room(range(6), chains(9, 9), cache) == []
    assert lacking_room([1, 4], chains(9, 10), cache) == [1, 4]
    assert lacking_room([0], chains(1), KVCache([None], 1)) == [0]


class Recorder:
    """A step that notes what runs; `captured` stands for a capture of it."""

    def __init__(self, form: ForwardForm | None = None) -> None:
        self.ran: list[Any] = []

    def enter(self) -> None:
        self.ran.append("enter")

    def leave(self) -> None:
        self.ran.append("leave")

    def layer(self, index: int) -> None:
        self.ran.append(index)


def captured(run: Callable[[], object], pool: Any) -> Any:
    return SimpleNamespace(replay=run)


def test_pieces_are_captured_once_and_frequent_plans_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Any] = []

    def noted(run: Callable[[], object], pool: Any) -> Any:
        captures.append(run)
        return captured(run, pool)

    monkeypatch.setattr(graphs, "_captured", noted)
    step = Recorder()
    pieces = graphs.CapturedForward(step, capture=True, pool=None)
    pieces.run((0, 2))
    assert len(captures) == 4 and step.ran == ["enter", 0, 2, "leave"]
    pieces.run((0, 1, 2))
    assert len(captures) == 5
    for _ in range(graphs.OFTEN + 2):
        step.ran.clear()
        pieces.run((0, 2))
        assert step.ran == ["enter", 0, 2, "leave"]
    assert len(captures) == 7
    for plan in range(20):
        for _ in range(graphs.OFTEN):
            pieces.run((plan,))
    assert len(pieces._wholes) == graphs.WHOLES


def test_without_capture_nothing_is_kept() -> None:
    step = Recorder()
    pieces = graphs.CapturedForward(step, capture=False, pool=None)
    for _ in range(2 * graphs.OFTEN):
        pieces.run((1,))
    assert not pieces._pieces and not pieces._wholes and len(step.ran) == 6 * graphs.OFTEN
