"""GSM8K training problems with new random numbers, whose chain of calculations is evaluated again.

A number stands for one quantity wherever it occurs: in the question, in the calculations `<<a>>` and in the sentences
of the answer. A problem can be renumbered if every number of its answer is a number of the question, an earlier result,
or a common constant, and no two quantities share a number. A number followed by a comma is not read.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from .templates.draw import Problem

CONSTANTS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 24, 30, 52, 60, 100})
ANY_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>]+)>>")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
WORDS = {
    2: r"two|twice|doubl\w*|half|halves|second|couple|pair\w*|both|other",
    3: r"three|thrice|tripl\w*|third\w*",
    4: r"four|quadrupl\w*|quarter\w*|fourth\w*|month\w*",
    5: r"five|fifth\w*",
    6: r"six|sixth\w*",
    7: r"seven|week\w*",
    10: r"ten|tenth\w*",
    12: r"twelve|dozen\w*|year\w*",
    24: r"day\w*|hour\w*",
    60: r"hour\w*|minute\w*|seconds",
    30: r"month\w*",
    52: r"year\w*",
}
LARGEST = 1_000
TRIES = 200


@dataclass(frozen=True, slots=True)
class Known:
    """A problem that can be renumbered: its text, its calculations, and the numbers that may change."""

    question: str
    answer: str
    steps: tuple[tuple[str, int], ...]
    given: tuple[int, ...]


def evaluate(expression: str) -> Fraction:
    """The exact value of a calculation with whole numbers, + - * / and brackets.

    Raises:
        ValueError: the text is not such a calculation.
    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"{expression!r} cannot be calculated: {error}") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return Fraction(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"{ast.dump(node)} is no calculation with whole numbers")


def known(question: str, answer: str) -> Known | None:
    """Read a GSM8K problem; None if it cannot be renumbered."""
    if any(not part.isdigit() for part in ANY_NUMBER.findall(question + answer)) or "%" in question + answer:
        return None
    given = tuple(sorted({int(part) for part in ANY_NUMBER.findall(question)}))
    steps = tuple((left.strip(), right.strip()) for left, right in ANNOTATION.findall(answer))
    if not steps or not all(right.isdigit() for _, right in steps) or max(given, default=0) > LARGEST:
        return None
    problem = Known(question, answer, tuple((left, int(right)) for left, right in steps), given)
    return problem if _traceable(problem) else None


def _traceable(problem: Known) -> bool:
    """Whether the chain is right and every number of the answer has one source."""
    if any(
        number in problem.given and re.search(rf"\b({word})\b", problem.question, re.I)
        for number, word in WORDS.items()
    ):
        return False
    names = set(problem.given)
    try:
        for left, right in problem.steps:
            operands = {int(part) for part in ANY_NUMBER.findall(left)}
            if not operands <= names | CONSTANTS or evaluate(left) != right:
                return False
            names.add(right)
    except ValueError:
        return False
    total = problem.answer.rsplit("####", 1)[-1].strip()
    rest = {int(part) for part in ANY_NUMBER.findall(problem.answer)}
    return rest <= names | CONSTANTS and total.isdigit() and int(total) == problem.steps[-1][1]


def _replace(text: str, new: Mapping[int, int]) -> str:
    return ANY_NUMBER.sub(lambda match: str(new.get(int(match.group()), int(match.group()))), text)


def renumbered(problem: Known, source: random.Random, largest: int = LARGEST) -> tuple[str, str] | None:
    """Question and annotated answer with new numbers up to `largest`, or None if no fitting ones were found."""
    for _ in range(TRIES):
        new = {old: _near(old, source, largest) for old in problem.given}
        if _extend(problem, new, largest):
            return _replace(problem.question, new), _replace(problem.answer, new)
    return None


def _near(old: int, source: random.Random, largest: int) -> int:
    top = min(largest, old + old // 2 + 3)
    return old if old <= 1 else source.randint(min(top, max(2, old // 2)), top)


def _extend(problem: Known, new: dict[int, int], largest: int) -> bool:
    """Add the results of the chain to `new`; False if one is not whole, not positive, too large or ambiguous."""
    for left, right in problem.steps:
        value = evaluate(_replace(left, new))
        if value.denominator != 1 or not 0 < value <= largest or new.setdefault(right, int(value)) != value:
            return False
    return True


def sound(answer: str) -> bool:
    """Whether every calculation of an annotated answer is right.

    It is not if the answer used a constant that later turned out to be the number of a result.
    """
    return all(evaluate(left) == int(right) for left, right in ANNOTATION.findall(answer))


def natural(question: str, answer: str, kind: str) -> Problem:
    """The form with sentences: annotations removed, one blank around the signs of a calculation."""
    text = ANNOTATION.sub("", answer)
    text = re.sub(r"(?<=\d)\s*([-+*/x=])\s*(?=\$?\d)", lambda m: f" {m.group(1).replace('x', '*')} ", text)
    sentences, total = (part.strip() for part in text.rsplit("####", 1))
    lines = [line.strip() for line in sentences.splitlines() if line.strip()]
    told = " ".join(line if line.endswith((".", "!", "?", ":")) else f"{line}." for line in lines)
    return Problem(" ".join(question.split()), " ".join(told.split()) + f"\n#### {total}", total, kind)


def equations(question: str, answer: str, kind: str) -> Problem:
    """The form with calculations only; its question ends with ` (equations)`."""
    chain = " ".join(f"<<{left.replace(' ', '')}={right.strip()}>>" for left, right in ANNOTATION.findall(answer))
    total = answer.rsplit("####", 1)[-1].strip()
    return Problem(f"{' '.join(question.split())} (equations)", f"{chain} #### {total}", total, kind)
