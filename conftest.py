"""Settings and fixtures of every test: one thread, fixed seeds, no network, tiny models that nobody may change."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["SHOAL_CONFIG"] = ""  # no settings of the user
os.environ["SHOAL_WEIGHTS"] = ""  # no weights of tests in the user's cache

import torch

if not torch.cuda.is_available():  # kernels for GPUs run in Python then; Triton asks when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings
from transformers import PreTrainedModel

import folders
from families import FAMILIES, changed, fingerprint, tiny

MANY, SHARE = 1, 24

settings.register_profile("shoal", deadline=None, print_blob=True)
settings.load_profile("shoal")


def pytest_configure() -> None:
    """With several workers, threads of one only get in the way of the others."""
    torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    """Leave nothing behind but what later runs use again."""
    folders.remove()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, metavar="N", help="of each test run at most N slow cases, drawn by names")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with many cases the quick suite runs some, drawn by their names.

    Those are as many as the mark `quick` says, or `MANY` and one in `SHARE` of the others. The others are slow.
    """
    for drawn in _by_test(items, slow=False):
        mark = drawn[0].get_closest_marker("quick")
        for item in drawn[mark.args[0] if mark else MANY + max(0, len(drawn) - MANY) // SHARE :]:
            item.add_marker(pytest.mark.slow)
    most = config.getoption("--cases")
    if most is not None:
        _leave_out(config, items, most)


def _by_test(items: list[pytest.Item], *, slow: bool) -> list[list[pytest.Item]]:
    """The slow or the quick cases of each test, in an order drawn by their names."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        if (item.get_closest_marker("slow") is not None) == slow:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(cases.values())


def _leave_out(config: pytest.Config, items: list[pytest.Item], most: int) -> None:
    """Deselect slow cases beyond `most` of each test."""
    left = {item for drawn in _by_test(items, slow=True) for item in drawn[most:]}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _shared_models() -> Iterator[None]:
    """A test that changes a model of all fails itself, not one that runs after it."""
    yield
    assert not (found := changed()), f"the test changed shared models: {', '.join(found)}; copy.deepcopy them first"


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """The name of every family in turn."""
    return str(request.param)


@pytest.fixture
def model(family: str) -> Iterator[PreTrainedModel]:
    """The tiny fp64 model of every family in turn; the test fails if it changed the model."""
    yield from _guarded(tiny(family))


@pytest.fixture
def llama() -> Iterator[PreTrainedModel]:
    """The tiny fp64 Llama; the test fails if it changed the model."""
    yield from _guarded(tiny("llama"))


def _guarded(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    before = fingerprint(model)
    yield model
    assert fingerprint(model) == before, "the test left the shared model changed"
