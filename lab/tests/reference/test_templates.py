"""Word problems from templates: calculations checked by a separate oracle, questions read and simulated."""

from __future__ import annotations

import operator
import re

import pytest
from tools.reference import templates
from tools.reference.templates import sums

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
CALCULATION = re.compile(r"(\d+(?: [-+*/] \d+)+) = (\d+)")


def left_to_right(text: str) -> float:
    first, *rest = text.split()
    value = float(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        value = SIGNS[sign](value, int(number))
    return value


@pytest.mark.parametrize("name", sorted(templates.ALL))
def test_every_calculation_is_right_and_the_last_one_gives_the_answer(name: str) -> None:
    for seed in range(150):
        problem = templates.problem(name, seed)
        found = CALCULATION.findall(problem.solution)
        assert found, problem
        for left, right in found:
            assert left_to_right(left) == int(right), problem
        assert found[-1][1] == problem.answer
        assert problem.solution.endswith(f"\n#### {problem.answer}")
        assert problem.solution.count("=") == len(found)


@pytest.mark.parametrize("name", sorted(templates.ALL))
def test_calculations_use_only_known_numbers(name: str) -> None:
    free = {"2", "3", "4", "5"}
    for seed in range(150):
        problem = templates.problem(name, seed)
        known = set(re.findall(r"\d+", problem.question)) | free
        if name == "discount":
            known |= {"10"}
        for left, right in CALCULATION.findall(problem.solution):
            assert set(re.findall(r"\d+", left)) <= known, problem
            known.add(right)


def simulated(question: str) -> int:
    """The number at the end of a story, from the sentences of its question alone."""
    first, *events = (part for part in question.split(". ") if not part.startswith("How many"))
    have = int(re.findall(r"\d+", first)[0])
    for event in events:
        numbers = [int(part) for part in re.findall(r"\d+", event)]
        if " more " in event:
            have += numbers[0]
        elif "puts all" in event:
            have = have // numbers[0] * (numbers[0] - numbers[1])
        elif "to each of" in event or " each" in event or re.search(r"buys \d+ \w+ of \d+", event):
            change = numbers[0] * numbers[1]
            have += -change if "friends" in event else change
        elif "half" in event:
            have //= 2
        elif "doubles" in event:
            have *= 2
        else:
            have -= numbers[0]
    return have


def test_a_story_ends_as_its_question_says() -> None:
    lengths = set()
    for seed in range(400):
        problem = templates.problem("story", seed)
        assert simulated(problem.question) == int(problem.answer), problem
        lengths.add(problem.question.count(". "))
    assert lengths >= {3, 4, 5, 6}


def test_riders_of_a_bus_are_those_who_stay() -> None:
    for seed in range(200):
        problem = templates.problem("bus", seed)
        riders, *changes = (int(part) for part in re.findall(r"\d+", problem.question))
        assert riders - sum(changes[::2]) + sum(changes[1::2]) == int(problem.answer)


def test_a_purchase_costs_what_its_goods_cost() -> None:
    for seed in range(200):
        problem = templates.problem("shopping", seed)
        goods = re.findall(r"(\d+) \w+s at \$(\d+)", problem.question)
        total = sum(int(count) * int(price) for count, price in goods)
        purse = re.search(r"has \$(\d+)\.", problem.question)
        assert int(problem.answer) == (int(purse.group(1)) - total if purse else total)


def test_a_seed_gives_the_same_problem_and_seeds_differ() -> None:
    once = [templates.trained_problem(seed) for seed in range(300)]
    assert once == [templates.trained_problem(seed) for seed in range(300)]
    assert len({problem.question for problem in once}) > 295


def test_held_out_templates_are_never_trained_on() -> None:
    trained = {templates.trained_problem(seed).kind for seed in range(2_000)}
    unseen = {templates.unseen_problem(seed).kind for seed in range(20)}
    assert trained == set(templates.TRAINED)
    assert unseen == set(templates.HELD_OUT)
    assert not trained & unseen


def test_an_unknown_template_is_named() -> None:
    with pytest.raises(ValueError, match="no template is called 'poetry'; there are story"):
        templates.problem("poetry", 0)


def test_sums_that_are_too_hard_are_rejected() -> None:
    assert sums.add(12, 15).text == "12 + 15 = 27"
    assert f"{sums.mul(5, 3)}" == "15"
    for make in (
        lambda: sums.sub(3, 3),
        lambda: sums.div(7, 2),
        lambda: sums.mul(21, 22),
        lambda: sums.mul(20, 51),
        lambda: sums.add(1_000, 501),
    ):
        with pytest.raises(sums.Reject):
            make()
