from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_lab.eval.agreement import agreement, common_subsequence, rouge_l
from shoal_lab.eval.items import final_answer, is_right

TOKENS = st.lists(st.integers(0, 4), max_size=9)


def subsequences(tokens: list[int]) -> set[tuple[int, ...]]:
    return {chosen for size in range(len(tokens) + 1) for chosen in combinations(tokens, size)}


@given(TOKENS, TOKENS)
def test_the_common_subsequence_by_trying_all(base, other):
    longest = max(map(len, subsequences(base) & subsequences(other)))
    assert common_subsequence(base, other) == longest
    if base and other:
        recall, precision = longest / len(base), longest / len(other)
        f1 = 2 * recall * precision / (recall + precision) if longest else 0.0
        assert rouge_l(base, other) == pytest.approx(f1)


@given(TOKENS, TOKENS)
def test_divergence_and_token_agreement(base, other):
    found = agreement(base, other)
    first = found.first_divergence
    assert base[:first] == other[:first]
    assert first == min(len(base), len(other)) or base[first] != other[first]
    assert found.same == (base == other)
    assert found.token_agreement == 1.0 or base != other


def test_empty_outputs_agree():
    assert agreement([], []) == agreement([1], [1]).__class__(0, True, 1.0, 1.0)
    assert agreement([1], []).rouge_l == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [("so 3+4=7 #### 7", "7"), ("#### 1,200 ", "1200"), ("#### $5.", "5"), ("#### 3\nand more #### 4", "3"),
     ("no mark 5", None), ("####", None), ("#### 2.50", "2.50")],
)
def test_the_final_answer(text, answer):
    assert final_answer(text) == answer


def test_judging():
    assert is_right("<<1+1=2>> #### 2", "2") and is_right("#### 1,000.", "1000")
    assert not is_right("#### 20", "2") and not is_right("2", "2")
