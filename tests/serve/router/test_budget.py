"""What fits beside what, and that an unloaded model gives back its memory, mapped files among it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from chat_tokenizer import chat_tokenizer
from families import tiny
from real_models import real_model
from shoal import load
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.memory.memory_limit import MemoryLimit
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import OutOfMemory
from shoal.serve.facts import ModelFacts
from shoal.serve.router.budget import MemoryBudget
from shoal.serve.router.listing import Listed
from shoal.serve.router.loading import Making, ModelInMemory, ModelLoader
from shoal.serve.router.shelf import Shelf
from shoal.serve.settings import Settings

MIB = 1 << 20


def no_facts(one: Listed) -> ModelFacts:
    raise AssertionError(f"the facts of {one.name} are asked for")


def test_models_fit_by_all_that_they_may_take() -> None:
    budget = MemoryBudget(MemoryLimit("1000MiB"))
    budget.base = 150 * MIB
    assert budget.fits([300 * MIB, 300 * MIB], 200 * MIB)  # 950 MiB are usable
    assert not budget.fits([300 * MIB, 300 * MIB], 201 * MIB)
    budget.check("the model 'a'", 800 * MIB)
    with pytest.raises(OutOfMemory, match=r"memory of 1000\.0 MiB for the model 'a': it takes 801\.0 MiB, the process "
                       r"without it 150\.0 MiB, and 5% are kept back\. Use .*or memory of 1001\.1 MiB at least"):
        budget.check("the model 'a'", 801 * MIB)
    free = MemoryBudget(None)
    free.check("the model 'a'", 1 << 60)
    assert free.fits([], 1) and not free.fits([], 1 << 60)


def test_a_model_starts_though_others_take_memory_as_it_does() -> None:
    engine = engine_for(tiny("llama", layers=2), chat_tokenizer(), name="a")
    engine.limit = limit = MemoryLimit("8GiB")
    given = list[int]()

    def scheduler(found: Engine, kv: int | None, prefixes: int | None) -> Scheduler:
        assert kv is not None and prefixes is not None
        left = limit.for_seqs(found, 256)
        given.extend([left, kv + prefixes])
        return Scheduler(found, kv_bytes=kv, prefix_bytes=prefixes)

    making = Making(lambda one: 1, no_facts, lambda one: engine, scheduler)
    held = ModelLoader(Settings(), making, MemoryBudget(limit)).load(Listed("a", "a"))
    held._kv = 1 << 50  # more than there is
    held.start()
    assert held.close(1.0) and given[1] < 0.97 * given[0]


@pytest.mark.slow
def test_an_unloaded_model_gives_back_its_memory_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_WEIGHTS", str(tmp_path / "weights"))  # packed once, then mapped
    file, limit = real_model("smollm2"), MemoryLimit("8GiB")
    process = psutil.Process()

    def scheduler(engine: Engine, kv: int | None, prefixes: int | None) -> Scheduler:
        return Scheduler(engine, kv_bytes=kv, prefix_bytes=prefixes)

    making = Making(lambda one: Path(file).stat().st_size, no_facts, lambda one: load(file, memory=limit), scheduler)
    loader = ModelLoader(Settings(), making, MemoryBudget(limit))
    shelf = Shelf([Listed("a", file)], loader)

    def of_weights() -> int:
        return sum(one.rss for one in process.memory_maps() if one.path.startswith(str(tmp_path)))

    async def once() -> tuple[int, int, int]:
        one = shelf.get("a")
        async with shelf.using(one) as model:
            assert isinstance(model, ModelInMemory) and model.scheduler is not None
            await asyncio.to_thread(list, model.scheduler.submit("Once upon a time", max_new_tokens=8))
            inside, mapped = process.memory_info().rss, of_weights()
            assert model.nbytes > model.own >= Path(file).stat().st_size * 0.9
        del model
        await shelf.unload(one)
        return inside, mapped, process.memory_info().rss

    async def often() -> list[tuple[int, int, int]]:
        return [await once() for _ in range(4)]

    found = asyncio.run(often())
    assert of_weights() == 0 and all(mapped > 50 * MIB for _, mapped, _ in found[1:])
    assert all(inside - after > 80 * MIB for inside, _, after in found[1:])
    assert found[-1][2] - found[1][2] < 8 * MIB  # nothing stays from time to time
    assert loader.budget.base == pytest.approx(found[-1][2], abs=16 * MIB)


def test_a_models_size_is_read_again_only_when_its_file_has_changed(tmp_path: Path) -> None:
    file, sizes = tmp_path / "a.gguf", iter([0, 10, 20])
    file.write_bytes(b"1")
    making = Making(lambda _: next(sizes), no_facts, lambda _: pytest.fail("loads"), lambda *_: pytest.fail("decodes"))
    loader, one = ModelLoader(Settings(), making, MemoryBudget(None)), Listed("a", str(file))
    assert [loader.least(one) for _ in range(3)] == [0, 10, 10], "what is unknown is asked for again"
    file.write_bytes(b"12")
    assert [loader.least(one) for _ in range(2)] == [20, 20]
