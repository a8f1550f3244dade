"""The component `constraint`: all that decodes says what masking the law by hand says; forced tokens cost nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from constrained_law import law, samples, target
from drafts import noisy
from drive import banning, prompt
from exactness import chi_square
from masks import Bound, Ruled, by_hand, turns
from method_matrix import COUNTING, MATRIX, SPEAKING
from own_loop import Repeating, RepeatingLoop
from searches import Given, Script, Steps
from shoal.decode import sampling
from shoal.decode.branches.search import Branch
from shoal.decode.recipe import Recipe
from shoal.decode.rules.probabilistic import Rejection
from shoal.decode.running_sequence import RunningSequence
from shoal.depth.plan import DepthPlan
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.speculative import choose as choosing
from shoal.speculative import model as module
from shoal.types import Result
from test_matrix import NEW, PROMPTS, SAMPLINGS, alone, decode, engine_of, tiny_of
from turns import by_turns

TURNS = Ruled(turns)
BOUND = [method for method in MATRIX if method not in SPEAKING]
"""Those that put in no tokens of their own, which no law has allowed."""
FORCED = [method for method in BOUND if "window=4" not in repr(method) and method not in COUNTING]
"""Those that let a forward hold several tokens of the text, and go neither by what was uncertain about each of them nor
by how many there are."""


@functools.cache
def slow(model: str, sampling: str) -> list[tuple[int, ...]]:
    options = SAMPLINGS[sampling]
    return [by_hand(tiny_of(model), ids, TURNS, NEW, seq, **options) for seq, ids in enumerate(PROMPTS)]


def unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningSequence, "force", lambda seq: [])


@by_turns("method, model, sampling", BOUND, ["llama", "packed hybrid"], SAMPLINGS)
def test_whatever_decodes_says_what_masking_by_hand_says(method: Method, model: str, sampling: str) -> None:
    engine, bound = engine_of(model), Bound(method, TURNS)
    recipe = method.recipe(engine.info(NEW))
    results = decode(engine, PROMPTS, bound, sampling)
    for seq, result in enumerate(results):
        assert all(turns(result.tokens[:at], token) for at, token in enumerate(result.tokens))
        assert alone(engine, seq, bound, sampling).tokens == result.tokens
    if recipe.exact_to == "full" and (sampling == "greedy" or not isinstance(recipe.rule, Rejection)):
        assert [result.tokens for result in results] == slow(model, sampling)


@by_turns("method, sampling", FORCED, SAMPLINGS)
def test_forcing_changes_nothing_but_the_forwards(
    method: Method, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"method": Bound(method, TURNS), "max_new_tokens": NEW, "logprobs": 2, **SAMPLINGS[sampling]}
    forced = engine_of("llama").generate(PROMPTS, **options)
    unforced(monkeypatch)
    plain = engine_of("llama").generate(PROMPTS, **options)
    if not isinstance(method.recipe(engine_of("llama").info(NEW)).rule, Rejection) or sampling == "greedy":
        assert [one.tokens for one in forced] == [one.tokens for one in plain]
        assert _rounded(forced) == _rounded(plain)
    assert [one.depths for one in forced] == [one.depths for one in plain]
    recipe = method.recipe(engine_of("llama").info(NEW))
    if not recipe.proposer and recipe.search is None:  # a search has a budget of tokens, which forced ones take as well
        assert _forwards(forced) < _forwards(plain)


def _forwards(results: Sequence[Result]) -> int:
    """Of both models, where there are two."""
    return sum(one.stats.target_forwards + one.stats.draft_forwards for one in results)


def _rounded(results: Sequence[Result]) -> list[Any]:
    return [[(one.token, round(one.logprob, 9), [(token, round(value, 9)) for token, value in one.top])
             for one in result.logprobs or ()] for result in results]


def test_forced_tokens_share_the_next_forward() -> None:
    """A text of which all but every fourth token is settled."""
    rule = Ruled(lambda words, token: len(words) % 4 == 0 or token == 11)
    result = engine_of("llama").generate(PROMPTS[0], method=Bound(Full(), rule), max_new_tokens=12, logprobs=1)
    assert result.stats.target_forwards == 3
    assert [one.logprob for at, one in enumerate(result.logprobs or ()) if at % 4] == [0.0] * 9
    assert result.tokens == by_hand(tiny_of("llama"), PROMPTS[0], rule, 12)
    assert result.stats.layer_tokens == 12 * 6


@pytest.mark.parametrize("keys", ["temperature", "greedy"])
def test_a_limit_ends_forced_tokens_too(keys: str) -> None:
    rule = Ruled(lambda words, token: token == 11 or not words)
    options = {"temperature": 1.0, "seed": 4} if keys == "temperature" else {}
    for new in (1, 2, 5):
        result = engine_of("llama").generate(PROMPTS[0], method=Bound(Full(), rule), max_new_tokens=new, **options)
        assert (len(result.tokens), result.finish_reason, result.stats.target_forwards) == (new, "length", 1)


def test_penalties_and_truncation_come_before_and_after_the_mask() -> None:
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 2, "repetition_penalty": 1.5, "presence_penalty": 0.4}
    result = engine_of("llama").generate(PROMPTS[1], method=Bound(Full(), TURNS), max_new_tokens=9, seed=3, **options)
    assert result.tokens == by_hand(tiny_of("llama"), PROMPTS[1], TURNS, 9, seed=3, **options)


def test_under_a_plan_forced_tokens_run_their_own_depth() -> None:
    method = Bound(D3(alpha=0.8, core=2), TURNS)
    result = engine_of("llama").generate(PROMPTS[0], method=method, max_new_tokens=NEW)
    assert list(result.depths) == [len(layers) for layers in engine_of("llama").plan(method, max_new_tokens=NEW)]


def test_a_branch_that_forks_has_a_mask_of_its_own() -> None:
    def steps(root: Branch) -> Steps:
        root.advance(3)
        yield [root]
        children = root.fork(2)
        for one in (root, *children):
            one.advance()
        yield [root, *children]
        for one in (root, *children):
            assert all(turns(one.tokens[:at], token) for at, token in enumerate(one.tokens))
        return children[1]

    recipe = Recipe(DepthPlan.full(6), search=Script(3, steps), constraint=TURNS)
    result = engine_of("llama").generate(PROMPTS[0], method=Given(recipe), max_new_tokens=10, temperature=1.0, seed=2)
    assert len(result.tokens) == 10


def test_rows_of_a_scheduler_have_constraints_of_their_own() -> None:
    """Some have none; what they say alone is what they say together, and prompts are kept for later ones."""
    engine = engine_of("llama")
    rules = [TURNS, Ruled(lambda words, token: token == 11), None, Ruled(lambda words, token: token % 2 == 0)]
    inners: list[Method] = [Full(), D3Spec(), Repeating()]
    methods = [inner if rule is None else Bound(inner, rule) for rule in rules for inner in inners]
    expected = [engine.generate(PROMPTS[0], method=method, max_new_tokens=NEW).tokens for method in methods]
    scheduler = Scheduler(engine, start=False, prefix_bytes=1 << 24)
    handles = [scheduler.submit(PROMPTS[0], method=method, max_new_tokens=NEW) for method in methods]
    for _ in range(60):
        scheduler.turn()
    assert [handle.results[0].tokens for handle in handles] == expected
    late = scheduler.submit([*PROMPTS[0], 9], method=methods[0], max_new_tokens=2)
    for _ in range(5):
        scheduler.turn()
    assert late.entries[0].seq.cached == len(PROMPTS[0])


def test_a_text_that_is_forced_from_its_first_token_is_kept_for_later_prompts() -> None:
    """It has said several tokens before a step follows that could keep the prompt."""
    engine, long = engine_of("llama"), prompt(20, 5)
    scheduler = Scheduler(engine, start=False, prefix_bytes=1 << 24)
    method = Bound(D3(alpha=0.5, core=2), Ruled(lambda words, token: token == 11 or len(words) not in (1, 2)))
    for ids, cached in ((long, 0), ([*long, 4], 20)):
        handle = scheduler.submit(ids, method=method, max_new_tokens=12)
        while not handle.done:
            scheduler.turn()
        assert handle.entries[0].seq.cached == cached


def test_a_token_that_no_rule_allows_is_an_error_and_other_rows_go_on() -> None:
    engine = engine_of("llama")
    nothing = Ruled(lambda words, token: token == 96)
    for options in ({}, {"temperature": 1.0}):
        with pytest.raises(ValueError, match="no token has a positive probability"):
            engine.generate(PROMPTS[0], method=Bound(Full(), nothing), logits_processor=[banning([96])], **options)
    scheduler = Scheduler(engine, start=False)
    wrong = scheduler.submit(PROMPTS[0], method=Bound(Full(), nothing), logits_processor=[banning([96])])
    plain = scheduler.submit(PROMPTS[1], max_new_tokens=NEW)
    for _ in range(30):
        scheduler.turn()
    with pytest.raises(ValueError, match="every token was banned"):
        list(wrong)
    assert plain.results[0].tokens == engine.generate(PROMPTS[1], max_new_tokens=NEW).tokens


def test_a_loop_without_a_place_for_it_refuses_a_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RepeatingLoop, "takes", ("plan",))
    with pytest.raises(Unsupported, match="the part 'constraint' beside a loop"):
        Bound(Repeating(4), TURNS).recipe(engine_of("llama").info(NEW))


DRAFTS: dict[str, Any] = {
    "plain": lambda draft: Full(),
    "chain": lambda draft: DraftModel(draft, length=3, rule="rejection"),
    "tree": lambda draft: DraftModel(draft, branching=(2, 2, 1), rule="rejection"),
    "n-grams": lambda draft: PromptLookup(min_ngram=1, rule="rejection"),
    "own layers": lambda draft: D3Spec(alpha=0.6, core=1, rule="rejection"),
}


@pytest.mark.slow
@by_turns("name", DRAFTS)
def test_samples_have_the_renormalised_law(name: str) -> None:
    found, kept = samples(DRAFTS[name](noisy(target().model, 0.15, seed=3)))
    assert chi_square(found, law()) > 1e-4
    assert name == "plain" or 0.01 < kept < 1


@pytest.mark.slow
def test_a_law_that_is_masked_after_its_truncation_is_seen() -> None:
    assert chi_square(samples(Full())[0], law(masked_last=True)) < 1e-6


def test_a_draft_that_says_it_was_drawn_without_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = choosing.choose

    def free(places: Any, logits: Any, count: int) -> Any:
        said = sampling.probs_of(logits, places[0].seq.sampling)
        return [type(g)(g.tokens, one, g.logs) for g, one in zip(real(places, logits, count), said, strict=True)]

    monkeypatch.setattr(module, "extend", functools.partial(choosing.extend, pick=free))
    with pytest.raises(ValueError, match="was drafted, but the distribution"):
        samples(DRAFTS["chain"](noisy(target().model, 1.0, seed=3)))
