"""Chains that the kernels draft within one call: the same guesses as forward by forward, and as transformers' layer."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from backends import NATIVE
from drive import Run, decode, prompt
from eagle_part import IDS, EagleReference, target, write_eagle
from part_checks import check_trees
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.speculative import draft_head_file
from shoal.speculative import eagle as drafting
from shoal.speculative.eagle import LayerProposer
from shoal.speculative.growth import Branching
from shoal.types import Sampling
from watched import Watched

NEW = 24
IDS_OF_PROMPTS = [prompt(70, 1), prompt(5, 2), prompt(1, 3)]


@functools.cache
def plain(temperature: float = 0.0) -> list[list[int]]:
    options = {"runner": NATIVE.runner("llama"), "new": NEW, "watch": False, "sampling": Sampling(temperature)}
    return decode(None, IDS_OF_PROMPTS, DepthPlan.full(6), **options).tokens


def ids(few: bool) -> tuple[int, ...]:
    """Tokens to guess: many, or three that the model says most, so that some guesses are kept."""
    said = Counter(token for text in plain() for token in text)
    return tuple(sorted(token for token, _ in said.most_common(3))) if few else IDS


def drafted(
    tmp_path: Path, few: bool, length: int = 5, temperature: float = 0.0, **options: object
) -> tuple[Run, Watched]:
    engine = target("llama")
    part = draft_head_file.read(str(write_eagle(tmp_path, "llama", ids(few))), "eagle", engine.info())
    proposer = Watched(LayerProposer(part, Branching((1,) * length), **options))
    recipe = Recipe(DepthPlan.full(6), proposer)
    how = {"runner": NATIVE.runner("llama"), "new": NEW, "watch": False, "sampling": Sampling(temperature)}
    return decode(None, IDS_OF_PROMPTS, recipe, **how), proposer


@pytest.mark.parametrize("few", [False, True], ids=["many tokens", "few tokens"])
@pytest.mark.parametrize("options", [{}, {"stop": (1e-3, 0.05)}, {"nodes": 2}, {"temperature": 0.7}],
                         ids=["all", "stop", "nodes", "drawn"])
def test_one_call_guesses_what_forwards_would(
    tmp_path: Path, few: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "stop" in options:
        options = {"stop": options["stop"][few]}
    quick, proposer = drafted(tmp_path, few, **options)
    monkeypatch.setattr(drafting.LayerDrafter, "_chained", lambda self, seqs: False)
    slow, one_by_one = drafted(tmp_path, few, **options)
    assert quick.tokens == slow.tokens == plain(options.get("temperature", 0.0))
    assert [tree.tokens for tree in proposer.trees] == [tree.tokens for tree in one_by_one.trees]
    assert [seq.ledger.accepted for seq in quick.seqs] == [seq.ledger.accepted for seq in slow.seqs]
    lengths = {len(tree) for tree in proposer.trees}
    assert max(lengths) == 3 if "nodes" in options else len(lengths) > 2 if "stop" in options else max(lengths) == 6
    assert not few or proposer.met["all"] + proposer.met["some"] > 1
    monkeypatch.undo()


@pytest.mark.slow
def test_one_call_guesses_what_transformers_would(tmp_path: Path) -> None:
    run, proposer = drafted(tmp_path, few=True, length=3)
    slow = EagleReference(tmp_path, "llama")
    check_trees(run, proposer, lambda text, tree: slow.agrees(text, tree, {}, 1), more_than=10)
