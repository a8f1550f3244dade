"""Log-probabilities of tokens that are part of a character, share a text or have none: bytes, alternatives, offsets."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from transformers import AddedToken

from families import tiny
from serving import MODEL, Running, serving
from shoal.decode.text.pieces import TokenBytes
from shoal.engine.loading.load import engine_for
from toy_tokenizers import BUILDERS, marked_words, split_characters

KINDS = {"split characters": split_characters, "marked words": marked_words}
ASK = [{"role": "user", "content": "the"}]
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"


@pytest.fixture(scope="module", params=list(KINDS))
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    words = KINDS[request.param]()
    words.chat_template = _TEMPLATE
    with serving(engine_for(tiny("llama", layers=2), words, name=MODEL)) as running:
        yield running


def post(server: Running, **given: Any) -> httpx.Response:
    route = "completions" if "prompt" in given else "chat/completions"
    body = {"model": MODEL, "max_tokens": 60, "temperature": 2.0, "seed": 3, **given}
    return httpx.post(f"{server.url}/v1/{route}", content=json.dumps(body), timeout=60)


def events(answer: httpx.Response) -> list[Any]:
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in answer.text.split("\n\n")[:-2]]


def begins(pieces: list[bytes]) -> list[int]:
    """The character of the joint text that holds each piece's first byte, found by where a decoder reports errors."""
    wrong: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        wrong.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("noted", note)
    whole = b"".join(pieces)
    whole.decode("utf-8", "noted")
    runs = {start: end for start, end in wrong}
    place, character, of_byte = 0, 0, dict[int, int]()
    while place < len(whole):
        end = runs.get(place) or next(end for end in range(place + 1, place + 5) if _is_text(whole[place:end]))
        of_byte |= dict.fromkeys(range(place, end), character)
        place, character = end, character + 1
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces))]
    return [of_byte.get(start, character) for start in starts]


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_bytes_of_a_chat_are_those_of_its_text(server: Running, seed: int) -> None:
    given: dict[str, Any] = {"messages": ASK, "logprobs": True, "top_logprobs": 20, "seed": seed}
    choice = post(server, **given).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    special = set(server.engine.tokenizer.all_special_tokens)
    made = [bytes(entry["bytes"]) for entry in entries if entry["token"] not in special]
    if server.engine.tokenizer.vocab_size == 97:  # of the others a wrong run has as many marks as bytes
        assert b"".join(made).decode("utf-8", "replace") == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 20
        for one in (entry, *entry["top_logprobs"]):
            text = bytes(one["bytes"]).decode("utf-8", "backslashreplace")
            assert one["token"] == text and "\ufffd" not in text
    streamed = [entry for one in events(post(server, **given, stream=True)) if one["logprobs"]
                for entry in one["logprobs"]["content"]]
    assert [(one["token"], one["bytes"]) for one in streamed] == [(one["token"], one["bytes"]) for one in entries]


@pytest.mark.parametrize("seed", range(4))
def test_no_alternative_is_lost_for_its_text(server: Running, seed: int) -> None:
    """All tokens have different names, and the chosen one is among them by its own name."""
    given = {"prompt": "the", "logprobs": 20, "seed": seed}
    found = post(server, **given).json()["choices"][0]["logprobs"]
    for token, own, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == own and len(top) in (20, 21) and (len(top) == 20 or own == min(top.values()))
        assert "\ufffd" not in "".join(top)
    ids = post(server, **given, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for top in ids["top_logprobs"] for name in top)
    values = [[sorted(top.values()) for top in one["top_logprobs"]] for one in (ids, found)]
    assert [*map(len, values[0])] == [*map(len, values[1])] and values[0][0] == pytest.approx(values[1][0])
    assert ids["text_offset"] == found["text_offset"]


