"""What holds of every trained part that guesses: whatever it says, no token changes, and fewer forwards are needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from backends import Backend
from drive import decode, prompt
from eagle_part import ECHO, target
from shoal.engine.engine import Engine
from shoal.methods.base import Method
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
    backend: Backend, family: str, method: Method, sampling: str, engine: Engine | None = None
) -> None:
    """Texts are those of the plan, and nothing, some and all of the guesses are accepted now and then.

    Args:
        engine: for which the method makes its recipe; by default one of the family's modules.
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
    assert {*met} == {"none", "some", "all"}, met
    assert forwards < NEW * sum(map(len, BATCHES.values()))
