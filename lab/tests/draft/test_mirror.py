"""Drafts made ahead: the same guesses as those made afterwards, whether they are ready, and the ledger's times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafts import draft_of, noisy
from drive import decode, prompt
from families import tiny
from mirrored import SAMPLINGS, joined, stack_of_draft
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.model.packed.native import MAX_NODES
from shoal.model.runner import SequenceChunk
from shoal.types import Result
from shoal_lab.drafts import mirror
from shoal_lab.drafts.mirror import DraftRound
from shoal_lab.methods.mirror_sd import MirrorSD
from toy_tokenizers import byte_level, metaspace

LAYERS, NEW = 6, 32
PROMPTS = [prompt(9, 1), prompt(4, 2), prompt(1, 3), prompt(7, 4)]
each_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)


def home(family: str = "llama") -> Engine:
    return engine_for(tiny(family))


def work(result: Result) -> tuple[Any, ...]:
    """Guesses that were made and kept."""
    stats = result.stats
    return result.tokens, stats.drafted, stats.accepted, stats.acceptance, stats.target_forwards


def reused(result: Result) -> list[bool]:
    return [one.reused for one in result.stats.records["draft_rounds"]]


# Guesses are those of draft_model.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sampling", "exit_layer", "k"),
    [("llama", "greedy", 3, 1), ("llama", "sampled", 5, 4), ("hybrid", "penalised", 5, 3), ("hybrid", "greedy", 6, 2)],
)
def test_guesses_are_those_that_are_made_afterwards(family: str, sampling: str, exit_layer: int, k: int) -> None:
    engine, draft, options = home(family), draft_of(family), SAMPLINGS[sampling]
    method = MirrorSD(draft, exit_layer=exit_layer, k=k, length=3)
    for some in (PROMPTS[:1], PROMPTS):
        plain = engine.generate(some, method=DraftModel(draft, length=3), max_new_tokens=NEW, **options)
        found = engine.generate(some, method=method, max_new_tokens=NEW, **options)
        assert list(map(work, found)) == list(map(work, plain))
        assert any(map(any, map(reused, found)))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_under_other_rules_too(rule: Any) -> None:
    engine, draft, options = home(), draft_of("llama"), SAMPLINGS["sampled"]
    plain, found = (
        engine.generate(PROMPTS, method=method, max_new_tokens=NEW, **options)
        for method in (DraftModel(draft, rule=rule), MirrorSD(draft, k=3, exit_layer=5, rule=rule))
    )
    assert list(map(work, found)) == list(map(work, plain))
    assert any(map(any, map(reused, found)))


@pytest.mark.slow
def test_a_pool_of_several_trees() -> None:
    """More branches than the kernels take at a time: the window is fed again with each part."""
    engine, draft = home(), draft_of("llama")
    seen: list[SequenceChunk] = []
    runner = stack_of_draft(engine, draft)
    forward = runner.forward

    def watched(chunks: Sequence[SequenceChunk], *rest: Any) -> Any:
        seen.extend(chunks)
        return forward(chunks, *rest)

    runner.forward = watched
    plain = engine.generate(PROMPTS[:2], method=DraftModel(draft, length=9), max_new_tokens=NEW)
    found = engine.generate(PROMPTS[:2], method=MirrorSD(draft, k=3, exit_layer=5, length=9), max_new_tokens=NEW)
    assert list(map(work, found)) == list(map(work, plain))
    rounds = [one for result in found for one in result.stats.records["draft_rounds"]]
    most = (MAX_NODES - 10) // 9
    assert any(one.reused for one in rounds) and max(one.branches for one in rounds) > 2 * most
    assert max(chunk.nodes.stop for chunk in seen if chunk.parents is not None) <= MAX_NODES


def test_a_draft_made_anew_reads_one_token() -> None:
    """The window was read with the branches, and its first token too if that came from a branch."""
    engine, draft = home(), draft_of("llama")
    runner, seen = stack_of_draft(engine, draft), list[SequenceChunk]()
    forward = runner.forward

    def watched(chunks: Sequence[SequenceChunk], *rest: Any) -> Any:
        seen.extend(chunks)
        return forward(chunks, *rest)

    runner.forward = watched
    result = engine.generate(PROMPTS[0], method=MirrorSD(draft, k=2, exit_layer=5, length=3), max_new_tokens=NEW)
    missed = [not one for one in reused(result)]
    reads = [len(chunk.tokens) for chunk in seen if chunk.parents is None]
    assert reads == [len(PROMPTS[0]) + 1, *[1] * sum(missed)]
    assert any(late and not early for early, late in itertools.pairwise(missed))


@pytest.mark.slow
def test_d3_as_target() -> None:
    engine, draft, inner = home(), draft_of("llama"), D3(alpha=0.93, core=2)
    plain = engine.generate(PROMPTS, method=inner, max_new_tokens=NEW)
    after = engine.generate(PROMPTS, method=DraftModel(draft, inner=inner), max_new_tokens=NEW)
    found = engine.generate(PROMPTS, method=MirrorSD(draft, k=3, exit_layer=5, inner=inner), max_new_tokens=NEW)
    assert [result.tokens for result in found] == [result.tokens for result in plain]
    assert list(map(work, found)) == list(map(work, after))
    assert any(map(any, map(reused, found)))


@pytest.mark.parametrize("control", ["goodput", "width"])
def test_a_controller_may_change_the_length(control: Any) -> None:
    engine, draft = home(), draft_of("llama")
    method = MirrorSD(draft, k=2, exit_layer=5, control=control)
    for options in (SAMPLINGS["greedy"], SAMPLINGS["sampled"]):
        plain = engine.generate(PROMPTS, max_new_tokens=NEW, **options)
        found = engine.generate(PROMPTS, method=method, max_new_tokens=NEW, **options)
        assert [result.tokens for result in found] == [result.tokens for result in plain]


def test_rows_that_join_one_another() -> None:
    """One drafter for sequences that come and go: each decodes as it does alone."""
    engine = home()
    recipe = MirrorSD(draft_of("llama"), k=3, exit_layer=5, length=3).recipe(engine.info(NEW))
    lengths = [5, NEW, 9, 20]
    alone = [decode(engine.model, [ids], recipe, new, watch=False, numbers=[number]).seqs[0]
             for number, (ids, new) in enumerate(zip(PROMPTS, lengths, strict=True))]
    joined(engine.model, PROMPTS, recipe, lengths, alone)


# Which drafts are ready.


@each_sampling
def test_the_whole_target_foresees_everything(sampling: str) -> None:
    method = MirrorSD(draft_of("llama"), exit_layer=LAYERS, k=1, length=3)
    for result in home().generate(PROMPTS, method=method, max_new_tokens=NEW, **SAMPLINGS[sampling]):
        assert len(reused(result)) > 5 and all(reused(result))
        assert all(one.foreseen for one in result.stats.records["draft_rounds"])


def test_all_words_are_foreseen_by_any_layer() -> None:
    method = MirrorSD(draft_of("llama"), exit_layer=LAYERS - 1, k=97, length=2)
    result = home().generate(PROMPTS[0], method=method, max_new_tokens=12)
    assert len(reused(result)) > 3 and all(reused(result))


def test_nothing_is_made_ahead_with_k_0() -> None:
    engine, draft = home(), draft_of("llama")
    plain, found = (engine.generate(PROMPTS, method=method, max_new_tokens=NEW)
                    for method in (DraftModel(draft, length=3), MirrorSD(draft, k=0, length=3)))
    for one, other in zip(plain, found, strict=True):
        assert work(one) == work(other) and one.stats.draft_forwards == other.stats.draft_forwards
        assert one.stats.layers_read == other.stats.layers_read and one.stats.ideal_speedup == other.stats.ideal_speedup
        rounds = other.stats.records["draft_rounds"]
        assert rounds and not any(a.reused or a.foreseen or a.branches for a in rounds)
        assert not one.stats.records["draft_rounds"]


@torch.no_grad()
def offline(draft: Any, text: Sequence[int], token: int, kept: bool, exit_layer: int, k: int) -> tuple[bool, bool]:
    """By transformers: whether a layer's k best tokens after a text hold the token, and whether they or the draft do.

    The draft is only asked if all of its guesses were kept, and the token follows them.
    """
    target, ids = tiny("llama"), torch.tensor([text])
    hidden = target(ids, output_hidden_states=True).hidden_states[exit_layer][:, -1]
    foreseen = token in target.lm_head(target.model.norm(hidden))[0].topk(k).indices.tolist()
    return foreseen, foreseen or (kept and int(draft(ids).logits[0, -1].argmax()) == token)


@pytest.mark.parametrize(("exit_layer", "k"), [
    (1, 1), (2, 4), (5, 3), *(pytest.param(*some, marks=pytest.mark.slow) for some in ((3, 2), (4, 1), (5, 1)))
])
@pytest.mark.quick(1)
def test_a_draft_is_ready_where_transformers_would_have_foreseen_it(exit_layer: int, k: int) -> None:
    engine, draft, length = home(), draft_of("llama", 0.01), 2
    method = MirrorSD(draft, exit_layer=exit_layer, k=k, length=length)
    for ids in PROMPTS:
        told, kept = [], 0
        stream = engine.stream(ids, method=method, max_new_tokens=NEW)
        for place, step in enumerate(stream):
            if place and not step.from_draft:  # what a verification brought beside guesses
                text = [*ids, *stream.tokens[len(ids) : len(ids) + place]]
                told.append(offline(draft, text, step.token, kept == length, exit_layer, k))
            kept = kept + 1 if step.from_draft else 0
        rounds = stream.result.stats.records["draft_rounds"]
        assert [(one.foreseen, one.reused) for one in rounds] == told[: len(rounds)] and len(rounds) > 5


# The ledger.


def test_the_formula() -> None:
    hidden = DraftRound(True, True, 3, before=2.0, after=5.0, message=0.5, pool=4.0)
    assert hidden.overlapped == 2 + 0.5 + 5 and hidden.in_turn == 2 + 5 + 0.5 + 4
    long = DraftRound(False, False, 3, before=2.0, after=5.0, message=0.5, pool=7.0, redraft=1.5)
    assert long.overlapped == 2 + 0.5 + 7 + 1.5 and long.in_turn == 2 + 5 + 0.5 + 7 + 1.5


class Planted:
    """A clock that only planted work advances; counts the forwards of the draft model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Any, draft: Any) -> None:
        self.now, self.drafts = 0.0, 0
        monkeypatch.setattr(mirror.time, "perf_counter", lambda: self.now)
        timed = (target, "forward", 80.0), (target, "exit_logits", 0.5), (draft, "forward", 10.0)
        for runner, name, seconds in timed:
            monkeypatch.setattr(runner, name, self._moving(getattr(runner, name), seconds, runner is draft))

    def _moving(self, real: Any, seconds: float, drafting: bool) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.now += seconds
            self.drafts += drafting
            return real(*args, **options)

        return call


