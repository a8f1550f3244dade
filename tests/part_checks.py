"""What holds of every trained part that guesses: whatever it says, no token changes, and fewer forwards are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from backends import Backend
from drive import Run, decode, prompt
from eagle_part import ECHO, target
from shoal.decode.tree import TokenTree
from shoal.engine.engine import Engine
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.types import Sampling
from watched import Watched

NEW = 32
BATCHES = {1: [prompt(6, 1)], 4: [prompt(5, 1), prompt(12, 2), prompt(1, 3), prompt(8, 4)]}
SAMPLINGS = {
    "greedy": Sampling(logit_bias=ECHO),
    "sampled": Sampling(temperature=1.0, logit_bias=ECHO),
    "penalised": Sampling(temperature=0.9, top_k=40, repetition_penalty=1.1, logit_bias=ECHO),
}


def check_tokens(
    backend: Backend, family: str, method: Method, sampling: str, engine: Engine | None = None,
    met_at_least: Collection[str] = ("none", "some", "all"),
) -> None:
    """Texts are those of the plan, and nothing, some and all of the guesses are accepted now and then.

    Args:
        engine: for which the method makes its recipe; by default one of the family's modules.
        met_at_least: what must come to pass of these; in any case some guess is accepted.
    """
    made = method.recipe((engine or target(family)).info(NEW))
    assert made.exact_to == ("full" if made.plan.is_full else "plan") and made.proposer is not None
    met: Counter[str] = Counter()
    forwards = 0
    for size, ids in BATCHES.items():
        proposer = Watched(made.proposer)
        recipe = replace(made, proposer=proposer)
        options = {"new": NEW, "runner": backend.runner(family), "watch": False, "sampling": SAMPLINGS[sampling],
                   "seed": size}
        plain, run = decode(None, ids, recipe.plan, **options), decode(None, ids, recipe, **options)
        assert run.tokens == plain.tokens
        met += proposer.met
        forwards += sum(seq.ledger.target_forwards for seq in run.seqs)
    assert {*met} >= {*met_at_least}, met
    assert forwards < NEW * sum(map(len, BATCHES.values()))


def check_trees(
    run: Run, proposer: Watched, agrees: Callable[[list[int], TokenTree], bool], more_than: int = 4
) -> None:
    """There are so many trees, and each is what a reference guesses after a text that ends with the tree's root."""
    seen = 0
    for tree in proposer.trees:
        texts = [seq.tokens[: end + 1] for seq in run.seqs for end in range(seq.prompt_length, len(seq.tokens))
                 if seq.tokens[end] == tree.tokens[0]]
        seen += any(agrees(text, tree) for text in texts)
    assert seen == len(proposer.trees) > more_than


def check_searches_and_turns(engine: Engine, method: Method) -> None:
    """Forks of a sequence know nothing of its states, and a turn takes over what the turns before have stored."""
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "logit_bias": ECHO}
    plain, found = (engine.generate(BATCHES[4], method=one, **options) for one in (BestOf(3), BestOf(3, inner=method)))
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert sum(one.stats.accepted for one in found) > 0
    with Scheduler(engine, max_seqs=2) as scheduler:
        for turn in range(1, 4):  # each prompt begins with what the one before has left
            ids = prompt(30, 5)[: 10 * turn]
            answers = []
            for one in ("full", method):
                handle = scheduler.submit(ids, method=one, max_new_tokens=16, logit_bias=ECHO)
                list(handle)
                answers.append(handle.results[0])
            assert answers[0].tokens == answers[1].tokens and answers[1].stats.drafted > 0
