"""AdaDec against a slow reference that runs every text anew; a pause leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from backends import HF, Backend, on_backends, reference
from chat_tokenizer import chat_tokenizer
from drive import SHORT, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from generate_calls import batch, generate
from oracle import prefix_counts, prefix_oracle
from serving import MODEL, serving, tiny_engine
from shoal.decode import sampling
from shoal.decode.text.stop import StopRules
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.common.limits import limits_of
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.packed.native import MAX_NODES
from shoal.model.runner import SequenceChunk
from shoal.types import ModelInfo, Sampling
from shoal_lab.loops.adadec import PausingBatch
from shoal_lab.methods.adadec import AdaDec
from shoal_lab.methods.jacobi import Jacobi
from test_matrix import SAMPLINGS, engine_of

FULL = DepthPlan.full(6)
SETTINGS = [Sampling(), Sampling(temperature=0.7, top_k=6)]
NEW = 14


def recipe_of(method: Method) -> Any:
    return method.recipe(ModelInfo(6))


def twin_logits(name: str, text: Sequence[int], prompt_length: int, plan: DepthPlan) -> Tensor:
    counts = [prefix_counts(drops, prompt_length, len(text)) for drops in (plan.attention, plan.mlp)]
    return prefix_oracle(reference(name), torch.tensor([list(text)]), *counts)[-1]


def by_hand(
    name: str, ids: Sequence[int], method: AdaDec, how: Sampling, seq: int, new: int = NEW, *,
    plan: DepthPlan = FULL, ends: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Tokens, and forwards that a cache would need; everything is run anew from its beginning."""
    text, forwards = list(ids), 0
    while len(text) - len(ids) < new and not (len(text) > len(ids) and text[-1] in ends):
        logits = twin_logits(name, text, len(ids), plan)
        logs, forwards = logits.log_softmax(-1), forwards + 1
        probs = sampling.probs_of(logits, how)
        token = sampling.draw(probs, sampling.uniform(4, seq, len(text) - len(ids), "sample"))
        if -sum(float(log) * math.exp(float(log)) for log in logs) >= method.threshold:
            ranked = sorted(range(len(logs)), key=lambda one: -float(logs[one]))
            ranked = [one for one in ranked if how.greedy or probs[one] > 0][: method.candidates]
            scores, most = [], 0
            for one in ranked:
                path, found = [one], [float(logs[one])]
                while len(path) <= method.lookahead and path[-1] not in ends:
                    after = twin_logits(name, [*text, *path], len(ids), plan).log_softmax(-1)
                    path.append(int(after.argmax()))
                    found.append(float(after.max()))
                most = max(most, len(path) - 1)
                scores.append(sum(found) / len(found))
            token, forwards = ranked[scores.index(max(scores))], forwards + most
        text.append(token)
    return text[len(ids) :], forwards


@on_backends("llama", "hybrid", "gemma3")
@pytest.mark.parametrize("how", [SETTINGS[0], pytest.param(SETTINGS[1], marks=pytest.mark.slow)],
                         ids=["greedy", "sampled"])
@pytest.mark.quick(2)
def test_tokens_and_forwards_are_the_references_on_every_executor(backend: Backend, name: str, how: Sampling) -> None:
    method = AdaDec(threshold=1.0, candidates=3, lookahead=3)
    run = decode(None, SHORT, recipe_of(method), NEW, runner=backend.runner(name), sampling=how, seed=4, watch=False)
    expected = [by_hand(name, ids, method, how, seq) for seq, ids in enumerate(SHORT)]
    assert run.tokens == [tokens for tokens, _ in expected]
    assert [seq.ledger.target_forwards for seq in run.seqs] == [forwards for _, forwards in expected]
    plain = decode(None, SHORT, FULL, NEW, runner=backend.runner(name), sampling=how, seed=4, watch=False)
    assert run.tokens != plain.tokens
    pauses = [forwards - NEW for _, forwards in expected]
    assert 0 < sum(pauses) < 3 * NEW * 3, "some steps pause, others do not"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_a_pause_under_a_plan_that_drops_layers(name: str) -> None:
    method, depth = AdaDec(threshold=0.5, candidates=2, lookahead=4), D3(alpha=0.85, core=2)
    recipe = make([method, depth]).recipe(engine_of(name).info(NEW))
    run = decode(None, SHORT, recipe, NEW, runner=HF.runner(name), watch=False, seed=4)
    expected = [by_hand(name, ids, method, Sampling(), seq, plan=recipe.plan) for seq, ids in enumerate(SHORT)]
    assert run.tokens == [tokens for tokens, _ in expected]


def test_candidates_end_where_the_answer_would() -> None:
    """Their mean is over their own length."""
    ends = frozenset(range(0, 97, 4))
    method = AdaDec(threshold=0.4, candidates=4, lookahead=6)
    run = decode(None, SHORT, recipe_of(method), runner=HF.runner("llama"), seed=4, watch=False,
                 rules=lambda _: StopRules(max_new_tokens=40, eos_token_ids=ends))
    expected = [by_hand("llama", ids, method, Sampling(), seq, 40, ends=tuple(ends)) for seq, ids in enumerate(SHORT)]
    assert run.tokens == [tokens for tokens, _ in expected]
    assert [seq.ledger.target_forwards for seq in run.seqs] == [forwards for _, forwards in expected]
    assert all(seq.finish_reason == "stop" for seq in run.seqs)


