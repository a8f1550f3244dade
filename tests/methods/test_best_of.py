"""Best of n against its slow reference: n separate runs, of which the likeliest is taken by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tokenizer import SPECIALS, chat_tokenizer
from drafts import draft_of
from drive import SHORT, prompt
from families import tiny
from schedules import Action, Job, actions, follow
from shoal.decode.branches.search import branch_seed
from shoal.engine.engine import Engine, Stream
from shoal.engine.loading.load import engine_for
from shoal.engine.request import Request
from shoal.engine.scheduling.batching import Policy
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.topk_oracle import TopKOracle
from shoal.types import Result
from test_matrix import engine_of
from turns import by_turns

SHALLOW = D3(alpha=0.9, core=2)
WORDS = chat_tokenizer()
LETTERS_ONLY = dict.fromkeys(range(len(SPECIALS)), -1e4)
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_new_tokens": 12}


def by_hand(engine: Engine, prompts: Sequence[Any], n: int, method: Method | str, **options: Any) -> list[Result]:
    """The likeliest of n runs of each prompt alone, under its own number and the branches' seeds."""
    found = []
    for number in range(len(prompts)):
        results = []
        for branch in range(n):
            seed = branch_seed(options["seed"], number, branch)
            request = Request.from_options({**options, "method": method, "seed": seed, "logprobs": 0})
            seq = engine.seqs(prompts, request)[number]
            seq.seq_id = 0
            with Stream(engine, [seq], engine.cache_for([seq], request.max_new_tokens)) as stream:
                assert all(step.seq == number for step in stream)
                results.append(stream.result)
        found.append(max(results, key=_mean))
    return found


def _mean(result: Result) -> float:
    assert result.logprobs is not None
    return sum(one.logprob for one in result.logprobs) / len(result.logprobs)


INNER = (
    None, SHALLOW, PromptLookup(min_ngram=1, inner=SHALLOW), StreamingLLM(window=3, sinks=1, every=2), KVInt8(first=1),
    TopKOracle(k=3, first=1),
)


@by_turns("model, inner", ["llama", "hybrid", "packed hybrid"], INNER)
@pytest.mark.quick(3)
def test_it_is_the_likeliest_of_separate_runs(model: str, inner: Method | None) -> None:
    engine, options = engine_of(model), {**WARM, "top_p": 0.9, "repetition_penalty": 1.2}
    expected = by_hand(engine, SHORT, 4, inner or "full", **options)
    results = engine.generate(SHORT, method=BestOf(4, inner=inner), logprobs=0, **options)
    assert [r.tokens for r in results] == [r.tokens for r in expected]
    assert [r.depths for r in results] == [r.depths for r in expected]
    for result, wanted in zip(results, expected, strict=True):
        assert [one.logprob for one in result.logprobs or ()] == pytest.approx(
            [one.logprob for one in wanted.logprobs or ()], abs=1e-5 if "packed" in model else 1e-9)
        assert result.seed == options["seed"]
    first = engine.generate(SHORT, method=inner or "full", **options)
    assert [r.tokens for r in first] != [r.tokens for r in results], "the first sample always won"


@pytest.mark.parametrize(
    "drafting", [DraftModel(draft_of("llama")), D3Spec(mean=0.8, core=2, length=3)], ids=repr
)
def test_drafts_change_no_sample(drafting: Method) -> None:
    engine = engine_of("llama")
    plain = engine.generate(SHORT, method=BestOf(3), **WARM)
    drafted = engine.generate(SHORT, method=BestOf(3, inner=drafting), **WARM)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert sum(r.stats.drafted for r in drafted) > 0


@pytest.mark.slow
def test_each_sample_ends_where_it_would_alone() -> None:
    """By stop strings, stop ids, an end of sequence and the limit, each with its text."""
    engine = engine_for(tiny("llama"), WORDS)
    engine.eos_token_ids = frozenset(WORDS.encode("e", add_special_tokens=False))
    prompts = [WORDS.encode(words, add_special_tokens=False) for words in ("Hello there", "and 2+2?", "why, though")]
    stops = {"stop": ["a", "k1"], "stop_token_ids": WORDS.encode("o", add_special_tokens=False)}
    reasons = set()
    for seed in range(6):
        options = {**WARM, **stops, "logit_bias": LETTERS_ONLY, "seed": seed, "max_new_tokens": 20}
        expected = by_hand(engine, prompts, 3, "full", **options)
        results = engine.generate(prompts, method=BestOf(3), **options)
        for result, wanted in zip(results, expected, strict=True):
            assert (result.tokens, result.text, result.finish_reason) == (
                wanted.tokens, wanted.text, wanted.finish_reason)
            reasons.add(result.finish_reason)
    assert reasons == {"stop", "length"}


