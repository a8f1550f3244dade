"""Answers that were given before: the longest match of the latest places, against a search of everything."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shoal.speculative.earlier import KEY, EarlierTexts, KeptTexts, Tenants
from shoal.speculative.suffix_matcher import LONGEST, Chances, SuffixMatcher

LATEST = 8
"""Places of the same tokens that are looked at."""


def longest(texts: list[list[int]], tail: list[int]) -> int:
    """The longest match of the end of `tail` before any token of the texts, among the latest places of its last tokens.

    A match goes on into the text before only where that is what `tail` has; texts end with -1, which it never has.
    """
    log = [token for text in texts for token in (*text, -1)]
    places = [end for end in range(KEY, len(log) + 1) if log[end - KEY : end] == tail[-KEY:]][-LATEST:]
    return max((_alike(log[:end], tail) for end in places), default=0)


def _alike(one: list[int], other: list[int]) -> int:
    """How many last tokens agree."""
    size = 0
    while size < min(len(one), len(other), LONGEST) and one[-1 - size] == other[-1 - size]:
        size += 1
    return size


@pytest.mark.parametrize("seed", range(20))
def test_random_texts(seed: int) -> None:
    dice, held = random.Random(seed), EarlierTexts()
    texts = [[dice.randrange(3) for _ in range(dice.randrange(1, 60))] for _ in range(dice.randrange(1, 12))]
    for text in texts:
        held.add(text)
    for _ in range(100):
        tail = [dice.randrange(3) for _ in range(dice.randrange(1, 50))]
        found, wanted = held.find(tail, len(tail) - 1), longest(texts, tail)
        assert (0 if found is None else found[1]) == wanted
        if found is not None:
            place, length = found
            assert list(held.log[place - length : place]) == tail[-length:]


def test_the_latest_texts_stay() -> None:
    held = EarlierTexts(most=100)
    texts = [[text * 100 + token for token in range(30)] for text in range(40)]
    for text in texts:
        held.add(text)
        assert len(held.log) <= 200
        assert held.find(text, 20) is not None
    assert held.find(texts[0], 20) is None and held.find(texts[-2], 20) is not None
    assert held.log[held.find(texts[-1], 29)[0]] == -1, "a text ends before the next one begins"


def test_tenants_see_nothing_of_each_other_and_are_few() -> None:
    tenants = Tenants(lambda _: EarlierTexts(), most=2)
    tenants.of("a").add([1, 2, 3, 4, 5])
    assert tenants.of("a").find([1, 2, 3, 4], 3) == (4, 4) and tenants.of("b").find([1, 2, 3, 4], 3) is None
    tenants.of("c")
    assert tenants.of("b").find([1, 2, 3, 4], 3) is None and tenants.of("a").find([1, 2, 3, 4], 3) is None, "forgotten"


def test_a_passage_of_an_earlier_text_is_followed_until_it_ends() -> None:
    held, own, others = EarlierTexts(), Chances(), Chances()
    held.add([7, 8, 9, 10, 11, 12, 13])
    matcher = SuffixMatcher((own,), 2, (held, (others,)))
    text = [50, 51, 7, 8, 9, 10]
    matcher.read(text)
    assert matcher.guesses(text, 8) == [11, 12, 13] and len(matcher.chances(3)) == 3
    before = others.rates()
    text += [11, 12, 13, 14]
    matcher.read(text)
    assert matcher.place is None and matcher.guesses(text, 8) == [] and matcher.chances(3) == []
    assert others.rates() != before and own.rates() == Chances().rates()


def test_a_file_keeps_the_latest_texts_from_start_to_start(tmp_path: Path) -> None:
    path, dice = tmp_path / "new" / "a.answers", random.Random(1)
    texts = [[dice.randrange(1000) for _ in range(30)] for _ in range(40)]
    for start in range(4):
        held = KeptTexts(path, most=100)
        for text in texts[10 * start : 10 * start + 10]:
            held.add(text)
        again = KeptTexts(path, most=100)
        assert list(again.log[-62:]) == list(held.log[-62:]) and again.find(texts[10 * start + 9], 20) is not None
        assert path.stat().st_size < 4 * 100 * 4 + 10 * 32 * 4 + 2 * 32 * 4, "it does not grow without bound"
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("cut", [1, 5, 20, 31])
def test_of_a_damaged_file_what_is_whole_is_used(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.answers"
    held = KeptTexts(path)
    held.add([1, 2, 3, 4, 5])
    held.add([6, 7, 8, 9, 10, 11])
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    assert list(KeptTexts(path).log) == [1, 2, 3, 4, 5, -1]
    path.write_bytes(raw[:-cut] + bytes([raw[-cut] ^ 1]) + raw[len(raw) - cut + 1 :])
    assert list(KeptTexts(path).log) == [1, 2, 3, 4, 5, -1]


def test_a_folder_that_cannot_be_written_loses_no_text_of_this_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    held = KeptTexts(tmp_path / "file" / "a.answers")
    held.add([1, 2, 3, 4, 5])
    assert held.find([1, 2, 3, 4], 3) == (4, 4)
