"""The small models of the fixtures: complete, with equal tokenizers, and able to do their job."""

from __future__ import annotations

import pytest

import shoal
from shared_models import DRAFT, FIXTURES, LAYERSKIP, REFERENCE
from shoal.methods.base import Method
from shoal.methods.draft_model import DraftModel
from shoal_lab import reference
from shoal_lab.eval.items import is_right
from shoal_lab.methods.layerskip import LayerSkip


@pytest.mark.parametrize("name", (REFERENCE, LAYERSKIP, DRAFT))
def test_a_model_holds_all_it_needs(name: str) -> None:
    folder = FIXTURES / name
    held = {path.name for path in folder.iterdir()}
    assert held >= {"README.md", "config.json", "model.safetensors", "shoal.json", "tokenizer.json"}
    assert all(path.stat().st_size < 15 * 2**20 for path in folder.iterdir())
    engine = shoal.load(folder, dtype="float32")
    assert engine.runner.num_layers == (3 if name == DRAFT else 24)
    assert engine.tokenizer.get_vocab() == shoal.load(FIXTURES / REFERENCE, dtype="float32").tokenizer.get_vocab()
    assert engine.card.order == "leave_one_out"


@pytest.mark.parametrize("name", (REFERENCE, LAYERSKIP))
def test_a_model_solves_most_of_a_few_problems(name: str) -> None:
    engine = shoal.load(FIXTURES / name, dtype="float32")
    problems = reference.problems("known_templates")[:12]
    found = [engine.generate(problem["question"] + "\n", max_new_tokens=200).text for problem in problems]
    assert sum(is_right(text, problem["answer"]) for text, problem in zip(found, problems, strict=True)) >= 6


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (REFERENCE, DraftModel(draft=str(FIXTURES / DRAFT), length=3)),
        (LAYERSKIP, LayerSkip(exit_layer=9, length=3)),
    ],
)
def test_the_other_models_guess_what_they_are_there_to_guess(name: str, method: Method) -> None:
    engine = shoal.load(FIXTURES / name, dtype="float32")
    for problem in reference.problems("known_templates")[:3]:
        plain = engine.generate(problem["question"] + "\n", max_new_tokens=120)
        guessed = engine.generate(problem["question"] + "\n", max_new_tokens=120, method=method)
        assert guessed.tokens == plain.tokens
        assert guessed.stats.tokens_per_forward > 2
