"""A*-decoding against a textbook A* on toy graphs, and against a search that runs every token anew."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tokenizer import chat_tokenizer
from drafts import draft_of
from drive import SHORT, prompt
from families import tiny
from generate_calls import batch, generate
from serving import MODEL, serving, tiny_engine
from shoal.decode import sampling
from shoal.decode.branches.search import branch_seed
from shoal.decode.branches.verifier import Attempt, verdict
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.d3 import D3
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.types import ModelInfo, Sampling
from shoal_lab.methods.a_star import AStar, BestFirst
from shoal_lab.methods.jacobi import Jacobi
from test_matrix import SAMPLINGS, engine_of

TOKENIZER = chat_tokenizer()
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 11}
Path = tuple[int, ...]


@dataclass(eq=False)
class Toy:
    """A graph whose nodes are paths: a search without decoding.

    Attributes:
        width: edges of every node.
        goal: which paths are finished.
        taken: number of taken edges by node; the next visit takes the next one.
        opened: nodes whose edges were taken, in that order.
    """

    width: int
    goal: Callable[[Path], bool]
    taken: Counter[Path] = field(default_factory=Counter)
    opened: list[Path] = field(default_factory=list)


class ToyBranch:
    """Stands for `shoal.decode.branches.search.Branch`."""

    greedy, score, text, question = False, 0.0, "", ""

    def __init__(self, toy: Toy, path: Path) -> None:
        self.toy, self.path, self.alive = toy, path, True
        self.seq = SimpleNamespace(tokens=[], prompt_length=0, drafts=False)

    @property
    def tokens(self) -> list[int]:
        return list(self.path)

    @property
    def finish_reason(self) -> str | None:
        return "stop" if self.toy.goal(self.path) else None

    def fork(self, count: int = 1) -> list[ToyBranch]:
        assert self.alive
        return [ToyBranch(self.toy, self.path) for _ in range(count)]

    def force(self, tokens: Sequence[int]) -> None:
        self.path += tuple(tokens)

    def end(self) -> None:
        self.alive = False

    def advance(self, count: int) -> None:
        assert self.alive
        if count:
            if self.path not in self.toy.taken:
                self.toy.opened.append(self.path)
            edge = self.toy.taken[self.path]
            self.toy.taken[self.path] += 1
            self.path += (edge,)


def walk(toy: Toy, method: AStar, promise: Callable[[Path], float], budget: int = 10**6) -> Path:
    """The winner of the search on a toy graph."""
    how = BestFirst(method, budget, lambda attempt: promise(attempt.tokens))
    run = how.run(ToyBranch(toy, ()))  # type: ignore[arg-type]
    try:
        while True:
            next(run)
    except StopIteration as end:
        return tuple(end.value.tokens)


def textbook(
    toy: Toy, edge: Callable[[Path, Path], float], h: Callable[[Path], float]
) -> tuple[Path, list[Path], list[float]]:
    """The goal, the opened nodes, and f of all taken edges, with a list that is searched each time."""
    waiting: list[tuple[float, int, int, float, Path]] = [(h(()), 0, 0, 0.0, ())]
    opened, values, made = list[Path](), list[float](), 0
    while True:
        best = min(waiting, key=lambda one: one[:3])
        waiting.remove(best)
        values.append(best[0])
        _, _, _, g, path = best
        if toy.goal(path):
            return path, opened, values
        opened.append(path)
        for number in range(toy.width):
            child, made = (*path, number), made + 1
            cost = g + edge(path, child)
            waiting.append((cost + h(child), -len(child), made, cost, child))


EDGES: dict[str, Callable[[float, float], float]] = {
    "change": lambda a, b: abs(b - a), "rise": lambda a, b: max(0.0, b - a), "fall": lambda a, b: max(0.0, a - b),
    "one": lambda a, b: 1.0,
}


def promise_of(seed: int) -> Callable[[Path], float]:
    """Multiples of an eighth, for many ties and sums without rounding."""
    return lambda path: 1.0 if seed < 0 else int(sampling.uniform(seed, 0, 0, str(path)) * 9) / 8


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 4), st.sampled_from(sorted(EDGES)), st.integers(1, 3))
def test_nodes_are_opened_in_the_order_of_a_textbook(seed: int, width: int, depth: int, edge: Any, kept: int) -> None:
    promise, cost = promise_of(seed), EDGES[edge]

    def goal(path: Path) -> bool:
        return len(path) >= depth

    found, seen = Toy(width, goal), Toy(width, goal)
    method = AStar(k=width, step=1, width=kept, edge_cost=edge)
    winner = walk(found, method, promise)
    h = lambda path: 1 - promise(path)  # noqa: E731
    expected, opened, values = textbook(seen, lambda a, b: cost(h(a), h(b)), h)
    assert (winner, found.opened) == (expected, opened)
    assert all(count == width for count in found.taken.values()), "no node is opened twice"
    if edge == "change":
        assert values == sorted(values), "h is consistent"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(["change", "fall"]))
def test_answers_whose_promise_only_grows_are_equals_to_the_last_bit(seed: int, kept: int, edge: Any) -> None:
    """A step costs as much as h falls by, whatever floating point makes of their sum: the longest path continues.

    An answer without tokens has the highest promise, as with likelihood.
    """

    def promise(path: Path) -> float:
        steps = (sampling.uniform(seed, 0, 0, str(path[: end + 1])) for end in range(len(path)))
        return 1 - math.prod(steps, start=0.99) if path else 1.0

    toy = Toy(3, lambda path: len(path) == 6)
    winner = walk(toy, AStar(k=3, step=1, width=kept, edge_cost=edge), promise)
    best = max(range(3), key=lambda number: promise((number,)))
    assert winner == (best, *(0,) * 5) and toy.opened == [winner[:length] for length in range(6)]


def test_without_a_promise_and_at_equal_costs_it_goes_breadth_first() -> None:
    toy = Toy(3, lambda path: path == (2, 1, 0))
    assert walk(toy, AStar(k=3, step=1, width=2, edge_cost="one"), promise_of(-1)) == (2, 1, 0)
    levels = [len(path) for path in toy.opened]
    assert levels == sorted(levels) and toy.opened[:4] == [(), (0,), (1,), (2,)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_the_budget_is_what_is_spent(seed: int, budget: int) -> None:
    toy = Toy(3, lambda path: False)
    walk(toy, AStar(k=3, step=1, width=2), promise_of(seed), budget)
    assert sum(toy.taken.values()) == budget


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(2, 4), st.sampled_from(sorted(EDGES)), st.integers(1, 60))
def test_an_exhausted_budget_leaves_what_a_textbook_leaves(
    seed: int, width: int, depth: int, edge: Any, budget: int
) -> None:
    """The best finished answer, or else the best waiting one; an answer that moved in some ways only still waits."""
    promise, cost = promise_of(seed), EDGES[edge]
    toy = Toy(width, lambda path: len(path) >= depth)
    winner = walk(toy, AStar(k=width, step=1, width=2, edge_cost=edge), promise, budget)

    def h(path: Path) -> float:
        return 1 - promise(path)

    waiting, opened, made, left = [(h(()), 0, 0, 0.0, ())], list[Path](), 0, budget
    while left:
        best = min(waiting, key=lambda one: one[:3])
        if toy.goal(best[4]):
            break
        waiting.remove(best)
        _, rank, _, g, path = best
        opened.append(path)
        moved = min(width, left)
        for child in [*((*path, number) for number in range(moved)), *[path] * (moved < width)]:
            made += 1
            spent = g + cost(h(path), h(child))
            waiting.append((spent + h(child), rank - 1, made, spent, child))
        left -= moved
    assert winner == min(waiting, key=lambda one: (not toy.goal(one[4]), one[:3]))[4]
    assert toy.opened == opened and sum(toy.taken.values()) == budget - left


class Way:
    """A branch as recorded by `by_hand`."""

    def __init__(self, tokens: Sequence[int], logs: Sequence[float], seed: int) -> None:
        self.tokens, self.logs, self.seed = list(tokens), list(logs), seed


def by_hand(
    name: str, ids: Sequence[int], method: AStar, seq: int, new: int, how: Sampling, budget: int, *,
    tokenizer: Any = None, promise: Callable[[list[int]], float] | None = None,
) -> tuple[list[int], int, int]:
    """The answer, branches and decoded tokens; every token comes from a forward over its whole text."""
    made, spent, counted = 1, 0, 0

    def draw(way: Way) -> None:
        logits = tiny(name)(torch.tensor([[*ids, *way.tokens]]), use_cache=False).logits[0, -1]
        number = sampling.uniform(way.seed, seq, len(way.tokens), "sample")
        token = sampling.draw(sampling.probs_of(logits, how), number)
        way.logs.append(float(logits.log_softmax(-1)[token]))
        way.tokens.append(token)

    def ended(way: Way, before: int) -> bool:
        text = "" if tokenizer is None else tokenizer.decode(way.tokens[before:], skip_special_tokens=True)
        return (len(way.tokens) in (new, before + method.step) or method.delimiter in text.lstrip())

    def h(way: Way) -> float:
        if promise is not None:
            return 1 - promise(way.tokens)
        return 1 - (math.exp(sum(way.logs) / len(way.logs)) if way.logs else 1.0)

    def another(way: Way) -> Way:
        nonlocal made
        made += 1
        return Way(way.tokens, way.logs, branch_seed(WARM["seed"], seq, made - 1))

    waiting: list[list[Any]] = [[h(Way([], [], 0)), 0, 0, Way([], [], 0), True]]
    while True:
        node = min(waiting, key=lambda one: one[:3])
        waiting.remove(node)
        f, level, _, way, kept = node
        if len(way.tokens) == new or spent == budget:
            break
        if level == 0:
            ways = [another(way) for _ in range(method.k)]
        else:
            first = way if kept else another(way)
            ways = [first, *(another(first) for _ in range(method.k - 1))]
        parent_h, before = h(way), len(way.tokens)
        while (going := [one for one in ways if not ended(one, before)][: budget - spent]):
            for one in going:
                draw(one)
            spent += len(going)
        seen = list[list[int]]()
        for one in ways:
            if one.tokens not in seen:
                seen.append(one.tokens)
                counted += 1
                waiting.append([f + 2 * max(0.0, h(one) - parent_h), level - 1, counted, one, True])
        holding = sorted((one for one in waiting if one[4]), key=lambda one: one[:3])
        for one in holding[method.width :]:
            one[4] = False
    best = min([node, *waiting], key=lambda one: (len(one[3].tokens) < new, one[:3]))
    answer = best[3] if best[4] else another(best[3])
    while len(answer.tokens) < new:
        draw(answer)
        spent += 1
    return answer.tokens, made, spent


@pytest.mark.parametrize("name", ["llama", "hybrid"])
@pytest.mark.parametrize(
    ("method", "budget"),
    [(AStar(k=2, step=3, width=2), 768), (AStar(k=3, step=4, width=1), 768), (AStar(k=3, step=2, width=3), 31),
     (AStar(k=2, step=5, width=1), 17)],
    ids=repr,
)
@pytest.mark.quick(3)
def test_answers_branches_and_work_are_those_of_the_reference(name: str, method: AStar, budget: int) -> None:
    limited = AStar(**{**vars(method), "budget": budget})
    options: dict[str, Any] = {**WARM, "max_new_tokens": 12, "top_k": 20}
    found = engine_of(name).generate(SHORT, method=limited, **options)
    for number, (result, ids) in enumerate(zip(found, SHORT, strict=True)):
        how = Sampling(temperature=1.0, top_k=20)
        tokens, made, spent = by_hand(name, ids, method, number, 12, how, budget)
        assert (list(result.tokens), result.stats.extras["branches"]) == (tokens, made)
        assert result.stats.extras["thrown_away"] == spent - 12
    assert [r.tokens for r in found] != [r.tokens for r in engine_of(name).generate(SHORT, **options)]


def test_on_the_packed_executor_rows_share_forwards_and_change_nothing() -> None:
    engine = engine_of("packed hybrid")
    options: dict[str, Any] = {**WARM, "max_new_tokens": 12, "method": AStar(k=3, step=3, width=2)}
    scheduler = Scheduler(engine, max_seqs=18, prefill_chunk=7, start=False)
    handles = [scheduler.submit(ids, **options) for ids in SHORT] + [scheduler.submit(SHORT[0], max_new_tokens=9)]
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    for ids, handle in zip(SHORT, handles, strict=False):
        assert handle.results[0].tokens == engine.generate(ids, **options).tokens
    assert handles[-1].results[0].tokens == engine.generate(SHORT[0], max_new_tokens=9).tokens
    assert scheduler._batches.plain.cache.seqs == 0, "nothing is left of them"


def test_steps_end_at_the_delimiter() -> None:
    """The delimiter sometimes occurs in the text; the model's text decides, not its tokens."""
    engine = engine_for(tiny("llama"), TOKENIZER)
    marks = "".join(TOKENIZER.decode([token]) for token in range(7, 97))
    for delimiter in marks[3:12]:
        method = AStar(k=2, step=6, delimiter=delimiter, width=2)
        found = engine.generate(SHORT[0], method=method, **WARM, max_new_tokens=14)
        how = Sampling(temperature=1.0)
        tokens, made, spent = by_hand("llama", SHORT[0], method, 0, 14, how, 8 * 14, tokenizer=TOKENIZER)
        counts = found.stats.extras
        assert (list(found.tokens), counts["branches"], counts["thrown_away"]) == (tokens, made, spent - 14)


