"""Shared by tests of `mirror_sd`: settings, the draft model's runner, and sequences that join one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drive import make_run
from shoal.decode.recipe import Recipe
from shoal.engine.engine import Engine

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "penalised": {"temperature": 0.9, "seed": 3, "top_k": 40, "repetition_penalty": 1.1},
}


def stack_of_draft(engine: Engine, draft: Any) -> Any:
    """The runner of a draft model."""
    draft_engine = engine.info().draft_engine
    assert draft_engine is not None
    return draft_engine(draft).runner


def joined(
    model: Any, prompts: Sequence[Sequence[int]], recipe: Recipe, lengths: Sequence[int], alone: Sequence[Any],
    runner: Any = None,
) -> list[Any]:
    """Sequences that joined one another, each of which has decoded as `alone`."""
    run = make_run(model, prompts[:1], recipe, lengths[:1], runner=runner, watch=False)
    later = make_run(model, prompts, recipe, lengths, runner=runner, watch=False).seqs
    seqs = [run.seqs[0], *later[1:]]
    for seq in later[1:]:
        run.batch.step(64)
        run.batch.join([seq])
    while run.batch.seqs:
        run.batch.step(64)
    for seq, one in zip(seqs, alone, strict=True):
        assert seq.tokens == one.tokens
        assert (seq.ledger.drafted, seq.ledger.accepted) == (one.ledger.drafted, one.ledger.accepted)
        assert [r.reused for r in seq.ledger.draft_rounds] == [r.reused for r in one.ledger.draft_rounds]
    return seqs
