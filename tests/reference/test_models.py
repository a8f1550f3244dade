"""The models in the package: found by name, whole, and able to do what they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shoal
from shoal import reference
from shoal.eval.answers import is_right
from shoal.methods.base import Method
from shoal.methods.draft_model import DraftModel
from shoal.methods.layerskip import LayerSkip


@pytest.mark.parametrize("name", reference.NAMES)
def test_a_packaged_model_is_found_by_name_and_holds_all_it_needs(name: str) -> None:
    folder = reference.path(name)
    assert reference.find(name) == str(folder)
    held = {path.name for path in folder.iterdir()}
    assert held >= {"README.md", "config.json", "model.safetensors", "shoal.json", "tokenizer.json"}
    assert all(path.stat().st_size < 15 * 2**20 for path in folder.iterdir())
    engine = shoal.load(name, dtype="float32")
    assert engine.stack.num_layers == (3 if name == reference.DRAFT else 24)
    assert engine.tokenizer.get_vocab() == shoal.load(dtype="float32").tokenizer.get_vocab()
    assert engine.card.order == "leave_one_out"


def test_the_first_is_the_default() -> None:
    assert reference.find(None) == str(reference.path()) == str(reference.path(reference.NAMES[0]))


def test_other_names_stay_and_a_folder_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.find("someone/model") == "someone/model"
    monkeypatch.chdir(tmp_path)
    (tmp_path / reference.NAME).mkdir()
    assert reference.find(reference.NAME) == reference.NAME
    with pytest.raises(ValueError, match=re.escape(f"no packaged model 'gpt'; choose one of {reference.NAME}")):
        reference.path("gpt")


@pytest.mark.parametrize("name", (reference.NAME, reference.LAYERSKIP))
def test_a_packaged_model_solves_most_of_a_few_problems(name: str) -> None:
    engine = shoal.load(name, dtype="float32")
    problems = reference.problems("known_templates")[:12]
    found = [engine.generate(problem["question"] + "\n", max_new_tokens=200).text for problem in problems]
    assert sum(is_right(text, problem["answer"]) for text, problem in zip(found, problems, strict=True)) >= 6


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (reference.NAME, DraftModel(draft=reference.DRAFT, length=3)),
        (reference.LAYERSKIP, LayerSkip(exit_layer=9, length=3)),
    ],
)
def test_the_other_models_guess_what_they_are_there_to_guess(name: str, method: Method) -> None:
    engine = shoal.load(name, dtype="float32")
    for problem in reference.problems("known_templates")[:3]:
        plain = engine.generate(problem["question"] + "\n", max_new_tokens=120)
        guessed = engine.generate(problem["question"] + "\n", max_new_tokens=120, method=method)
        assert guessed.tokens == plain.tokens
        assert guessed.stats.tokens_per_forward > 2
