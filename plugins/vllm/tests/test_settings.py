"""Options become plans, or one sentence that says what is wrong."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

import shoal
from shoal_vllm.settings import Settings, as_options

D3 = {"method": "d3", "mean": 0.75}


def settings(asked: Any) -> Settings | None:
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: 8, max_model_len=128)
    return Settings.of(SimpleNamespace(additional_config={} if asked is None else {"shoal": asked}, model_config=model))


def plan(asked: Any, own: Any = None, tokens: int = 64) -> Any:
    made = settings(asked)
    assert made is not None
    return made.plan(SamplingParams(max_tokens=tokens, extra_args=None if own is None else {"shoal": own}))


def test_nothing_asked_is_nothing_done() -> None:
    assert settings(None) is None
    assert plan({}).is_full


@pytest.mark.parametrize("asked", [D3, json.dumps(D3), {"method": "d3", "method_args": {"mean": 0.75}}])
def test_the_plan_is_shoals(asked: Any) -> None:
    wanted = shoal.D3(mean=0.75).recipe(shoal.ModelInfo(8, 64)).plan
    assert plan(asked) == wanted != shoal.D3(mean=0.75).recipe(shoal.ModelInfo(8, 32)).plan


def test_a_request_has_the_last_word() -> None:
    assert plan(D3, "full").is_full
    assert plan({}, D3) == plan(D3)
    assert plan(D3, {"method": "schedule", "order": [3], "steps": [5]}).attention[3] == 5


@pytest.mark.parametrize(("asked", "says"), [
    ({"method": "d4"}, "unknown method 'd4'"),
    ({"method": "d3", "mena": 0.9}, "Did you mean 'mean'"),
    ({"method": "d3", "mean": 0.9, "method_args": {"core": 4}}, "mean stands beside method_args"),
    ({"method": "auto"}, "only a depth plan reaches vLLM's layers"),
    ({"method": "snapkv"}, "only a depth plan reaches vLLM's layers"),
    ({"method": "schedule", "order": [3, 4], "steps": [5, 4]}, "must be at least 1 and not descend"),
    ({"admission": "never"}, "unknown admission 'never'"),
    ({"untested": 1}, "it must be true or false"),
    ("{", "which is no JSON"),
    (3, "it must be an object"),
])
def test_wrong_options_are_named(asked: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        settings(asked)
    assert "\n" not in str(caught.value)


def test_what_holds_for_the_server_is_refused_in_a_request() -> None:
    with pytest.raises(ValueError, match="admission in a request: it holds for the whole server"):
        plan(D3, {"admission": "waves"})


def test_an_answer_too_short_for_the_servers_mean_runs_at_full_depth() -> None:
    assert plan(D3, tokens=1).is_full and not plan(D3, tokens=16).is_full
    with pytest.raises(ValueError, match="out of reach"):
        plan({}, D3, tokens=1)


def test_options_are_copied() -> None:
    given = {"method": "d3"}
    as_options(given).pop("method")
    assert given == {"method": "d3"}