def test_a_verifier_of_ones_own_steers() -> None:
    """The verifier receives prompt, tokens and text, and its favourite wins."""
    engine, seen = engine_for(tiny("llama"), TOKENIZER), list[Attempt]()

    def likes_even(attempt: Attempt) -> float:
        seen.append(attempt)
        return (1 + sum(token % 2 == 0 for token in attempt.tokens)) / (1 + len(attempt.tokens))

    method = AStar(k=3, step=2, width=2, verifier=likes_even)
    found = engine.generate(SHORT[0], method=method, **WARM, max_new_tokens=10)
    tokens, made, _ = by_hand(
        "llama", SHORT[0], method, 0, 10, Sampling(temperature=1.0), 80,
        promise=lambda tokens: (1 + sum(token % 2 == 0 for token in tokens)) / (1 + len(tokens)),
    )
    assert (list(found.tokens), found.stats.extras["branches"]) == (tokens, made)
    assert seen[0] == Attempt(tuple(SHORT[0]), (), "", False, 1.0, TOKENIZER.decode(SHORT[0], skip_special_tokens=True))
    assert all(one.text == TOKENIZER.decode(one.tokens, skip_special_tokens=True) for one in seen)
    assert any(one.finished for one in seen) and all(0 < one.likelihood <= 1 for one in seen)
    other = engine.generate(SHORT[0], method=AStar(k=3, step=2, width=2), **WARM, max_new_tokens=10)
    assert found.tokens != other.tokens


