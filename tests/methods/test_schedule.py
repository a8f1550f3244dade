"""Schedules written down, and methods bound to a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.depth.plan import NEVER
from shoal.errors import Unsupported
from shoal.methods.calibrated import Calibrated
from shoal.methods.d3 import D3
from shoal.methods.schedule import Schedule
from shoal.types import ModelInfo

ORDERS = st.permutations(range(8)).flatmap(
    lambda order: st.lists(st.integers(1, 30), max_size=7).map(lambda steps: (order[: len(steps)], sorted(steps)))
)


@given(ORDERS)
def test_each_layer_goes_at_its_step(case):
    order, steps = case
    plan = Schedule(tuple(order), tuple(steps)).recipe(ModelInfo(8)).plan
    for step in range(32):
        gone = {layer for layer, first in zip(order, steps, strict=True) if first <= step}
        assert set(plan.layers(step)) == set(range(8)) - gone
    assert plan.is_full == (not order) and (order or plan.attention == (NEVER,) * 8)


@pytest.mark.parametrize(
    ("order", "steps", "message"),
    [
        ((1, 2), (1,), "same length"),
        ((1, 1), (1, 2), "one place in the order"),
        ((1, 2), (3, 2), "not descend"),
        ((1,), (0,), "at least 1"),
    ],
)
def test_schedules_are_checked(order, steps, message):
    with pytest.raises(ValueError, match=message):
        Schedule(order, steps)


def test_a_schedule_must_fit_the_model():
    with pytest.raises(ValueError, match="order names layer 6; the model's layers are 0..5"):
        Schedule((6,), (1,)).recipe(ModelInfo(6))
    with pytest.raises(ValueError, match="names all 2 layers"):
        Schedule((1, 0), (1, 1)).recipe(ModelInfo(2))


def test_a_calibrated_method_runs_on_its_model_only():
    inner = D3(alpha=0.9)
    here = ModelInfo(8, fingerprint=lambda: "here")
    assert Calibrated(inner, "here").recipe(here) == inner.recipe(here)
    assert Calibrated(inner).recipe(here) == Calibrated(inner, "other").recipe(ModelInfo(8)) == inner.recipe(here)
    with pytest.raises(Unsupported, match="calibrated for model other: this model is here") as refusal:
        Calibrated(inner, "other").recipe(here)
    assert "shoal calibrate" in refusal.value.remedy
