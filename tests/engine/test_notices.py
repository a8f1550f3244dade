"""What an engine says of its own accord: once, and only where there is something to say."""

from __future__ import annotations

import logging

import pytest
import torch

from families import tiny
from method_matrix import SELF_DRAFTING
from shoal.engine.cards.card import Card
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.base import Method
from shoal.methods.d3_spec import D3Spec
from test_matrix import SCORES

DEFAULTS = tuple(kind() for kind in dict.fromkeys([D3Spec, *map(type, SELF_DRAFTING.values())]))


def engine(card: Card | None = None) -> Engine:
    return engine_for(tiny("llama", dtype=torch.float32), card=card)


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "nothing is known" in record.getMessage()]


@pytest.mark.parametrize("method", DEFAULTS, ids=lambda method: method.name)
def test_uncalibrated_self_drafting_is_told_of_once(method: Method, caplog: pytest.LogCaptureFixture) -> None:
    one = engine()
    for _ in range(2):
        one.recipe(method, 8)
    assert len(notices(caplog)) == 1
    assert notices(caplog)[0].startswith(f"{method.name} drafts with") and "shoal calibrate" in notices(caplog)[0]


@pytest.mark.parametrize("method", DEFAULTS, ids=lambda method: method.name)
def test_on_a_calibrated_model_it_is_not(method: Method, caplog: pytest.LogCaptureFixture) -> None:
    engine(Card(SCORES)).recipe(method, 8)
    assert not notices(caplog)


def test_nor_where_the_layers_were_named(caplog: pytest.LogCaptureFixture) -> None:
    engine().recipe(D3Spec(order=(2, 3), core=4), 8)
    assert not notices(caplog)


@pytest.mark.parametrize("method", ["full", "auto", "prompt_lookup"])
def test_nor_for_other_methods(method: str, caplog: pytest.LogCaptureFixture) -> None:
    engine().recipe(method, 8)
    assert not notices(caplog)


@pytest.mark.slow
def test_a_method_that_loses_time_is_told_of_through_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Guesses of random layers are hardly ever right, and each costs most of a forward."""
    with caplog.at_level(logging.WARNING):
        engine(Card(SCORES)).generate(
            [5, 17, 80], method=D3Spec(alpha=0.5, core=5, length=8, order="high_first"), max_new_tokens=400,
            temperature=1.5, seed=1, ignore_eos=True,
        )
    assert [record for record in caplog.records if "d3_spec is losing time" in record.getMessage()]