def test_one_sample_is_no_search_and_greedy_needs_none() -> None:
    engine = engine_of("llama")
    assert BestOf(1, inner=SHALLOW).recipe(engine.info()) == SHALLOW.recipe(engine.info())
    assert BestOf(1).recipe(engine.info()) == Full().recipe(engine.info())
    greedy = engine.generate(SHORT, method=BestOf(3), max_new_tokens=9)
    plain = engine.generate(SHORT, max_new_tokens=9)
    assert [r.tokens for r in greedy] == [r.tokens for r in plain]
    assert [r.stats.layers_read for r in greedy] == [r.stats.layers_read for r in plain]


def test_what_is_refused() -> None:
    info = engine_of("llama").info()
    with pytest.raises(ValueError, match="n is 0; it must be at least 1"):
        BestOf(0)
    with pytest.raises(Unsupported, match="it searches itself"):
        BestOf(2, inner=BestOf(2)).recipe(info)


JOBS: list[Job] = [
    (prompt(5, 1), {"max_new_tokens": 7}),
    (prompt(9, 2), {"max_new_tokens": 8, "method": BestOf(3), "temperature": 1.0, "seed": 1}),
    (prompt(13, 3), {"max_new_tokens": 9, "method": BestOf(2, inner=SHALLOW), "temperature": 1.0, "seed": 2}),
    (prompt(1, 4), {"max_new_tokens": 5, "method": BestOf(3), "temperature": 1.0, "seed": 3, "stop_token_ids": [5, 9]}),
    (prompt(21, 5), {"max_new_tokens": 9, "method": SHALLOW, "temperature": 1.0, "seed": 4}),
    (prompt(7, 7), {"max_new_tokens": 9, "method": BestOf(2, inner=KVInt8()), "temperature": 1.0, "seed": 6}),
    (prompt(6, 6), {"max_new_tokens": 1, "method": BestOf(3), "temperature": 1.0, "seed": 5}),
]


@pytest.mark.slow
@settings(max_examples=30)
@given(todo=actions(len(JOBS), 14), seqs=st.integers(3, 8), chunk=st.integers(1, 24),
       how=st.sampled_from(["join", "waves"]), kept=st.sampled_from((0, 1 << 14, 1 << 24)))
def test_searches_come_and_go_among_other_rows(todo: list[Action], seqs: int, chunk: int, how: str, kept: int) -> None:
    """Each answer is what it is alone, no more sequences are stored than were announced, and nothing is left behind."""
    engine = engine_of("hybrid")
    scheduler = Scheduler(
        engine, max_seqs=seqs, prefill_chunk=chunk, policy=Policy(how), prefix_bytes=kept, start=False
    )
    follow(scheduler, JOBS, todo, lambda job: [engine.generate(JOBS[job][0], **JOBS[job][1]).tokens])


def test_the_scheduler_counts_every_branch() -> None:
    engine, ids = engine_of("llama"), prompt(9, 2)
    options: dict[str, Any] = {"method": BestOf(3), "temperature": 1.0, "max_new_tokens": 8}
    with pytest.raises(Unsupported, match="a search of 3 branches: there is room for 2 sequences"):
        Scheduler(engine, max_seqs=2, start=False).submit(ids, **options)
    need = Scheduler(engine, start=False).submit(ids, **options).entries[0].needs
    size = Scheduler(engine, start=False)._room.bytes(need)
    with pytest.raises(Unsupported, match="in 3 branches: its KV can take"):
        Scheduler(engine, kv_bytes=size - 1, start=False).submit(ids, **options)
    scheduler = Scheduler(engine, kv_bytes=size, prefix_bytes=0, start=False)
    handles = [scheduler.submit(ids, **options) for _ in range(2)]
    scheduler.turn()
    assert (scheduler.running, scheduler.waiting, scheduler.kv_use) == (1, 1, 1.0)
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
        assert scheduler._batches.plain.cache.bytes().allocated <= size
    for stats in (handle.results[0].stats for handle in handles):
        assert stats.new_tokens == 8
        assert 0 < stats.tokens_per_second <= 7 / stats.decode_seconds < 1e5


