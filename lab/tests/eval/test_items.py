"""Items and suites; calibration and evaluation share no item."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from shared_models import data_path
from shoal.errors import Unsupported
from shoal_lab.eval import suites
from shoal_lab.eval.items import part_of, problem, read_lines, stretches
from word_problems import rows, write

DATA = ("bbh", "gsm8k", "gsm8k_8shot", "gsm8k_chat", "gsm8k_renumbered", "humaneval", "mbpp", "novels", "squad",
        "wikidata_qa", "wikitext2")
"""Suites with items in a data folder that may be used for calibration."""


def letters(question: str) -> str:
    return " ".join(re.sub("[^a-z]", " ", question.lower()).split())


def test_the_parts_of_a_file_share_no_problem_whatever_its_numbers(tmp_path: Path) -> None:
    suite = suites.get(str(write(tmp_path, variants=3)))
    evaluation, calibration = (suite.items(None, part) for part in ("evaluation", "calibration"))
    assert len(evaluation) + len(calibration) == len(rows(3)) and len(calibration) > 0.03 * len(rows(3))
    seen = [{letters(item.prompt) for item in part} for part in (evaluation, calibration)]
    assert not seen[0] & seen[1]
    assert not {item.id for item in evaluation} & {item.id for item in calibration}


@pytest.mark.parametrize("name", DATA)
def test_the_parts_of_every_data_set_share_no_item(name: str) -> None:
    data = data_path("gsm8k").parent
    evaluation, calibration = (suites.get(name).items(data, part) for part in ("evaluation", "calibration"))
    assert not {letters(item.prompt + item.solution) for item in evaluation} & {
        letters(item.prompt + item.solution) for item in calibration
    }
    assert len(evaluation) >= 164 and len(calibration) >= 100


def test_nothing_is_left_of_both_code_suites_to_calibrate_on() -> None:
    data = data_path("humaneval").parent
    assert len(suites.get("programs").items(data)) == 1138
    with pytest.raises(ValueError, match="suite programs has no items for calibration"):
        suites.get("programs").items(data, "calibration")


def test_packaged_problems_share_none() -> None:
    kinds = [name for name in suites.names() if name not in (*DATA, "programs") and suites.get(name).kind != "prompts"]
    for name in kinds:
        evaluation, calibration = (suites.get(name).items(None, part) for part in ("evaluation", "calibration"))
        assert not {item.prompt for item in evaluation} & {item.prompt for item in calibration}


def test_a_share_of_a_tenth_calibrates() -> None:
    found = [part_of(f"question {chr(97 + i % 26)}{chr(97 + i // 26 % 26)} {chr(97 + i // 676)}") for i in range(4000)]
    assert 0.08 < found.count("calibration") / len(found) < 0.12
    assert part_of("Tom has 3 hats.") == part_of("Tom has 117 hats!")


def test_the_forms_of_a_problem() -> None:
    gsm8k = problem("a", {"question": "Q", "answer": "One <<1+1=2>>2.\n#### 2"}, "x")
    assert (gsm8k.solution, gsm8k.answer) == ("One 2.\n#### 2", "2")
    equations = problem("a", {"question": "Q", "equations": "<<1+1=2>>", "answer": 2}, "x")
    assert (equations.solution, equations.answer) == ("<<1+1=2>> #### 2", "2")
    with pytest.raises(ValueError, match="problem a of x has no 'question'"):
        problem("a", {"answer": "2"}, "x")


def test_a_text_is_cut_without_losing_or_changing_words() -> None:
    text = "one two  three\nfour five six seven"
    found = stretches("t", text, 1, 2)
    assert "".join(item.prompt + item.solution for item in found) == "one two  three\nfour five six "


def test_items_are_drawn_by_the_seed(tmp_path: Path) -> None:
    suite = suites.get(str(write(tmp_path)))
    first = [item.id for item in suite.items(None, limit=20, seed=1)]
    assert first == [item.id for item in suite.items(None, limit=20, seed=1)]
    assert first != [item.id for item in suite.items(None, limit=20, seed=2)]
    assert first[:5] == [item.id for item in suite.items(None, limit=5, seed=1)]


def test_lines_are_read_packed_too_and_refused_when_they_are_no_objects(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(rows()[0]).encode()))
    assert read_lines(tmp_path / "a.jsonl.gz") == rows()[:1]
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n[2]\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of .* is no JSON object"):
        read_lines(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="there is no file"):
        read_lines(tmp_path / "c.jsonl")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'gsm8k'"):
        suites.get("gsm8")
    with pytest.raises(Unsupported, match="--data DIR"):
        suites.get("gsm8k").items(None)
    with pytest.raises(ValueError, match="there is no data folder"):
        suites.get("gsm8k").items(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no wikitext2/"):
        suites.get("wikitext2").items(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    with pytest.raises(ValueError, match=r"there is no file .*test.jsonl"):
        suites.get("gsm8k").items(tmp_path)
