from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.early_exit import EarlyExit
from shoal.methods.full import Full
from shoal.methods.shortgpt import ShortGPT
from shoal.methods.unified_layer_skipping import UnifiedLayerSkipping
from shoal.types import ModelInfo


def info(num_layers: int = 32, max_new_tokens: int = 64, **others: object) -> ModelInfo:
    return ModelInfo(num_layers, max_new_tokens, **others)  # type: ignore[arg-type]


def scored(num_layers: int = 32) -> ModelInfo:
    scores = tuple(float(layer * 37 % num_layers) for layer in range(num_layers))
    return info(num_layers, scores={"influence": scores, "leave_one_out": scores})


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 16, 32, 80])
def test_neutral_settings_are_the_full_plan(num_layers: int) -> None:
    neutral = [
        Full(),
        D3(alpha=1),
        D3(alpha=1.0, start=3, horizon=5),
        D3(core=num_layers, alpha=0.5),
        D3(mean=1.0),
        UnifiedLayerSkipping(speedup=1),
        EarlyExit(num_layers),
        ShortGPT(removed=0),
        ShortGPT(removed=0.0),
    ]
    for method in neutral:
        recipe = method.recipe(info(num_layers))
        assert recipe.plan == DepthPlan.full(num_layers), method
        assert recipe.exact_to == "full"


@pytest.mark.parametrize("method", [D3(), UnifiedLayerSkipping(), EarlyExit(), ShortGPT()])
@pytest.mark.parametrize("num_layers", [16, 30, 32, 80])
def test_defaults_are_lossy_and_gentle(method: Method, num_layers: int) -> None:
    recipe = method.recipe(scored(num_layers))
    assert recipe.exact_to == "plan"
    assert recipe.proposer is None and recipe.rule is None
    assert 0.8 <= recipe.plan.mean_depth(64) / num_layers <= 0.9


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.5, 1.0),
    st.one_of(st.floats(0, 1), st.integers(0, 20)),
    st.sampled_from(["auto", "center_out", "late_middle", "low_first", "high_first", "spread", "influence"]),
    st.one_of(st.none(), st.integers(1, 32)),
    st.one_of(st.none(), st.integers(1, 120)),
)
def test_d3_runs_what_its_formula_says(
    alpha: float, start: float | int, order: str, core: int | None, horizon: int | None
) -> None:
    recipe = D3(alpha, start, order, core, horizon).recipe(scored())
    planned = horizon or 64
    assert recipe.horizon == planned
    first = round(start * planned) if isinstance(start, float) else start
    size = 4 if core is None else core
    for step in range(max(planned, 64)):
        wanted = math.floor(32 * alpha ** max(0, step - first) + 1e-9)
        kept = recipe.plan.layers(step)
        assert len(kept) == max(size, wanted)
        assert 0 in kept
        assert 31 in kept or order == "high_first" or size == 1


def test_d3_follows_the_card_and_early_exit_has_no_tail() -> None:
    order = (15, 14, 16, *(layer for layer in range(2, 30) if layer not in (14, 15, 16)))
    plan = D3(alpha=0.9).recipe(info(order=order)).plan
    assert plan.layers(1) == tuple(layer for layer in range(32) if layer not in (15, 14, 16, 2))
    assert D3(alpha=0.5).recipe(info(order="high_first")).plan.layers(10) == (0, 1, 2, 3)
    assert D3(alpha=0.5, order="low_first").recipe(info()).plan.layers(10) == (0, 1, 30, 31)


@pytest.mark.parametrize("start", [0.0, 0.4, 5])
@pytest.mark.parametrize("max_new_tokens", [32, 128, 500])
def test_d3_without_alpha_has_a_mean_depth_of_85_percent(start: float | int, max_new_tokens: int) -> None:
    plan = D3(start=start).recipe(info(32, max_new_tokens)).plan
    assert plan.mean_depth(max_new_tokens) == pytest.approx(0.85 * 32, abs=1.0 if max_new_tokens == 32 else 0.2)


@pytest.mark.parametrize(("num_layers", "max_new_tokens", "start"), [(2, 64, 0.0), (32, 1, 0.0), (32, 64, 1.0)])
def test_d3_without_alpha_stays_as_deep_as_it_must(num_layers: int, max_new_tokens: int, start: float) -> None:
    assert D3(start=start).recipe(info(num_layers, max_new_tokens)).plan.is_full


def test_d3_for_a_mean_depth() -> None:
    method = D3.for_mean_depth(num_layers=32, mean=19.2, horizon=256, start=0.2, order="late_middle", core=6)
    assert method == D3(method.alpha, 0.2, "late_middle", 6, 256)
    assert method.recipe(info(32, 16)).plan.mean_depth(256) == pytest.approx(19.2, abs=0.05)
    assert D3.for_mean_depth(32, 0.6, 256).alpha == D3.for_mean_depth(32, 0.6 * 32, 256).alpha
    by_mean = D3(mean=0.6, horizon=256).recipe(info()).plan
    assert by_mean == D3.for_mean_depth(32, 0.6, 256).recipe(info()).plan


