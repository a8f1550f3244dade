"""`dflash`: no token changes on any backend, and guesses are those of the formulas."""

from __future__ import annotations

import pytest

from backends import NATIVE, TORCH, Backend, on_one_backend
from dflash_drafters import BLOCK_FORMS, block_drafter, of_block
from drive import decode, prompt
from eagle_part import ECHO
from part_checks import check_searches_and_turns, check_tokens, check_trees
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.methods.d3 import D3
from shoal.methods.dflash import DFlash
from shoal.speculative.drafters import dflash_checkpoint
from shoal.speculative.drafters.dflash import DFlashHead, DFlashProposer
from shoal.types import Sampling
from turns import by_turns
from watched import Watched

METHODS: dict[str, dict[str, object]] = {
    "whole blocks": {}, "short": {"length": 2}, "on d3": {"length": 3, "inner": D3(alpha=0.93, core=2)},
}


def method(form: str, kind: str) -> DFlash:
    return DFlash(part=block_drafter(form), stop=0.0, **METHODS[kind])  # type: ignore[arg-type]


@on_one_backend("form", {name: name for name in BLOCK_FORMS}, "llama", "qwen3")
def test_no_greedy_token_changes(backend: Backend, name: str, form: str) -> None:
    engine = Engine(backend.runner(name))
    seldom = BLOCK_FORMS[form].from_last  # that five random guesses are all right
    for kind in METHODS:
        check_tokens(backend, name, method(form, kind), "greedy", engine, *[("none", "some")] * seldom)


@by_turns("kind, sampling", METHODS, ["sampled", "penalised"])
@pytest.mark.parametrize("form", ["dflash with windows", "dflash, speculators"])
def test_no_sample_changes(form: str, kind: str, sampling: str) -> None:
    check_tokens(NATIVE, "llama", method(form, kind), sampling, Engine(NATIVE.runner("llama")))


@on_one_backend("form", {name: name for name in BLOCK_FORMS}, "llama")
def test_guesses_are_those_of_the_formulas(backend: Backend, name: str, form: str) -> None:
    """Through prompts and accepted guesses, in a batch."""
    runner, slow = backend.runner(name), of_block(form, name)
    head = DFlashHead(runner, dflash_checkpoint.read(block_drafter(form)))
    proposer = Watched(DFlashProposer(head, head.guesses))
    options = {"runner": runner, "new": 12, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    run = decode(None, [prompt(40, 1), prompt(5, 2)], Recipe(DepthPlan.full(6), proposer), **options)
    check_trees(run, proposer, lambda text, tree: slow.guesses(text, ECHO)[: len(tree) - 1] == [*tree.tokens[1:]])


def test_unlikely_chains_end_early() -> None:
    engine = Engine(TORCH.runner("llama"))
    drafted = [engine.generate(prompt(9, 3), method=DFlash(part=block_drafter("dflash"), stop=stop), max_new_tokens=16)
               .stats.drafted for stop in (0.0, 0.3, 1.0)]
    assert drafted[0] > drafted[1] >= drafted[2] > 0


def test_searches_and_turns_of_a_chat_guess_as_well() -> None:
    check_searches_and_turns(Engine(TORCH.runner("llama")), DFlash(part=block_drafter("dflash with windows"), stop=0.0))


@pytest.mark.parametrize("options, told", [({"length": 0}, "length is 0"), ({"stop": 2.0}, "stop is 2.0")])
def test_options_out_of_range_are_told(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DFlash(**options)  # type: ignore[arg-type]
