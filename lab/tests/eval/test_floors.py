"""Trivial answers, and the prompts of the suites that they answer."""

from __future__ import annotations

from typing import Any

import pytest

from chat_tokenizer import chat_tokenizer
from shared_models import data_path
from shoal_lab.eval import suites
from shoal_lab.eval.floors import floors
from shoal_lab.eval.items import Item, Sample, encode


def samples(*items: Item) -> list[Sample]:
    return [Sample(item, (1,), (1,)) for item in items]


class WordTokenizer:
    """A token per word."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[str]]:
        return {"input_ids": text.split(" ")}

    def decode(self, tokens: list[str]) -> str:
        return " ".join(tokens)


def contained(name: str, prompt: str, answer: str) -> Item:
    return Item(name, prompt, "", answer, judge="contains", golds=(answer,))


def test_trivial_answers_are_judged_like_others():
    items = samples(contained("a", "It is red. Its roof is blue. What colour?", "red"),
                    contained("b", "It is old. Its roof is blue. What colour?", "blue"),
                    contained("c", "Nothing is said.", "blue"))
    found = floors(items, WordTokenizer(), 100)
    assert found["empty"] == {"accuracy": 0, "f1": 0}
    assert found["echo"]["accuracy"] == pytest.approx(2 / 3)
    assert found["first sentence"]["accuracy"] == pytest.approx(1 / 3)
    assert found["most frequent answer"] == pytest.approx({"accuracy": 2 / 3, "f1": 2 / 3})


def test_an_echo_is_no_longer_than_an_answer():
    item = contained("a", "one two three four", "four")
    assert floors(samples(item), WordTokenizer(), 4)["echo"]["accuracy"] == 1
    assert floors(samples(item), WordTokenizer(), 3)["echo"]["accuracy"] == 0


def test_the_most_frequent_number_is_said_as_the_judge_reads_it():
    items = [Item(name, "x 9", "", answer, judge=judge) for judge in ("mark", "number")
             for name, answer in ((f"{judge} a", "4"), (f"{judge} b", "4"), (f"{judge} c", "5"))]
    found = floors(samples(*items), WordTokenizer(), 9)
    assert found["most frequent answer"]["accuracy"] == pytest.approx(2 / 3) and found["echo"]["accuracy"] == 0


@pytest.mark.parametrize("name", ["humaneval", "mbpp", "gsm8k", "squad", "wikidata_qa"])
def test_prompts_are_asked_by_chat_and_plainly(name):
    item = suites.get(name).items(data_path(name).parent)[0]
    assert item.prompt and item.plain and item.answer and item.stop and item.judge != "mark"
    assert item.solution.rstrip("`\n") not in item.prompt + item.plain or item.judge == "contains"


def test_questions_on_a_paragraph_begin_alike():
    items = suites.get("squad").items(data_path("squad").parent)
    mine = [item for item in items if item.prompt.split("\n\n")[0] == items[0].prompt.split("\n\n")[0]]
    assert len(mine) > 1 and len({item.cluster for item in mine}) == 1
    assert len({item.cluster for item in items}) == 21 and len(items) + 310 == 4961


def test_an_answer_goes_on_where_its_opening_ends():
    tokenizer = chat_tokenizer()
    item = Item("a", "Hi", "bc.", "x", opening="Here: a", plain="Hi again", stop=("\n",))
    (sample,) = encode([item], tokenizer, 2, None)
    assert tokenizer.decode(sample.prompt).endswith("<|user|>Hi<|end|><|assistant|>Here: a")
    assert tokenizer.decode(sample.reference) == "bc." and sample.reference[-1] != 2
    tokenizer.chat_template = None
    (sample,) = encode([item], tokenizer, 2, None)
    assert tokenizer.decode(sample.prompt) == "Hi again"
