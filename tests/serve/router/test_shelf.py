"""Loads on request, waits with a bound, unloading by least use, by time and by hand; with a clock and loads by hand."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import OutOfMemory
from shoal.serve.errors import ApiError
from shoal.serve.router.listing import Listed
from shoal.serve.router.shelf import RETRY, Shelf

SIZE = 10


class Thing:
    """A model in memory."""

    def __init__(self, loader: FakeLoader, name: str) -> None:
        self.loader, self.name, self.nbytes = loader, name, loader.sizes.get(name, SIZE)
        self.open, self.users = False, 0

    def start(self) -> None:
        self.open = True

    def close(self, seconds: float) -> bool:
        assert self.open and not self.users, "a model is closed under its requests"
        self.open = False
        self.loader.inside.discard(self.name)
        return True


class FakeLoader:
    """Loads things, of which so many bytes fit; counts, fails and waits as it is told."""

    def __init__(self, room: int = 2 * SIZE, **sizes: int) -> None:
        self.room, self.sizes = room, sizes
        self.loads: Counter[str] = Counter()
        self.inside: set[str] = set()
        self.broken: dict[str, Exception] = {}
        self.go = threading.Event()
        self.go.set()
        self.settled = 0
        self.beside = 99
        """Most others beside which a model can be loaded, whatever their sizes say."""

    def least(self, listed: Listed) -> int:
        return self.sizes.get(listed.name, SIZE) // 2

    def check(self, listed: Listed, size: int) -> None:
        if size > self.room:
            raise OutOfMemory("memory of 20 B", f"{listed.name} takes {size} B", "Use a smaller model")

    def load(self, listed: Listed) -> Thing:
        assert self.go.wait(10)
        self.loads[listed.name] += 1
        if listed.name in self.broken:
            raise self.broken[listed.name]
        if len(self.inside) > self.beside:
            raise OutOfMemory("memory of 20 B", f"the process takes {len(self.inside)} B more", "Use a smaller model")
        self.inside.add(listed.name)
        return Thing(self, listed.name)

    def fits(self, held: Iterable[int], size: int) -> bool:
        return sum(held) + size <= self.room

    def settle(self, held: Sequence[int]) -> None:
        self.settled += 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(work: Callable[[], Awaitable[Any]]) -> None:
    asyncio.run(asyncio.wait_for(_awaited(work), 30))


async def _awaited(work: Callable[[], Awaitable[Any]]) -> None:
    await work()


def shelf_of(loader: FakeLoader, names: str = "abc", **options: Any) -> Shelf:
    return Shelf([Listed(name, None) for name in names], loader, **{"keep": math.inf, **options})


async def use(shelf: Shelf, name: str, seconds: float = 0.0, keep: float | None = None) -> str:
    async with shelf.using(shelf.get(name), keep) as held:
        held.users += 1
        try:
            await asyncio.sleep(seconds)
            assert held.open
        finally:
            held.users -= 1
        return str(held.name)


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def states(shelf: Shelf) -> str:
    return " ".join(one.state for one in shelf.models)


def test_a_model_is_loaded_on_its_first_request_and_once_for_many() -> None:
    loader = FakeLoader()

    async def work() -> None:
        shelf = shelf_of(loader)
        assert states(shelf) == "unloaded unloaded unloaded"
        loader.go.clear()
        asked = [asyncio.ensure_future(use(shelf, "a")) for _ in range(5)]
        await until(lambda: len(shelf.models[0].waiting) == 5 and states(shelf) == "loading unloaded unloaded")
        loader.go.set()
        assert await asyncio.gather(*asked) == ["a"] * 5 and await use(shelf, "a") == "a"
        assert loader.loads == {"a": 1} and states(shelf) == "loaded unloaded unloaded"
        assert shelf.models[0].users == 0 and shelf.models[0].size == SIZE

    run(work)


def test_the_idle_model_that_was_used_longest_ago_makes_room() -> None:
    loader, clock = FakeLoader(), Clock()

    async def work() -> None:
        shelf = shelf_of(loader, clock=clock)
        for name in "abac":
            clock.now += 1
            await use(shelf, name)
        assert states(shelf) == "loaded unloaded loaded" and loader.inside == {"a", "c"}
        assert shelf.counts == {"loads": {"a": 1, "b": 1, "c": 1}, "failures": {}, "unloads": {"b": 1}}

    run(work)


def test_requests_under_way_are_not_cut_and_those_that_come_wait_for_their_turn() -> None:
    loader = FakeLoader(room=SIZE)

    async def work() -> None:
        shelf = shelf_of(loader)
        first = asyncio.ensure_future(use(shelf, "a", 0.5))
        await until(lambda: shelf.models[0].users)
        other = asyncio.ensure_future(use(shelf, "b"))
        await until(lambda: shelf.models[0].leaving is not None)
        assert not first.done()
        again = asyncio.ensure_future(use(shelf, "a"))  # while the model leaves
        assert [await first, await other, await again] == ["a", "b", "a"]
        assert loader.loads == {"a": 2, "b": 1}

    run(work)


@pytest.mark.parametrize("seed", range(3))
def test_many_streams_that_switch_at_random_lose_no_request(seed: int) -> None:
    loader, dice = FakeLoader(), random.Random(seed)

    async def stream(shelf: Shelf) -> int:
        for _ in range(25):
            name = dice.choice("abc")
            assert await use(shelf, name, dice.random() / 200) == name
            assert len(loader.inside) <= 2
            if dice.random() < 0.1:
                left = asyncio.ensure_future(use(shelf, dice.choice("abc"), 1.0))
                await asyncio.sleep(dice.random() / 100)
                left.cancel()  # a client that leaves, whether it waits or is answered
        return 25

    async def work() -> None:
        shelf = shelf_of(loader)
        assert sum(await asyncio.gather(*(stream(shelf) for _ in range(16)))) == 400
        await until(lambda: not shelf._tasks)
        assert [(one.users, len(one.waiting)) for one in shelf.models] == [(0, 0)] * 3
        assert loader.loads.total() >= 3 and len(loader.inside) <= 2

    run(work)


def test_a_failure_is_told_to_its_own_clients_alone(tmp_path: Path) -> None:
    loader, clock = FakeLoader(), Clock()
    file = tmp_path / "b.gguf"
    file.write_bytes(b"good")

    async def work() -> None:
        shelf = Shelf([Listed("a", None), Listed("b", str(file))], loader, keep=math.inf, clock=clock)
        await use(shelf, "b")
        await shelf.unload(shelf.get("b"))
        file.write_bytes(b"damaged")  # between two loads
        loader.broken["b"] = ValueError("the file\n is damaged")
        busy = asyncio.ensure_future(use(shelf, "a", 0.2))
        found = await asyncio.gather(*(use(shelf, "b") for _ in range(3)), return_exceptions=True)
        told = [(one.status, one.code, one.message) for one in found if isinstance(one, ApiError)]
        assert told == [(500, "model_not_loaded", "b cannot be loaded: the file is damaged")] * 3
        assert states(shelf) == "loaded failed" and await busy == "a" and await use(shelf, "a") == "a"
        with pytest.raises(ApiError, match="the file is damaged"):
            await use(shelf, "b")
        assert loader.loads["b"] == 2  # it was not tried again at once
        clock.now += RETRY
        with pytest.raises(ApiError):
            await use(shelf, "b")
        assert loader.loads["b"] == 3
        loader.broken.clear()
        file.write_bytes(b"whole again")  # which is seen at once
        assert await use(shelf, "b") == "b" and states(shelf) == "loaded loaded"
        assert shelf.counts["failures"] == {"b": 2}

    run(work)


def test_an_error_of_the_server_is_not_told_to_clients(caplog: pytest.LogCaptureFixture) -> None:
    loader = FakeLoader()
    loader.broken["a"] = RuntimeError("secret")

    async def work() -> None:
        with pytest.raises(ApiError) as told:
            await use(shelf_of(loader), "a")
        assert "secret" not in told.value.message and "its log says why" in told.value.message

    run(work)
    assert "secret" in caplog.text


def test_what_does_not_fit_alone_is_refused_and_nothing_makes_room_for_it() -> None:
    loader = FakeLoader(c=100)

    async def work() -> None:
        shelf = shelf_of(loader)
        await use(shelf, "a")
        await use(shelf, "b")
        with pytest.raises(ApiError, match="c cannot be loaded: memory of 20 B: c takes 50 B. Use a smaller") as told:
            await use(shelf, "c")
        assert told.value.code == "model_too_large" and loader.inside == {"a", "b"}

    run(work)


def test_where_the_process_has_grown_others_make_room_instead_of_a_refusal() -> None:
    loader, clock = FakeLoader(room=3 * SIZE), Clock()

    async def work() -> None:
        shelf = shelf_of(loader, clock=clock)
        for name in "ab":
            clock.now += 1
            await use(shelf, name)
        loader.beside = 1
        assert await use(shelf, "c") == "c" and loader.inside == {"b", "c"} and loader.loads["c"] == 2
        loader.beside = -1
        with pytest.raises(ApiError, match="a cannot be loaded: memory of 20 B: the process takes 0 B more") as told:
            await use(shelf, "a")
        assert told.value.code == "model_too_large" and states(shelf) == "failed unloaded unloaded"
        assert shelf.counts["failures"] == {"a": 1}

    run(work)


def test_a_request_waits_no_longer_than_the_bound() -> None:
    loader = FakeLoader(room=SIZE)

    async def work() -> None:
        shelf = shelf_of(loader, most_waiting=2)
        busy = asyncio.ensure_future(use(shelf, "a", 1.0))
        await until(lambda: shelf.models[0].users)
        shelf._patience = 0.1
        found = await asyncio.gather(*(use(shelf, "b") for _ in range(3)), return_exceptions=True)
        assert [one.code for one in found if isinstance(one, ApiError)] == ["model_not_loaded"] * 2 + ["queue_full"]
        assert all(isinstance(one, ApiError) and one.status == 503 for one in found)
        answer = found[0].response("/v1/completions")  # type: ignore[union-attr]
        assert int(answer.headers["retry-after"]) >= 1 and b"in use are a" in bytes(answer.body)
        assert await busy == "a"
        shelf._patience = 30.0
        assert await use(shelf, "b") == "b"  # it is loaded once there is room

    run(work)


def test_a_model_leaves_when_its_time_is_up() -> None:
    loader, clock = FakeLoader(), Clock()

    async def work() -> None:
        shelf = shelf_of(loader, keep=60.0, clock=clock)
        await use(shelf, "a")
        await use(shelf, "b", keep=10.0)
        clock.now = 30.0
        await shelf.expire()
        assert states(shelf) == "loaded unloaded unloaded"
        await use(shelf, "a")  # which begins its time anew
        clock.now = 89.0
        await shelf.expire()
        assert states(shelf) == "loaded unloaded unloaded"
        busy = asyncio.ensure_future(use(shelf, "a", 0.2))
        await until(lambda: shelf.models[0].users)
        clock.now = 1000.0
        await shelf.expire()  # not while it answers
        assert states(shelf) == "loaded unloaded unloaded" and await busy == "a"
        clock.now = 1060.0
        await shelf.expire()
        assert states(shelf) == "unloaded unloaded unloaded" and not loader.inside
        await use(shelf, "a", keep=math.inf)
        clock.now = 1e9
        await shelf.expire()
        assert states(shelf) == "loaded unloaded unloaded"
        await use(shelf, "a")
        assert shelf.models[0].keep == 60.0  # a request that says nothing means the operator's time

    run(work)


def test_no_time_at_all_unloads_after_the_request_by_itself() -> None:
    loader = FakeLoader()

    async def work() -> None:
        shelf = shelf_of(loader)
        await use(shelf, "a", keep=0.0)
        await until(lambda: states(shelf) == "unloaded unloaded unloaded" and not loader.inside)

    run(work)


def test_unloading_by_hand_waits_for_requests() -> None:
    loader = FakeLoader()

    async def work() -> None:
        shelf = shelf_of(loader)
        await shelf.load(shelf.get("a"))
        assert states(shelf) == "loaded unloaded unloaded"
        busy = asyncio.ensure_future(use(shelf, "a", 0.2))
        await until(lambda: shelf.models[0].users)
        await shelf.unload(shelf.get("a"))
        assert await busy == "a" and states(shelf) == "unloaded unloaded unloaded"
        await shelf.unload(shelf.get("a"))  # again, to no effect
        loader.go.clear()
        loading = asyncio.ensure_future(use(shelf, "b"))
        await until(lambda: shelf.get("b").state == "loading")
        with pytest.raises(ApiError, match="b is being loaded"):
            await shelf.unload(shelf.get("b"))
        loader.go.set()
        await loading

    run(work)


def test_so_many_models_at_most() -> None:
    loader = FakeLoader(room=100)

    async def work() -> None:
        shelf = shelf_of(loader, most=2)
        for name in "abcabc":
            await use(shelf, name)
            assert len(loader.inside) <= 2

    run(work)


def test_names() -> None:
    shelf = Shelf([Listed("q:4b", "q", ("fast",)), Listed("q:8b", None)], FakeLoader())
    assert shelf.get(None) is shelf.get("fast") is shelf.get("q:4b") is shelf.models[0]
    with pytest.raises(ApiError, match="'q' may be q:4b, q:8b: give one of them"):
        shelf.get("q")
    with pytest.raises(ApiError, match="there is no model 'x' here; there are q:4b, q:8b"):
        shelf.get("x")
    shelf.add(Listed("fast", "q"))
    shelf.add(Listed("new", "q"))
    assert [one.listed.name for one in shelf.models] == ["q:4b", "q:8b", "new"]


def test_a_server_that_ends_takes_no_more_and_finishes() -> None:
    loader = FakeLoader(room=SIZE)

    async def work() -> None:
        shelf = shelf_of(loader)
        await use(shelf, "a")
        loader.go.clear()
        waiting = asyncio.ensure_future(use(shelf, "b"))
        await until(lambda: shelf.get("b").state == "loading")
        assert await shelf.close(1.0)
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        with pytest.raises(ApiError, match="shutting down"):
            await use(shelf, "c")
        loader.go.set()

    run(work)
