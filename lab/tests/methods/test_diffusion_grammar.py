"""Filling masks under a grammar, against an enumeration of all its texts."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import shoal
from grammars import measured, recognises, rules_of
from masked import MASK, masked_engine
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal_lab.loops.grammar import CanvasGrammar
from shoal_lab.methods.diffusion import Diffusion
from shoal_lab.methods.diffusion_grammar import DiffusionGrammar

GRAMMARS = {
    "brackets": 's ::= "(" ")" | "(" s ")" | s s',
    "lists": 'list ::= name | name "," list\nname ::= "a" | "b" tail\ntail ::= "c" | "c" tail',
    "units": 'top ::= one | one "x"\none ::= two\ntwo ::= "a" | "b" one',
    "nothing": 'm ::= "" | "a" m "b" m',
    "optional": 's ::= a b a\na ::= "" | "c"\nb ::= a | "d" b',
    "circle": 's ::= t | "a" s\nt ::= s | u u\nu ::= "" | "b" | t',
    "long": 'l ::= "a" "b" "c" "d" | "a" "a" l',
}
LETTERS = "(),abcdx"
END = 99


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def fits(name: str, canvas: Sequence[str | None], place: int) -> list[int]:
    """Tokens allowed at a place, by trying all; None stands for a mask, END follows a text."""
    rules = rules_of(GRAMMARS[name])

    def possible(canvas: Sequence[str | None]) -> bool:
        return any(recognises(rules, canvas[:last]) and all(one in (None, "END") for one in canvas[last:])
                   for last in range(len(canvas) + 1))

    return [word for word, letter in (*enumerate(LETTERS), (END, "END"))
            if possible([*canvas[:place], letter, *canvas[place + 1 :]])]


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_chart_says_what_trying_all_words_says(name: str) -> None:
    """At every state of random canvases, for every token at every open place."""
    dice = random.Random(name)
    grammar = CanvasGrammar.read(GRAMMARS[name], encode)
    for length in (1, 2, 3, 5, 7):
        canvas: list[str | None] = [None] * length
        chart = grammar.chart(length, [END])
        assert chart.possible == bool(fits(name, canvas, 0))
        for place in dice.sample(range(length), length) if chart.possible else ():
            found = fits(name, canvas, place)
            assert chart.fits(place) == found and found
            word = dice.choice(found)
            chart.put(place, word)
            canvas[place] = "END" if word == END else LETTERS[word]
            assert chart.possible


def test_the_recogniser_knows_languages_that_a_line_of_code_tells() -> None:
    """The judge of the tests and of the benchmark: all texts of up to six letters, one by one."""
    languages = {
        'm ::= "" | "a" m "a" | "b" m "b"': lambda text: text == text[::-1] and len(text) % 2 == 0,
        's ::= "" | "a" s "b"': lambda text: text == "a" * (len(text) // 2) + "b" * (len(text) // 2),
        's ::= s "a" t | t\nt ::= "b" | "b" t': lambda text: all(text.split("a")),
    }
    for rules, holds in languages.items():
        for length in range(7):
            for text in map("".join, itertools.product("ab", repeat=length)):
                assert recognises(rules_of(rules), list(text)) == holds(text), (rules, text)


def test_without_an_end_a_text_fills_the_canvas() -> None:
    grammar = CanvasGrammar.read(GRAMMARS["brackets"], encode)
    assert [grammar.chart(length, []).possible for length in range(1, 7)] == [False, True] * 3
    assert all(grammar.chart(length, [END]).possible for length in range(2, 7))


@pytest.mark.parametrize(("text", "message"), [
    ("", "has no rule"), ("a", "'a' is no rule of a grammar"), ('a ::= "b" |', "no alternative of which is left out"),
    ("a ::= b", "names 'b' and has no rule for it"), ('a ::= "b', "is no rule of a grammar"),
    ('a b ::= "c"', "is no rule of a grammar"), ('a ::= "b"\n' * 500, "has 5000 characters; it may have 4000"),
])
def test_what_is_no_grammar(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CanvasGrammar.read(text, encode)


def test_texts_of_several_tokens_and_escapes() -> None:
    said: list[str] = []

    def listen(text: str) -> list[int]:
        said.append(text)
        return [ord(letter) for letter in text]

    grammar = CanvasGrammar.read('a ::= "ab" "\\n" | "say \\"x\\""', listen)
    assert said == ["ab", "\n", 'say "x"']
    chart = grammar.chart(3, [])
    for place, letter in enumerate("ab\n"):
        assert chart.fits(place) == [ord(letter)] or place == 0
        chart.put(place, ord(letter))


@functools.cache
def canvas() -> Engine:
    return shoal.load(str(Path(__file__).parents[3] / "hub" / "shoal-canvas"), dtype="float32")


NAMES = 'list ::= name | name list\nname ::= "ann" | "bob" | "cid" | "dee" | "kim"'
PAIRS = 'top ::= sum "\\n" sum\nsum ::= digit "+" digit "=" digit\ndigit ::= "1" | "2" | "3"'


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("steps", [None, 4, 1])
def test_answers_are_texts_of_the_grammar_whatever_the_prompt(steps: Any, options: dict[str, Any]) -> None:
    for prompt in ("shuffle : ann bob cid dee =", "sum : 1 2 3 =", "sentence : dog red hill ="):
        method = DiffusionGrammar(rules=PAIRS, steps=steps)
        found = canvas().generate(prompt, method=method, max_new_tokens=12, **options)
        lines = found.text.split("\n")
        assert len(lines) == 2 and found.finish_reason == "stop", found.text
        for line in lines:
            left, plus, right, equals, total = line.split()
            assert {left, right, total} <= {"1", "2", "3"} and (plus, equals) == ("+", "=")


@pytest.mark.parametrize("steps", [None, 2, 1])
def test_words_that_are_decided_together_fit_each_other(steps: Any) -> None:
    """Each token would be allowed in several places, but tokens of different texts do not fit together."""
    rules = 'turn ::= "ann" "bob" "cid" | "bob" "cid" "ann" | "cid" "ann" "bob"'
    found = set()
    for seed in range(12):
        out = canvas().generate("shuffle : ann bob cid dee =", method=DiffusionGrammar(rules=rules, steps=steps),
                                max_new_tokens=3, temperature=2.0, seed=seed)
        found.add(out.text)
    assert found <= {"ann bob cid", "bob cid ann", "cid ann bob"} and len(found) > 1


def test_an_answer_that_is_a_text_anyway_stays_as_it_is() -> None:
    for method in ({}, {"temperature": 0.7, "seed": 5}):
        options: dict[str, Any] = {"max_new_tokens": 5, "logprobs": 1, **method}
        plain, bound = (canvas().generate("copy : ann bob cid dee =", method=how, **options)
                        for how in (Diffusion(), DiffusionGrammar(rules=NAMES)))
        assert plain.text == bound.text == "ann bob cid dee" and plain.logprobs == bound.logprobs


def test_without_a_grammar_it_is_diffusion_bit_for_bit() -> None:
    options: dict[str, Any] = {"max_new_tokens": 9, "logprobs": 1}
    plain, bound = (masked_engine().generate([5, 17, 80], method=how, **options)
                    for how in (Diffusion(block=4, steps=5), DiffusionGrammar(block=4, steps=5)))
    assert (plain.tokens, plain.logprobs) == (bound.tokens, bound.logprobs)


def test_draws_that_are_replaced_have_the_law_of_what_is_let() -> None:
    """One of three tokens, drawn many times: each as often as its share among the three."""
    engine, prompt = canvas(), "put kim anywhere : ann bob cid dee ="
    method, runs = DiffusionGrammar(rules='w ::= "ann" | "kim" | "bob"'), 600
    asked: dict[str, Any] = {"max_new_tokens": 1, "temperature": 4.0, "ignore_eos": True}
    found = [one.text for one in engine.generate([prompt] * runs, method=method, seed=4, **asked)]
    (wide,) = engine.generate([prompt], method=Diffusion(), logprobs=85, seed=0, **asked)[0].logprobs or ()
    logs = {engine.tokenizer.decode([token]): log for token, log in wide.top}
    shares = {word: math.exp(logs[word] / 4) for word in ("ann", "kim", "bob")}
    assert sum(math.exp(log / 4) for log in logs.values()) > 1.5 * sum(shares.values())  # many are replaced
    assert max(shares.values()) > 2 * min(shares.values())
    for word, share in shares.items():
        expected = runs * share / sum(shares.values())
        assert abs(found.count(word) - expected) < 4.5 * expected**0.5 + 3, (word, found.count(word), expected)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Unsupported, match="a text of the grammar in 7 words: it has none that fits"):
        canvas().generate("sum : 1 2 3 =", method=DiffusionGrammar(rules=PAIRS), max_new_tokens=7)
    with pytest.raises(Unsupported, match="the text 'zebra' of a grammar: the model has no tokens for it"):
        canvas().generate("sum : 1 2 3 =", method=DiffusionGrammar(rules='a ::= "zebra"'), max_new_tokens=7)
    with pytest.raises(Unsupported, match="text is only known with a tokenizer"):
        masked_engine().generate([5, MASK], method=DiffusionGrammar(rules='a ::= "b"'), max_new_tokens=3)
    with pytest.raises(Unsupported, match="a grammar over 300 words: it is tried in plain Python, for up to 256"):
        engine = canvas()
        engine.runner.max_positions, before = 1000, engine.runner.max_positions
        try:
            engine.generate("sum : 1 2 3 =", method=DiffusionGrammar(rules=PAIRS), max_new_tokens=300)
        finally:
            engine.runner.max_positions = before
    with pytest.raises(ValueError, match="is no rule of a grammar"):
        DiffusionGrammar(rules="nonsense")


def test_a_canvas_of_hundreds_of_words_is_filled_in_seconds() -> None:
    """In any order; every second token of a list is a comma, and the chart must allow no others there."""
    length, dice = 201, random.Random(1)
    chart = CanvasGrammar.read('list ::= name | name "," list\nname ::= "a" | "b"', encode).chart(length, [])
    for place in dice.sample(range(length), 20):
        found = encode(",") if place % 2 else encode("ab")
        assert chart.fits(place) == found
        chart.put(place, found[-1])
    assert chart.possible


def test_an_answer_of_no_words() -> None:
    method = DiffusionGrammar(rules='none ::= ""')
    found = canvas().generate("copy : ann bob cid dee =", method=method, max_new_tokens=5)
    assert (found.text, found.finish_reason) == ("", "stop")


@pytest.mark.slow
@pytest.mark.parametrize("count", [32, 2000])
def test_all_answers_are_texts_and_no_guess_is_lost(count: int) -> None:
    """Eight grammars, greedy and sampled, judged by a recogniser that shares no code with the chart."""
    total = measured(canvas(), count)["total"]
    assert total["answers"] == total["in_language"] == count and total["free_in_language"] < count / 4
    assert 0 < total["replaced"] < total["words"]


def test_every_canvas_on_the_way_has_a_filling() -> None:
    """Soundness, token by token: decided tokens always belong to some text."""
    left = list(itertools.product(("ann", "bob", "cid", "dee", "kim"), repeat=3))
    with canvas().stream("shuffle : ann bob cid dee =", method=DiffusionGrammar(block=1, rules=NAMES),
                         max_new_tokens=3) as stream:
        for step in stream:
            if step.token not in canvas().eos_token_ids:
                word = canvas().tokenizer.decode([step.token])
                left = [one for one in left if one[step.index] == word]
                assert left
