"""Renumbering of GSM8K: exact chains, sentences that follow, refused problems."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.reference import renumber

QUESTION = "Ann has 48 red and 10 blue pens. She sells half as many as she has red ones. How many are left?"
ANSWER = "She sells 48/2=<<48/2=24>>24.\nShe had 48+10=<<48+10=58>>58 pens\nSo 58-24=<<58-24=34>>34 are left.\n#### 34"


def known() -> renumber.Known:
    problem = renumber.known(QUESTION, ANSWER)
    assert problem is not None
    return problem


@given(st.integers(0, 99), st.sampled_from("+-*/"), st.integers(1, 99), st.sampled_from("+-*"), st.integers(0, 9))
def test_evaluates_as_python_does(a: int, first: str, b: int, second: str, c: int) -> None:
    text = f"{a}{first}{b}{second}{c}"
    assert renumber.evaluate(text) == eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})


@pytest.mark.parametrize("text", ["1/0", "2**3", "a+1", "1+", "f(2)", "True", "0.5*2"])
def test_refuses_what_is_no_whole_calculation(text: str) -> None:
    with pytest.raises(ValueError, match="calculat"):
        renumber.evaluate(text)


def test_new_numbers_go_everywhere() -> None:
    for seed in range(50):
        drawn = renumber.renumbered(known(), random.Random(seed))
        assert drawn is not None
        red, blue = map(int, re.findall(r"\d+", drawn[0]))
        left = red + blue - red // 2
        assert red % 2 == 0
        assert f"{red}/2=<<{red}/2={red // 2}>>{red // 2}." in drawn[1]
        assert drawn[1].endswith(f"{left} are left.\n#### {left}")


def test_both_forms() -> None:
    natural = renumber.natural(QUESTION, ANSWER, "x")
    assert natural.solution == "She sells 48 / 2 = 24. She had 48 + 10 = 58 pens. So 58 - 24 = 34 are left.\n#### 34"
    equations = renumber.equations(QUESTION, ANSWER, "x")
    assert equations.question == f"{QUESTION} (equations)"
    assert equations.solution == "<<48/2=24>> <<48+10=58>> <<58-24=34>> #### 34"
    assert natural.answer == equations.answer == "34"


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("He pays 0.5 dollars for 4.", "<<4*0.5=2>>2\n#### 2"),
        ("10% of 50", "<<50*10=500>>500\n#### 500"),
        ("There are 8 and 9.", "<<8+9=18>>18\n#### 18"),
        ("There are 8 and 9.", "<<8+9+77=94>>94\n#### 94"),
        ("There are 8 and 9.", "<<8+9=17>>17 and 55 more\n#### 17"),
        ("There are 8 and 9.", "<<8+9=17>>17\n#### 18"),
        ("There are 8 and 9.", "Seventeen.\n#### 17"),
        ("There are 2 hens and twice as many cows.", "<<2*2=4>>4\n#### 4"),
        ("There are 8 and 5000.", "<<8+5000=5008>>5008\n#### 5008"),
    ],
)
def test_problems_that_cannot_be_traced_are_left_out(question: str, answer: str) -> None:
    assert renumber.known(question, answer) is None


def test_a_chain_that_a_constant_broke_is_not_sound() -> None:
    assert renumber.sound("<<8/4=2>> and <<2+3=5>>")
    assert not renumber.sound("<<8/2=2>> and <<2+3=5>>")


def test_two_quantities_with_one_number_are_refused() -> None:
    text = "<<12+6=18>>18\n<<9*4=36>>36\n<<36-18=18>>18\n<<18+6=24>>24\n#### 24"
    problem = renumber.known("Of 12 and 6 and 9.", text)
    assert problem is not None
    drawn = [drawn for seed in range(400) if (drawn := renumber.renumbered(problem, random.Random(seed)))]
    assert drawn
    assert all(renumber.sound(answer) for _, answer in drawn)