@pytest.mark.parametrize("sampling_name", SAMPLINGS)
def test_one_way_changes_nothing_and_a_greedy_request_is_decoded_once(sampling_name: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, **SAMPLINGS[sampling_name]}
    plain = engine_of("hybrid").generate(SHORT, **options)
    one = engine_of("hybrid").generate(SHORT, method=AStar(k=1), **options)
    assert [r.tokens for r in one] == [r.tokens for r in plain]
    if sampling_name == "greedy":
        several = engine_of("hybrid").generate(SHORT, method=AStar(k=4), **options)
        assert [r.tokens for r in several] == [r.tokens for r in plain]
        assert [(r.stats.extras["branches"], r.stats.extras["thrown_away"]) for r in several] == [(1, 0)] * 3


def broken(attempt: Attempt) -> float:
    raise KeyError("no such book")


@pytest.mark.parametrize(
    ("verifier", "error", "message"),
    [
        (broken, ValueError, "the verifier failed: KeyError: 'no such book'"),
        (lambda attempt: 1.5, ValueError, r"the verifier said 1.5; it must say a number in \[0, 1\]"),
        (lambda attempt: math.nan, ValueError, "the verifier said nan"),
        (lambda attempt: None, ValueError, "the verifier said None"),
        (lambda attempt: "good", ValueError, "the verifier said 'good'"),
        (lambda attempt: threading.Event().wait(60), TimeoutError, "gave no answer within 0.2 s; use a faster one"),
    ],
)
def test_a_bad_verifier_fails_its_own_request_in_time(verifier: Any, error: type[Exception], message: str) -> None:
    began = time.monotonic()
    scheduler = Scheduler(engine_of("llama"), start=False)
    bad = scheduler.submit(SHORT[0], method=AStar(k=2, step=3, verifier=verifier, patience=0.2), **WARM)
    good = scheduler.submit(SHORT[1], method=AStar(k=2, step=3, width=1), max_new_tokens=9, **WARM)
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    with pytest.raises(error, match=message):
        list(bad)
    alone = engine_of("llama").generate(SHORT[1], method=AStar(k=2, step=3, width=1), max_new_tokens=9, **WARM)
    assert good.results[0].tokens == alone.tokens and time.monotonic() - began < 30


