"""A simulated server: its seconds against hand-computed ones, and properties of any load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_expect import Costs, House, in_phase, on_line
from shoal.depth.plan import DepthPlan
from shoal_lab.bench.load.figures import speed
from shoal_lab.bench.load.loops import Load, LoadPhase
from shoal_lab.bench.load.prompts import Prompts
from shoal_lab.components.cost import CostCard

LAYERS = 4
FULL = DepthPlan.full(LAYERS)
HALF = DepthPlan.from_counts([4, 2], [1, 2], LAYERS)
PROMPTS = ((10, 0.5), (20, 1.0), (40, 2.0))


def card(rows: int = 1, layer: float = 0.01, kv: float = 0.0) -> CostCard:
    return CostCard(layer, 0.02, 0.005, kv * rows, (None,) * LAYERS, PROMPTS if rows == 1 else (), rows)


def house(plan: DepthPlan = FULL, waves: bool = True, layer8: float = 0.01, **more: int) -> House:
    costs = Costs([card(), card(8, layer8)])
    return House(costs, lambda answer: plan, waves, more.get("max_seqs", 16), more.get("prompt", 10), 40)


def test_costs_lie_on_straight_lines() -> None:
    points = [(1.0, 10.0), (3.0, 20.0), (4.0, 40.0)]
    assert [on_line(points, place) for place in (0, 1, 2, 3, 3.5, 5)] == [10, 10, 15, 20, 30, 60]
    costs = Costs([card(8, 0.024, kv=1e-5), card(1, 0.010, kv=1e-5)])
    assert costs.prompts(15) == pytest.approx(0.75)
    one = costs.step([(FULL, 1, 100)])
    assert one == pytest.approx(0.025 + 4 * 0.010 + 4 * 100 * 1e-5)
    mixed = costs.step([(FULL, 1, 100), (HALF, 1, 50)])  # two layers with both rows, two with one
    assert mixed == pytest.approx(0.025 + 2 * 0.012 + 2 * 0.010 + (4 * 100 + 2 * 50) * 1e-5)


@pytest.mark.parametrize("cards", [[], [card(), card()]])
def test_cards_must_differ_in_rows(cards: list[CostCard]) -> None:
    with pytest.raises(ValueError, match="cost cards"):
        Costs(cards)


@pytest.mark.parametrize("plan", [FULL, HALF])
def test_a_wave_takes_what_the_card_predicts(plan: DepthPlan) -> None:
    alone = CostCard(0.01, 0.02, 0.005, 1e-5 * 4, (None,) * LAYERS, ((10, 2.0),), 4)
    paper = House(Costs([alone]), lambda answer: plan, True, 16, 10, 40)
    traces = paper.serve(LoadPhase(Load(concurrency=4), requests=8), Prompts(new_tokens=(6,)))
    assert speed(traces) == pytest.approx(in_phase(alone, plan, 10, 6))
    assert [trace.due for trace in traces] == pytest.approx([0.0] * 4 + [alone.predict(plan, 10, 6)] * 4)


def test_a_turn_by_hand() -> None:
    """Two clients, three answers of three tokens; the third request joins when the first two have ended."""
    traces = house(waves=False).serve(LoadPhase(Load(concurrency=2), requests=3), Prompts(new_tokens=(3,)))
    step = 0.025 + 4 * 0.01
    assert traces[0].chunks == pytest.approx([1.0, 1.0 + step, 1.0 + 2 * step])
    assert traces[2].due == pytest.approx(1.0 + 2 * step)
    assert traces[2].chunks[0] == pytest.approx(traces[2].due + 0.5)


def test_an_open_loop_waits_for_requests_and_requests_for_waves() -> None:
    turn, asked = LoadPhase(Load(rate=1.0), requests=6, seed=3), Prompts(new_tokens=(30,))
    assert [trace.due for trace in house().serve(turn, asked)] == pytest.approx(list(turn.arrivals()))
    waited = sum(trace.ttft or 0.0 for trace in house(waves=True).serve(turn, asked))
    assert waited > sum(trace.ttft or 0.0 for trace in house(waves=False).serve(turn, asked))


def test_rows_of_different_ages_undo_what_rows_in_phase_save() -> None:
    late = DepthPlan.from_counts([4] * 20 + [2], [1, 2], LAYERS)
    asked, turn = Prompts(new_tokens=(10, 40)), LoadPhase(Load(concurrency=8), requests=64)
    gains = [speed(house(late, waves).serve(turn, asked)) / speed(house(FULL, waves).serve(turn, asked))
             for waves in (False, True)]
    assert 1 < gains[0] < gains[1]


@given(
    st.integers(1, 6), st.integers(1, 12), st.integers(1, 4), st.booleans(),
    st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 90),
)
def test_every_request_is_answered_in_full(
    clients: int, requests: int, rows: int, waves: bool, answers: list[int], prompt: int
) -> None:
    paper, asked = house(HALF, waves, max_seqs=rows, prompt=prompt), Prompts(new_tokens=answers)
    traces = paper.serve(LoadPhase(Load(concurrency=clients), requests=requests), asked)
    assert [trace.tokens for trace in traces] == [asked[number].new_tokens for number in range(requests)]
    for trace in traces:
        assert list(trace.chunks) == sorted(trace.chunks) and trace.due < trace.chunks[0] and not trace.error
        active = [one for one in traces if one.due <= trace.due < one.end]
        assert len(active) <= clients