@pytest.mark.parametrize(("exit_layer", "k"), [(2, 0), (2, 1), (5, 3), (LAYERS, 1)])
def test_seconds_are_those_that_were_planted(monkeypatch: pytest.MonkeyPatch, exit_layer: int, k: int) -> None:
    engine, draft, length = home(), draft_of("llama"), 3
    head = engine.runner.head_layers
    clock = Planted(monkeypatch, engine.runner, stack_of_draft(engine, draft))
    method = MirrorSD(draft, exit_layer=exit_layer, k=k, length=length)
    result = engine.generate(PROMPTS[0], method=method, max_new_tokens=NEW)
    rounds = result.stats.records["draft_rounds"]
    assert {one.reused for one in rounds} == {(2, 0): {False}, (LAYERS, 1): {True}}.get((exit_layer, k), {True, False})
    for one in rounds:
        assert one.before == pytest.approx(80 * exit_layer / (LAYERS + head))
        assert one.after == pytest.approx(80 * (LAYERS - exit_layer + head) / (LAYERS + head))
        assert one.message == (0.5 if k else 0.0)
        assert one.redraft == 0 if one.reused else one.redraft in (10.0, 20.0, 30.0)
        assert one.pool in ((10.0, 20.0, 30.0, 40.0) if k else (0.0,))  # the draft's own branch lags a level behind
        by_hand = one.before + one.message + (one.pool if one.pool > one.after else one.after) + one.redraft
        assert one.overlapped == pytest.approx(by_hand)
    first = 10 * length  # before any verification
    assert sum(one.pool + one.redraft for one in rounds) + first == 10 * clock.drafts
    assert clock.drafts == result.stats.draft_forwards


