"""Gemma 4's assistant: guesses what transformers' modules would, whatever runs the target, and changes no token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from assistants import NEEDS, AssistantReference, write_assistant
from backends import NATIVE, Backend, each_backend
from drive import decode, prompt
from eagle_part import ECHO, target
from families import tiny
from part_checks import BATCHES, SAMPLINGS, check_searches_and_turns, check_trees
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.methods.auto import Auto, Cautious
from shoal.methods.eagle import Eagle
from shoal.methods.mtp import Mtp
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal.speculative.drafters.assistant import Assistant, AssistantProposer, read
from shoal.speculative.growth import Branching
from shoal.types import Sampling
from shoal.user_cache import cache_folder
from watched import Watched

pytestmark = NEEDS


def head(runner: ModelRunner, folder: Path, **options: Any) -> Assistant:
    family = options.pop("family", "gemma4_small")
    return Assistant(runner, read(str(write_assistant(folder, family, **options))))


@each_backend
@pytest.mark.parametrize("family", ["gemma4_small", "gemma4"])
def test_it_guesses_what_its_modules_would(backend: Backend, tmp_path: Path, family: str) -> None:
    runner = backend.runner(family)
    proposer = Watched(AssistantProposer(head(runner, tmp_path, family=family), Branching((2, 1, 1))))
    options = {"runner": runner, "new": 10, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    recipe = Recipe(DepthPlan.full(runner.num_layers), proposer)
    run = decode(None, [prompt(7, 1), prompt(3, 2)], recipe, **options)
    slow = AssistantReference(family)
    check_trees(run, proposer, lambda text, tree: slow.agrees(text, tree, ECHO, 2))


@each_backend
@pytest.mark.parametrize("clusters", [False, True])
def test_its_logits_are_its_modules(backend: Backend, tmp_path: Path, clusters: bool) -> None:
    runner, text = backend.runner("gemma4_small"), prompt(13, 3)
    made = head(runner, tmp_path, clusters=clusters)
    slow = AssistantReference("gemma4_small", clusters=clusters)
    cache, states = runner.new_cache(1), []

    def hook(layer: int, hidden: torch.Tensor) -> None:
        if layer == runner.num_layers:
            states.append(hidden[0, -1:].clone())

    plan = DepthPlan.full(runner.num_layers)
    runner.forward([SequenceChunk(0, text[:-1], [0] * (len(text) - 1), plan)], cache, hook)
    cache.commit(0, range(len(text) - 1))
    seen = made.seen(cache, 0, len(text) - 1)
    assert seen is not None
    carried, found = made.begin(states[0]), []
    for token in (text[-1], 5, 8):
        logits, carried = made.step(carried, [token], [seen])
        found.append(logits[0])
    for guesses, own in zip(([], [5], [5, 8]), found, strict=True):
        expected = slow.logits(text, guesses)
        assert float((own.double() - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@each_backend
@pytest.mark.parametrize("size", BATCHES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_token_changes(backend: Backend, tmp_path: Path, sampling: str, size: int) -> None:
    runner = backend.runner("gemma4_small")
    options = {"new": 24, "runner": runner, "watch": False, "sampling": SAMPLINGS[sampling]}
    proposer = Watched(AssistantProposer(head(runner, tmp_path), Branching((1,) * 3)))
    plain = decode(None, BATCHES[size], DepthPlan.full(6), **options)
    run = decode(None, BATCHES[size], Recipe(DepthPlan.full(6), proposer), **options)
    assert run.tokens == plain.tokens and proposer.met["some"] + proposer.met["all"] > 0
    assert sum(seq.ledger.target_forwards for seq in run.seqs) < 24 * size


def test_searches_and_turns(tmp_path: Path) -> None:
    folder = write_assistant(tmp_path, "gemma4_small")
    check_searches_and_turns(Engine(NATIVE.runner("gemma4_small")), Mtp(str(folder), stop=0.0))


def test_auto_tells_its_kind(tmp_path: Path) -> None:
    folder = str(write_assistant(tmp_path, "gemma4_small"))
    engine = shoal.load(tiny("gemma4_small", dtype=torch.float32))
    judge = engine.recipe(Auto(part=folder), 16).proposer
    assert isinstance(judge, Cautious) and isinstance(judge.drafter, AssistantProposer)
    assert judge.kept_bytes == 4 * 32
    plain, found = (engine.generate(prompt(9, 3), method=one, max_new_tokens=48) for one in ("full", Auto(part=folder)))
    assert found.tokens == plain.tokens
    with pytest.raises(Unsupported, match="it is of kind 'mtp'"):
        engine.generate([3, 4, 5], method=Eagle(folder), max_new_tokens=2)


def test_mtp_finds_one_among_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny("gemma4_small", dtype=torch.float32)
    with pytest.raises(Unsupported, match="no layer for further tokens"):
        shoal.load(model).recipe(Mtp(), 16)
    place = cache_folder() / "parts" / "one"
    place.mkdir(parents=True)
    write_assistant(place, "gemma4_small")
    assert isinstance(shoal.load(model).recipe(Mtp(), 16).proposer, AssistantProposer)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "hidden size": (lambda config: config.update(backbone_hidden_size=48), "states of 48 numbers; this one has 32"),
    "no hidden size": (lambda config: config.update(backbone_hidden_size="wide"), "backbone_hidden_size is 'wide'"),
    "vocabulary": (lambda config: config["text_config"].update(vocab_size=50), "with 50 tokens; this one has 97"),
    "kind": (lambda config: config["text_config"].update(model_type="llama"), "is of model type 'llama'; it must be"),
    "experts": (lambda config: config["text_config"].update(enable_moe_block=True), "has enable_moe_block True"),
    "neurons": (lambda config: config["text_config"].update(intermediate_size=9), "is needed"),
    "groups": (lambda config: config.update(use_ordered_embeddings=True, num_centroids=5), "it has 5 groups for 97"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_that_does_not_fit_is_told(tmp_path: Path, change: str) -> None:
    made, told = CHANGES[change]
    file = write_assistant(tmp_path, "gemma4_small") / "config.json"
    config = json.loads(file.read_text())
    made(config)
    file.write_text(json.dumps(config))
    with pytest.raises(Unsupported) as error:
        target("gemma4_small").generate([3, 4, 5], method=Mtp(str(tmp_path)), max_new_tokens=2)
    assert told in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_model_without_its_kinds_of_layers_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="it has a layer of kind sliding_attention; the model has none"):
        target("llama").generate([3, 4, 5], method=Mtp(str(write_assistant(tmp_path, "gemma4_small"))),
                                 max_new_tokens=2)
