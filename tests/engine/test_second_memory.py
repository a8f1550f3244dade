"""What a second model stores of a sequence is counted where sequences are admitted."""

from __future__ import annotations

import pytest

from drive import prompt
from families import tiny
from method_matrix import switching_of_lab
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.auto import Auto
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.draft_model import DraftModel

SMALL = tiny("llama", seed=1, layers=4)
ENGINE = engine_for(tiny("llama"))
IDS, NEW = prompt(20, 3), 12
FILLING = [DraftModel(SMALL, length=3), *switching_of_lab(SMALL)]
METHODS = [*FILLING, Auto(draft=SMALL), BestOf(2, inner=DraftModel(SMALL, length=3))]


def second(engine: Engine, method: Method) -> tuple[int, int]:
    """Bytes that are counted for a sequence's second model, and positions of it that these are."""
    entry = Scheduler(engine, start=False).submit(IDS, method=method, max_new_tokens=NEW, temperature=1.0).entries[0]
    own = sum(need.own_bytes for need in entry.needs)
    return own, own // sum(engine_for(SMALL).runner.position_bytes)


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_it_is_counted_for_every_branch(method: Method) -> None:
    assert second(ENGINE, "full")[0] == 0  # type: ignore[arg-type]
    branches = 2 if method.name == "best_of" else 1
    scratch = ENGINE.recipe(method, NEW).scratch
    assert second(ENGINE, method)[1] == branches * (len(IDS) + NEW + scratch)


@pytest.mark.parametrize("method", FILLING, ids=lambda one: one.name)
def test_it_stores_no_more_than_that_and_rows_wait_for_room(method: Method) -> None:
    room = Scheduler(ENGINE, start=False)
    need = room.submit(IDS, method=method, max_new_tokens=NEW).entries[0].need
    one = room._room.bytes([need])
    found = []
    for most in (2 * one, 2 * one - 1):
        scheduler = Scheduler(ENGINE, kv_bytes=most, prefix_bytes=0, start=False)
        handles = [scheduler.submit(IDS, method=method, max_new_tokens=NEW) for _ in range(2)]
        scheduler.turn()
        found.append(scheduler.running)
        while scheduler.running or scheduler.waiting:
            scheduler.turn()
            for batch in scheduler._batches:
                small = getattr(batch, "_small", None)
                stored = 0 if small is None else small.bytes().used
                assert stored <= scheduler.running * need.second
        alone = ENGINE.generate(IDS, method=method, max_new_tokens=NEW)
        assert [handle.results[0].tokens for handle in handles] == [alone.tokens] * 2
    assert found == [2, 1]
    with pytest.raises(Unsupported, match=f"its KV can take {one} bytes, and there are {one - 1}"):
        Scheduler(ENGINE, kv_bytes=one - 1, start=False).submit(IDS, method=method, max_new_tokens=NEW)
