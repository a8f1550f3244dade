"""Chat templates in their process: the text is that of transformers, and hostile ones are limited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shoal.engine.request import chat_ids
from shoal.sandbox import template
from shoal.sandbox.helper import Helpers
from shoal.sandbox.template import TakesTooMuch, rendered
from tool_tokenizer import NOW, tool_tokenizer

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be é 世."}, {"role": "user", "content": "one\n <|end|>", "name": None},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {"a": [1, None]}}}]},
    {"role": "tool", "content": "12"},
]
HOSTILE = {
    "ranges": ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "computing time"),
    "lipsum": ("{{ lipsum(n=100000, min=500, max=1000) }}", "computing time"),
    "indent": ("{{ messages | tojson(indent=10**9) }}", "memory"),
    "times": ("{{ 'a' * 10**10 }}", "memory"),
    "doubled": ("{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
                "memory|writes"),
    "format": ("{{ '{:>9999999999}'.format(1) }}", "memory"),
    "center": ("{{ 'a' | center(10**10) }}", "memory"),
    "join": ("{{ range(99999) | join('a' * 99999) }}", "memory"),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    "blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "nested too deeply"),
    "long": ("{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "writes 9899901 characters, and may write 10"),
}


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    helpers = Helpers("shoal.sandbox.template", seconds=1, memory=template.MEMORY)
    monkeypatch.setattr(template, "_helpers", helpers)
    yield
    helpers.end()


def spoken(chat_template: str) -> Any:
    words = tool_tokenizer()
    words.chat_template = chat_template
    return words


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("more", [{}, {"tools": [NOW]}, {"mood": "glad", "bos_token": "x"}], ids=str)
def test_the_text_is_that_of_transformers(tagged: bool, more: dict[str, Any]) -> None:
    words = tool_tokenizer(tagged)
    for opening in (True, False):
        options = {"add_generation_prompt": opening, **more}
        assert rendered(words, TALK, **options) == words.apply_chat_template(TALK, tokenize=False, **options)
    left = {"continue_final_message": True, **more}
    assert rendered(words, TALK[:2], **left) == words.apply_chat_template(TALK[:2], tokenize=False, **left)
    assert chat_ids(TALK, words) == words.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)


def test_a_tokenizer_with_a_way_of_its_own_keeps_it() -> None:
    class Own:
        chat_template = "x"

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return f"{len(messages)} {options}"

    assert rendered(Own(), TALK, a=1) == "4 {'a': 1, 'tokenize': False}"


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_is_held_to_limits(little_time: None, case: str) -> None:
    text, why = HOSTILE[case]
    with pytest.raises(TakesTooMuch, match=f"refuses these messages: it .*({why})"):
        rendered(spoken(text), TALK[:2])
    assert rendered(spoken("{{ messages[0].content }}"), TALK) == TALK[0]["content"]


def test_a_long_talk_may_be_long() -> None:
    long = "a" * (template.LONGEST + 1)
    twice = "{{ messages[0].content }}" * 2
    assert rendered(spoken(twice), [{"role": "user", "content": long}]) == 2 * long


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ raise_exception('') }}", "TemplateError, without a reason$"),
        ("{{ raise_exception(' \n ') }}", "TemplateError, without a reason$"),
        ("{{ raise_exception('roles must\nalternate\x1b[31m') }}", r"roles must alternate \[31m$"),
        ("{{ raise_exception('a' * 100000) }}", "a{300} ...$"),
        ("{{ messages.none.of }}", "no attribute 'none'$"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
    ],
    ids=str,
)
def test_what_a_template_says_is_told_in_a_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"refuses these messages: .*{why}") as caught:
        rendered(spoken(text), TALK)
    assert not isinstance(caught.value, TakesTooMuch) and str(caught.value).isprintable()


def test_a_limit_is_met_once_where_a_system_message_would_be_told_otherwise(
    little_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = [], Helpers.ask
    monkeypatch.setattr(Helpers, "ask", lambda self, question: asked.append(1) or ask(self, question))
    with pytest.raises(TakesTooMuch):
        chat_ids(TALK, spoken("{{ 'a' * 10**10 }}"))
    assert len(asked) == 1
