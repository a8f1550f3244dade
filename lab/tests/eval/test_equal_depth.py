"""Schedules of equal realised depth, against summing token by token."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.depth.plan import DepthPlan
from shoal.types import ModelInfo
from shoal_lab.eval.controls import even_order, schedule
from shoal_lab.eval.equal_depth import TOLERANCE, Lengths, linear, power_law, rising, two_levels
from shoal_lab.eval.rising import RisingPlan

LENGTHS = st.lists(st.integers(1, 60), min_size=3, max_size=40).filter(lambda found: sum(found) / len(found) > 15)


def realised(lengths: Lengths, table: tuple[int, ...]) -> float:
    layers = [table[min(step, len(table) - 1)] for n in lengths.tokens for step in range(n)]
    return sum(layers) / len(layers)


@given(LENGTHS, st.integers(6, 32), st.floats(0.55, 1.0))
def test_every_kind_reaches_the_mean(tokens, layers, share):
    lengths, core = Lengths(tuple(tokens)), 4
    mean = max(core + 1.0, share * layers)
    makers = {
        "two levels": lambda: two_levels(lengths, layers, core, mean),
        "power law": lambda: power_law(lengths, layers, core, mean)[1],
        "linear": lambda: linear(lengths, layers, core, mean)[2],
        "rising": lambda: rising(lengths, layers, core, mean),
    }
    reached = 0
    for name, make in makers.items():
        try:
            table = make()
        except ValueError as error:
            assert "no such schedule" in str(error), name
            continue
        reached += 1
        assert abs(realised(lengths, table) - mean) <= TOLERANCE + 1e-9, name
        assert lengths.mean(table) == pytest.approx(realised(lengths, table))
        assert table[0] == layers and all(core <= k <= layers for k in table)
        steps = zip(table[1:], table[2:], strict=False)
        assert all(a <= b if name == "rising" else a >= b for a, b in steps), name
    assume(reached)


@given(LENGTHS, st.floats(0.5, 1.0))
def test_a_constant_depth_runs_the_larger_then_the_smaller(tokens, share):
    lengths = Lengths(tuple(tokens))
    try:
        table = two_levels(lengths, 12, 2, share * 12)
    except ValueError:
        assume(False)
    rest = table[1:]
    assert len(set(rest)) <= 2 and max(rest, default=12) - min(rest, default=12) <= 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.permutations([1, 2, 3, 4, 5, 6]))
def test_a_table_becomes_the_schedule_of_the_same_plan(falls, order):
    table, depth = [8], 8
    for fall in falls:
        depth = max(2, depth - fall)
        table.append(depth)
    found = schedule(tuple(table), order, 8).recipe(ModelInfo(8)).plan
    assert found == DepthPlan.from_counts(table, order, 8)


def test_a_plan_counts_its_layers():
    plan = RisingPlan((6, 3, 4), (2, 3, 1), 6)
    assert [plan.layer_tokens(n) for n in range(5)] == [0, 6, 9, 13, 17]
    nested = DepthPlan.from_counts([6, 4, 4, 3], (2, 3, 1), 6)
    assert [nested.layer_tokens(n) for n in range(6)] == pytest.approx([0, 6, 10, 14, 17, 20])


@given(st.integers(4, 40).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(2, layers - 1))))
def test_even_orders_leave_even_sets(case):
    layers, count = case
    order = even_order(layers, count)
    for kept in (count + 1, count):
        left = [layer for layer in range(layers) if layer not in order[: layers - kept]]
        assert len(left) == kept and left[0] == 0 and left[-1] == layers - 1
        gaps = [b - a for a, b in zip(left, left[1:], strict=False)]
        assert max(gaps) <= (min(gaps) + 1 if kept == count + 1 else 2 * (layers // kept + 1))


def test_lengths_say_how_many_go_on():
    lengths = Lengths((1, 3, 3, 5))
    assert lengths.still_going() == [4, 3, 3, 1, 1]
    assert Lengths((7,), laid_out=3).horizon == 3
    with pytest.raises(ValueError, match="at least 1 token"):
        Lengths((0,))
