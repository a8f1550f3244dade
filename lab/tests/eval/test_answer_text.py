"""Which of an answer's tokens a judge is shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chat_tokenizer import chat_tokenizer
from shoal_lab.eval.decoders import Answered
from shoal_lab.eval.evaluate import Evaluator
from shoal_lab.eval.items import Item, Sample


def shown(prompt: str, answer: str, stop: tuple[str, ...], tokenizer: Any = None, eos: bool = False) -> str:
    tokenizer = tokenizer or chat_tokenizer()
    item = Item("a", "", "", "x", stop=stop)
    ids, tokens = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (prompt, answer))
    found = Answered([*tokens, *([2] if eos else [])], 1.0, "stop")
    there: Any = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer, eos_token_ids=frozenset({2})))
    return Evaluator._text(there, Sample(item, ids, ()), found)


@pytest.mark.parametrize(("answer", "stop", "text"), [
    ("one? two", ("?",), "one"), ("one two", ("?",), "one two"), ("one! two?", ("?", "! "), "one"), ("?", ("?",), ""),
    ("one? two", (), "one? two"),
])
@pytest.mark.parametrize("eos", [False, True])
def test_an_answer_ends_where_the_first_stop_text_begins(answer, stop, text, eos):
    assert shown("some prompt", answer, stop, eos=eos) == text


class Stripping:
    """Letters as tokens, and a decoder that drops the space before the first word, like sentencepiece."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens)).removeprefix(" ")


def test_the_space_before_the_first_word_is_kept():
    assert shown("def f():\n", "    return 1\n```", ("\n```",), Stripping()) == "    return 1"