@pytest.mark.parametrize("seed", range(6))
def test_offsets_count_the_characters_of_the_text(seed: int) -> None:
    words = split_characters()
    with serving(engine_for(tiny("llama", layers=2), words, name=MODEL)) as running:
        given: dict[str, Any] = {"logprobs": 0, "seed": seed, "return_tokens_as_token_ids": True}
        for prompt, echo in (("the é", False), ("é the😀", True), ("a<unk>b", True), ("<s>ab</s>é", True)):
            choice = post(running, **given, prompt=prompt, echo=echo).json()["choices"][0]
            raw, special = TokenBytes(words), set(words.all_special_ids)
            ids = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
            read = len(words(prompt)["input_ids"]) if echo else 0
            pieces = [b"" if token in special and (place >= read or place == 0) else raw(token)
                      for place, token in enumerate(ids)]
            assert b"".join(pieces).decode("utf-8", "replace") == choice["text"]
            told = zip(choice["logprobs"]["text_offset"], begins(pieces), pieces, strict=True)
            assert all(offset == expected for offset, expected, piece in told if piece)
            streamed = events(post(running, **given, prompt=prompt, echo=echo, stream=True))
            places = [offset for one in streamed if one["logprobs"] for offset in one["logprobs"]["text_offset"]]
            assert places == choice["logprobs"]["text_offset"]


def test_a_beginning_of_sequence_has_no_place_in_a_text(server: Running) -> None:
    given = {"echo": True, "logprobs": 1, "max_tokens": 0}
    choice = post(server, prompt="a b ab", **given).json()["choices"][0]
    ids, found = server.engine.tokenizer("a b ab")["input_ids"], choice["logprobs"]
    assert (choice["text"], found["tokens"][0], found["text_offset"][:2]) == ("a b ab", "<s>", [0, 0])
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][-1] == 5
    shown = post(server, prompt=ids, **given).json()["choices"][0]  # as ids it is a part of the prompt, and shown
    assert shown["text"].startswith("<s>") and shown["logprobs"]["text_offset"][:2] == [0, 3]
    for one in (choice, shown):
        where = [*one["logprobs"]["text_offset"], len(one["text"])]
        parts = [one["text"][start:end] for start, end in zip(where, where[1:], strict=False)]
        for part, name in zip(parts[1:], one["logprobs"]["tokens"][1:], strict=True):
            assert part.strip() == name.strip()


def test_a_stop_string_cuts_the_places_too(server: Running) -> None:
    plain = post(server, prompt="the", logprobs=0).json()["choices"][0]
    stop = plain["text"][7:10]
    cut = post(server, prompt="the", logprobs=0, stop=stop).json()["choices"][0]
    assert cut["text"] == plain["text"][: plain["text"].index(stop)]
    assert max(cut["logprobs"]["text_offset"]) <= len(cut["text"])


def test_words_keep_their_spaces() -> None:
    words = marked_words()
    added = [AddedToken(name, normalized=False) for name in ("▁▁", "<tag>")]  # as Gemma has them, decoded as all others
    words.add_tokens(added)
    assert TokenBytes(words)(words.convert_tokens_to_ids("▁▁")) == b"  "
    assert TokenBytes(words)(words.convert_tokens_to_ids("<tag>")) == b"<tag>"
    raw = TokenBytes(words)
    names = {name: raw(token) for name, token in words.get_vocab().items()}
    assert (names["▁ab"], names["ab"], names["▁"], names["<0xF0>"], names["<s>"], names["é"]) == (
        b" ab", b"ab", b" ", b"\xf0", b"<s>", "é".encode())
    assert raw(10_000) == b"" and len(raw(words.convert_tokens_to_ids("<0x41>"))) == 1


@pytest.mark.parametrize("name", list(BUILDERS))
def test_bytes_join_to_the_text_for_every_kind(name: str) -> None:
    words = BUILDERS[name]()
    raw, plain = TokenBytes(words), [token for token in range(3, len(words))]
    for token in plain:
        text = words.decode([words.convert_tokens_to_ids("a"), token], clean_up_tokenization_spaces=False)[1:]
        assert "\ufffd" in text or name == "word_piece" or raw(token).decode("utf-8") == text