def test_the_share_of_the_layers_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, draft = home(), draft_of("llama")
    plan = D3(alpha=0.8, core=2).recipe(engine.info(NEW)).plan
    Planted(monkeypatch, engine.runner, stack_of_draft(engine, draft))
    method = MirrorSD(draft, exit_layer=4, k=1, length=2, inner=D3(alpha=0.8, core=2))
    stream = engine.stream(PROMPTS[0], method=method, max_new_tokens=NEW)
    ends = [place for place, step in enumerate(stream) if not step.from_draft]  # the next window begins there
    rounds = stream.result.stats.records["draft_rounds"]
    shares = []
    for step, one in zip([place + 1 for place in ends], rounds, strict=False):
        layers = plan.layers(step)
        below = sum(layer < 4 for layer in layers)
        shares.append(below / (len(layers) + engine.runner.head_layers))
        assert one.before == pytest.approx(80 * shares[-1]) and one.before + one.after == pytest.approx(80)
    assert len(set(shares)) > 1


# Errors.


@pytest.mark.parametrize("call", [1, 3, 4, 5, 6, 9])
@pytest.mark.quick(2)
def test_a_draft_that_breaks_leaves_the_target_as_it_was(call: int) -> None:
    engine, draft = home(), noisy(tiny("llama"), 0.03)
    runner, calls = stack_of_draft(engine, draft), 0
    forward = runner.forward

    def breaking(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("the draft model broke")
        return forward(*args)

    runner.forward = breaking
    method = MirrorSD(draft, k=2, exit_layer=5, length=3)
    stream = engine.stream(PROMPTS[0], method=method, max_new_tokens=NEW)
    with pytest.raises(RuntimeError, match="the draft model broke"):
        list(stream)
    plain = engine.generate(PROMPTS[0], method=Full(), max_new_tokens=NEW)
    assert plain.tokens[: len(stream.result.tokens)] == stream.result.tokens
    assert engine.generate(PROMPTS[0], method=method, max_new_tokens=NEW).tokens == plain.tokens


@pytest.mark.parametrize("sizes", [(97, 104), (97, 90)])
@pytest.mark.quick(1)
def test_heads_of_other_sizes_with_the_same_tokenizer(sizes: tuple[int, int]) -> None:
    """The exit layer predicts tokens that the draft model has no embedding for."""
    tokenizer = byte_level()
    target, other = (engine_for(tiny("llama", vocab_size=size), tokenizer) for size in sizes)
    draft = target.info().draft_engine
    assert draft is not None
    draft._known["padded"] = "padded", other  # type: ignore[attr-defined]
    for options in (SAMPLINGS["greedy"], SAMPLINGS["sampled"]):
        plain = target.generate(PROMPTS[0], method=DraftModel("padded"), max_new_tokens=NEW, **options)
        found = target.generate(PROMPTS[0], method=MirrorSD("padded", k=6, exit_layer=5), max_new_tokens=NEW, **options)
        assert work(found) == work(plain)


@pytest.mark.slow
def test_branches_end_with_the_context() -> None:
    engine, draft = home(), tiny("gpt2", n_positions=40)
    for new in (28, 31):
        plain = engine.generate(PROMPTS[0], max_new_tokens=new)
        method = MirrorSD(draft, k=12, exit_layer=LAYERS, length=3)
        assert engine.generate(PROMPTS[0], method=method, max_new_tokens=new).tokens == plain.tokens
    with pytest.raises(Unsupported, match="context is 40 tokens"):
        engine.generate(PROMPTS[0], method=MirrorSD(draft, k=2), max_new_tokens=32)


def test_settings_out_of_range() -> None:
    for make, message in (
        (lambda: MirrorSD("m", exit_layer=0), "exit_layer is 0; it must be at least 1"),
        (lambda: MirrorSD("m", k=-1), "k is -1; it must be at least 0"),
        (lambda: MirrorSD("m", length=0), "length is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    engine = home()
    for method, message in (
        (MirrorSD(draft_of("llama"), exit_layer=7), "exit_layer is 7, but the model has 6 layers; use 1..6"),
        (MirrorSD(), "mirror_sd has no draft model; give draft"),
        (MirrorSD(tiny("llama", vocab_size=50)), "has 50 tokens and the model 97"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(PROMPTS[0], method=method, max_new_tokens=4)


def test_other_tokenizers_are_refused() -> None:
    engine, other = engine_for(tiny("llama"), byte_level()), engine_for(tiny("llama"), metaspace())
    draft_engine = engine.info().draft_engine
    assert draft_engine is not None
    draft_engine._open = lambda home, model: other  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="its tokenizer has another vocabulary"):
        engine.generate(PROMPTS[0], method=MirrorSD(tiny("llama", seed=1)), max_new_tokens=4)


def test_half_the_layers_unless_told() -> None:
    info = home().info(NEW)
    proposer = MirrorSD(draft_of("llama")).recipe(info).proposer
    assert isinstance(proposer, mirror.MirrorProposer) and proposer.exit_layer == LAYERS // 2
    assert MirrorSD().recipe(replace(info, draft_engine=None)).exact_to == "full"
