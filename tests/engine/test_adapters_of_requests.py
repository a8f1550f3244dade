"""Adapters by name: requests with different ones in one batch, chats, kept prefixes, drafts, and what is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapters import drawn, write_peft
from chat_tokenizer import chat_tokenizer
from drive import prompt
from eagle_part import eagle_part
from families import tiny
from folders import lasting
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.model.packed.native_runner import NativeRunner

NAMES: tuple[str | None, ...] = ("one", "two", "")


@functools.cache
def engine(backend: str) -> Engine:
    """A tiny model with two adapters; `kernels` are of float32."""
    model = copy.deepcopy(tiny("llama")).float() if backend == "kernels" else tiny("llama")
    made = engine_for(model, chat_tokenizer(), backend="hf" if backend == "hf" else "packed")
    assert isinstance(made.runner, NativeRunner) == (backend == "kernels")
    for seed, name in enumerate(("one", "two"), start=1):
        made.add_adapter(write_peft(lasting("adapters"), drawn(tiny("llama"), seed=seed)), name)
    return made


@functools.cache
def alone(backend: str, name: str, seed: int, length: int = 16) -> tuple[int, ...]:
    """What an adapter says to a prompt, alone."""
    found = engine(backend).generate(prompt(9, seed=seed), adapter=name, max_new_tokens=length)
    assert not isinstance(found, list)
    return found.tokens


backends = pytest.mark.parametrize("backend", ["hf", "packed", "kernels"])


@backends
def test_requests_with_different_adapters_share_a_batch(backend: str) -> None:
    assert len({alone(backend, name, 0) for name in ("one", "two", "")}) == 3
    with Scheduler(engine(backend), prefix_bytes=0) as scheduler:
        asked = [(name, seed) for seed in range(3) for name in ("one", "two", "")]
        handles = [scheduler.submit(prompt(9, seed=seed), adapter=name, max_new_tokens=16) for name, seed in asked]
        for handle, (name, seed) in zip(handles, asked, strict=True):
            list(handle)
            assert handle.results[0].tokens == alone(backend, name, seed)


@backends
def test_a_place_in_the_cache_changes_its_adapter(backend: str) -> None:
    """Steps of the one request after those of the other, in the same place and cache: nothing else tells them apart."""
    with Scheduler(engine(backend), prefix_bytes=0) as scheduler:
        for name in ("one", "two", "", "one"):
            handle = scheduler.submit(prompt(9, seed=6), adapter=name, max_new_tokens=16)
            list(handle)
            assert handle.results[0].tokens == alone(backend, name, 6)


@backends
def test_what_one_adapter_has_kept_serves_no_other(backend: str) -> None:
    with Scheduler(engine(backend), prefix_bytes=1 << 24) as scheduler:
        for again in range(2):
            for name in ("one", "", "two"):
                handle = scheduler.submit(prompt(9, seed=4), adapter=name, max_new_tokens=16)
                list(handle)
                assert handle.results[0].tokens == alone(backend, name, 4)
                assert (handle.entries[0].seq.cached > 0) == bool(again)


METHODS: Mapping[str, Any] = {
    "prompt lookup": {"method": "prompt_lookup"}, "own layers": {"method": "d3_spec"},
    "eagle": lambda: {"method": "eagle", "method_args": {"part": eagle_part("llama")}},
}


@backends
@pytest.mark.parametrize("method", [*METHODS])
def test_drafts_stay_exact(backend: str, method: str) -> None:
    """The target has the adapter; whatever is guessed without it changes no token."""
    asked = METHODS[method]() if callable(METHODS[method]) else METHODS[method]
    for name in ("one", ""):
        ids = [*prompt(9, seed=5), *alone(backend, name, 5, 12), *prompt(9, seed=5)]
        plain = engine(backend).generate(ids, adapter=name, max_new_tokens=24)
        drafted = engine(backend).generate(ids, adapter=name, max_new_tokens=24, method=asked)
        assert drafted.tokens == plain.tokens and drafted.stats.target_forwards <= plain.stats.target_forwards


@backends
def test_a_chat_that_changes_its_adapter_reads_itself_again(backend: str) -> None:
    made = engine(backend)
    chat = made.session(max_new_tokens=8)
    for name in ("one", "two", "", "", "one"):
        fresh = made.generate([*chat.messages, {"role": "user", "content": "abc"}], adapter=name, max_new_tokens=8)
        assert chat.send("abc", adapter=name).tokens == fresh.tokens


def test_the_engines_own_choice_is_for_requests_that_name_none() -> None:
    made = engine("packed")
    made.adapter = "two"
    try:
        assert made.generate(prompt(9), max_new_tokens=16).tokens == alone("packed", "two", 0)
        assert made.generate(prompt(9), max_new_tokens=16, adapter="").tokens == alone("packed", "", 0)
    finally:
        made.adapter = ""


def test_names_that_are_taken_or_unknown(tmp_path: Path) -> None:
    made, path = engine("packed"), write_peft(tmp_path / "one", drawn(tiny("llama")))
    with pytest.raises(ValueError, match="two adapters named 'one'"):
        made.add_adapter(path)
    with pytest.raises(ValueError, match="no adapter 'three'; the model has one, two"):
        made.generate(prompt(9), adapter="three")
    with pytest.raises(ValueError, match="it must be an adapter's name"):
        made.generate(prompt(9), adapter=3)
    assert list(made.adapters) == ["one", "two"]


def test_branches_of_a_search_have_their_roots_adapter() -> None:
    made = engine("packed")
    method = {"method": "best_of", "method_args": {"n": 3}}
    found = made.generate(prompt(9), adapter="one", method=method, max_new_tokens=8, temperature=0.0)
    assert found.tokens == alone("packed", "one", 0)[:8]
