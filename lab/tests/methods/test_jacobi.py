"""Jacobi decoding against a slow reference, and against the plain loop wherever a sequence may end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from backends import Backend, on_backends
from chat_tokenizer import chat_tokenizer
from drive import SHORT, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from generate_calls import batch, generate
from scripted import Scripted
from serving import MODEL, serving, tiny_engine
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.topk_oracle import TopKOracle
from shoal.types import ModelInfo, Sampling
from shoal_lab.methods.jacobi import Jacobi
from shoal_lab.methods.layerskip import LayerSkip
from test_matrix import SAMPLINGS, engine_of

FULL = DepthPlan.full(6)
WRITTEN = [3, *prompt(40, 5)]


def recipe_of(n: int) -> Any:
    return Jacobi(n).recipe(ModelInfo(6))


def by_hand(model: PreTrainedModel, ids: Sequence[int], n: int, new: int) -> list[list[int]]:
    """Tokens emitted by each forward: the whole text is run every time, without a cache, and everything is argmax."""
    text, block, found = list(ids), list[int](), list[list[int]]()
    while (done := len(text) - len(ids)) < new:
        block = block[: max(0, new - done - 1)]
        logits = model(torch.tensor([[*text, *block]]), use_cache=False).logits[0, len(text) - 1 :]
        chosen = logits.argmax(-1).tolist()
        right = 0
        while right < len(block) and block[right] == chosen[right]:
            right += 1
        found.append(chosen[: right + 1])
        text += found[-1]
        block = chosen[right + 1 :]
        block += text[-1:] * (n - 1 - len(block))
    return found


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("ids", SHORT, ids=len)
def test_each_step_emits_what_the_reference_does(ids: list[int], n: int) -> None:
    model = tiny("llama")
    run = make_run(model, [ids], recipe_of(n), 30, watch=False)
    assert [[step.token for step in steps] for steps in run.steps()] == by_hand(model, ids, n, 30)


def test_the_reference_emits_several_tokens_at_a_time() -> None:
    """Otherwise the equality above would say little."""
    assert max(len(emitted) for ids in SHORT for emitted in by_hand(tiny("llama"), ids, 5, 30)) > 1


@on_backends("llama", "hybrid", "gemma3")
def test_rows_at_different_lengths_on_every_executor(backend: Backend, name: str) -> None:
    for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.95, frequency_penalty=0.4)):
        options: dict[str, Any] = {"runner": backend.runner(name), "sampling": sampling, "seed": 3}
        run = decode(None, SHORT, recipe_of(4), [9, 14, 11], **options)
        plain = decode(None, SHORT, FULL, [9, 14, 11], **options)
        assert run.tokens == plain.tokens
        assert all(gap(run.logits(seq), plain.logits(seq)) <= backend.exact for seq in range(3))


BESIDE: tuple[Method, ...] = (
    D3(alpha=0.85, core=2), StreamingLLM(window=4, sinks=1, every=3), KVInt8(), TopKOracle(k=3, first=1),
)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("other", BESIDE, ids=lambda method: method.name)
def test_beside_another_method_it_gives_that_methods_tokens(other: Method, sampling: str) -> None:
    engine, options = engine_of("hybrid"), {"max_new_tokens": 40, **SAMPLINGS[sampling]}
    alone = engine.generate(SHORT, method=other, **options)
    both = engine.generate(SHORT, method=[Jacobi(n=6), other], **options)
    assert [r.tokens for r in both] == [r.tokens for r in alone]
    assert [r.depths for r in both] == [r.depths for r in alone]
    assert max(r.stats.tokens_per_forward for r in both) > 1


@pytest.mark.parametrize(
    "other", [PromptLookup(), LayerSkip(3), BestOf(2)], ids=lambda method: method.name
)
def test_what_makes_no_sense_beside_it_is_refused_by_name(other: Method) -> None:
    for both in ([Jacobi(), other], [other, Jacobi()]):
        with pytest.raises(ValueError, match=f"jacobi has a loop of its own.*of {other.name}; leave jacobi or"):
            make(both).recipe(ModelInfo(6))


@pytest.mark.parametrize("other", [PromptLookup(inner=Jacobi()), BestOf(2, inner=Jacobi())], ids=repr)
def test_it_is_no_inner_method_of_such(other: Method) -> None:
    with pytest.raises(Unsupported, match="beside a loop of its own, JacobiLoop.*Leave one of them out"):
        other.recipe(ModelInfo(6))


@pytest.mark.parametrize("n", [0, -1, 65])
def test_a_block_out_of_range(n: int) -> None:
    with pytest.raises(ValueError, match=f"n is {n}; it must be 1 to 64 tokens"):
        Jacobi(n)


def test_it_is_exact_and_says_what_it_excludes() -> None:
    recipe = recipe_of(8)
    assert (recipe.exact_to, recipe.components, recipe.scratch) == ("full", ("loop",), 7)
    assert recipe.excludes == ("proposer", "rule", "experts", "search")
    assert make([Jacobi(), D3()]).recipe(ModelInfo(6)).exact_to == "plan"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """A model that knows its text by heart, whatever it is fed: a block is right after one step."""
    return Scripted(monkeypatch, [WRITTEN], lambda seqs, tokens: 1.0)


def ended(engine: Engine, method: Any, **options: Any) -> tuple[Any, ...]:
    result = engine.generate(WRITTEN[:2], method=method, **options)
    return result.tokens, result.text, result.finish_reason


def test_steps_and_ledger_of_a_text_known_by_heart(written: Scripted) -> None:
    """Step by step: a block of fillers, which yields one token, then a right block, which yields n."""
    result = written.engine.generate(WRITTEN[:2], method=Jacobi(n=4), max_new_tokens=1 + 3 * 5)
    assert result.tokens == tuple(WRITTEN[2:18])
    assert written.forwards == [(1, 2), *[(1, 4)] * 6]
    stats = result.stats
    assert (stats.target_forwards, stats.drafted, stats.accepted) == (7, 18, 9)
    assert stats.acceptance == (0.5, 0.5, 0.5) and stats.tokens_per_forward == 15 / 6


@pytest.mark.parametrize("new", range(1, 12))
def test_a_limit_within_a_block(written: Scripted, new: int) -> None:
    assert ended(written.engine, Jacobi(n=4), max_new_tokens=new) == ended(written.engine, Full(), max_new_tokens=new)
    assert all(tokens <= 4 for _, tokens in written.forwards)


@pytest.mark.parametrize("last", range(3, 12))
def test_an_end_of_sequence_within_a_block(written: Scripted, last: int) -> None:
    options: dict[str, Any] = {"stop_token_ids": [WRITTEN[last]], "max_new_tokens": 20}
    found = ended(written.engine, Jacobi(n=4), **options)
    assert found == ended(written.engine, Full(), **options) and found[2] == "stop" and len(found[0]) <= last - 1


@pytest.mark.parametrize("last", range(4, 12))
def test_a_stop_string_within_a_block(written: Scripted, last: int) -> None:
    written.engine.tokenizer = tokenizer = chat_tokenizer()
    stop = tokenizer.decode(WRITTEN[last : last + 2])
    found = ended(written.engine, Jacobi(n=4), stop=stop, max_new_tokens=30)
    assert found == ended(written.engine, Full(), stop=stop, max_new_tokens=30)
    assert found[2] == "stop" and found[1] and stop not in found[1]


@pytest.mark.parametrize("context", range(3, 12))
def test_the_contexts_end_within_a_block(written: Scripted, context: int) -> None:
    written.engine.runner.max_positions = context
    found = ended(written.engine, Jacobi(n=4), max_new_tokens=30)
    assert found == ended(written.engine, Full(), max_new_tokens=30) and len(found[0]) == context - 2


def test_processors_are_shown_the_text_and_nothing_else() -> None:
    """A grammar may fail on a text that never comes."""
    seen: list[list[int]] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.7, "seed": 1, "presence_penalty": 0.5}
    result = engine_of("llama").generate(SHORT[0], method=Jacobi(n=6), logits_processor=[watch], **options)
    text = [*SHORT[0], *result.tokens]
    assert seen == [text[:end] for end in range(len(SHORT[0]), len(text))]
    assert result.tokens == engine_of("llama").generate(SHORT[0], **options).tokens


def test_leaving_early_keeps_committed_positions_only() -> None:
    run = make_run(tiny("hybrid"), SHORT[:1], recipe_of(5), 30)
    steps = run.steps()
    for _ in range(6):
        next(steps)
    steps.close()
    seq = run.seqs[0]
    assert run.cache.positions == [len(seq.tokens) - 1] and seq.finish_reason is None
    assert all(layer.lengths == run.cache.positions for layer in run.cache.layers)
    left = run.logits(0)[: seq.emitted]
    assert gap(left, oracle_logits(tiny("hybrid"), SHORT[0], FULL, seq.tokens[seq.prompt_length :])) <= 1e-10


def test_a_chat_goes_on_from_what_was_kept() -> None:
    engine = engine_of("llama")
    engine_words, engine.tokenizer = engine.tokenizer, chat_tokenizer()
    try:
        chats = [engine.session(method=method, max_new_tokens=9) for method in (Full(), Jacobi(n=4))]
        for message in ("Hello", "And then?"):
            plain, found = [chat.send(message) for chat in chats]
            assert found.tokens == plain.tokens
    finally:
        engine.tokenizer = engine_words


@pytest.mark.parametrize("sampled", [False, True])
def test_in_transformers_generate(sampled: bool) -> None:
    found = []
    for method in (Full(), Jacobi(n=4)):
        torch.manual_seed(3)
        options: dict[str, Any] = {"do_sample": sampled, "top_k": 20 if sampled else None, "repetition_penalty": 1.2}
        found.append(generate(tiny("llama"), **batch(), **options, custom_generate=method))
    assert torch.equal(*found)


def test_over_http() -> None:
    body = {"model": MODEL, "prompt": "Some words", "max_tokens": 24, "temperature": 0.8, "seed": 4}
    with serving(tiny_engine()) as server:
        asked = ({"method": "full"}, {"method": "jacobi", "method_args": {"n": 4}})
        answers = [httpx.post(f"{server.url}/v1/completions", json={**body, **how}, timeout=60) for how in asked]
        refused = httpx.post(f"{server.url}/v1/completions", json={**body, "method": ["jacobi", "best_of"]}, timeout=60)
    plain, found = [answer.json()["choices"][0] for answer in answers]
    assert found == plain and found["text"]
    assert refused.status_code == 400 and "jacobi has a loop of its own" in refused.json()["error"]["message"]
