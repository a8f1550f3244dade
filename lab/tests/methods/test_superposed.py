"""Superposed decoding against a slow reference: transformers' model on vectors, from the beginning, without a cache."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tokenizer import chat_tokenizer
from drive import SHORT
from families import tiny
from generate_calls import batch, generate
from serving import MODEL, serving, tiny_engine
from shoal.batch.lines import answered
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.constraints.constraint import Regex
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.request import Request
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.stream import Stream
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.types import ModelInfo, Result
from shoal_lab.loops.ngrams import WEIGHTS, NGramCounts
from shoal_lab.methods.jacobi import Jacobi
from shoal_lab.methods.superposed import Superposed, Superposing
from test_matrix import engine_of

TOKENIZER = chat_tokenizer()
REPEATS = [5, 17, 80, 3, 41, 5, 17, 80, 9, 5, 17, 33, 3, 41, 5, 17]
PROMPTS = [REPEATS, *SHORT]
Found = list[tuple[list[int], float]]


def shares(text: Sequence[int], last: Sequence[int]) -> dict[int, float]:
    """Weighted n-gram shares, by going through the text for each size."""
    found: dict[int, float] = {}
    for size, weight in enumerate(WEIGHTS, start=1):
        after = Counter(text[at] for at in range(size, len(text))
                        if size <= len(last) and list(text[at - size : at]) == list(last[-size:]))
        for token, count in after.items():
            found[token] = found.get(token, 0.0) + weight * count / after.total()
    return found


def by_hand(
    name: str, ids: Sequence[int], method: Superposed, new: int, corpus: Sequence[int] | None = None,
    ends: Sequence[int] = (),
) -> Found:
    """Drafts, best first, with their scores; every vector is run anew for every token."""
    model = tiny(name)
    embed = model.get_input_embeddings()
    fed = embed(torch.tensor([list(ids)]))
    live: Found = [([], 0.0)]
    ended: Found = []
    while live:
        with torch.no_grad():
            logs = (model(inputs_embeds=fed).logits[0, -1] / method.sharpen).log_softmax(-1)
        ranked = sorted(range(len(logs)), key=lambda token: -float(logs[token]))[: method.tokens or 3 * method.k]
        ways = []
        for tokens, score in live:
            seen = shares(corpus or ids, [*ids, *tokens][-5:])
            for token in ranked:
                gram = max(math.log(seen[token]) if token in seen else -math.inf, method.unseen)
                ways.append(([*tokens, token], score + (1 - method.alpha) * float(logs[token]) + method.alpha * gram))
        best = sorted(ways, key=lambda way: -way[1])[: method.k - len(ended)]
        live = [way for way in best if len(way[0]) < new and way[0][-1] not in ends]
        ended += [way for way in best if way not in live]
        if live:
            total = sum(math.exp(score - live[0][1]) for _, score in live)
            parts = [math.exp(score - live[0][1]) / total * embed(torch.tensor([tokens[-1]])) for tokens, score in live]
            fed = torch.cat((fed, torch.stack(parts).sum(0)[None]), 1)
    return sorted(((tokens, score / len(tokens)) for tokens, score in ended), key=lambda way: -way[1])


@functools.cache
def engine(name: str = "llama") -> Engine:
    packed = "packed" in name
    model = tiny(name.split()[-1], dtype=torch.float32 if packed else torch.float64)
    return engine_for(model, TOKENIZER, backend="packed" if packed else "hf")


def texts_of(found: Result) -> list[tuple[int, ...]]:
    """Tokens of all drafts, best first."""
    return [found.tokens, *(tokens for _, tokens, _ in found.alternatives)]


METHODS = [
    Superposed(), Superposed(k=2, tokens=2, sharpen=1.0), Superposed(k=5, alpha=0.0, sharpen=0.7),
    Superposed(k=3, tokens=12, alpha=0.9, sharpen=3.0, unseen=-370.0), Superposed(k=4, alpha=0.3, sharpen=2.0),
]


@pytest.mark.parametrize("name", ["llama", "hybrid", "gemma3", "gpt2", "packed llama", "packed hybrid"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_drafts_and_scores_are_those_of_the_reference(name: str, method: Superposed) -> None:
    exact = 5e-2 if "packed" in name else 1e-9
    for ids in PROMPTS[:3]:
        expected = by_hand(name.split()[-1], ids, method, 9)
        found = engine(name).generate(ids, method=method, max_new_tokens=9, ignore_eos=True)
        if "packed" not in name:  # its float32 may swap two drafts of nearly equal score
            assert [list(tokens) for tokens in texts_of(found)] == [tokens for tokens, _ in expected]
        assert [score for *_, score in found.alternatives] == pytest.approx([s for _, s in expected[1:]], abs=exact)
        assert (found.stats.target_forwards, found.stats.extras["branches"]) == (9, method.k)
        assert found.stats.extras["thrown_away"] <= 9 * (method.k - 1)
        assert len({found.tokens, *(tokens for _, tokens, _ in found.alternatives)}) == method.k


@pytest.mark.parametrize("name", ["llama", "hybrid", "packed llama", "packed hybrid"])
def test_one_draft_is_greedy_decoding_bit_for_bit(name: str) -> None:
    home, options = engine(name), {"max_new_tokens": 14, "ignore_eos": True, "logprobs": 2}
    plain = home.generate(PROMPTS, **options)
    assert [one.tokens for one in home.generate(PROMPTS, method=Superposed(k=1), **options)] == [
        one.tokens for one in plain]
    request = Request.from_options({**options, "method": Superposed(k=1)})
    loop = Superposing(replace(Superposed(), k=1, alpha=0.0, tokens=1))
    for ids, expected in zip(PROMPTS, plain, strict=True):
        seqs = home.seqs([ids], request, Recipe(DepthPlan.full(home.runner.num_layers), loop=loop))
        stream = Stream(home, seqs, home.cache_for(seqs, 14))
        assert len(list(stream)) == 14
        assert stream.result.tokens == expected.tokens
        assert "packed" in name or stream.result.logprobs == home.generate(ids, **options).logprobs


def test_rows_are_independent_and_an_answer_comes_as_a_whole() -> None:
    home, method = engine("hybrid"), Superposed(k=3, sharpen=1.0)
    several = home.generate(PROMPTS, method=method, max_new_tokens=9)
    alone = [home.generate(ids, method=method, max_new_tokens=9) for ids in PROMPTS]
    assert [texts_of(one) for one in several] == [texts_of(one) for one in alone]
    with Scheduler(home) as scheduler:
        handles = [scheduler.submit(ids, method=method, max_new_tokens=9) for ids in (*PROMPTS, REPEATS, [*REPEATS, 4])]
        plain = scheduler.submit([*REPEATS, several[0].tokens[0], 7], max_new_tokens=6)
        for handle in (*handles, plain):
            list(handle)
        later = scheduler.submit([*REPEATS, *several[0].tokens, 7], max_new_tokens=6)
        list(later)
    assert [handle.results[0].tokens for handle in handles[:5]] == [one.tokens for one in (*alone, alone[0])]
    for handle, ids in ((plain, [*REPEATS, several[0].tokens[0], 7]), (later, [*REPEATS, *several[0].tokens, 7])):
        assert handle.results[0].tokens == home.generate(ids, max_new_tokens=6).tokens


def test_drafts_end_one_by_one() -> None:
    method = Superposed(k=4, sharpen=3.0, alpha=0.2)
    free = by_hand("llama", REPEATS, method, 8)
    ends = sorted({tokens[2] for tokens, _ in free} | {tokens[5] for tokens, _ in free[:1]})[:3]
    expected = by_hand("llama", REPEATS, method, 8, ends=ends)
    assert len({len(tokens) for tokens, _ in expected}) > 1
    found = engine().generate(REPEATS, method=method, max_new_tokens=8, ignore_eos=True, stop_token_ids=ends)
    assert [list(tokens) for tokens in texts_of(found)] == [tokens for tokens, _ in expected]
    text = engine().generate(REPEATS, method=method, max_new_tokens=8, ignore_eos=True).text
    cut = engine().generate(REPEATS, method=method, max_new_tokens=8, ignore_eos=True, stop=[text[2:4]])
    assert text[2:4] not in cut.text and all(text[2:4] not in one for one, *_ in cut.alternatives)
    assert any(len(tokens) < 8 for _, tokens, _ in cut.alternatives) or len(cut.tokens) < 8


def test_a_constraint_binds_all_drafts() -> None:
    pytest.importorskip("llguidance")
    home = engine_for(tiny("llama"), TOKENIZER)
    home.eos_token_ids = frozenset({2})
    found = home.generate(REPEATS, method=Superposed(k=4, tokens=97), max_new_tokens=9, constraint=Regex("[ab]{2,7}"))
    texts = [found.text, *(text for text, *_ in found.alternatives)]
    assert len(set(texts)) == 4 and all(set(text) <= {"a", "b"} and 2 <= len(text) <= 7 for text in texts)


def test_a_session_goes_on_as_if_it_read_all_anew() -> None:
    home, options = engine("hybrid"), {"method": Superposed(k=3, sharpen=1.0), "max_new_tokens": 9}
    chat = home.session(**options)
    first, second = chat.send("Hello").text, chat.send("More").text
    texts = ["Hello", first, "More"]
    roles = ["user", "assistant", "user"]
    anew = home.generate([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)], **options)
    assert anew.text == second


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.lists(st.integers(0, 5), max_size=7))
@settings(max_examples=150, deadline=None)
def test_ngrams_are_what_counting_says(text: list[int], last: list[int]) -> None:
    found, expected = NGramCounts(text).after(last), shares(text, last)
    assert found.keys() == expected.keys()
    assert all(found[token] == pytest.approx(expected[token]) for token in found)


def test_a_corpus_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("the cat, the hat, the cat\n" * 3)
    counted = TOKENIZER(path.read_text(), add_special_tokens=False)["input_ids"]
    method = Superposed(k=3, tokens=40, alpha=0.8, sharpen=2.0, corpus=str(path))
    ids = TOKENIZER("see the ", add_special_tokens=False)["input_ids"]
    expected = by_hand("llama", ids, method, 7, counted)
    assert list(engine().generate(ids, method=method, max_new_tokens=7, ignore_eos=True).tokens) == expected[0][0]
    assert expected != by_hand("llama", ids, method, 7)
    with pytest.raises(ValueError, match="corpus is '/no/such/file', which cannot be read"):
        engine().generate(ids, method=Superposed(corpus="/no/such/file"))


def test_a_failed_forward_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    home, method = engine("hybrid"), Superposed(k=3, sharpen=1.0)
    alone = [home.generate(ids, method=method, max_new_tokens=9) for ids in PROMPTS[:2]]

    def bad(ids: Any, scores: Any) -> Any:
        if ids.shape[1] > len(REPEATS) + 3:
            raise RuntimeError("no more")
        return scores

    with Scheduler(home) as scheduler:
        good = [scheduler.submit(ids, method=method, max_new_tokens=9) for ids in PROMPTS[:2]]
        ill = scheduler.submit(REPEATS, method=method, max_new_tokens=9, logits_processor=[bad])
        with pytest.raises(RuntimeError, match="no more"):
            list(ill)
        for handle in good:
            list(handle)
    assert [handle.results[0].tokens for handle in good] == [one.tokens for one in alone]


@pytest.mark.parametrize("calls", [range(1, 99), range(2, 99), range(6, 99), [1], [2], [6]], ids=str)
def test_what_fails_between_two_tokens_can_begin_again(calls: Sequence[int]) -> None:
    home, method, called = engine(), Superposed(k=3, sharpen=1.0), 0

    def fails(ids: Any, scores: Any) -> Any:
        nonlocal called
        called += 1
        if called in calls:
            raise RuntimeError("this row and no other")
        return scores

    scheduler = Scheduler(home, start=False)
    ill, good = [scheduler.submit(SHORT[0], method=method, max_new_tokens=9, **how)
                 for how in ({"logits_processor": [fails]}, {})]
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    alone = home.generate(SHORT[0], method=method, max_new_tokens=9).tokens
    assert good.results[0].tokens == alone
    if len(calls) == 1:
        assert ill.results[0].tokens == alone, "it has been tried again"
    else:
        with pytest.raises(RuntimeError, match="this row and no other"):
            list(ill)


def test_where_every_token_is_banned_it_says_so() -> None:
    def ban(ids: Any, scores: Any) -> Any:
        return scores if ids.shape[1] < len(SHORT[0]) + 3 else torch.full_like(scores, -math.inf)

    with pytest.raises(ValueError, match="no token has a positive probability"):
        engine().generate(SHORT[0], method=Superposed(k=3, sharpen=1.0), max_new_tokens=9, logits_processor=[ban])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"k is 0; it must be in 1\.\.64"),
        ({"k": 4, "tokens": 3}, r"tokens is 3; it must be in 4\.\.256"),
        ({"tokens": 257}, r"tokens is 257; it must be in 3\.\.256"),
        ({"alpha": 1.0}, r"alpha is 1.0; it must be in \[0, 1\)"),
        ({"sharpen": 0.0}, "sharpen is 0.0; it must be more than 0"),
        ({"unseen": 1.0}, "unseen is 1.0"),
        ({"unseen": -math.inf}, "unseen is -inf"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Superposed(**options)


def test_what_it_is_and_what_is_refused() -> None:
    recipe = make([Superposed(), KVInt8(), D3(alpha=0.9)]).recipe(ModelInfo(6))
    assert (recipe.exact_to, recipe.components) == ("none", ("plan", "store", "loop"))
    assert Superposed(k=1).recipe(ModelInfo(6)).exact_to == "full"
    assert make(Superposed(k=5, alpha=0.2).to_dict()) == Superposed(k=5, alpha=0.2)
    for other in (PromptLookup(), Jacobi()):
        with pytest.raises(ValueError, match="a loop of its own|both fill the part 'loop'"):
            make([Superposed(), other]).recipe(ModelInfo(6))
    with pytest.raises(Unsupported, match="scores and logits of every token with superposed"):
        generate(tiny("llama"), **batch(), custom_generate=Superposed(), output_scores=True,
                 return_dict_in_generate=True)
    plain = generate(tiny("llama"), **batch(), custom_generate=Full())
    assert torch.equal(generate(tiny("llama"), **batch(), custom_generate=Superposed(k=1)), plain)
    assert generate(tiny("llama"), **batch(), custom_generate=Superposed()).shape == plain.shape
    combined = engine_of("llama").generate(SHORT, method=[Superposed(), KVInt8()], max_new_tokens=6)
    assert [len(one.alternatives) for one in combined] == [2, 2, 2]


def test_over_http_and_in_a_file_of_prompts() -> None:
    home, method = tiny_engine(), Superposed(k=3, sharpen=1.0)
    body = {"model": MODEL, "max_tokens": 9, "temperature": 0, **method.to_dict()}
    expected = home.generate("Some words", method=method, max_new_tokens=9)
    others = [text for text, *_ in expected.alternatives]
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    with serving(home) as server:
        whole = httpx.post(f"{server.url}/v1/completions", json={**body, "prompt": "Some words"}, timeout=60).json()
        asked = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **chat}, timeout=60).json()
        stream = {**body, "prompt": "Some words", "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=stream, timeout=60) as lines:
            data = [json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: {")]
        named = {**body, "prompt": "Some words", "method_args": {"corpus": "/etc/passwd"}}
        refused = httpx.post(f"{server.url}/v1/completions", json=named, timeout=60)
    assert (whole["choices"][0]["text"], whole["choices"][0]["alternatives"]) == (expected.text, others)
    assert len(asked["choices"][0]["alternatives"]) == 2
    assert "".join(one["choices"][0]["text"] for one in data) == expected.text
    assert refused.status_code == 403
    assert answered(1, None, expected, with_tokens=False)["alternatives"] == others
