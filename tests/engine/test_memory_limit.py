"""A limit on memory: what is given up for it, in which order, and what is refused before it starts."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shoal.engine.memory.footprint as footprints
import shoal.engine.memory.memory_limit as limits
from backends import NATIVE
from drive import prompt
from method_matrix import MATRIX
from shoal.decode.recipe import Recipe
from shoal.engine.engine import Engine
from shoal.engine.memory.amounts import parse, shown
from shoal.engine.memory.footprint import Footprint, footprint, weights_on_disk
from shoal.engine.memory.memory_limit import SPARE, MemoryLimit
from shoal.engine.memory.shorter import shorter
from shoal.engine.request import Request
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import OutOfMemory, Unsupported
from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.packed.native.library import ROOM_BESIDE
from shoal.types import ModelInfo

PROCESS = 50 << 20
DEFAULTS = [kind() for kind in dict.fromkeys(map(type, MATRIX)) if kind.name in ("eagle", "swift", "rapid", "deer")]
IDS = [prompt(40, 1), prompt(60, 2), prompt(50, 3)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """In a process whose size does not wander, and in which nothing is estimated."""
    monkeypatch.setattr(footprints, "resident", lambda: PROCESS)
    monkeypatch.setattr(footprints, "_work", lambda *_: 0)
    return Engine(NATIVE.runner("llama"))


def sized(engine: Engine, ids: list[list[int]], **options: Any) -> Footprint:
    request = Request.from_options({"max_new_tokens": 20, **options})
    return footprint(engine, engine.seqs(ids, request), make(request.method), request.max_new_tokens)


def limit(total: int, *lossy: str) -> MemoryLimit:
    """Of which plans may use exactly that much."""
    memory = int(total / (1 - SPARE)) - 2
    while MemoryLimit(memory).usable < total:
        memory += 1
    return MemoryLimit(memory, lossy)


def plan(engine: Engine, one: MemoryLimit, ids: list[list[int]] = IDS, **options: Any) -> limits.MemoryPlan:
    return one.plan(engine, ids, Request.from_options({"max_new_tokens": 20, **options}))


@pytest.mark.parametrize(("word", "size"), [("1KiB", 1024), ("2 GiB", 2 << 30), ("1.5MB", 1_500_000), ("7", 7),
                                            ("3gb", 3 * 10**9), (12, 12), ("9B", 9)])
def test_amounts(word: str | int, size: int) -> None:
    assert parse(word) == size


@pytest.mark.parametrize("word", ["", "2G", "GiB", "-1GiB", "1e3", "0", "0.1B", True, "2GiBs"])
def test_what_is_no_amount(word: Any) -> None:
    with pytest.raises(ValueError, match="memory is"):
        parse(word)


def test_amounts_are_shown_in_units_of_1024() -> None:
    assert [shown(size) for size in (5, 2048, 3 << 20, 5 << 29)] == ["5 B", "2.0 KiB", "3.0 MiB", "2.50 GiB"]


def test_less_is_guessed_until_nothing_is() -> None:
    lengths = [getattr(one, "length", None) for one in shorter(make({"method": "prompt_lookup"}))]
    assert lengths == [10, 5, 2, 1, None]
    names = [one.name for one in shorter(make(["prompt_lookup", "kv_int8"]))]
    assert names == ["prompt_lookup+kv_int8"] * 4 + ["kv_int8"]
    lossy = [one.name for one in shorter(make({"method": "prompt_lookup", "method_args": {"rule": "typical"}}))]
    assert lossy == ["prompt_lookup"] * 4
    assert [one.name for one in shorter(make("full"))] == ["full"]


@pytest.mark.parametrize("method", [*MATRIX, *DEFAULTS],
                         ids=lambda one: repr(one)[:60])
def test_every_method_can_be_made_shorter(method: Method) -> None:
    options = ("branching", "nodes", "length")
    sizes = [[getattr(one, option, None) for option in options] for one in shorter(method)]
    assert all(len(before) == 3 for before in sizes) and len(sizes) <= 12
    for before, after in pairwise(sizes[:-1]):
        assert all(old is None or new == old or new < old for old, new in zip(before, after, strict=True))
        assert before != after


def test_what_fits_is_left_as_it_is(engine: Engine) -> None:
    whole = sized(engine, IDS, method="prompt_lookup")
    found = plan(engine, limit(whole.total), method="prompt_lookup")
    assert (found.method, found.seqs, found.changed, found.sizes) == (make("prompt_lookup"), 3, "", whole)


@pytest.mark.slow
def test_guesses_go_first_then_rows_then_what_is_allowed(engine: Engine) -> None:
    whole = sized(engine, IDS, method="prompt_lookup")
    fewer = plan(engine, limit(whole.total - 1), method="prompt_lookup")
    assert (fewer.seqs, fewer.method.length) == (3, 5)  # type: ignore[attr-defined]
    pair = plan(engine, limit(sized(engine, IDS).total - 1))
    assert (pair.seqs, pair.method.name, pair.changed) == (1, "full", "prompts at a time: 1")
    smallest = limit(sized(engine, IDS[1:2]).total - 1, "kv_int8")
    lossy = plan(engine, smallest)
    assert lossy.method.name == "full+kv_int8" or lossy.method.name == "kv_int8"
    assert "lossy" in lossy.changed
    with pytest.raises(OutOfMemory, match="kv_int8"):
        plan(engine, replace(smallest, lossy=()))


@pytest.mark.slow
@dataclass(frozen=True)
class Fours(PromptLookup):
    """Takes lengths that four divides, and refuses 6 before it knows a model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length == 6:
            raise ValueError("length is 6")

    def recipe(self, info: ModelInfo) -> Recipe:
        if self.length % 4:
            raise ValueError(f"length is {self.length}; it must be a multiple of 4")
        return super().recipe(info)


