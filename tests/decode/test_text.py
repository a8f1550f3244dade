from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.decode.text.pieces import Detokenizer
from toy_tokenizers import NAMES, tokenizer, whole

TEXTS = [
    "Hello, world!\n",
    "a 😀😀 b",
    "日本語のテキスト、世界。",
    "é à ü 👩‍👩‍👧 end",
    " leading and  double ",
    "\n\n",
    "😀",
]


def pieces_of(tok: Any, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tok)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_random_tokens_join_to_the_whole_text(name: str, data: st.DataObject) -> None:
    tok = tokenizer(name)
    tokens = data.draw(st.lists(st.integers(0, len(tok) + 1), max_size=40))
    assert "".join(pieces_of(tok, tokens)) == whole(tok, tokens)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "shoal-reference", "stories260K"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_broken_bytes_and_specials_among_them(name: str, data: st.DataObject) -> None:
    """Bytes of multi-byte characters, bad ones and skipped tokens in between: where decoders differ most."""
    tok = tokenizer(name)
    pool = tok.encode("😀世é", add_special_tokens=False) + tok.encode("a b", add_special_tokens=False)
    odd = [tok.convert_tokens_to_ids(name) for name in ("<0xFF>", "<0x20>", "ÿÿ", "\ufffd", "")]
    pool += [tok.eos_token_id, *(token for token in odd if token)]
    tokens = data.draw(st.lists(st.sampled_from(pool), max_size=30))
    assert "".join(pieces_of(tok, tokens)) == whole(tok, tokens)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_real_text_join_and_are_never_taken_back(name: str, text: str) -> None:
    tok = tokenizer(name)
    tokens = tok.encode(text, add_special_tokens=False)
    pieces = pieces_of(tok, tokens)
    assert "".join(pieces) == whole(tok, tokens)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in whole(tok, tokens)


def test_a_character_comes_with_its_last_byte() -> None:
    tok = tokenizer("byte_level")
    tokens = tok.encode("a😀b", add_special_tokens=False)
    assert pieces_of(tok, tokens) == ["a", "", "", "", "😀", "b", ""]


def test_words_are_not_delayed() -> None:
    tok = tokenizer("byte_fallback")
    assert pieces_of(tok, tok.convert_tokens_to_ids(["▁the", "▁a", "▁ab", "ab"])) == ["the", " a", " ab", "ab", ""]


def tails_of(names: list[str]) -> list[str]:
    tok = tokenizer("byte_fallback")
    detokenizer, tails = Detokenizer(tok), []
    for token in tok.convert_tokens_to_ids(names):
        detokenizer.push(token)
        tails.append(detokenizer.tail)
    return tails


def test_a_byte_run_waits_for_its_end() -> None:
    tok = tokenizer("byte_fallback")
    tokens = tok.convert_tokens_to_ids(["▁a", "\ufffd", "<0x41>", "<0xC3>", "<0xA9>", "b"])
    assert pieces_of(tok, tokens) == ["a", "", "\ufffd", "", "", "Aéb", ""]


@pytest.mark.parametrize(
    ("names", "tails"),
    [
        (["▁a", "<0x41>", "<0xC3>", "<0xA9>", "<0x42>", "b"], ["", "A", "A", "Aé", "AéB", ""]),
        (["▁a", "<0x41>", "<0xFF>", "<0x42>", "b", "<0x42>"], ["", "A", "", "", "", "B"]),
        (["<0x20>", "<0x20>", "<0x41>"], ["", " ", " A"]),
        (["▁a", "<0x20>", "</s>", "<0x41>"], ["", " ", " ", " A"]),
    ],
)
def test_a_byte_run_shows_its_characters_meanwhile(names: list[str], tails: list[str]) -> None:
    assert tails_of(names) == tails


def test_an_unfinished_character_ends_as_the_tokenizer_shows_it() -> None:
    tok = tokenizer("byte_level")
    tokens = tok.encode("a😀", add_special_tokens=False)[:-1]
    assert pieces_of(tok, tokens)[-1] == "\ufffd"


def test_without_a_tokenizer_every_piece_is_empty() -> None:
    assert pieces_of(None, [1, 2, 3]) == ["", "", "", ""]


class Counting:
    """Counts the tokens that a tokenizer is asked to decode."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.decoded = inner, 0

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.inner.convert_ids_to_tokens(token)

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.decoded += len(tokens)
        return self.inner.decode(tokens, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["the cat. ", "😀", "日本", "\x00", "a b"])
def test_the_work_is_linear_in_the_tokens(name: str, text: str) -> None:
    tok = tokenizer(name)
    tokens = tok.encode(text * 300, add_special_tokens=False)
    counting = Counting(tok)
    pieces_of(counting, tokens)
    assert counting.decoded <= 16 * len(tokens) + 100


def test_the_work_is_linear_for_bytes_that_never_make_a_character() -> None:
    tok = tokenizer("byte_level")
    counting = Counting(tok)
    tokens = tok.convert_tokens_to_ids(["ÿ", "ÿÿ", "ð"]) * 200
    assert "".join(pieces_of(counting, tokens)) == whole(tok, tokens)
    assert counting.decoded <= 16 * len(tokens) + 100
