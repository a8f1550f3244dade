"""Looking up n-grams: against a slow search of the whole text, and what it may cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.methods.prompt_lookup import Index, PromptLookup
from shoal.speculative.suffix_matcher import continuation

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def slow_find(tokens: list[int], longest: int, shortest: int) -> int | None:
    """The place after the latest earlier occurrence of the longest suffix that has one."""
    for size in range(longest, shortest - 1, -1):
        suffix = tokens[len(tokens) - size :]
        for end in range(len(tokens) - 1, size - 1, -1):
            if size <= len(tokens) and tokens[end - size : end] == suffix:
                return end
    return None


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 3), st.integers(0, 3), st.data())
def test_a_growing_text_is_searched_as_if_from_scratch(
    text: list[int], shortest: int, more: int, data: st.DataObject
) -> None:
    index, size = Index(shortest + more, shortest), 1
    while size <= len(text):
        assert index.find(text[:size]) == slow_find(text[:size], shortest + more, shortest)
        size += data.draw(st.integers(1, 6))


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(1, 12), st.data())
def test_a_continuation_reads_on_in_itself(text: list[int], length: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(text) - 1))
    whole = list(text)
    for offset in range(length):
        whole.append(whole[place + offset])
    assert continuation(text, place, length) == whole[len(text) :]


def test_what_a_tick_costs_does_not_grow_with_the_text() -> None:
    """Each token is put into the index once, whatever came before."""

    class Counted(list[int]):
        slices = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Counted.slices += isinstance(key, slice)
            return super().__getitem__(key)

    index, text, costs = Index(3, 1), Counted(), []
    for step in range(400):
        text.append(step * step % 7)
        before = Counted.slices
        index.find(text)
        costs.append(Counted.slices - before)
    assert max(costs[10:]) <= 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [((4, 0, 5), "min_ngram is 0"), ((1, 2, 5), "max_ngram is 1, below min_ngram 2"), ((4, 2, 0), "length is 0")],
)
def test_settings_out_of_range(settings: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PromptLookup(*settings)
