"""Drafts made by a thread that leaves the target's forward: what is guessed and written is as in turn."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from drafts import draft_of
from drive import breaks_at_times, decode, make_run, prompt
from families import tiny
from mirrored import SAMPLINGS, joined, stack_of_draft
from shoal.engine.engine import Engine
from shoal.engine.loading.load import Backend, engine_for
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.model.packed import native
from shoal.model.packed.native.threads import MACHINE
from shoal.types import Result
from shoal_lab.drafts.mirror import DraftRound, MirrorProposer
from shoal_lab.methods.mirror_sd import MirrorSD

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}"),
    pytest.mark.usefixtures("two_threads"),
]

LAYERS, NEW = 6, 20
PROMPTS = [prompt(9, 1), prompt(4, 2), prompt(7, 4)]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, and however many processors it has."""
    monkeypatch.setattr(MACHINE, "fixed", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})


def made(family: str = "llama", backend: Backend = "packed") -> tuple[Engine, str]:
    """An engine on the kernels, and the name of a model that drafts for it."""
    engine, draft = (engine_for(model(family, dtype=torch.float32), backend=some)
                     for model, some in ((tiny, "packed"), (draft_of, backend)))
    known: Any = engine.info().draft_engine
    known._known["the smaller one"] = "the smaller one", draft
    return engine, "the smaller one"


home = functools.cache(made)


def rounds(result: Result) -> list[DraftRound]:
    return list(result.stats.records["draft_rounds"])


def work(result: Result) -> tuple[Any, ...]:
    """What was written and guessed, which guesses were kept, and which were ready when."""
    stats = result.stats
    ready = [(one.foreseen, one.reused, one.branches) for one in rounds(result)]
    return result.tokens, stats.drafted, stats.accepted, stats.acceptance, stats.target_forwards, ready


def both(engine: Engine, draft: Any, some: Any, **options: Any) -> tuple[list[Result], list[Result]]:
    """Results in turn, on one thread, and overlapped."""
    asked = {key: options.pop(key) for key in ("temperature", "seed", "top_k", "repetition_penalty") if key in options}
    methods = [MirrorSD(draft, overlap=overlap, **options) for overlap in (False, True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MACHINE, "fixed", 1)
        in_turn = engine.generate(some, method=methods[0], max_new_tokens=NEW, **asked)
    return in_turn, engine.generate(some, method=methods[1], max_new_tokens=NEW, **asked)


@pytest.mark.parametrize(("family", "sampling", "exit_layer", "k"), [
    ("llama", "greedy", 3, 1), ("llama", "sampled", 5, 4), ("hybrid", "penalised", 5, 3), ("qwen3_5", "greedy", 4, 2),
    ("llama", "greedy", LAYERS, 1),
])
@pytest.mark.quick(2)
def test_guesses_are_those_that_are_made_in_turn(family: str, sampling: str, exit_layer: int, k: int) -> None:
    engine, draft = home(family)
    for some in (PROMPTS[:1], PROMPTS):
        in_turn, beside = both(engine, draft, some, exit_layer=exit_layer, k=k, length=3, **SAMPLINGS[sampling])
        assert list(map(work, beside)) == list(map(work, in_turn))
        assert any(one.reused for result in beside for one in rounds(result))
        assert all(one.measured is None for result in in_turn for one in rounds(result))
        assert all(one.measured is not None for result in beside for one in rounds(result))


@pytest.mark.parametrize("options", [
    {"rule": "rejection", "temperature": 1.0, "seed": 3}, {"rule": "typical", "temperature": 1.0, "seed": 3},
    {"inner": D3(alpha=0.93, core=2)}, {"control": "width"}, {"length": 9, "k": 3},
], ids=str)
@pytest.mark.quick(2)
def test_beside_other_options(options: dict[str, Any]) -> None:
    engine, draft = home()
    in_turn, beside = both(engine, draft, PROMPTS, **{"exit_layer": 5, "k": 2, **options})
    if "control" in options:  # it follows the times
        assert [one.tokens for one in beside] == [one.tokens for one in in_turn]
    else:
        assert list(map(work, beside)) == list(map(work, in_turn))
    assert any(one.measured is not None for result in beside for one in rounds(result))


def test_rows_that_join_one_another() -> None:
    """Forwards in which some read their prompts draft in turn."""
    engine, draft = home()
    recipe = MirrorSD(draft, k=3, exit_layer=5, length=3, overlap=True).recipe(engine.info(NEW))
    lengths = [5, NEW, 9]
    alone = [decode(None, [ids], recipe, new, runner=engine.runner, watch=False, numbers=[number]).seqs[0]
             for number, (ids, new) in enumerate(zip(PROMPTS, lengths, strict=True))]
    seqs = joined(None, PROMPTS, recipe, lengths, alone, engine.runner)
    kinds = {r.measured is None for seq in seqs for r in seq.ledger.draft_rounds}
    assert kinds == {True, False}


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of every forward of the draft model, whether the target's was in progress."""
    engine, draft = home()
    runner, found, running = stack_of_draft(engine, draft), list[bool](), list[bool]()

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **options: Any) -> Any:
            running.append(True)
            try:
                return call(*args, **options)
            finally:
                running.pop()

        return forward

    def drafted(*args: Any, real: Callable[..., Any] = runner.forward, **options: Any) -> Any:
        found.append(bool(running))
        return real(*args, **options)

    for name in ("forward", "argmax"):
        monkeypatch.setattr(engine.runner, name, watched(getattr(engine.runner, name)))
    monkeypatch.setattr(runner, "forward", drafted)
    yield found


