from __future__ import annotations

import logging
import re

import pytest
import torch
import transformers
from transformers import DynamicCache

import shoal
from documents import ROOT
from families import tiny
from generate_calls import cache_name, generate, single
from shoal import compat


def test_versions_are_those_of_the_libraries():
    assert torch.__version__.startswith(compat.installed_version("torch"))  # a wheel may leave "+cu130" out
    assert compat.installed_version("transformers") == transformers.__version__


def test_absent_package():
    assert compat.installed_version("no-such-distribution") is None


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.25.0.dev0", (5, 25, 0)), ("5.24", (5, 24)), ("2.15.0a0+git", (2, 15, 0)),
     ("unknown", ())],
)
def test_the_numbers_of_a_version(version: str, numbers: tuple[int, ...]) -> None:
    assert compat.release(version) == numbers


def test_what_the_tests_have_passed_with_is_written_down() -> None:
    """Of the versions that `make` installs, and of those that run this test."""
    for pins in ("constraints.txt", "constraints-oldest.txt"):
        pinned = dict(re.findall(r"^([a-z]+)==([\d.]+)", (ROOT / pins).read_text("utf-8"), re.M))
        for package, tested in compat.TESTED.items():
            assert compat.release(pinned[package]) <= compat.release(tested), f"{package} in {pins}"
    newer = compat.untested()
    assert not newer, f"these tests run on {newer}: if nothing else fails, write that into TESTED of shoal.compat"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.TESTED, "transformers", "4.99.1")
    monkeypatch.setattr(compat, "tell_untested", compat.functools.cache(compat.tell_untested.__wrapped__))


@pytest.mark.usefixtures("newer")
def test_a_library_that_is_newer_than_any_that_was_tested_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            generate(tiny("llama"), **single(), custom_generate=shoal.Full())
            shoal.load(tiny("hybrid"))
    (line,) = [record for record in caplog.records if record.name == "shoal.compat"]
    told = line.getMessage()
    assert f"transformers {transformers.__version__}: newer than any version that Shoal was tested with" in told
    assert "transformers 4.99.1" in told and "\n" not in told and line.levelno == logging.WARNING


def test_what_was_tested_is_told_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TESTED", {"torch": "999", "transformers": "999", "no-such-distribution": "1"})
    compat.tell_untested.__wrapped__()
    assert not caplog.records


def test_a_cache_is_recognised_whatever_its_name() -> None:
    model, cache = tiny("llama"), DynamicCache()
    with torch.no_grad():
        out = model(torch.tensor([[3, 4, 5]]), use_cache=True, **{cache_name(model): cache})
    assert cache.get_seq_length() == 3 and [name for name, value in out.items() if compat.is_cache(value)]
