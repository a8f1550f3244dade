"""Draft models that guess in parallel (PARD): guesses are those of one forward over masks, and no token changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from backends import BACKENDS, TORCH, Backend
from drafts import draft_of, parallel_of
from drive import decode, prompt
from eagle_part import ECHO
from part_checks import check_tokens, check_trees
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.auto import Auto, Cautious
from shoal.methods.d3 import D3
from shoal.methods.draft_model import DraftModel
from shoal.speculative.growth import Branching
from shoal.speculative.model import ParallelProposer
from shoal.types import Sampling
from turns import by_turns
from watched import Watched

TOKEN = 96


METHODS: dict[str, dict[str, Any]] = {
    "chain": {"length": 4}, "tree": {"branching": (3, 2)}, "on d3": {"length": 3, "inner": D3(alpha=0.93, core=2)},
}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_no_greedy_token_changes(backend: Backend) -> None:
    for kind in METHODS:
        check_tokens(backend, "llama", DraftModel(parallel_of("llama"), **METHODS[kind]), "greedy")


@by_turns("kind, sampling", METHODS, ["sampled", "penalised"])
def test_no_sample_changes(kind: str, sampling: str) -> None:
    check_tokens(TORCH, "llama", DraftModel(parallel_of("llama"), **METHODS[kind]), sampling)


@pytest.mark.parametrize("chunk", [None, 7])
def test_guesses_are_those_of_a_forward_over_masks(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in AMD's loop: the text, then one mask less than there are guesses, which the last places give."""
    draft, length = engine_for(parallel_of("llama")), 4
    if chunk is not None:
        monkeypatch.setattr(draft.runner, "prefill_chunk", chunk)
    assert draft.parallel == TOKEN
    proposer = Watched(ParallelProposer(draft.runner, Branching((1,) * length), "it", TOKEN))
    options = {"runner": TORCH.runner("llama"), "new": 16, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    run = decode(None, [prompt(20, 1), prompt(5, 2)], Recipe(DepthPlan.full(6), proposer), **options)
    check_trees(run, proposer, lambda text, tree: _guesses(text, length)[: len(tree) - 1] == [*tree.tokens[1:]])
    assert sum(seq.ledger.draft_forwards for seq in run.seqs) <= len(proposer.trees) + (0 if chunk is None else 8)


@torch.no_grad()
def _guesses(text: list[int], length: int) -> list[int]:
    logits = parallel_of("llama")(torch.tensor([[*text, *[TOKEN] * (length - 1)]])).logits[0, -length:]
    for token, value in ECHO.items():
        logits[:, token] += value
    return logits.argmax(-1).tolist()


def test_auto_drafts_in_parallel() -> None:
    engine = Engine(TORCH.runner("llama"))
    judge = engine_for(draft_of("llama")).recipe(Auto(draft=parallel_of("llama")), 16).proposer
    assert isinstance(judge, Cautious) and isinstance(judge.drafter, ParallelProposer)
    assert engine.parallel is None


def test_a_token_that_the_model_lacks_is_told() -> None:
    model = copy.deepcopy(parallel_of("llama"))
    model.config.pard_token = 97
    with pytest.raises(ValueError, match=r"pard_token=97: its tokens are 0..96"):
        engine_for(model)


def test_models_of_pard_2_draft_token_by_token() -> None:
    model = copy.deepcopy(parallel_of("llama"))
    model.config.spd_type = "pard2"
    assert engine_for(model).parallel is None
