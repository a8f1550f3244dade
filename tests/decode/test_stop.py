from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

from shoal.decode.text.stop import StopRules, StopState
from shoal.errors import Unsupported
from toy_tokenizers import tokenizer, whole
from turns import by_turns

PROMPT = [5, 6, 7]
RULES = StopRules(max_new_tokens=100)


def slow(rules: StopRules, tok: Any, prompt: list[int], tokens: list[int]) -> tuple[list[int], str, str | None]:
    """Token by token, everything decoded anew each time: kept tokens, final text, reason."""
    room = min(rules.max_new_tokens, 10**9 if rules.max_length is None else rules.max_length - len(prompt))
    for count in range(1, min(len(tokens), room) + 1):
        kept, ended = tokens[:count], count == room
        if kept[-1] in rules.eos_token_ids | rules.stop_token_ids:
            return kept, cut(whole(tok, kept[:-1]), rules)[0], "stop"
        ids = torch.tensor([prompt + kept])
        stopped = any(bool(criterion(ids, None)) for criterion in rules.criteria)
        text = whole(tok, kept)
        shown, found = cut(text if ended or stopped else text.rstrip("\ufffd"), rules)
        if found or stopped or ended:
            return kept, shown, "stop" if found or stopped else "length"
    return tokens[: max(room, 0)], "", "length" if room <= 0 else None


def cut(text: str, rules: StopRules) -> tuple[str, bool]:
    found = [text.find(stop) for stop in rules.stop_strings if stop in text]
    return (text[: min(found)], True) if found else (text, False)


def run(rules: StopRules, tok: Any, tokens: list[int], sizes: list[int]) -> tuple[list[str], StopState]:
    """The texts of the tokens that are kept, of blocks of those sizes."""
    state, texts, at = StopState(rules, tok, PROMPT), [], 0
    for size in [*sizes, len(tokens)]:
        ended = state.finish_reason is not None
        new = state.push(tokens[at : at + size])
        assert not (ended and new)
        texts += new
        at += size
    return texts, state


def ids(tok: Any, text: str) -> list[int]:
    result: list[int] = tok.encode(text, add_special_tokens=False)
    return result


def cases(tok: Any, alphabet: str) -> st.SearchStrategy[tuple[StopRules, list[int], list[int]]]:
    """Rules, tokens over a few that matter, and block sizes; short alphabets make near misses frequent."""
    pool = sorted({i for char in alphabet for i in ids(tok, char)} | {tok.eos_token_id})
    pool += [i for word in ("ab", "▁ab", "Ġab", "ð", "Ã") if (i := tok.convert_tokens_to_ids(word)) not in (None, 0)]
    rules = st.builds(
        StopRules,
        eos_token_ids=st.sampled_from([frozenset(), frozenset({tok.eos_token_id})]),
        stop_token_ids=st.sampled_from([frozenset(), frozenset({pool[0]})]),
        stop_strings=st.lists(st.text(alphabet.replace("\ufffd", ""), min_size=1, max_size=4), max_size=3).map(tuple),
        max_new_tokens=st.integers(0, 30),
        max_length=st.none() | st.integers(0, 30),
        criteria=st.sampled_from([(), (lambda seen, _: seen.shape[1] >= 15,)]),
    )
    return st.tuples(rules, st.lists(st.sampled_from(pool), max_size=30), st.lists(st.integers(0, 6), max_size=8))


