"""Methods that guess with trained parts: any part, on every backend, changes the number of forwards and no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from backends import HF, Backend, on_backends
from drive import decode, prompt
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.d3 import D3
from shoal.methods.eagle import Eagle
from shoal.speculative import part_file
from shoal.speculative.eagle import EagleProposer
from shoal.speculative.shape import Branching, Likeliest, TreeShape
from shoal.types import Sampling
from shoal_lab.methods.medusa import Medusa
from shoal_lab.methods.ppd import PPD
from train_twin import agrees
from trained_parts import ECHOED, eagle, part_for, target
from turns import by_turns
from watched import Watched

NEW = 32
ECHO = dict.fromkeys(ECHOED, 12.0)
"""A bias that leaves three tokens to choose from, so that even random guesses are kept now and then."""
BATCHES = {1: [prompt(6, 1)], 4: [prompt(5, 1), prompt(12, 2), prompt(1, 3), prompt(8, 4)]}
SAMPLINGS = {
    "greedy": Sampling(logit_bias=ECHO),
    "sampled": Sampling(temperature=1.0, logit_bias=ECHO),
    "penalised": Sampling(temperature=0.9, top_k=40, repetition_penalty=1.1, logit_bias=ECHO),
}


def methods(family: str) -> dict[str, Method]:
    layer, heads, vectors = (part_for(kind, family) for kind in ("eagle", "medusa", "ppd"))
    d3 = D3(alpha=0.93, core=2)
    return {
        "eagle": Eagle(layer, stop=0.0),
        "eagle that stops": Eagle(layer, stop=0.4),
        "eagle tree": Eagle(layer, stop=0.0, width=3, nodes=8, length=3),
        "eagle on d3": Eagle(layer, stop=0.0, length=2, inner=d3),
        "medusa": Medusa(heads),
        "medusa tree": Medusa(heads, nodes=7),
        "medusa on d3": Medusa(heads, length=2, inner=d3),
        "ppd": PPD(vectors),
        "ppd tree": PPD(vectors, nodes=12),
        "ppd on d3": PPD(vectors, length=2, inner=d3),
    }


NAMES = list(methods("llama"))
each_method = pytest.mark.parametrize("method", NAMES)


def watched(method: str, family: str, new: int = NEW) -> Recipe:
    recipe = methods(family)[method].recipe(target(family).info(new))
    assert recipe.exact_to == ("plan" if "d3" in method else "full") and recipe.proposer is not None
    return replace(recipe, proposer=Watched(recipe.proposer))


def same_tokens(backend: Backend, family: str, method: str, sampling: str) -> None:
    met: Counter[str] = Counter()
    forwards = 0
    for size, ids in BATCHES.items():
        recipe = watched(method, family)
        options = {"new": NEW, "stack": backend.stack(family), "watch": False, "sampling": SAMPLINGS[sampling],
                   "seed": size}
        plain, run = decode(None, ids, recipe.plan, **options), decode(None, ids, recipe, **options)
        assert run.tokens == plain.tokens
        assert isinstance(recipe.proposer, Watched)
        met += recipe.proposer.met
        forwards += sum(row.ledger.target_forwards for row in run.rows)
    assert {*met} == {"none", "some", "all"}, met
    assert forwards < NEW * sum(map(len, BATCHES.values()))


@each_method
@on_backends("hybrid", "llama")
def test_no_greedy_token_changes(backend: Backend, name: str, method: str) -> None:
    same_tokens(backend, name, method, "greedy")


@by_turns("method, sampling", NAMES, ["sampled", "penalised"])
def test_no_sample_changes(method: str, sampling: str) -> None:
    same_tokens(HF, "hybrid", method, sampling)


def test_branches_of_a_search_and_turns_of_a_chat_guess_as_well() -> None:
    """Twins of a row know nothing of its states, and a turn takes over what the turns before have stored."""
    engine, layer = target("llama"), Eagle(part_for("eagle", "llama"), stop=0.0)
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "logit_bias": ECHO}
    plain = engine.generate(BATCHES[4], method=BestOf(3), **options)
    found = engine.generate(BATCHES[4], method=BestOf(3, inner=layer), **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert sum(one.stats.accepted for one in found) > 0
    with Scheduler(engine, max_rows=2) as scheduler:
        for turn in range(1, 4):  # each prompt begins with what the one before has left
            ids = prompt(30, 5)[: 10 * turn]
            answers = []
            for method in ("full", layer):
                handle = scheduler.submit(ids, method=method, max_new_tokens=16, logit_bias=ECHO)
                list(handle)
                answers.append(handle.results[0])
            assert answers[0].tokens == answers[1].tokens and answers[1].stats.drafted > 0


@pytest.mark.parametrize(("family", "shape"), [
    ("llama", Branching((1,) * 3)), ("qwen2", Branching((1,) * 3)), ("llama", Branching((3, 2, 2))),
    ("llama", Likeliest(3, 3)),
], ids=["chain", "chain of another family", "branching", "likeliest"])
def test_the_layer_guesses_what_its_module_would(family: str, shape: TreeShape) -> None:
    """Through prompts and accepted guesses, with the layer's own outputs in the place of states that are not known."""
    module, width = eagle(target(family)), shape.width(0)
    part = part_file.read(part_for("eagle", family), "eagle", target(family).info())
    proposer = Watched(EagleProposer(part, shape))
    recipe = Recipe(DepthPlan.full(6), proposer)
    ids = [prompt(70, 1), prompt(5, 2)]
    run = decode(None, ids, recipe, stack=HF.stack(family), new=12, sampling=Sampling(logit_bias=ECHO), watch=False)
    seen = 0
    for tree in proposer.trees:
        texts = [row.tokens[: end + 1] for row in run.rows for end in range(row.prompt_length, len(row.tokens))
                 if row.tokens[end] == tree.tokens[0]]
        seen += any(agrees(module, family, text, tree, ECHO, width) for text in texts)
    assert seen == len(proposer.trees) > 4
