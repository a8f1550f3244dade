"""Verdicts of judges: numbers, contained answers, code blocks."""

from __future__ import annotations

import ast
from fractions import Fraction

import pytest

from shared_models import data_path
from shoal.errors import Unsupported
from shoal_lab.eval import judging, suites
from shoal_lab.eval.items import Item
from shoal_lab.eval.judges import get, number, texts
from shoal_lab.eval.judges import tests as code
from shoal_lab.eval.judging import Judging


@pytest.mark.parametrize(("text", "found"), [
    ("3 and 4, so\n#### 7", "7"),
    ("#### 7\n\nQuestion: 8", "7"),
    ("#### $1,250.50 dollars of 9", "1250.5"),
    ("#### The answer is 7.", "7"),
    ("so \\boxed{12} of 30", "12"),
    ("first \\boxed{3}, then \\boxed{x = 4}", "4"),
    ("####\nThe answer is 5 apples.", "5"),
    ("He pays $3 and then 1,000,000.", "1000000"),
    ("1,23", "23"),
    ("it is -5", "-5"),
    ("10-3", "3"),
    ("10 - 3 = 7", "7"),
    ("a half is .5", "0.5"),
    ("none at all", None),
    ("", None),
])
def test_the_final_number(text, found):
    assert number.final_number(text) == (None if found is None else Fraction(found))


def test_numbers_are_compared_by_value():
    item = Item("a", "", "", "1,600")
    assert number.judge("#### 1600.00", item) == {"right": True}
    assert number.judge("#### 160", item) == {"right": False} == number.judge("", item)


def test_the_reference_solutions_of_gsm8k_are_right():
    items = suites.get("gsm8k").items(data_path("gsm8k").parent)
    assert all(number.judge(item.solution, item)["right"] for item in items)
    assert not any(number.judge("", item)["right"] for item in items)


@pytest.mark.parametrize(("text", "gold", "right"), [
    ("It was built by the Denver Broncos, of course.", "Denver Broncos", True),
    ("It was built by Denver's Broncos.", "Denver Broncos", False),
    ("It was a party.", "art", False),
    ("The THE a Theory", "theory", True),
    ("His blood type is A.", "A", True),
    ("His blood type is B.", "A", False),
    ("", "x", False),
    ("anything", "", False),
])
def test_contained_answers(text, gold, right):
    assert texts.contains(text, Item("a", "", "", gold))["right"] is right


def test_f1_is_the_best_gold_s():
    item = Item("a", "", "", "x", golds=("red brick house", "brick"))
    assert texts.contains("the brick", item) == {"right": True, "f1": 1.0}
    assert texts.contains("red brick", item)["f1"] == 0.8
    assert texts.f1(["x", "x"], ["x"]) == pytest.approx(2 / 3)


def test_unknown_judges_are_named():
    with pytest.raises(ValueError, match="Did you mean 'number'"):
        get("numbr")


ITEM = Item("a", "", "", "f", judge="tests", given="from math import pi\n\ndef helper():\n    return 2\n\ndef f():\n"
            '    """Doc."""\n', tests="def check(f):\n    assert f() == 4\n\ncheck(f)\n")


@pytest.mark.parametrize("text", [
    "def f():\n    return 4\n```\nThis works since",
    "```python\ndef f():\n    return 4\n```",
    "    return 2 * helper()\n",
    "    return 2 + 2\n\nprint(f())\nassert f() == 5\nn = int(input())\nif __name__ == '__main__':\n    f(1)\n",
    "def g():\n    return K\n\nK = 4\n\ndef f():\n    return g()\n\ndef cut(x",
    "import os\ndef f():\n    return 4\n\nclass Broken(",
    "table = {}\nfor i in range(5):\n    table[i] = i\ntable[9] = 0\ndef f():\n    return table[4]\n",
    "try:\n    from nosuch import four\nexcept ImportError:\n    four = 4\ndef f():\n    return four\n",
    "def f():\n    x = 4\n    return x\nx = f(1, 2)\nfor i in range(3):\n    x = 1 / 0\n",
])
def test_blocks_of_all_kinds_are_run(text):
    with Judging[str](unsafe=True, workers=1) as judged:
        judged.put("a", text, ITEM)
        assert dict(judged.rest()) == {"a": {"right": True, "verdict": "passed"}}


@pytest.mark.parametrize(("text", "verdict"), [
    ("def f():\n    return 5\n", "failed"), ("", "failed"), ("    return helper(\n", "failed"),
    ("import nosuch\ndef f():\n    return 4\n", "error"),
])
def test_blocks_that_are_wrong(text, verdict):
    with Judging[str](unsafe=True, workers=1) as judged:
        judged.put("a", text, ITEM)
        assert dict(judged.rest())["a"]["verdict"] == verdict


def test_only_what_the_function_needs_is_kept():
    kept = code.needed("import re\nX = 1\nY = 2\ndef f():\n    return X\nprint(Y)\nf()\n", "f", "check(f)")
    assert kept == ast.unparse(ast.parse("import re\nX = 1\ndef f():\n    return X")) + "\n"
    assert code.needed("print(1)\n", "f", "") == "print(1)\n"
    assert "class Pair" in code.needed("class Pair:\n    pass\ndef f():\n    pass\n", "f", "f([Pair()])")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("humaneval", 164), ("mbpp", 974)])
def test_every_reference_passes_its_tests_and_nothing_does_not(name, count):
    try:
        judging.find()
    except Unsupported as error:
        pytest.skip(str(error))
    items = suites.get(name).items(data_path(name).parent)
    with Judging[tuple[str, bool]]() as judged:
        for item in items:
            judged.put((item.id, True), item.solution, item)
            judged.put((item.id, False), "", item)
        found = dict(judged.rest())
    assert len(items) == count
    assert [item.id for item in items if not found[item.id, True]["right"]] == []
    assert [item.id for item in items if found[item.id, False]["right"]] == []


def test_slow_programs_do_not_hold_up_what_comes_after():
    wait = "import time\ndef f():\n    time.sleep(0.5)\n    return 4\n"
    with Judging[int](unsafe=True, workers=2) as judged:
        for index in range(2):
            judged.put(index, wait, ITEM)
        judged.put(2, "4", Item("b", "", "", "4", judge="number"))
        assert dict(judged.ready()) == {2: {"right": True}}
        assert sorted(dict(judged.rest())) == [0, 1]
        assert dict(judged.rest()) == {}


def test_an_interruption_ends_every_sandbox(monkeypatch):
    closed = []
    monkeypatch.setattr(judging.Sandbox, "close", lambda self: closed.append(self._stop()))
    with pytest.raises(KeyboardInterrupt), Judging[int](unsafe=True, workers=2) as judged:
        judged.put(0, "def f():\n    return 4\n", ITEM)
        raise KeyboardInterrupt
    assert len(closed) >= 2