def test_a_verdict_may_be_any_real_number_in_range() -> None:
    attempt = Attempt((), (), "", False, 0.25)
    said = iter((0, 1, True, 0.5))
    assert [verdict(lambda _: next(said), attempt, math.inf) for _ in range(4)] == [0.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k is 0; it must be at least 1"),
        ({"step": 0}, "step is 0; it must be at least 1"),
        ({"width": 0}, "width is 0; it must be at least 1"),
        ({"budget": 0}, "budget is 0; it must be at least 1 token, or None"),
        ({"delimiter": ""}, "delimiter is ''; it must have at least one character"),
        ({"patience": 0.0}, "patience is 0.0; it must be more than 0 seconds"),
        ({"patience": math.nan}, "patience is nan"),
        ({"verifier": "judge"}, "verifier is 'judge'; it must be 'likelihood', 'execution', an http"),
        ({"edge_cost": "two"}, "edge_cost of a_star is 'two'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AStar(**options)


def test_no_search_goes_on_for_ever() -> None:
    with pytest.raises(ValueError, match="budget is 641; it must be at most 640 tokens, 64 times max_new_tokens"):
        AStar(budget=641).recipe(ModelInfo(6, max_new_tokens=10))


def test_what_is_refused() -> None:
    for inner, what in ((AStar(), "searches itself"), (PromptLookup(), "drafts")):
        with pytest.raises(Unsupported, match=f"{inner.name} as inner of a_star: it {what}. Give another"):
            AStar(inner=inner).recipe(ModelInfo(6))
    with pytest.raises(Unsupported, match="a_star beside drafts"):
        engine_of("llama").generate(SHORT[0], method=[AStar(), DraftModel(draft_of("llama"))], **WARM)
    with pytest.raises(ValueError, match="jacobi has a loop of its own"):
        make([AStar(), Jacobi()]).recipe(ModelInfo(6))
    with pytest.raises(Unsupported, match="a callable cannot be written down"):
        AStar(verifier=broken).to_dict()
    with pytest.raises(Unsupported, match="a search of 9 branches: there is room for 8 sequences"):
        Scheduler(engine_of("llama"), max_seqs=8, start=False).submit(SHORT[0], method=AStar(), **WARM)


def test_what_it_is() -> None:
    recipe = AStar().recipe(ModelInfo(6, max_new_tokens=10))
    assert (recipe.exact_to, recipe.components) == ("none", ("search",))
    assert (recipe.branches(False), recipe.branches(True)) == (9, 1)
    assert AStar(k=1).recipe(ModelInfo(6)).exact_to == "full"
    assert make(AStar(k=3, inner=D3(alpha=0.9)).to_dict()) == AStar(k=3, inner=D3(alpha=0.9))


def test_in_transformers_generate() -> None:
    found = []
    for method in (AStar(k=2, step=3, width=2), AStar(k=1), Full()):
        torch.manual_seed(3)
        found.append(generate(tiny("llama"), **batch(), do_sample=True, custom_generate=method))
    assert torch.equal(found[1], found[2]) and not torch.equal(found[0], found[2])


def test_over_http() -> None:
    engine: Engine = tiny_engine()
    method = AStar(k=2, step=3, width=2)
    body = {"model": MODEL, "prompt": "Some words", "max_tokens": 12, "temperature": 1.0, "seed": 5, **method.to_dict()}
    expected = engine.generate("Some words", method=method, max_new_tokens=12, temperature=1.0, seed=5)
    with serving(engine) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        refused = httpx.post(f"{server.url}/v1/completions", json={**body, "method_args": {"k": 0}}, timeout=60)
    assert answer.json()["choices"][0]["text"] == expected.text
    assert refused.status_code == 400 and "k is 0" in refused.json()["error"]["message"]


def test_a_long_prompt_in_pieces_changes_nothing() -> None:
    ids, method = prompt(60, 3), AStar(k=2, step=3, width=1)
    scheduler = Scheduler(engine_of("hybrid"), prefill_chunk=7, start=False)
    handle = scheduler.submit(ids, method=method, max_new_tokens=10, **WARM)
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    alone = engine_of("hybrid").generate(ids, method=method, max_new_tokens=10, **WARM)
    assert handle.results[0].tokens == alone.tokens