def test_stop_strings_and_the_contexts_end_stop_a_candidate_and_criteria_see_none_of_it() -> None:
    seen: list[list[int]] = []

    def watch(ids: Tensor, _: Any) -> bool:
        seen.append(ids[0].tolist())
        return False

    tokenizer = chat_tokenizer()
    rules = StopRules(max_new_tokens=30, max_length=20, stop_strings=(tokenizer.decode([41, 42]),), criteria=(watch,))
    fed: list[int] = []

    recipe = recipe_of(AdaDec(threshold=0.0, candidates=3, lookahead=8))
    run = make_run(None, [SHORT[1]], recipe, runner=HF.runner("llama"), rules=lambda _: rules, tokenizer=tokenizer,
                   watch=False)
    assert isinstance(run.batch, PausingBatch)
    forward = run.batch.runner.forward

    def counted(chunks: Any, cache: Any, *rest: Any) -> Tensor:
        fed.extend(place for chunk in chunks for place in chunk.positions(cache.positions[chunk.seq]))
        return forward(chunks, cache, *rest)

    run.batch.runner = _Shown(run.batch.runner, counted)
    for _ in run.steps():
        pass
    text = [*SHORT[1], *run.tokens[0]]
    assert len(text) == 20 and max(fed) == 18
    assert seen == [text[:end] for end in range(len(SHORT[1]) + 1, len(text) + 1)]


