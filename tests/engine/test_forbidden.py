"""What a request forbids in its answer: words, tokens, an early end; kept whatever drafts, and the constraint first."""

from __future__ import annotations

from typing import Any

import pytest

import shoal
from serving import tiny_engine
from shoal.engine.engine import Engine
from tool_tokenizer import speaking

METHODS = ("full", {"method": "prompt_lookup", "method_args": {"min_ngram": 1}})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def greedy_twin(engine: Engine, ids: list[int], new: int, banned: Any) -> list[int]:
    """The likeliest token that `banned(answer so far)` does not hold, from the modules and without a cache."""
    import torch

    made: list[int] = []
    for _ in range(new):
        logits = engine.model(torch.tensor([ids + made])).logits[0, -1].clone()
        logits[sorted(banned(made))] = -torch.inf
        made.append(int(logits.argmax()))
    return made


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_words_do_not_come(engine: Engine, method: Any) -> None:
    tok = engine.tokenizer
    ids = tok("Some words")["input_ids"]
    plain = engine.generate(ids, max_new_tokens=30, ignore_eos=True)
    tokens = list(plain.tokens)
    one = tokens[0]
    two = list(engine.generate(ids, max_new_tokens=30, ignore_eos=True, bad_words=[tok.decode([one])]).tokens[3:5])
    words = [tok.decode([one]), tok.decode(two)]

    def banned(made: list[int]) -> set[int]:
        seen = [*ids, *made]
        return {one} | ({two[1]} if seen[-1] == two[0] else set())

    found = engine.generate(ids, max_new_tokens=30, ignore_eos=True, bad_words=words, method=method)
    assert list(found.tokens) == greedy_twin(engine, ids, 30, banned)
    assert list(found.tokens) != tokens and all(word not in found.text for word in words)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_only_some_tokens_come_and_none_ends_it_early(engine: Engine, method: Any) -> None:
    ids = engine.tokenizer("Some words")["input_ids"]
    only = [2, 20, 21, 22]
    free = greedy_twin(engine, ids, 12, lambda made: set(range(97)) - set(only))
    found = engine.generate(ids, max_new_tokens=12, allowed_token_ids=only, ignore_eos=True, method=method)
    assert list(found.tokens) == free
    drawn = engine.generate(ids, max_new_tokens=40, allowed_token_ids=only, temperature=2.0, seed=1, method=method,
                            stop_token_ids=[2])
    late = engine.generate(ids, max_new_tokens=40, allowed_token_ids=only, temperature=2.0, seed=1, method=method,
                           min_new_tokens=len(drawn.tokens) + 3, stop_token_ids=[2])
    assert set(drawn.tokens) <= set(only) and drawn.tokens[-1] == 2 and len(drawn.tokens) < 40
    assert 2 not in late.tokens[: len(drawn.tokens) + 3] and late.tokens[-1] == 2


def test_a_constraint_goes_first() -> None:
    found = speaking().generate("a", max_new_tokens=9, constraint=shoal.Regex("ab"), bad_words=["a", "b"],
                                min_new_tokens=8, temperature=1.0, allowed_token_ids=[30])
    assert (found.text, found.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_stop_string_may_stay(engine: Engine, method: Any) -> None:
    plain = engine.generate("Some words", max_new_tokens=20, ignore_eos=True).text
    stop = [plain[5:8], plain[5:7]]
    at = min(plain.index(one) for one in stop)
    cut = engine.generate("Some words", max_new_tokens=20, ignore_eos=True, stop=stop, method=method)
    kept = engine.generate("Some words", max_new_tokens=20, ignore_eos=True, stop=stop, method=method, keep_stop=True)
    assert cut.text == plain[:at] and kept.text == plain[: at + 2] and kept.finish_reason == "stop"
    steps = engine.stream("Some words", max_new_tokens=20, ignore_eos=True, stop=stop, method=method, keep_stop=True)
    assert "".join(step.text for step in steps) == kept.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bad_words": [""]}, "no word"), ({"bad_words": [" "]}, "no word"), ({"bad_words": [3]}, "list of strings"),
        ({"allowed_token_ids": []}, "empty"), ({"allowed_token_ids": [97]}, r"0\.\.96"),
        ({"allowed_token_ids": ["a"]}, "token ids"), ({"allowed_token_ids": 3}, "token ids"),
        ({"min_new_tokens": -1}, ">= 0"), ({"min_new_tokens": 1.5}, "whole number"),
        ({"typical_p": 0}, r"\(0, 1\]"), ({"repetition_window": -1}, ">= 0"), ({"repetition_window": 0.5}, "whole"),
    ],
    ids=str,
)
def test_what_nobody_can_mean(engine: Engine, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine.generate("a", max_new_tokens=2, **options)
