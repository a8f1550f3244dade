"""The KV's peak as it is predicted, and a look at the cache while what was predicted runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from backends import Backend
from drive import prompt
from shoal.engine.engine import Engine
from shoal.engine.memory.footprint import KVPeak, peak_of
from shoal.engine.memory.shorter import guesses
from shoal.engine.request import Request
from shoal.methods import make
from shoal.model.kv.cache import KVCache


def engine_of(backend: Backend, family: str = "llama") -> Engine:
    return Engine(backend.runner(family))


def watched(see: Callable[[KVCache], None], patch: pytest.MonkeyPatch) -> None:
    """Let the cache be seen before and after every commit: when scratch is largest, and before slots go."""
    commit = KVCache.commit

    def seen(self: KVCache, seq: int, path: Any) -> None:
        see(self)
        commit(self, seq, path)
        see(self)

    patch.setattr(KVCache, "commit", seen)


def run(engine: Engine, lengths: list[int], new: int, method: Any, see: Callable[[KVCache], None]) -> KVPeak:
    """The prediction; `see` is shown the cache while the sequences run."""
    ids = [prompt(length, number) for number, length in enumerate(lengths)]
    options = {"method": method, "max_new_tokens": new, "ignore_eos": True}
    request = Request.from_options(options)
    seqs = engine.seqs(ids, request)
    _, extra = guesses(make(request.method), seqs[0].recipe)
    predicted = peak_of(engine.runner, engine.cache_for(seqs, new), seqs, extra)
    with pytest.MonkeyPatch.context() as patch:
        watched(see, patch)
        engine.generate(ids, **options)
    return predicted
