"""Following a passage: against a search of the whole text with every token, and what is learned from it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.speculative.suffix_matcher import LONGEST, Chances, SuffixMatcher

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def slow_follow(tokens: list[int]) -> tuple[int | None, int]:
    """Place and length of the match after `tokens`, searched for anew at every token."""
    place, length = None, 0
    for size in range(1, len(tokens) + 1):
        text = tokens[:size]
        if place is not None and text[place] == text[-1]:
            place, length = place + 1, min(length + 1, LONGEST)
            continue
        ends = [end for end in range(2, size) if text[end - 2 : end] == text[-2:]]
        place = ends[-1] if size > 2 and ends else None
        length = 0
        while place is not None and length < min(place, LONGEST) and text[place - 1 - length] == text[-1 - length]:
            length += 1
    return place, length


@settings(max_examples=200, deadline=None)
@given(texts, st.data())
def test_a_growing_text_is_followed_as_if_searched_anew(text: list[int], data: st.DataObject) -> None:
    matcher, size = SuffixMatcher((Chances(),), 0), 1
    while size <= len(text):
        matcher.read(text[:size])
        assert (matcher.place, matcher.length) == slow_follow(text[:size])
        size += data.draw(st.integers(1, 6))


def test_a_long_match_is_capped() -> None:
    matcher = SuffixMatcher((Chances(),), 0)
    matcher.read([1, 2, 3, 4, 5] * 30)
    assert (matcher.place, matcher.length) == (145, LONGEST)


def test_what_a_token_costs_does_not_grow_with_the_text() -> None:
    class Counted(list[int]):
        looks = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Counted.looks += 1
            return super().__getitem__(key)

    matcher, text, costs = SuffixMatcher((Chances(),), 0), Counted(), []
    for step in range(600):
        text.append(step * step % 7 if step % 50 else 99)
        before = Counted.looks
        matcher.read(text)
        costs.append(Counted.looks - before)
    assert max(costs) <= 5 + 2 * LONGEST


def test_chances_are_learned_from_the_answer_alone() -> None:
    prompt, right, wrong = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], [1, 2, 9, 1, 2, 8]
    chances = {name: Chances() for name in ("prompt", "right", "wrong")}
    before = chances["prompt"].rates()
    for name, text, start in (("prompt", right, 99), ("right", right, 8), ("wrong", wrong, 8)):
        SuffixMatcher((chances[name],), start).read([*prompt, *text])
    assert chances["prompt"].rates() == before
    assert chances["right"].rate(0) > before[0] > chances["wrong"].rate(0)


def test_chances_fall_with_every_guess_and_rise_with_the_match() -> None:
    short, long = SuffixMatcher((Chances(),), 99), SuffixMatcher((Chances(),), 99)
    short.read([1, 2, 3, 1, 2])
    long.read([*range(20), *range(18)])
    for matcher in (short, long):
        found = matcher.chances(6)
        assert len(found) == 6 and found == sorted(found, reverse=True) and 0 < found[-1] <= found[0] <= 1
    assert long.chances(1)[0] > short.chances(1)[0]


def test_without_a_match_there_is_no_guess() -> None:
    matcher = SuffixMatcher((Chances(),), 0)
    matcher.read([1, 2, 3])
    assert matcher.place is None and matcher.chances(5) == []


@pytest.mark.parametrize("hits", [0.1, 0.9])
def test_an_estimate_follows_what_happens(hits: float) -> None:
    chances = Chances()
    for number in range(300):
        chances.learn(2, number % 10 < 10 * hits)
    assert chances.rate(2) == pytest.approx(hits, abs=0.12)
    assert Chances(chances).rate(2) == pytest.approx(chances.rate(2))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=70, max_size=300))
def test_the_beginning_of_a_prompt_is_indexed_at_once(prompt: list[int]) -> None:
    """The passage that is followed then may be another one, if the former began long before."""
    at_once, one_by_one = (SuffixMatcher((Chances(),), count) for count in (len(prompt), 0))
    at_once.read(prompt)
    one_by_one.read(prompt)
    assert at_once._places == one_by_one._places
    assert (at_once.place is None) == (one_by_one.place is None)
    if at_once.place is not None:
        assert prompt[at_once.place - at_once.length : at_once.place] == prompt[len(prompt) - at_once.length :]
