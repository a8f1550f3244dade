"""What a request costs before it is queued: nothing that takes longer the more packages are installed."""

from __future__ import annotations

import importlib.metadata
import pkgutil

import pytest

from shoal.methods.d3 import D3
from shoal.serve import policy
from shoal.serve.settings import Settings


def test_only_the_first_request_looks_for_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*_: object, **__: object) -> None:
        raise AssertionError("a request looked through the installed packages")

    policy.choose("d3", {}, Settings())
    monkeypatch.setattr(pkgutil, "iter_modules", looked)
    monkeypatch.setattr(importlib.metadata, "entry_points", looked)
    assert policy.choose("d3", {"alpha": 0.9}, Settings()) == D3(alpha=0.9)
    assert "d3" in policy.allowed(Settings())