def test_branches_are_drafted_while_the_target_runs(inside: list[bool]) -> None:
    engine, draft = home()
    for overlap in (False, True):
        inside.clear()
        method = MirrorSD(draft, exit_layer=LAYERS, k=1, length=3, overlap=overlap)
        result = engine.generate(PROMPTS[0], method=method, max_new_tokens=NEW)
        assert all(one.reused for one in rounds(result)) and len(rounds(result)) > 4
        assert inside[:3] == [False] * 3  # the first draft; then all are ready
        assert set(inside[3:]) == {overlap}


# The ledger.


def test_what_is_measured() -> None:
    one = DraftRound(True, True, 3, before=2.0, after=5.0, message=0.5, pool=7.0, redraft=1.5, together=9.75)
    assert one.measured == 9.75 + 1.5 and one.overlapped == 2 + 0.5 + 7 + 1.5
    assert DraftRound(True, True, 3, before=2.0, after=5.0).measured is None


def test_measured_seconds_hold_their_parts() -> None:
    engine, draft = home()
    _, [result] = both(engine, draft, PROMPTS[:1], exit_layer=3, k=2)
    assert len(rounds(result)) > 4
    for one in rounds(result):
        assert one.measured is not None and min(one.before, one.after, one.message, one.pool) > 0
        assert one.measured >= one.before + max(one.after, one.message + one.pool) + one.redraft


# Where they cannot overlap.


def told(engine: Engine, draft: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of two requests whose models run in turn."""
    method = MirrorSD(draft, k=2, exit_layer=5, length=3, overlap=True)
    MACHINE.fixed = 1
    with caplog.at_level(logging.WARNING):
        results = [engine.generate(PROMPTS[0], method=method, max_new_tokens=NEW) for _ in range(2)]
    for result in results:
        assert result.tokens == engine.generate(PROMPTS[0], method=Full(), max_new_tokens=NEW).tokens
        assert rounds(result) and all(one.measured is None for one in rounds(result))
    return [record.message for record in caplog.records if "mirror_sd runs" in record.message]


def test_one_processor_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    engine, draft = made()
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    [line] = told(engine, draft, caplog)
    assert "\n" not in line and "in turn, for the model cannot overlap with the other" in line
    assert "this process has one thread for the kernels, or one processor" in line


def test_models_that_are_not_on_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    [line] = told(engine_for(tiny("llama")), draft_of("llama"), caplog)
    assert "for the model cannot overlap with the other: it is not on the kernels" in line
    caplog.clear()
    [line] = told(*made(backend="hf"), caplog)
    assert "for the draft model cannot overlap" in line


def test_a_busy_machine_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a forward has one thread, which drafts afterwards."""
    engine, draft = home()
    monkeypatch.setattr(MACHINE, "fixed", 1)
    in_turn, beside = both(engine, draft, PROMPTS[:1], exit_layer=5, k=2)
    assert list(map(work, beside)) == list(map(work, in_turn))
    assert all(one.measured is None for one in rounds(beside[0]))


def test_in_turn_unless_told() -> None:
    engine, draft = home()
    for overlap in (False, True):
        proposer = MirrorSD(draft, overlap=overlap).recipe(engine.info(NEW)).proposer
        assert isinstance(proposer, MirrorProposer) and proposer.overlap == overlap
    assert MirrorSD(overlap=True).notice(engine.info(NEW).__class__(LAYERS)) is None


# Errors.


@pytest.mark.parametrize("call", [1, 3, 4, 5, 6, 9])
@pytest.mark.quick(2)
def test_a_draft_that_breaks_leaves_the_target_as_it_was(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, draft = home()
    runner, calls = stack_of_draft(engine, draft), 0
    forward = runner.forward

    def breaking(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("the draft model broke")
        return forward(*args)

    monkeypatch.setattr(runner, "forward", breaking)
    method = MirrorSD(draft, k=2, exit_layer=5, length=3, overlap=True)
    stream = engine.stream(PROMPTS[0], method=method, max_new_tokens=NEW)
    with pytest.raises(RuntimeError, match="the draft model broke"):
        list(stream)
    plain = engine.generate(PROMPTS[0], method=Full(), max_new_tokens=NEW)
    assert plain.tokens[: len(stream.result.tokens)] == stream.result.tokens
    assert engine.generate(PROMPTS[0], method=method, max_new_tokens=NEW).tokens == plain.tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_breaks_is_taken_again(overlap: bool) -> None:
    """The branches of a verification that failed are forgotten, in the draft model's cache too."""
    engine, draft = home()
    recipe = MirrorSD(draft, k=2, exit_layer=5, length=3, overlap=overlap).recipe(engine.info(NEW))
    expected = decode(None, PROMPTS[:1], recipe, NEW, runner=engine.runner, watch=False)
    run = make_run(None, PROMPTS[:1], recipe, NEW, runner=engine.runner, watch=False)
    breaks_at_times(run)
    assert run.tokens == expected.tokens
    assert run.seqs[0].ledger.accepted == expected.seqs[0].ledger.accepted > 0