def test_a_greedy_request_takes_one_row() -> None:
    """It is decoded once, so no more is counted for it; the need is the same for all answers."""
    engine, ids = engine_of("llama"), prompt(9, 2)
    scheduler = Scheduler(engine, max_seqs=2, start=False)
    handle = scheduler.submit(ids, method=BestOf(3), max_new_tokens=8, n=2)
    assert [len(entry.needs) for entry in handle.entries] == [1, 1]
    scheduler.turn()
    assert scheduler.running == 2
    while scheduler.running:
        scheduler.turn()
    expected = engine.generate(ids, max_new_tokens=8).tokens
    assert [result.tokens for result in handle.results] == [expected] * 2


def test_a_search_that_fails_or_is_cancelled_frees_its_rows_and_disturbs_nobody() -> None:
    engine, ids = engine_of("llama"), prompt(9, 2)
    expected = engine.generate(ids, max_new_tokens=12).tokens
    calls = list[int]()

    def breaks(seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 9:
            raise RuntimeError("broken processor")
        return scores

    for more in ({"logits_processor": [breaks]}, {}):
        scheduler = Scheduler(engine, prefix_bytes=0, start=False)
        plain = scheduler.submit(ids, max_new_tokens=12)
        search = scheduler.submit(ids, method=BestOf(3), **WARM, **more)
        seqs = list[int]()
        for _ in range(6):
            scheduler.turn()
            seqs.append(scheduler._batches.plain.cache.seqs)
        assert max(seqs) == 4
        if more:
            assert seqs[-1] == 1
            with pytest.raises(RuntimeError, match="broken processor"):
                list(search)
        search.cancel()
        scheduler.turn()
        assert scheduler._batches.plain.cache.seqs == 1 and not scheduler._batches.plain.searches
        assert search.results[0].finish_reason == "cancelled" and search.results[0].tokens == ()
        while scheduler.running:
            scheduler.turn()
        assert plain.results[0].tokens == expected
    with pytest.raises(RuntimeError, match="broken processor"):
        calls.clear()
        engine.generate(ids, method=BestOf(3), **WARM, logits_processor=[breaks])


def test_a_chat_goes_on_from_the_winner() -> None:
    """The next turn reads what is new, and answers as one that starts afresh."""
    engine = engine_for(tiny("llama"), WORDS)
    options: dict[str, Any] = {**WARM, "method": BestOf(3), "logit_bias": LETTERS_ONLY}
    chat = engine.session(**options)
    for seed, question in enumerate(("Hello there", "and 2+2?", "why, though")):
        asked = [*chat.messages, {"role": "user", "content": question}]
        ids = WORDS.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=False)
        expected = engine.generate(ids, **{**options, "seed": seed})
        result = chat.send(question, seed=seed)
        assert (result.tokens, result.text) == (expected.tokens, expected.text)
        assert chat._cache.seqs == 1 and chat._cached[: len(ids)] == ids
        assert len(chat._cached) == len(ids) + len(result.tokens) - 1
    left = chat.stream("ok")
    left.close()
    assert chat.send("ok", seed=5).tokens
    assert chat._cache.seqs == 1


def test_transformers_generate() -> None:
    model, ids = tiny("llama", dtype=torch.float64), torch.tensor([SHORT[0]])
    torch.manual_seed(3)
    out = model.generate(ids, custom_generate=BestOf(3), max_new_tokens=6, do_sample=True, pad_token_id=0)
    torch.manual_seed(3)
    alone = model.generate(ids, custom_generate=BestOf(3), max_new_tokens=6, do_sample=True, pad_token_id=0)
    assert out.shape == (1, len(SHORT[0]) + 6) and torch.equal(out, alone)
    with pytest.raises(Unsupported, match="Leave output_scores"):
        model.generate(ids, custom_generate=BestOf(3), max_new_tokens=6, do_sample=True, pad_token_id=0,
                       return_dict_in_generate=True, output_scores=True)