@by_turns("name", ["byte_level", "byte_fallback", "metaspace", "shoal-reference", "stories260K", "babyllama361"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_blocks_end_where_the_reference_ends(name: str, data: st.DataObject) -> None:
    tok = tokenizer(name)
    rules, tokens, sizes = data.draw(cases(tok, "ab é" if name != "metaspace" else "ab"))
    pieces, state = run(rules, tok, tokens, sizes)
    kept, text, reason = slow(rules, tok, PROMPT, tokens)
    assert tokens[: len(pieces)] == kept
    assert state.finish_reason == reason
    shown = "".join(pieces)
    assert not any(stop in shown for stop in rules.stop_strings)
    if reason is not None:
        assert shown == text
        assert state.push([1, 2]) == []
    else:
        assert whole(tok, tokens).startswith(shown)
    assert pieces == run(rules, tok, tokens, [1] * len(tokens))[0]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_reader_sees_the_beginning_of_a_stop_string_that_comes(data: st.DataObject) -> None:
    tok = tokenizer("byte_level")
    stop = data.draw(st.text("ab", min_size=1, max_size=5))
    before = data.draw(st.text("ab", max_size=12))
    text = before + stop
    pieces, state = run(replace(RULES, stop_strings=(stop,)), tok, ids(tok, text), [])
    assert state.finish_reason == "stop"
    assert "".join(pieces) == text[: text.find(stop)]


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("field", ["eos_token_ids", "stop_token_ids"])
def test_an_end_token_at_each_place_of_a_block(at: int, field: str) -> None:
    tok = tokenizer("byte_level")
    letters = ids(tok, "vwxyz")
    state = StopState(replace(RULES, **{field: frozenset({letters[at]})}), tok, PROMPT)
    assert state.push(letters) == [*"vwxyz"[:at], ""]
    assert state.finish_reason == "stop"


@pytest.mark.parametrize("limit", range(7))
@pytest.mark.parametrize("rules", [{"max_new_tokens": 0}, {"max_length": 0}])
def test_limits_are_exact(limit: int, rules: dict[str, int]) -> None:
    tok = tokenizer("byte_level")
    rules = {name: limit + (len(PROMPT) if name == "max_length" else 0) for name in rules}
    state = StopState(replace(RULES, **rules), tok, PROMPT)
    assert state.room == limit
    pieces = state.push(ids(tok, "vw")) + state.push(ids(tok, "xyz"))
    assert len(pieces) == min(limit, 5)
    assert state.finish_reason == ("length" if limit <= 5 else None)
    assert "".join(pieces) == "vwxyz"[:limit]


def test_an_end_token_at_the_limit_counts_as_stop() -> None:
    state = StopState(replace(RULES, max_new_tokens=1, eos_token_ids=frozenset({9})), None, [])
    assert state.push([9, 9]) == [""]
    assert state.finish_reason == "stop"


def test_a_stop_string_inside_and_across_tokens() -> None:
    tok = tokenizer("byte_level")
    across = tok.convert_tokens_to_ids(["x", "ab", "ab", "y"])
    assert StopState(replace(RULES, stop_strings=("ba",)), tok, PROMPT).push(across) == ["x", "a", ""]
    inside = tok.convert_tokens_to_ids(["x", "Ġab", "y"])
    state = StopState(replace(RULES, stop_strings=("a",)), tok, PROMPT)
    assert state.push(inside) == ["x", " "]
    assert state.finish_reason == "stop"


def test_the_earliest_beginning_wins() -> None:
    tok = tokenizer("byte_level")
    state = StopState(replace(RULES, stop_strings=("b", "ab")), tok, PROMPT)
    assert state.push(tok.convert_tokens_to_ids(["Ġab"])) == [" "]


@pytest.mark.parametrize(("last", "shown"), [("c", "aabc"), (None, "aab")])
def test_held_text_is_released_when_it_cannot_be_a_stop_string(last: str | None, shown: str) -> None:
    tok = tokenizer("byte_level")
    tokens = ids(tok, "aab" + (last or ""))
    state = StopState(replace(RULES, stop_strings=("abd",), max_new_tokens=len(tokens)), tok, PROMPT)
    pieces = state.push(tokens)
    assert pieces[:2] == ["", "a"]
    assert "".join(pieces) == shown
    assert state.finish_reason == "length"


def test_a_stop_string_of_byte_tokens_needs_no_further_token() -> None:
    tok = tokenizer("byte_fallback")
    tokens = tok.convert_tokens_to_ids(["▁a", "<0x0A>", "▁a"])
    state = StopState(replace(RULES, stop_strings=("\n",)), tok, PROMPT)
    assert state.push(tokens) == ["a", ""]
    assert state.finish_reason == "stop"


def test_a_stop_string_that_only_the_final_flush_completes_is_cut() -> None:
    tok = tokenizer("byte_level")
    state = StopState(replace(RULES, stop_strings=("a\ufffd",), max_new_tokens=3), tok, PROMPT)
    assert state.push(tok.convert_tokens_to_ids(["x", "a", "ð"])) == ["x", "", ""]
    assert state.finish_reason == "stop"


class AfterToken(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token, self.shapes = token, []

    def __call__(self, input_ids: torch.Tensor, scores: None, **kwargs: Any) -> torch.Tensor:
        assert scores is None
        self.shapes.append(tuple(input_ids.shape))
        return input_ids[:, -1] == self.token


def test_transformers_criteria_are_asked_after_each_token() -> None:
    tok = tokenizer("byte_level")
    tokens, criterion = ids(tok, "vwxyz"), AfterToken(ids(tok, "x")[0])
    state = StopState(replace(RULES, criteria=(criterion,), stop_strings=("xq",)), tok, PROMPT)
    assert state.push(tokens) == ["v", "w", "x"]
    assert state.finish_reason == "stop"
    assert criterion.shapes == [(1, 4), (1, 5), (1, 6)]


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: StoppingCriteriaList([c]), lambda c: lambda *a: bool(c(*a))])
def test_any_truthy_answer_stops(wrap: Any) -> None:
    criterion = wrap(MaxLengthCriteria(max_length=5))
    assert len(StopState(replace(RULES, criteria=(lambda *_: False, criterion)), None, PROMPT).push([1] * 9)) == 2


def test_impossible_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopRules(stop_strings=("a", ""))
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        StopRules(max_new_tokens=-1)
    with pytest.raises(ValueError, match="max_length is -2"):
        StopRules(max_length=-2)
    with pytest.raises(Unsupported, match="tokenizer"):
        StopState(StopRules(stop_strings=("a",)), None, [])
