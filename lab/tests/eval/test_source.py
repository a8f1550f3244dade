"""Code of a model as text: where it is cut, how often it is parsed for that, and that warnings stay silent."""

from __future__ import annotations

import ast
import random
import warnings
from pathlib import Path

import pytest

from shoal.decode.branches.examples import examples, program
from shoal.sandbox import source
from shoal_lab.eval.judges.tests import needed

PIECES = ["(", ")", "'", '"""', "x = (\n", "\n", "    ", "return 1\n", "f'{a b}'", "try:\n", "?", "\\\n", "it was so\n"]


def slowly(code: str) -> ast.Module | None:
    """The longest prefix, in lines, that can be parsed."""
    lines = code.splitlines()
    trees = (source.tree_of("\n".join(lines[:count])) for count in range(len(lines), 0, -1))
    return next((tree for tree in trees if tree is not None), None)


def test_code_is_cut_where_a_reading_of_every_beginning_cuts_it() -> None:
    dice, text, cut = random.Random(5), Path(source.__file__).read_text("utf-8"), 0
    for _ in range(150):
        code = text[: dice.randrange(60, len(text))]
        for _ in range(dice.randrange(3)):
            place = dice.randrange(len(code))
            code = code[:place] + dice.choice(PIECES) + code[place:]
        wanted, found = slowly(code), source.tree_of(source.whole(code))
        if wanted is None or not wanted.body:
            assert found is None or not found.body
        else:
            assert found is not None and ast.dump(found) == ast.dump(wanted), code
            cut += source.tree_of(code) is None
    assert cut > 50


@pytest.mark.parametrize(("end", "most"), [
    ("x = (\n" * 190, 3), ("it was so\n" * 300, 3), ("x = '''\n" + "a\n" * 300, 3),
    ("try:\n" + "    x = 1\n" * 300, 50),
])
def test_no_code_is_read_more_often_than_said(monkeypatch: pytest.MonkeyPatch, end: str, most: int) -> None:
    reads: list[str] = []
    monkeypatch.setattr(source, "parsed", lambda code: reads.append(code) or ast.parse(code))
    good = "def f():\n    return 1\n"
    assert source.whole(good + end) == (good if most < 50 else good + end)
    assert len(reads) <= most


def test_what_is_nested_too_deeply_to_be_written_stays_as_it_is() -> None:
    code = f"def f():\n    return {'1 + ' * 400}1\n"
    assert program("", code + "x = (") == code == needed(code, "f", "")


def test_warnings_about_a_model_s_code_are_nobody_s() -> None:
    code = 'def f():\n    return "\\d" is 2\n'
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert program("", code) == needed(code, "f", "") != code
        assert len(examples(">>> f('\\d' is 2)\n'\\d'\nf('\\d') => '\\d'\n")) == 2
    assert not told