def test_only_what_the_method_takes_is_chosen(engine: Engine) -> None:
    assert [one.option("length") for one in shorter(Fours(length=12))] == [12, 3, 1, None]
    whole, plain = (sized(engine, IDS, method=method).total for method in (Fours(length=16), "full"))
    chosen = [plan(engine, limit(total), method=Fours(length=16)).method for total in range(plain, whole + 1, 512)]
    lengths = [one.option("length") for one in chosen]
    assert {16, 8, 4, None} >= {*lengths} and {8, 4} & {*lengths} and lengths[0] is None


def test_more_memory_never_gives_less(engine: Engine) -> None:
    least, most = sized(engine, IDS[1:2]).total, sized(engine, IDS, method="prompt_lookup").total
    steps = [*range(least, most, (most - least) // 24), most]
    found = [plan(engine, limit(size), method="prompt_lookup") for size in steps]
    rank = [(one.seqs, getattr(one.method, "length", 0)) for one in found]
    assert rank == sorted(rank)
    assert len(set(rank)) > 4
    assert all(one.sizes.total <= size for one, size in zip(found, steps, strict=True))


@pytest.mark.slow
def test_a_refusal_names_the_parts_and_a_length_that_fits(engine: Engine) -> None:
    tight = limit(sized(engine, IDS[1:2], max_new_tokens=11).total)
    with pytest.raises(OutOfMemory, match=r"kv \d.*max_new_tokens of 11 or less") as refused:
        plan(engine, tight)
    assert "max_new_tokens=20" in str(refused.value)
    assert plan(engine, tight, max_new_tokens=11).seqs == 1
    with pytest.raises(OutOfMemory, match="smaller model"):
        plan(engine, MemoryLimit(PROCESS))


def test_groups_give_the_same_tokens(engine: Engine) -> None:
    wished = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "ignore_eos": True, "method": "prompt_lookup"}
    free = engine.generate(IDS, **wished)
    engine.limit = limit(sized(engine, IDS[1:2]).total)
    held = engine.generate(IDS, **wished)
    assert [one.tokens for one in held] == [one.tokens for one in free]
    assert [one.stats.drafted for one in held] == [0] * 3
    with pytest.raises(OutOfMemory, match="Stream fewer"):
        engine.stream(IDS, max_new_tokens=20)
    with pytest.raises(OutOfMemory):
        engine.generate(prompt(60), max_new_tokens=400)


def test_a_scheduler_lets_rows_wait_and_refuses_what_never_fits(engine: Engine) -> None:
    need = Scheduler(engine, start=False).submit(IDS[0], max_new_tokens=20).entries[0].need
    logits = engine.runner.vocab_size * 4
    room = 2 * (sum(map(int.__mul__, need.slots, engine.runner.position_bytes)) + logits)
    used = MemoryLimit(1 << 30).for_seqs(engine, 256)
    engine.limit = MemoryLimit(int((room + limits.MemoryLimit(1 << 30).usable - used) / (1 - SPARE)) + 2)
    scheduler = Scheduler(engine, prefix_bytes=0, start=False, prefill_chunk=256)
    assert room <= scheduler.kv_bytes <= room + 4
    handles = [scheduler.submit(IDS[0], max_new_tokens=20, ignore_eos=True) for _ in range(3)]
    assert handles[0].entries[0].need == replace(need, second=logits)
    scheduler.turn()
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    assert len({handle.results[0].tokens for handle in handles}) == 1
    with pytest.raises(Unsupported, match=r"KV can take .* kv_int8"):
        scheduler.submit(prompt(100), max_new_tokens=200)
    with pytest.raises(ValueError, match="the memory limit leaves"):
        Scheduler(engine, kv_bytes=int(engine.limit.memory), start=False, prefill_chunk=256)  # what is left wanders
    engine.limit = MemoryLimit(PROCESS)
    with pytest.raises(OutOfMemory, match="before it serves"):
        Scheduler(engine, start=False)


def test_a_scheduler_s_rows_need_what_choosing_takes(engine: Engine) -> None:
    engine.limit = MemoryLimit(1 << 30)
    scheduler, shape = Scheduler(engine, start=False), engine.runner.shape
    plain, tidal = (scheduler.submit(IDS[0], max_new_tokens=20, method=method).entries[0].need.second
                    for method in ("full", {"method": "tidal", "method_args": {"k": 16}}))
    assert tidal - plain == 4 * (shape.heads * (60 + ROOM_BESIDE) + shape.kv_heads * 16)


def test_weights_are_known_from_their_files(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"a": "b"}, "x": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
                         "y": {"dtype": "F32", "shape": [], "data_offsets": [60, 64]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    sizes = [weights_on_disk(str(tmp_path), torch.bfloat16, quant) for quant in (None, "int8", "int4")]
    assert sizes == [32, 16, 8]
    (tmp_path / "blocks").mkdir()
    save_file({"x_blocks": torch.zeros(4, 16, dtype=torch.uint8)}, tmp_path / "blocks" / "model.safetensors")
    assert weights_on_disk(str(tmp_path / "blocks"), torch.bfloat16, None) == 64
    (tmp_path / "broken.safetensors").write_bytes(b"abc")
    assert weights_on_disk(str(tmp_path), torch.float32, None) == 64
    file = tmp_path / "one.gguf"
    file.write_bytes(b"12345")
    assert weights_on_disk(str(file), torch.float32, None) == 5
    assert weights_on_disk("a/hub-id", torch.float32, None) == 0
    with pytest.raises(OutOfMemory, match=r"for the model 'm'.*weights take 1.00 GiB"):
        MemoryLimit("1GiB").check_weights("the model 'm'", 1 << 30)
