from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depth_strategies import budgets
from shoal.depth.budget import Budget, counts, lay_out
from shoal.depth.order import Core, core_for, default_core, removal_order
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported

BY_PLACE = ("auto", "center_out", "late_middle", "low_first", "high_first", "spread")
BY_SCORE = ("influence", "leave_one_out")


def fake_scores(num_layers: int) -> dict[str, list[float]]:
    return {
        "influence": [(layer * 37 % 11) / 10 for layer in range(num_layers)],
        "leave_one_out": [float((layer * 53 + 5) % 17) for layer in range(num_layers)],
    }


def sets_by_count(removal: tuple[int, ...], num_layers: int) -> dict[int, set[int]]:
    return {num_layers - gone: set(range(num_layers)) - set(removal[:gone]) for gone in range(len(removal) + 1)}


@pytest.mark.parametrize("order", BY_PLACE + BY_SCORE)
def test_every_order_is_nested_keeps_the_core_and_counts_right(order: str) -> None:
    for num_layers in range(1, 81):
        scores = fake_scores(num_layers)
        for core in {core_for(num_layers, None, order), Core(1, min(1, num_layers - 1)), Core(min(3, num_layers), 0)}:
            removal = removal_order(order, num_layers, core.head, core.tail, scores)
            assert sorted(removal) == list(range(core.head, num_layers - core.tail))
            table = range(num_layers, core.size - 1, -1)
            plan = DepthPlan.from_counts(table, removal, num_layers)
            always = {*range(core.head), *range(num_layers - core.tail, num_layers)}
            expected, before = sets_by_count(removal, num_layers), set(range(num_layers))
            for step, count in enumerate(table):
                now = set(plan.layers(step))
                assert len(now) == count
                assert always <= now <= before
                assert now == expected[count]
                before = now


@settings(max_examples=150)
@given(budgets, st.sampled_from(BY_PLACE + BY_SCORE), st.integers(1, 80), st.integers(1, 60), st.data())
def test_budget_times_order_is_the_set_of_each_step(
    budget: Budget, order: str, num_layers: int, horizon: int, data: st.DataObject
) -> None:
    core = core_for(num_layers, data.draw(st.integers(1, num_layers)), order)
    limit = data.draw(st.integers(1, 90))
    removal = removal_order(order, num_layers, core.head, core.tail, fake_scores(num_layers))
    plan = lay_out(budget, removal, num_layers, horizon, limit)
    table = counts(budget, num_layers, core.size, horizon, max(horizon, limit))
    before = set(range(num_layers))
    for step, count in enumerate(table):
        now = set(plan.layers(step))
        assert now == set(range(num_layers)) - set(removal[: num_layers - count])
        assert now <= before
        before = now
    assert plan.mean_depth(len(table)) == pytest.approx(sum(table) / len(table))


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("center_out", (6, 5, 7, 4, 8, 3, 9, 2)),
        ("late_middle", (9, 8, 7, 6, 5, 4, 3, 2)),
        ("low_first", (2, 3, 4, 5, 6, 7, 8, 9)),
        ("high_first", (9, 8, 7, 6, 5, 4, 3, 2)),
        ("auto", (6, 5, 7, 4, 8, 3, 9, 2)),
    ],
)
def test_orders_of_twelve_layers(order: str, expected: tuple[int, ...]) -> None:
    assert removal_order(order, 12, 2, 2) == expected


def test_center_out_takes_the_nearest_to_the_middle_that_is_left() -> None:
    for num_layers in range(1, 81):
        head, tail = default_core(num_layers)
        left = set(range(head, num_layers - tail))
        for layer in removal_order("center_out", num_layers, head, tail):
            nearest = min(abs(other - (num_layers - 1) / 2) for other in left)
            assert abs(layer - (num_layers - 1) / 2) == nearest
            left.remove(layer)


def test_spread_keeps_the_gaps_even_at_every_count() -> None:
    for num_layers in range(4, 81):
        removal = removal_order("spread", num_layers, 1, 1)
        for count, kept in sets_by_count(removal, num_layers).items():
            ordered = sorted(kept)
            gaps = [high - low for low, high in zip(ordered, ordered[1:], strict=False)]
            assert max(gaps) <= 2 * min(gaps) + 1, (num_layers, count)


