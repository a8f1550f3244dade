"""Choosing a request's method takes no longer if more packages are installed."""

from __future__ import annotations

import importlib.metadata
import pkgutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from method_matrix import CORE, SEARCHES
from shoal import methods
from shoal.methods import make
from shoal.methods.auto import Auto
from shoal.methods.d3 import D3
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.topk_oracle import TopKOracle
from shoal.serve import policy
from shoal.serve.errors import ApiError
from shoal.serve.settings import Settings


def test_only_the_first_request_looks_for_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*_: object, **__: object) -> None:
        raise AssertionError("a request looked through the installed packages")

    policy.choose("d3", {}, Settings())
    monkeypatch.setattr(pkgutil, "iter_modules", looked)
    monkeypatch.setattr(importlib.metadata, "entry_points", looked)
    assert policy.choose("d3", {"alpha": 0.9}, Settings()) == D3(alpha=0.9)
    assert "d3" in policy.allowed(Settings())


def test_each_of_a_list_must_be_allowed() -> None:
    several = ["prompt_lookup", {"method": "d3", "method_args": {"alpha": 0.9}}]
    assert policy.choose(several, {}, Settings()) == make(several)
    assert policy.choose(several, {}, Settings(methods=frozenset({"d3", "prompt_lookup"}))) == make(several)
    inner = {"inner": ["full", {"method": "aded", "method_args": {"corpus": "/etc/passwd"}}]}
    refused: list[tuple[list[Any], Settings, int]] = [
        (several, Settings(methods=frozenset({"d3"})), 403),
        (["full", "draft_model"], Settings(), 403),
        (["full", ["d3", {"method": "auto", "method_args": {"draft": "some/model"}}]], Settings(), 403),
        (["full", {"method": "prompt_lookup", "method_args": inner}], Settings(), 403),
        (["full", {"method": ["d3", "draft_model"]}], Settings(), 403),
        (["full", "/some/card.json"], Settings(), 400),
        (["full", 3], Settings(), 400),
        ([], Settings(), 400),
    ]
    for method, settings, status in refused:
        with pytest.raises(ApiError) as error:
            policy.choose(method, {}, settings)
        assert error.value.status == status, method
    with pytest.raises(ApiError, match="beside a list"):
        policy.choose(several, {"alpha": 0.9}, Settings())


def test_no_free_text_of_a_request_names_a_file() -> None:
    texts_that_name_none = {("d3", "order"), ("d3_spec", "order")}
    for name in set(policy.allowed(Settings())) & {method.name for method in CORE}:
        method = methods.get(name)
        hints = get_type_hints(method)
        free = {knob for knob in method.option_names() if {str, object, Path} & {hints[knob], *get_args(hints[knob])}}
        for knob in sorted(free):
            if (name, knob) in texts_that_name_none:
                continue
            with pytest.raises(ApiError, match=f"{knob} of {name} names a file") as error:
                policy.choose(name, {knob: "/some/folder"}, Settings())
            assert error.value.status == 403
    listed = Settings(methods=frozenset({"draft_model"}))
    assert policy.choose("draft_model", {"draft": "m"}, listed) == DraftModel(draft="m")


@pytest.mark.parametrize("name", ["best_of", *(method.name for method in SEARCHES)])
def test_a_request_names_no_verifier_that_runs_or_asks_anything(name: str) -> None:
    listed = Settings(methods=frozenset({name}))
    assert policy.choose(name, {"verifier": "likelihood"}, Settings()) == make(name)
    assert policy.choose(name, {"verifier": "execution"}, listed).to_dict()["method_args"]["verifier"] == "execution"
    inner = {"method": name, "method_args": {"verifier": "http://127.0.0.1:9/"}}
    for method, args, settings in (
        (name, {"verifier": "execution"}, Settings()), (name, {"verifier": "http://127.0.0.1:9/"}, Settings()),
        (name, {"verifier": "http://169.254.169.254/"}, listed), ([inner], {}, listed),
        (name, {"verifier": "https://127.0.0.1/"}, Settings(methods=frozenset({name, "d3"}))),
        ("prompt_lookup", {"inner": inner}, Settings()),
    ):
        with pytest.raises(ApiError, match=f"verifier of {name} names") as error:
            policy.choose(method, args, settings)
        assert error.value.status == 403


def test_methods_that_find_all_they_need_in_the_model_are_allowed() -> None:
    own = {"full", "shortgpt", "topk_oracle", "streaming_llm", "kv_int8", "best_of", "tidal", "snapkv"}
    assert own <= set(policy.allowed(Settings()))
    assert policy.choose("topk_oracle", {"k": 8}, Settings()) == TopKOracle(k=8)
    assert not {"draft_model", "calibrated", "schedule"} & set(policy.allowed(Settings()))


def test_requests_are_decoded_by_auto_and_may_turn_it_off_but_load_nothing_through_it() -> None:
    assert policy.choose(None, {}, Settings()) == Auto()
    assert policy.choose("full", {}, Settings()) == Full()
    assert policy.choose("auto", {"length": 4}, Settings()) == Auto(length=4)
    with pytest.raises(ApiError, match="draft of auto names a file"):
        policy.choose("auto", {"draft": "some/model"}, Settings())
