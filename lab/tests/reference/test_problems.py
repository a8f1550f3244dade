"""The problems that ship: right, enough, and distinct from each other, from the training, and from the GSM8K test."""

from __future__ import annotations

import io
import itertools
import json
import re
import tarfile
from pathlib import Path

import pytest
from tools.reference import corpus, hold_out, renumber, templates
from tools.reference.templates.draw import Problem

from shared_models import data_path
from shoal_lab import reference


def shipped(kind: str) -> list[Problem]:
    return [Problem(**row) for row in reference.problems(kind)]


@pytest.mark.parametrize("kind", reference.PROBLEM_KINDS)
def test_there_are_enough_and_each_says_its_answer(kind: str) -> None:
    problems = shipped(kind)
    assert len(problems) >= 1_000
    for problem in problems:
        assert "\n" not in problem.question
        assert problem.solution.rsplit("####", 1)[1].strip() == problem.answer
        assert problem.answer.isdigit()


@pytest.mark.parametrize("kind", ["known_templates", "unseen_templates", "known_gsm8k_equations"])
def test_calculations_are_right(kind: str) -> None:
    pattern = r"<<([^=]+)=(\d+)>>" if kind.endswith("equations") else r"(\d+(?: [-+*/] \d+)+) = (\d+)"
    checked = 0
    for problem in shipped(kind):
        for left, right in re.findall(pattern, problem.solution):
            checked += 1
            assert renumber.evaluate(left) == int(right), problem
    assert checked > 1_000


def test_no_problem_is_in_two_sets() -> None:
    marks = {kind: {hold_out.mark(problem) for problem in shipped(kind)} for kind in reference.PROBLEM_KINDS}
    for first, second in itertools.combinations(marks, 2):
        assert not marks[first] & marks[second], (first, second)


def test_an_unknown_set_is_named() -> None:
    with pytest.raises(ValueError, match="no problems called 'poetry'; choose one of known_templates"):
        reference.problems("poetry")


@pytest.fixture(scope="module")
def data() -> Path:
    return data_path()


@pytest.fixture(scope="module")
def training(data: Path) -> list[Problem]:
    data_path("gsm8k", "train.jsonl")
    return list(hold_out.trained(data, 1_000, 2_000))


@pytest.mark.slow
def test_training_problems_are_the_same_every_time_and_not_shipped(data: Path, training: list[Problem]) -> None:
    assert training[:50] + training[1_000:1_050] == list(hold_out.trained(data, 50, 50))
    marks = {hold_out.mark(problem) for problem in training}
    for kind in reference.PROBLEM_KINDS:
        assert not marks & {hold_out.mark(problem) for problem in shipped(kind)}, kind


@pytest.mark.slow
def test_no_test_question_is_trained_on(data: Path, training: list[Problem]) -> None:
    lines = data_path("gsm8k", "test.jsonl").read_text().splitlines()
    test = {_letters(json.loads(line)["question"]) for line in lines}
    assert len(test) > 1_300
    assert not test & {_letters(problem.question) for problem in training}
    assert not test & {_letters(problem.question) for problem in corpus.split(data).known}


@pytest.mark.slow
def test_no_bbh_text_is_trained_on(training: list[Problem]) -> None:
    files = sorted(data_path("bbh", "bbh").glob("*.json"))
    inputs = {_letters(row["input"]) for file in files for row in json.loads(file.read_text())["examples"]}
    assert len(inputs) > 5_000
    assert not inputs & {_letters(problem.question) for problem in training}


def _letters(question: str) -> str:
    """A question without numbers and signs, so that a renumbered copy is found too."""
    return re.sub(r"\W+", " ", re.sub(r"\d+", "", question.lower().removesuffix("(equations)"))).strip()


@pytest.mark.slow
def test_unseen_problems_are_never_drawn_for_training(data: Path, training: list[Problem]) -> None:
    split = corpus.split(data)
    known, unseen = ({_letters(problem.question) for problem in part} for part in (split.known, split.unseen))
    assert len(split.known) == corpus.TRAINED_COUNT
    assert not known & unseen
    assert {_letters(problem.question) for problem in training if problem.kind.startswith("gsm8k")} <= known
    assert {problem.kind for problem in training} <= {*templates.TRAINED, "gsm8k_natural", "gsm8k_equations"}


def test_novels_held_out_are_not_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "novels"
    folder.mkdir()
    with tarfile.open(folder / "novels_before_1900.tar.xz", "w:xz") as archive:
        for name in (*corpus.NOVELS_HELD_OUT, "A_1850.txt", "B_1860.txt"):
            text = "\n\n".join(f"{name} \u2018paragraph\u2019\n{n}." for n in range(900)).encode()
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    trained, held = corpus.novels(tmp_path), corpus.novels(tmp_path, held_out=True)
    assert (set(trained), set(held)) == ({"A_1850.txt", "B_1860.txt"}, set(corpus.NOVELS_HELD_OUT))
    assert trained["A_1850.txt"].startswith("A1850.txt 'paragraph' 0.\nA1850.txt 'paragraph' 1.\n")
    passages = list(itertools.islice(corpus.passages(trained, "x"), 20))
    assert passages == list(itertools.islice(corpus.passages(trained, "x"), 20))
    assert all(any(f"\n{passage}" in text for text in trained.values()) for passage in passages)
