"""A shortened long prompt: what stays, what is chosen, and that the choice is BM25's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_lab.drafts.retrieved import Retrieved, bm25


def scores_by_formula(pieces: Sequence[Sequence[int]], query: Sequence[int]) -> list[float]:
    """BM25 as in Lucene, with k1 = 1.5 and b = 0.75."""
    mean = sum(map(len, pieces)) / len(pieces)
    found = []
    for piece in pieces:
        count, score = Counter(piece), 0.0
        for token in dict.fromkeys(query):
            holding = sum(token in one for one in pieces)
            rarity = math.log(1 + (len(pieces) - holding + 0.5) / (holding + 0.5))
            score += rarity * count[token] / (count[token] + 1.5 * (0.25 + 0.75 * len(piece) / mean))
        found.append(score)
    return found


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=9),
       st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_scores_are_those_of_the_formula(pieces: list[list[int]], query: list[int]) -> None:
    assert bm25(pieces, query) == pytest.approx(scores_by_formula(pieces, query), abs=1e-5)


def test_a_needle_is_found() -> None:
    prompt = [1, 2, *[token % 17 + 50 for token in range(900)], 7, 8, 9, 6, *[token % 13 + 50 for token in range(700)],
              40, 7, 8, 9]
    view = Retrieved(context=48, chunk=8, begin=2, end=4)(prompt)
    assert view[:2] == [1, 2] and view[-4:] == [40, 7, 8, 9]
    assert "7, 8, 9, 6" in str(view)


@given(st.lists(st.integers(0, 30), max_size=80), st.integers(1, 9), st.integers(0, 5), st.integers(1, 5),
       st.integers(0, 20))
def test_a_view_is_a_part_of_the_prompt_in_its_order(
    prompt: list[int], chunk: int, begin: int, end: int, more: int
) -> None:
    numbered = list(enumerate(prompt))
    context = begin + chunk + end + more
    likeness = lambda pieces, query: [sum(token for _, token in piece) for piece in pieces]  # noqa: E731
    view = Retrieved(context, chunk, begin, end, likeness)(numbered)  # type: ignore[arg-type]
    assert view == sorted(view) and len(set(view)) == len(view) <= context
    if len(prompt) <= context:
        assert view == numbered
    else:
        assert view[:begin] == numbered[:begin] and view[-end:] == numbered[-end:]
        assert len(view) > context - 2 * chunk  # no room for another piece, but for one that is cut short


@pytest.mark.parametrize("given", [[1.0], [1.0, math.nan, 2.0]], ids=str)
def test_nonsense_from_a_likeness_is_told(given: list[float]) -> None:
    with pytest.raises(ValueError, match=f"3 pieces came as {len(given)} numbers"):
        Retrieved(4, 2, 1, 1, lambda pieces, query: given)([1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize(("options", "message"), [
    ({"chunk": 0}, "chunk is 0"), ({"end": 0}, "end 0"), ({"begin": -1}, "begin -1"),
    ({"context": 4}, "context is 4; beginning, end and one chunk already take 5"),
])
def test_bad_sizes_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retrieved(**{"context": 9, "chunk": 2, "begin": 1, "end": 2, **options})