class _Shown:
    """A runner whose forwards are reported to a test."""

    def __init__(self, runner: Any, forward: Any) -> None:
        self._runner, self.forward = runner, forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Told:
    """A logits processor that forces one token at each step: another run's output."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        token = self._tokens.pop(0)
        return torch.where(torch.arange(scores.shape[-1]) == token, scores, -math.inf)


@on_backends("llama", "hybrid")
def test_a_look_leaves_nothing_in_the_cache(backend: Backend, name: str) -> None:
    """The cache holds, bit for bit, what the plain loop stores of the same text."""
    stack_here = backend.runner(name)
    run = make_run(None, SHORT, recipe_of(AdaDec(threshold=0.7)), NEW, runner=stack_here)
    for _ in run.steps():
        for seq in run.batch.seqs:
            assert run.cache.positions[seq.seq_id] == len(seq.tokens) - 1
            assert all(layer.scratch[seq.seq_id] == 0 for layer in run.cache.layers)
    assert all(seq.ledger.target_forwards > NEW for seq in run.seqs)
    plain = make_run(None, SHORT, FULL, NEW, runner=stack_here)
    for seq, tokens in zip(plain.seqs, run.tokens, strict=True):
        seq.processors = (Told(tokens),)
    assert [step.token for steps in plain.steps() for step in steps] and plain.tokens == run.tokens
    for layer, other in zip(run.cache.layers, plain.cache.layers, strict=True):
        for seq_id in range(len(SHORT)):
            ends = layer.stored(seq_id), other.stored(seq_id)  # what has left a window may be dropped sooner or later
            count = min(ends)
            assert layer.lengths[seq_id] == other.lengths[seq_id] and count >= min(layer.lengths[seq_id], 7)
            for tensors in zip(layer.seq_tensors(seq_id), other.seq_tensors(seq_id), strict=True):
                assert torch.equal(*(one[:, end - count : end] for one, end in zip(tensors, ends, strict=True)))
    for number, ids in enumerate(SHORT):
        expected = oracle_logits(reference(name), ids, FULL, run.tokens[number])
        assert gap(run.logits(number).double(), expected) <= backend.exact


def test_processors_are_shown_the_text_and_nothing_else() -> None:
    seen: list[list[int]] = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    method = AdaDec(threshold=0.5)
    result = engine_of("llama").generate(SHORT[0], method=method, max_new_tokens=NEW, logits_processor=[watch])
    text = [*SHORT[0], *result.tokens]
    assert seen == [text[:end] for end in range(len(SHORT[0]), len(text))]
    assert result.stats.target_forwards > NEW


def test_a_banned_token_is_no_candidate_and_in_no_outlook() -> None:
    options: dict[str, Any] = {"logit_bias": {token: -math.inf for token in range(97) if token not in (7, 8)}}
    method = AdaDec(threshold=0.0, candidates=5, lookahead=4)
    found = engine_of("llama").generate(SHORT[0], method=method, max_new_tokens=20, **options)
    assert set(found.tokens) <= {7, 8} and found.stats.target_forwards == 20 * 5


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("neutral", [AdaDec(math.inf), AdaDec(0.0, lookahead=0), AdaDec(0.0, candidates=1)], ids=repr)
def test_what_changes_nothing(neutral: AdaDec, sampling: str) -> None:
    assert recipe_of(neutral).exact_to == "full"
    options: dict[str, Any] = {"max_new_tokens": NEW, **SAMPLINGS[sampling]}
    plain, found = [engine_of("hybrid").generate(SHORT, method=one, **options) for one in (Full(), neutral)]
    assert [r.tokens for r in found] == [r.tokens for r in plain]


def test_a_threshold_that_is_never_reached_gives_plain_decoding_by_its_own_loop() -> None:
    method = AdaDec(threshold=50.0)
    assert recipe_of(method).loop is not None
    plain, found = [engine_of("hybrid").generate(SHORT, method=one, max_new_tokens=NEW) for one in (Full(), method)]
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    assert [r.stats.target_forwards for r in found] == [r.stats.target_forwards for r in plain]


def test_what_it_is() -> None:
    recipe = recipe_of(AdaDec())
    assert (recipe.exact_to, recipe.components, recipe.scratch) == ("none", ("loop",), 15)
    assert recipe.excludes == ("proposer", "rule", "keep", "select", "experts", "search")


@pytest.mark.slow
def test_beside_stored_integers() -> None:
    found = engine_of("hybrid").generate(SHORT, method=[AdaDec(0.5), KVInt8()], max_new_tokens=NEW)
    alone = [engine_of("hybrid").generate(ids, method=[AdaDec(0.5), KVInt8()], max_new_tokens=NEW) for ids in SHORT]
    assert [r.tokens for r in found] == [r.tokens for r in alone]


@pytest.mark.parametrize("other", [PromptLookup(), BestOf(2), Jacobi()], ids=lambda method: method.name)
def test_what_makes_no_sense_beside_it_is_refused_by_name(other: Method) -> None:
    with pytest.raises(ValueError, match=f"adadec.*{other.name}|{other.name}.*adadec"):
        make([AdaDec(), other]).recipe(ModelInfo(6))
    if other.name != "jacobi":
        with pytest.raises(Unsupported, match="beside a loop of its own, Pausing.*Leave one of them out"):
            type(other)(inner=AdaDec()).recipe(ModelInfo(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": -0.1}, "threshold is -0.1; it must be 0 nats or more, infinity"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"candidates": 0}, "candidates is 0; it must be at least 1"),
        ({"lookahead": -1}, "lookahead is -1; it must be 0 tokens"),
        ({"candidates": 26, "lookahead": 10}, "26 candidates x lookahead 10 is 260 tokens; they must be at most 256"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaDec(**options)


def test_infinity_has_a_form_in_json() -> None:
    assert make(AdaDec(math.inf).to_dict()) == AdaDec(math.inf)


@pytest.mark.parametrize("sampled", [False, True])
def test_in_transformers_generate(sampled: bool) -> None:
    found = []
    options: dict[str, Any] = {"do_sample": sampled, "top_k": 20 if sampled else None}
    for method in (AdaDec(0.5), AdaDec(50.0), Full()):
        torch.manual_seed(3)
        found.append(generate(tiny("llama"), **batch(), **options, custom_generate=method))
    assert torch.equal(found[1], found[2]) and not torch.equal(found[0], found[2])


def test_over_http_and_in_a_stream() -> None:
    engine = tiny_engine()
    method = AdaDec(threshold=0.5, lookahead=2)
    body = {"model": MODEL, "prompt": "Some words", "max_tokens": 16, "temperature": 0, **method.to_dict()}
    expected = engine.generate("Some words", method=method, max_new_tokens=16)
    assert expected.stats.target_forwards > 16
    assert "".join(step.text for step in engine.stream("Some words", method=method, max_new_tokens=16)) == expected.text
    with serving(engine) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        body["method_args"] = {"threshold": -1}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["choices"][0]["text"] == expected.text
    assert refused.status_code == 400 and "threshold is -1" in refused.json()["error"]["message"]


def test_a_long_prompt_in_pieces_changes_nothing() -> None:
    ids = prompt(60, 3)
    method = recipe_of(AdaDec(threshold=0.5))
    whole, pieces = [decode(None, [ids, *SHORT], method, NEW, runner=HF.runner("hybrid"), chunk=chunk).tokens
                     for chunk in (2048, 7)]
    assert whole == pieces


def test_candidates_never_hang_below_more_tokens_than_the_kernels_can_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger trees are read in plain torch, which would slow down all other sequences."""
    engine, nodes = engine_for(tiny("llama")), list[int]()
    forward = engine.runner.forward

    def seen(chunks: Sequence[SequenceChunk], *args: Any, **options: Any) -> Tensor:
        nodes.extend(chunk.nodes.stop for chunk in chunks if chunk.parents is not None)
        return forward(chunks, *args, **options)

    monkeypatch.setattr(engine.runner, "forward", seen)
    limits = limits_of(AdaDec)
    for size in (20, 60, 100):
        how = AdaDec(threshold=0, candidates=int(limits["candidates"].value), lookahead=int(limits["lookahead"].value))
        engine.generate([1 + place % 90 for place in range(size)], method=how, max_new_tokens=3)
    assert nodes and max(nodes) <= MAX_NODES
