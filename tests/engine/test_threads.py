"""Calls that share an engine, are left early or fail do not touch each other, nor the model."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from drive import prompt
from families import fingerprint, tiny
from oracle import decoder_layers
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.early_exit import EarlyExit
from shoal.model.kv.layer import KVLayer

NEW = 14
CALLS: list[tuple[Any, dict[str, Any]]] = [
    (prompt(5, 1), {"method": "full"}),
    (prompt(12, 2), {"method": D3(alpha=0.9, core=2)}),
    ([prompt(3, 3), prompt(9, 4)], {"method": EarlyExit(exit_layer=3)}),
    (prompt(7, 5), {"method": D3(alpha=0.8, core=2, order="low_first"), "temperature": 1.0, "seed": 4}),
    ([prompt(2, 6), prompt(4, 7), prompt(20, 8)], {"temperature": 0.9, "top_p": 0.9, "seed": 5}),
    (prompt(5, 1), {"repetition_penalty": 1.3}),
]


def engine() -> Engine:
    return engine_for(tiny("hybrid"))


def tokens(results: Any) -> Any:
    return [r.tokens for r in results] if isinstance(results, list) else results.tokens


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run all jobs at once and give back what they return."""
    out: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        start.wait()
        try:
            out[index] = jobs[index]()
        except BaseException as error:  # handed to the test's own thread
            out[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return out


def test_generations_at_once_equal_generations_alone() -> None:
    before, one = fingerprint(tiny("hybrid")), engine()
    alone = [tokens(one.generate(ids, max_new_tokens=NEW, **options)) for ids, options in CALLS]
    jobs = [lambda c=c: tokens(one.generate(c[0], max_new_tokens=NEW, **c[1])) for c in CALLS * 2]
    assert in_threads(jobs) == alone * 2
    assert fingerprint(tiny("hybrid")) == before


def test_streams_of_one_thread_interleave() -> None:
    one = engine()
    alone = [tokens(one.generate(ids, max_new_tokens=NEW, **options)) for ids, options in CALLS]
    streams = [one.stream(ids, max_new_tokens=NEW, **options) for ids, options in CALLS]
    alive = list(streams)
    while alive:
        alive = [stream for stream in alive if next(stream, None) is not None]
    results = [stream.results for stream in streams]
    assert [tokens(r if len(r) > 1 else r[0]) for r in results] == alone


def test_streams_and_closings_at_once() -> None:
    """Some threads leave their streams half-way, others run to the end."""
    one = engine()

    def half(index: int) -> list[int]:
        ids, options = CALLS[index]
        with one.stream(ids, max_new_tokens=NEW, **options) as stream:
            return [next(stream).token for _ in range(5)]

    expected = [half(0), half(1), *(tokens(one.generate(i, max_new_tokens=NEW, **o)) for i, o in CALLS[2:5])]
    jobs: list[Callable[[], Any]] = [lambda: half(0), lambda: half(1)]
    jobs += [lambda c=c: tokens(one.generate(c[0], max_new_tokens=NEW, **c[1])) for c in CALLS[2:5]]
    for _ in range(2):
        assert in_threads(jobs) == expected


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Weak references to the storage of every key tensor that is allocated."""
    made: list[weakref.ref[Tensor]] = []
    allocate = KVLayer.allocate

    def watched(self: KVLayer, *args: Any) -> None:
        allocate(self, *args)
        made.append(weakref.ref(self.keys))

    monkeypatch.setattr(KVLayer, "allocate", watched)
    return made


def test_a_closed_stream_frees_its_cache(stored: list[weakref.ref[Tensor]]) -> None:
    one = engine()
    stored.clear()
    stream = one.stream(prompt(5), max_new_tokens=NEW)
    for _ in range(4):
        next(stream)
    assert sum(ref() is not None for ref in stored) == 6
    stream.close()
    gc.collect()
    assert not any(ref() is not None for ref in stored)
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"
    assert len(stream.result.tokens) == 4
    assert stream.result.stats.kv_bytes_used > 0
    assert one.generate(prompt(5), max_new_tokens=NEW).tokens[:4] == stream.result.tokens


def test_a_forgotten_or_finished_stream_frees_its_cache(stored: list[weakref.ref[Tensor]]) -> None:
    one = engine()
    stored.clear()
    result = one.generate([prompt(5), prompt(3)], method=D3(alpha=0.8, core=2), max_new_tokens=NEW)
    for _step in one.stream(prompt(5), max_new_tokens=NEW):
        break
    gc.collect()
    assert stored and not any(ref() is not None for ref in stored)
    assert len(result) == 2


def test_closing_before_the_first_step() -> None:
    one = engine()
    stream = one.stream(prompt(5), max_new_tokens=NEW)
    stream.close()
    assert list(stream) == []
    assert (stream.result.tokens, stream.result.finish_reason, stream.result.text) == ((), "cancelled", "")
    assert stream.result.stats.new_tokens == 0


@contextmanager
def failing(at: int, error: BaseException) -> Iterator[None]:
    """Layer 2 raises in its call number `at`."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    handle = decoder_layers(tiny("hybrid"))[2].register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_failure_in_a_layer_harms_nothing(error: BaseException, at: int, stored: list[weakref.ref[Tensor]]) -> None:
    before, one = fingerprint(tiny("hybrid")), engine()
    ids, options = CALLS[2]
    expected = tokens(one.generate(ids, max_new_tokens=NEW, **options))
    bystander = one.stream(CALLS[0][0], max_new_tokens=NEW)
    first = [next(bystander).token for _ in range(3)]
    stored.clear()
    with failing(at, error), pytest.raises(type(error)):
        one.generate(ids, max_new_tokens=NEW, **options)
    error.__traceback__ = None
    gc.collect()
    assert not any(ref() is not None for ref in stored)
    assert tokens(one.generate(ids, max_new_tokens=NEW, **options)) == expected
    rest = [step.token for step in bystander]
    assert (*first, *rest) == one.generate(CALLS[0][0], max_new_tokens=NEW).tokens
    assert fingerprint(tiny("hybrid")) == before


def test_a_failing_callback_of_the_user_harms_nothing() -> None:
    one, expected = engine(), engine().generate(prompt(5), max_new_tokens=NEW).tokens

    def broken(ids: Tensor, scores: Tensor) -> Tensor:
        raise ZeroDivisionError

    for option in ("logits_processor", "stopping_criteria"):
        with pytest.raises(ZeroDivisionError):
            one.generate(prompt(5), max_new_tokens=NEW, **{option: [broken]})
        assert one.generate(prompt(5), max_new_tokens=NEW).tokens == expected


def test_a_failed_stream_says_so_and_ends() -> None:
    one = engine()
    stream = one.stream(prompt(5), max_new_tokens=NEW)
    next(stream)
    with failing(1, RuntimeError("broken")), pytest.raises(RuntimeError, match="broken"):
        next(stream)
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"
    assert len(stream.result.tokens) == 1


def test_loading_leaves_no_hooks_behind() -> None:
    before = fingerprint(tiny("gpt2"))
    engine_for(tiny("gpt2")).info()
    assert fingerprint(tiny("gpt2")) == before
    failures = 0
    for at in (1, 2, 3):
        model, calls = tiny("gpt2"), 0

        def fail(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls >= at:  # noqa: B023 - used up within the turn of the loop
                raise RuntimeError("broken")

        handle = decoder_layers(model)[2].register_forward_hook(fail)
        try:
            engine_for(model)
        except (RuntimeError, Unsupported):
            failures += 1
        finally:
            handle.remove()
        assert fingerprint(model) == before
    assert failures == 3
