"""Values of a wrong kind that only show while a request runs: text that is none, and callables that return nonsense."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from chat_tokenizer import chat_tokenizer
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for

LONE = "a\ud800b"


@functools.cache
def engine() -> Engine:
    return engine_for(tiny("llama", vocab_size=len(chat_tokenizer())), chat_tokenizer())


def run(prompt: Any = "Hello", **options: Any) -> Any:
    return engine().generate(prompt, **{"max_new_tokens": 3, "ignore_eos": "constraint" not in options, **options})


TEXTS: dict[str, Callable[[], Any]] = {
    "a prompt": lambda: run(LONE),
    "one prompt of two": lambda: run(["Hello", LONE]),
    "a message": lambda: run([{"role": "user", "content": LONE}]),
    "a system message": lambda: engine().session(system=LONE).send("Hi", max_new_tokens=2),
    "a turn": lambda: engine().session().send(LONE, max_new_tokens=2),
    "a stop string": lambda: run(stop=["b", LONE]),
    "a pattern": lambda: run(constraint=shoal.Regex(LONE)),
    "a grammar": lambda: run(constraint=shoal.Grammar(f'root ::= "{LONE}"')),
    "a schema": lambda: run(constraint={"enum": [LONE]}),
    "a schema's key": lambda: run(constraint={"properties": {LONE: {}}}),
    "a method's option": lambda: run(method={"method": "d3", "method_args": {"order": LONE}}),
}


@pytest.mark.parametrize("where", TEXTS)
def test_a_lone_surrogate(where: str) -> None:
    with pytest.raises(ValueError, match=r"has the lone surrogate '\\ud800' at character \d+, .*cut in two"):
        TEXTS[where]()
    assert run().tokens


@pytest.mark.parametrize("found", ["yes", b"yes", None, {}, object(), ["a"]])
def test_a_stopping_criterion_that_says_neither_yes_nor_no(found: Any) -> None:
    with pytest.raises(ValueError, match="the stopping criterion .* returned .*; it must be True or False"):
        run(stopping_criteria=[lambda ids, scores: found])


@pytest.mark.parametrize("found", [True, torch.tensor([True]), [False, True], 1])
def test_a_stopping_criterion_that_says_yes(found: Any) -> None:
    assert len(run(stopping_criteria=[lambda ids, scores: found]).tokens) == 1


@pytest.mark.parametrize("found", ["no", None, [], 5, torch.zeros(3), torch.zeros(1, 3)])
def test_a_logits_processor_that_returns_no_scores(found: Any) -> None:
    with pytest.raises(ValueError, match=r"the logits processor .* returned .*; it must be the scores, a tensor \[1, "):
        run(logits_processor=[lambda ids, scores: found])


@pytest.mark.parametrize("bias", [{5: None}, {5: "x"}, {True: 1.0}, [5], 5])
def test_a_bias_of_another_kind(bias: Any) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        run(logit_bias=bias)


def test_an_error_of_the_callers_own_comes_through() -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("mine")

    for options in ({"stopping_criteria": [fails]}, {"logits_processor": [fails]}):
        with pytest.raises(ZeroDivisionError, match="mine"):
            run(**options)