def test_d3_covers_the_request_beyond_its_horizon_and_the_horizon_beyond_the_request() -> None:
    long = D3(alpha=0.99, horizon=10).recipe(info(32, 200)).plan
    assert [long.depth(step) for step in (10, 69, 150)] == [28, 15, 7]
    assert D3(alpha=0.99, horizon=200).recipe(info(32, 10)).plan == D3(alpha=0.99).recipe(info(32, 200)).plan


@pytest.mark.parametrize("num_layers", [2, 12, 21, 30, 32, 36, 42, 80])
def test_unified_layer_skipping_spaces_its_layers_evenly(num_layers: int) -> None:
    for percent in range(100, 50 * num_layers + 1, 10):
        plan = UnifiedLayerSkipping(percent / 100).recipe(info(num_layers)).plan
        kept = plan.layers(1)
        gaps = {high - low for low, high in zip(kept, kept[1:], strict=False)}
        assert len(kept) == -(-num_layers * 100 // percent)
        assert kept[0] == 0 and kept[-1] == num_layers - 1
        assert max(gaps) - min(gaps) <= 1
        assert plan.layers(63) == kept and plan.layers(0) == tuple(range(num_layers))


def test_early_exit_stops_at_its_layer() -> None:
    for exit_layer in range(1, 33):
        plan = EarlyExit(exit_layer).recipe(info()).plan
        assert plan.layers(0) == tuple(range(32))
        assert plan.layers(1) == plan.layers(500) == tuple(range(exit_layer))


def test_shortgpt_leaves_out_the_least_influential_layers() -> None:
    scores = {"influence": (0.0, 0.5, 0.1, 0.4, 0.2, 0.3, 0.6, 0.0)}
    plan = ShortGPT(removed=3).recipe(info(8, scores=scores)).plan
    assert plan.layers(0) == tuple(range(8))
    assert plan.layers(1) == plan.layers(500) == (0, 1, 3, 6, 7)
    assert ShortGPT(removed=0.375).recipe(info(8, scores=scores)).plan == plan
    assert ShortGPT(removed=6).recipe(info(8, scores=scores)).plan.layers(1) == (0, 7)


def test_shortgpt_without_scores_says_how_to_get_them() -> None:
    with pytest.raises(Unsupported, match="quick_card"):
        ShortGPT().recipe(info())


def test_a_request_too_short_for_a_mean_comes_as_near_as_it_can() -> None:
    """Its first token runs every layer, so of two tokens at half the depth the second runs the core alone."""
    for tokens, mean in ((1, 32), (2, (32 + 4) / 2), (3, 16), (64, 16)):
        short = ModelInfo(32, tokens)
        assert D3(mean=0.5).recipe(short).plan.mean_depth(tokens) == pytest.approx(mean, abs=0.34)
        said = D3(mean=0.5).notice(short)
        assert (said is not None and "16 layers is out of reach" in said) == (tokens < 3)
    assert D3(mean=0.9, start=20).recipe(ModelInfo(32, 8)).plan.mean_depth(8) == 32


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: D3(alpha=0), r"alpha is 0.*\(0, 1\]"),
        (lambda: D3(alpha=1.1), r"alpha is 1\.1"),
        (lambda: D3(alpha="x"), "alpha of d3 is 'x'; it must be a number such as 0.5 or None"),
        (lambda: D3(alpha=True), "alpha of d3 is True"),
        (lambda: D3(alpha=0.9, mean=0.5), "give one"),
        (lambda: D3(start=1.5), r"start is 1\.5"),
        (lambda: D3(core=0), "core is 0"),
        (lambda: D3(core=4.0), "core of d3 is 4.0; it must be a whole number such as 4 or None"),
        (lambda: D3(horizon=0), "horizon is 0"),
        (lambda: D3(rounding="up"), "'floor' or 'ceil' or 'round'"),
        (lambda: D3(alpha=0.9, core=33).recipe(info()), r"core is 33.*1\.\.32"),
        (lambda: D3(order="sideways").recipe(info()), "unknown removal order 'sideways'"),
        (lambda: D3(order=(1, 2, 3)).recipe(info()), r"each flex layer \(2\.\.29\) once"),
        (lambda: D3(mean=2.0).recipe(info()), "out of reach"),
        (lambda: D3(mean=0.4, start=0.5).recipe(info()), "out of reach"),
        (lambda: D3(mean=0.9, horizon=1).recipe(info()), "out of reach"),
        (lambda: UnifiedLayerSkipping(0.5), "speedup is 0.5"),
        (lambda: UnifiedLayerSkipping(math.inf), "speedup is inf"),
        (lambda: UnifiedLayerSkipping(17).recipe(info(16)), r"2\.\.16.*at most 8"),
        (lambda: EarlyExit(0), "exit_layer is 0"),
        (lambda: EarlyExit(33).recipe(info()), r"33 layers.*1\.\.32"),
        (lambda: ShortGPT(-1), "removed is -1"),
        (lambda: ShortGPT(1.0), r"removed is 1\.0"),
        (lambda: ShortGPT(31).recipe(scored()), "at most 30"),
    ],
)
def test_bad_options_are_named(build: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()  # type: ignore[operator]
