from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_lab.cli.divergence import diverge, first_difference

TOKENS = st.lists(st.integers(0, 3), max_size=6)


@given(TOKENS, TOKENS)
def test_first_difference_is_the_length_of_the_common_prefix(a, b):
    common = max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])
    assert first_difference(a, b) == (None if a == b else common)


def test_the_margin_is_asked_for_where_they_part():
    asked = []

    def margin(tokens):
        asked.append(list(tokens))
        return 0.25

    found = diverge([1, 2, 3, 4], [1, 2, 9, 4], margin, tolerance=0.5)
    assert asked == [[1, 2]]
    assert (found.at, found.expected, found.found, found.margin, found.tie) == (2, 3, 9, 0.25, True)
    assert not found.wrong


def test_a_clear_margin_is_no_tie():
    assert diverge([1], [2], lambda tokens: 0.5, tolerance=0.5).wrong


def test_equal_sequences_ask_nothing():
    found = diverge([1, 2], (1, 2), lambda tokens: 1 / 0, tolerance=1)
    assert found.at is None and not found.wrong


def test_a_sequence_that_ends_early():
    found = diverge([1, 2], [1], lambda tokens: 3.0, tolerance=1)
    assert (found.at, found.expected, found.found, found.wrong) == (1, 2, None, True)