def test_scores_ascend_and_core_layers_are_left_out() -> None:
    scores = {"influence": [0.0, 0.9, 0.3, 0.3, 0.1, 0.0], "leave_one_out": [0.0, 1.0, 4.0, 3.0, 2.0, 0.0]}
    assert removal_order("influence", 6, 1, 1, scores) == (4, 3, 2, 1)
    assert removal_order("leave_one_out", 6, 1, 1, scores) == (1, 4, 3, 2)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(1, (1, 0)), (2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (16, (2, 2)), (32, (2, 2)), (40, (3, 2)), (80, (5, 5))],
)
def test_default_core(num_layers: int, expected: tuple[int, int]) -> None:
    assert default_core(num_layers) == expected


def test_early_exit_has_no_tail() -> None:
    assert core_for(40, order="high_first") == (5, 0)
    assert core_for(40, 7, "auto", "high_first") == (7, 0)
    assert core_for(40, 7, "auto", "low_first") == (4, 3)
    core = core_for(32, order="high_first")
    kept = sets_by_count(removal_order("high_first", 32, core.head, core.tail), 32)
    assert all(layers == set(range(count)) for count, layers in kept.items())


def test_low_first_with_one_warm_up_layer_is_the_geometry_of_skipdecode() -> None:
    kept = sets_by_count(removal_order("low_first", 24, 2, 0), 24)
    assert all(layers == {0, 1, *range(24 - (count - 2), 24)} for count, layers in kept.items())


def test_auto_is_what_the_card_recommends() -> None:
    assert removal_order("auto", 8, 1, 1, recommended="low_first") == (1, 2, 3, 4, 5, 6)
    assert removal_order("auto", 8, 1, 1, recommended=(3, 5, 1, 2, 4, 6)) == (3, 5, 1, 2, 4, 6)
    assert removal_order("auto", 8, 1, 1, {"influence": [0, 6, 5, 4, 3, 2, 1, 0]}, "influence") == (6, 5, 4, 3, 2, 1)


def test_a_recommended_order_is_cut_to_the_flex_layers_and_what_it_kept_goes_last() -> None:
    assert removal_order("auto", 8, 3, 2, recommended=(4, 1, 5, 2, 3, 6)) == (4, 5, 3)
    assert removal_order("auto", 8, 1, 1, recommended=(5, 3)) == (5, 3, 4, 2, 6, 1)


def test_an_explicit_order_is_taken_as_it_is() -> None:
    assert removal_order([3, 2, 4, 5], 8, 2, 2) == (3, 2, 4, 5)


@pytest.mark.parametrize("layers", [(3, 2, 4), (3, 2, 4, 5, 5), (3, 2, 4, 1), (3, 2, 4, 5, 6), ()])
def test_an_explicit_order_must_be_a_permutation_of_the_flex_layers(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"each flex layer \(2\.\.5\) once"):
        removal_order(layers, 8, 2, 2)


@pytest.mark.parametrize("name", BY_SCORE)
def test_missing_scores_name_the_way_to_measure_them(name: str) -> None:
    with pytest.raises(Unsupported, match=rf"{name}.*shoal\.quick_card\(engine\)"):
        removal_order(name, 8, 2, 2)
    with pytest.raises(Unsupported):
        removal_order("auto", 8, 2, 2, recommended=name)


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"'centre_out'\. Did you mean 'center_out'\?.*late_middle"):
        removal_order("centre_out", 8, 2, 2)


@pytest.mark.parametrize("scores", [[0.0] * 7, [0.0] * 9, [0.0] * 7 + [float("nan")]])
def test_scores_must_be_one_number_per_layer(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="8 numbers"):
        removal_order("influence", 8, 2, 2, {"influence": scores})


@pytest.mark.parametrize(("head", "tail"), [(-1, 2), (5, 4), (9, 0)])
def test_a_core_must_fit_the_stack(head: int, tail: int) -> None:
    with pytest.raises(ValueError, match="core"):
        removal_order("center_out", 8, head, tail)


@pytest.mark.parametrize("size", [0, 9, -3])
def test_the_size_of_a_core_must_fit_the_stack(size: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.8"):
        core_for(8, size)


def test_all_layers_of_a_kind_go_before_the_others_each_kind_in_its_usual_order() -> None:
    attends, scores = [False, False, True] * 4, {"leave_one_out": [float(-layer) for layer in range(12)]}
    assert removal_order("attention_first", 12, 2, 2, attends=attends) == (5, 8, 2, 6, 7, 4, 3, 9)
    assert removal_order("recurrent_first", 12, 2, 2, scores, "leave_one_out", attends) == (9, 7, 6, 4, 3, 8, 5, 2)
    with pytest.raises(Unsupported, match="recurrent_first.*all of one kind"):
        removal_order("recurrent_first", 12, 2, 2, attends=[True] * 12)
