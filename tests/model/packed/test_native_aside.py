"""A thread that leaves a forward for other work: the forward's bits stay, and the work sees what it was promised."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import NATIVE
from filled_caches import FULL, SHALLOW, block, filled
from native_reference import Case, chain_batch, make_reference, storage
from shoal.model.packed import native
from shoal.model.packed.native import Aside, KVBinding, NativeModel
from shoal.model.packed.native.threads import MACHINE
from shoal.model.runner import Meanwhile, OfLayers

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

LAYERS, TOKENS = 3, 5
Bound = tuple[NativeModel, KVBinding]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MACHINE, "fixed", 2)


def bound(**options: Any) -> Bound:
    """A model with an empty cache."""
    case = Case(**options)
    model = make_reference(case).native
    return model, model.bind(*storage(case, 1, 16))


def run(of: Bound, threads: int, aside: Aside | None = None, taps: Tensor | None = None, first: int = 1) -> Tensor:
    """Logits of some tokens."""
    model, kv = of
    batch = chain_batch(range(first, first + TOKENS), 0, range(TOKENS))
    return model.forward(batch, kv, threads, taps, aside=aside)


def new_taps(of: Bound) -> Tensor:
    return torch.full((LAYERS + 1, TOKENS, of[0].shape.hidden), torch.nan)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("entry", range(LAYERS + 1))
def test_nothing_changes_for_those_that_go_on(threads: int, entry: int) -> None:
    of, other = bound(), bound(hidden=64, biases=True)
    plain, beside, taps = run(of, threads), run(other, 2), new_taps(of)
    seen: list[tuple[int, Tensor, Tensor]] = []

    def work() -> None:
        seen.append((threading.get_ident(), taps[: entry + 1].clone(), run(other, MACHINE.choose())))

    aside = Aside(entry, work)
    assert torch.equal(run(of, threads, aside, taps), plain)
    assert (aside.others > 0) == (len(seen) == 1) == (threads > 1)
    for who, states, found in seen:
        assert who != threading.get_ident()
        assert states.isfinite().all() and torch.equal(states, taps[: entry + 1])
        assert torch.equal(found, beside)


def test_the_largest_logits_too() -> None:
    """What each thread found is joined, of those that went on."""
    model, kv = bound()
    batch = chain_batch(range(TOKENS), 0, range(TOKENS))
    for bounds in (False, True):
        model.bounds = bounds
        for entry in range(LAYERS + 1):
            plain, found = (array("i", bytes(4 * TOKENS)) for _ in range(2))
            model.forward(batch, kv, 3, argmax=plain)
            model.forward(batch, kv, 3, argmax=found, aside=Aside(entry, lambda: None))
            assert found == plain


def test_two_models_at_once_have_the_bits_that_each_has_alone() -> None:
    """Forwards of one process share neither memory nor threads."""
    models = [bound(), bound(hidden=64, biases=True)]
    alone = [[run(of, 2, first=first) for first in range(40)] for of in models]
    found: list[list[Tensor]] = [[], []]

    def work(place: int) -> None:
        found[place] = [run(models[place], 2, first=first) for first in range(40)]

    workers = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for expected, got in zip(alone, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.usefixtures("two_threads")
def test_it_runs_on_one_thread_in_the_modes_of_the_caller() -> None:
    of, seen = bound(), list[tuple[int, bool, bool]]()

    def work() -> None:
        seen.append((MACHINE.choose(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    run(of, 2, Aside(0, work))
    with torch.no_grad():
        run(of, 2, Aside(0, work))
    with torch.inference_mode():
        run(of, 2, Aside(0, work))
    assert seen == [(1, True, False), (1, False, False), (1, False, True)]
    assert MACHINE.choose() == 2


def failing() -> None:
    raise KeyError("in a thread")


def test_what_it_raises_is_raised_by_the_forward() -> None:
    of = bound()
    plain = run(of, 2)
    with pytest.raises(KeyError, match="in a thread"):
        run(of, 2, Aside(1, failing))
    assert torch.equal(run(of, 2), plain) and not MACHINE.parting.locked()


def test_a_forward_of_the_same_model_is_refused() -> None:
    """It would wait for itself forever."""
    of = bound()
    plain = run(of, 2)
    with pytest.raises(RuntimeError, match="ran another one of the same model"):
        run(of, 2, Aside(1, lambda: run(of, 1)))
    assert torch.equal(run(of, 2), plain)


def test_one_forward_parts_at_a_time() -> None:
    """Two whose work runs the other's model would wait for each other."""
    of, other, calls = bound(), bound(), list[str]()
    inner = Aside(1, lambda: calls.append("inner"))

    def work() -> None:
        calls.append("outer")
        run(other, 2, inner)

    outer = Aside(1, work)
    run(of, 2, outer)
    assert calls == ["outer"] and outer.others > inner.others == 0


def test_a_wrong_place_is_refused() -> None:
    of = bound()
    for entry in (-1, LAYERS + 1):
        with pytest.raises(ValueError, match=rf"leaves before layer {entry} of those that run; .* \[0, {LAYERS}\]"):
            run(of, 2, Aside(entry, failing))


# Of a runner.


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("plan", [FULL, SHALLOW], ids=["full", "shallow"])
def test_a_runner_shows_the_states_before_the_forward_ends(plan: Any) -> None:
    """Those of the hook, of layers that do not run as well."""
    runner, other = NATIVE.runner("llama"), NATIVE.runner("mistral")
    chunks = [block(4, plan), block(2, plan, 1)]
    plain, beside = runner.forward(chunks, filled(runner, (9, 5))), other.forward([block(3)], filled(other, (6, 1)))
    for layer in range(7):
        order: list[str] = []
        early: list[Tensor] = []

        def work(hidden: Tensor, order: list[str] = order, early: list[Tensor] = early) -> None:
            order.append("work")
            early += [hidden.clone(), other.forward([block(3)], filled(other, (6, 1)))]

        late = hooked(order, early)
        meanwhile = Meanwhile(layer, work)
        found = runner.forward(chunks, filled(runner, (9, 5)), OfLayers({layer, 2}, late, meanwhile))
        assert torch.equal(found, plain) and torch.equal(early[1], beside)
        assert order[0] == "work" and len(order) == len({layer, 2}) + 1 and meanwhile.others > 0
        assert torch.equal(early[0], early[2 + sorted({layer, 2}).index(layer)])


def hooked(order: list[str], states: list[Tensor]) -> Callable[[int, Tensor], None]:
    def hook(layer: int, hidden: Tensor) -> None:
        order.append(f"hook {layer}")
        states.append(hidden.clone())

    return hook


def test_a_runner_says_why_it_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = NATIVE.runner("llama")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert runner.keeps_threads == ""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1})
    assert "one processor" in runner.keeps_threads
