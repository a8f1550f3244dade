"""What a request costs before it is queued: nothing that takes longer the more packages are installed."""

from __future__ import annotations

import importlib.metadata
import pkgutil

import pytest

from shoal.methods.auto import Auto
from shoal.methods.d3 import D3
from shoal.methods.full import Full
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


def test_requests_are_decoded_by_auto_and_may_turn_it_off_but_load_nothing_through_it() -> None:
    assert policy.choose(None, {}, Settings()) == Auto()
    assert policy.choose("full", {}, Settings()) == Full()
    assert policy.choose("auto", {"length": 4}, Settings()) == Auto(length=4)
    with pytest.raises(ApiError, match="draft of auto names a file"):
        policy.choose("auto", {"draft": "some/model"}, Settings())
