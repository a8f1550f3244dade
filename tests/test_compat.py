from __future__ import annotations

import pytest
import torch
import transformers

from shoal import compat


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.0.0rc1", (5, 0, 0)), ("5.24.0.dev0", (5, 24, 0)), ("7", (7,))],
)
def test_release(version, release):
    assert compat.release(version) == release


def test_release_refuses_what_is_no_version():
    with pytest.raises(ValueError, match="'main'"):
        compat.release("main")


def test_versions_are_those_of_the_libraries():
    assert compat.installed_version("torch") == torch.__version__
    assert compat.installed_version("transformers") == transformers.__version__
    assert compat.torch_version()[:2] == tuple(map(int, torch.__version__.split(".")[:2]))
    assert compat.transformers_version() >= (5,)


def test_absent_package():
    assert compat.installed_version("no-such-distribution") is None
    assert not compat.at_least("no-such-distribution", "0")


def test_at_least_compares_numbers_not_text(monkeypatch):
    monkeypatch.setattr(compat.metadata, "version", lambda package: "5.10.0")
    assert compat.at_least("transformers", "5.9") and compat.at_least("transformers", "5.10.0")
    assert not compat.at_least("transformers", "5.11") and not compat.at_least("transformers", "6")
