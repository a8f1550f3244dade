"""Filling masks, against a replay in plain Python over bidirectional forwards without a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import shoal
from chat_tokenizer import chat_tokenizer
from drive import SHORT, prompt
from families import VOCAB, tiny
from generate_calls import generate
from masked import MASK, masked_engine, masked_model, seen_by_all
from method_matrix import MASKED
from serving import MODEL, serving
from shoal.cli.entry import main
from shoal.decode import sampling
from shoal.decode.batch import begin
from shoal.engine.constraints.constraint import Regex
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.request import Request
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.stream import Stream
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.types import Result
from shoal_lab.loops.canvas import Confident, Guess
from shoal_lab.methods.adablock import AdaBlock, Delimited
from shoal_lab.methods.diffusion import Diffusion
from shoal_lab.methods.fast_dllm import FastDLLM
from shoal_lab.methods.prophet import Prophet, WideGap

NEW = 11
ENDLESS = float("inf")


class Replay:
    """One answer: after each step the whole canvas is run again.

    Attributes:
        text: prompt and answer.
        order: decided places, by step.
    """

    def __init__(self, model: PreTrainedModel, ids: Sequence[int], method: Diffusion, shift: int = 0, new: int = NEW,
                 how: dict[str, Any] | None = None, seq: int = 0) -> None:
        self.model, self.shift, self.method, self.prompt, self.new = model, shift, method, len(ids), new
        self.text, self.order = [*ids, *[MASK] * new], list[list[int]]()
        self.how, self.seq = Request.from_options({"seed": 7, **(how or {})}), seq
        block, steps = method.block or min(32, new), method.steps or new
        for start in range(0, new, block):
            end = min(new, start + block)
            left = max(1, end * steps // new - start * steps // new)
            while masks := [p for p in range(start, end) if self.text[self.prompt + p] == MASK]:
                self._fill(masks, math.ceil(len(masks) / left))
                left -= 1

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.text[self.prompt :])

    def logits(self) -> Tensor:
        seen = seen_by_all(self.model, self.text, self.shift)
        if self.method.guidance:
            hidden = [MASK] * self.prompt + self.text[self.prompt :]
            free = seen_by_all(self.model, hidden, self.shift)
            seen = free + (self.method.guidance + 1) * (seen - free)
        seen[:, MASK] = -torch.inf
        return seen[self.prompt :]

    def _fill(self, masks: Sequence[int], count: int) -> None:
        logits, ranked = self.logits(), list[tuple[float, int, int]]()
        for place in masks:
            probs = logits[place].softmax(-1)
            key = (self.how.seed, self.seq, len(self.order) << 32 | place)
            if self.how.sampling.greedy:
                token = int(logits[place].argmax())
            else:
                law = sampling.probs_of(logits[place], self.how.sampling)
                token = sampling.draw(law, sampling.uniform(*key, "sample"))
            best = probs.topk(2).values
            score = {"confidence": float(probs[token]), "margin": float(best[0] - best[1]),
                     "entropy": float(probs.clamp_min(1e-300).log().mul(probs).sum()),
                     "random": sampling.uniform(*key, "remask")}[self.method.remasking]
            ranked.append((-score, place, token))
        chosen = sorted(ranked)[:count]
        for _, place, token in chosen:
            self.text[self.prompt + place] = token
        self.order.append(sorted(place for _, place, _ in chosen))


def answer(engine: Engine, ids: Sequence[int], method: Any, **options: Any) -> Result:
    return engine.generate(list(ids), method=method, **{"max_new_tokens": NEW, "seed": 7, **options})


CASES = [
    Diffusion(), Diffusion(block=1), Diffusion(block=4), Diffusion(block=4, steps=5), Diffusion(block=5, steps=3),
    Diffusion(steps=1), Diffusion(block=NEW, steps=4, remasking="margin"), Diffusion(block=6, remasking="entropy"),
    Diffusion(block=6, steps=4, remasking="random"), Diffusion(block=4, steps=6, guidance=0.7),
]
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", CASES, ids=repr)
def test_words_and_steps_are_those_of_the_reference(method: Diffusion, how: dict[str, Any]) -> None:
    for shift, ids in ((0, SHORT[0]), (1, SHORT[1])):
        engine = masked_engine(shift=shift)
        replay = Replay(masked_model(shift=shift), ids, method, shift, how=how)
        found = answer(engine, ids, method, **how)
        assert found.tokens == replay.tokens and found.finish_reason == "length"
        assert found.stats.target_forwards == len(replay.order) * (2 if method.guidance else 1)


def test_the_reference_fills_out_of_order_and_several_at_a_time() -> None:
    """Otherwise the equality above would say little."""
    order = Replay(masked_model(), SHORT[0], Diffusion()).order
    assert [place for places in order for place in places] != list(range(NEW))
    orders = {str(Replay(masked_model(), prompt(6), Diffusion(remasking=how), new=20).order)
              for how in ("confidence", "margin", "entropy", "random")}
    assert len(orders) == 4
    assert max(map(len, Replay(masked_model(), SHORT[0], Diffusion(steps=3)).order)) == 4


@pytest.mark.parametrize("shift", [0, 1])
def test_a_block_of_one_is_left_to_right_greedy(shift: int) -> None:
    """Each token is the argmax, given those before it and masks after it."""
    model, tokens = masked_model(shift=shift), [*SHORT[1], *[MASK] * NEW]
    for place in range(len(SHORT[1]), len(tokens)):
        logits = seen_by_all(model, tokens, shift)[place]
        logits[MASK] = -torch.inf
        tokens[place] = int(logits.argmax())
    for method in (Diffusion(block=1), Diffusion(block=1, steps=NEW), FastDLLM(block=1, reuse="none")):
        assert answer(masked_engine(shift=shift), SHORT[1], method).tokens == tuple(tokens[len(SHORT[1]) :])


NEUTRAL: list[tuple[Method, Method]] = [
    (Prophet(gaps=(ENDLESS,) * 3, block=4, steps=6), Diffusion(block=4, steps=6)),
    (Prophet(gaps=(ENDLESS,) * 3, remasking="entropy"), Diffusion(remasking="entropy")),
    (AdaBlock(block=4, delimiter_threshold=1.1, delimiters=(5,)), FastDLLM(block=4, reuse="none")),
    (AdaBlock(threshold=0.2, delimiter_threshold=2, delimiters=(5,), reuse="dual"),
     FastDLLM(threshold=0.2, reuse="dual")),
    (FastDLLM(threshold=1.0, reuse="none"), Diffusion()),
    (FastDLLM(threshold=0.0, block=4, reuse="none"), Diffusion(block=4, steps=3)),
    (Diffusion(guidance=0.0), Diffusion()),
]


@pytest.mark.parametrize(("method", "baseline"), NEUTRAL, ids=repr)
def test_neutral_settings_are_the_baseline_bit_for_bit(method: Method, baseline: Method) -> None:
    """Tokens, their log-probabilities, and the number of forwards."""
    for ids in SHORT:
        found, plain = (answer(masked_engine(), ids, one, logprobs=2) for one in (method, baseline))
        assert (found.tokens, found.logprobs) == (plain.tokens, plain.logprobs)
        assert found.stats.target_forwards == plain.stats.target_forwards


@pytest.mark.parametrize("name", ["llama", "packed llama"])
@pytest.mark.parametrize("method", MASKED, ids=repr)
def test_a_row_is_the_same_alone_in_a_batch_and_in_a_scheduler(method: Method, name: str) -> None:
    engine = masked_engine(name, shift=1)
    options: dict[str, Any] = {"method": method, "max_new_tokens": NEW, "temperature": 0.7, "seed": 7}
    together = engine.generate(SHORT, **options)
    for number in range(len(SHORT)):
        seq = engine.seqs(SHORT, Request.from_options(options))[number]
        seq.seq_id = 0
        stream = Stream(engine, [seq], engine.cache_for([seq], NEW))
        assert len(list(stream)) == NEW and stream.result.tokens == together[number].tokens
        assert MASK not in stream.result.tokens
    with Scheduler(engine, start=False) as scheduler:
        handles = [scheduler.submit(ids, **options) for ids in SHORT]
        while not all(handle.done for handle in handles):
            scheduler.turn()
        assert handles[0].results[0].tokens == together[0].tokens


@pytest.mark.parametrize("reuse", ["prefix", "dual"])
@pytest.mark.parametrize("shift", [0, 1])
def test_kept_kv_is_exact_in_a_model_of_one_layer(reuse: Any, shift: int) -> None:
    """In one layer, a place's KV depends on its own token alone, and tokens beyond the block are unchanged."""
    engine = masked_engine(shift=shift, layers=1)
    for ids in SHORT:
        whole, kept = (answer(engine, ids, Diffusion(block=4, reuse=how), logprobs=0) for how in ("none", reuse))
        assert kept.tokens == whole.tokens
        assert [one.logprob for one in kept.logprobs or ()] == pytest.approx(
            [one.logprob for one in whole.logprobs or ()], abs=1e-9)


@pytest.mark.parametrize("reuse", ["prefix", "dual"])
def test_kept_kv_is_exact_in_the_first_step_of_a_block(reuse: Any) -> None:
    method = {how: Diffusion(block=4, steps=3, reuse=how) for how in ("none", reuse)}
    for ids in SHORT:
        assert answer(masked_engine(), ids, method[reuse]).tokens == answer(masked_engine(), ids, method["none"]).tokens


@pytest.mark.parametrize("name", ["llama", "packed llama"])
@pytest.mark.parametrize("reuse", ["prefix", "dual"])
@pytest.mark.parametrize("shift", [0, 1])
def test_kept_kv_is_that_of_the_blocks_first_step(reuse: Any, shift: int, name: str) -> None:
    """The only approximation: tokens of the block see the others as of the first step."""
    ids = SHORT[1]
    found = answer(masked_engine(name, shift), ids, Diffusion(block=4, reuse=reuse), logprobs=0)
    model = masked_model(shift=shift)
    tokens, logs = by_frozen(model, ids, 4, reuse, shift)
    assert found.tokens == tuple(tokens)
    assert [one.logprob for one in found.logprobs or ()] == pytest.approx(logs, abs=1e-9 if name == "llama" else 1e-3)


def by_frozen(model: PreTrainedModel, ids: Sequence[int], block: int, reuse: str, shift: int) -> tuple[Any, Any]:
    """Tokens and log-probabilities if the KV outside the block is that of its first step, layer by layer.

    A hook replaces the inputs of frozen places by those of the first step.
    """
    size, tokens, logs = len(ids), [*ids, *[MASK] * NEW], [0.0] * NEW
    layers = model.model.layers
    for start in range(0, NEW, block):
        end = min(NEW, start + block)
        first, last = size + start - shift, size + end
        held: dict[int, Tensor] = {}
        frozen = [*range(first), *(range(last, len(tokens)) if reuse == "dual" else ())]
        begun = False

        def swap(module: Any, args: Any, kwargs: Any, held: dict[int, Tensor] = held,
                 frozen: list[int] = frozen) -> Any:
            at = next(number for number, layer in enumerate(layers) if layer is module)
            states = args[0] if args else kwargs["hidden_states"]
            if at not in held:
                held[at] = states.clone()
                return None
            states = states.clone()
            states[:, frozen] = held[at][:, frozen]
            return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

        hooks = [layer.register_forward_pre_hook(swap, with_kwargs=True) for layer in layers]
        try:
            while masks := [place for place in range(start, end) if tokens[size + place] == MASK]:
                logits = seen_by_all(model, tokens, shift)[size:]
                logits[:, MASK] = -torch.inf
                best = max(masks, key=lambda place: float(logits[place].softmax(-1).max()))
                tokens[size + best] = int(logits[best].argmax())
                logs[best] = float(logits[best].log_softmax(-1).max())
                begun = True
        finally:
            for hook in hooks:
                hook.remove()
        assert begun
    return tokens[size:], logs


def test_kept_kv_changes_words_and_work() -> None:
    """Otherwise the tests above would say little; a dual cache runs the block alone."""
    engine = masked_engine()
    found = {how: answer(engine, SHORT[1], Diffusion(block=4, reuse=how), logprobs=0) for how in
             ("none", "prefix", "dual")}
    assert len({one.logprobs for one in found.values()}) == 3
    assert found["dual"].stats.kv_bytes_used > 0 == found["none"].stats.kv_bytes_used


def test_a_confident_step_takes_all_that_are_sure_and_the_surest() -> None:
    guesses = [Guess(place, 1, sure, 0.0, 0.0) for place, sure in enumerate((0.5, 0.95, 0.2, 0.91))]

    def places(commit: Confident) -> list[int]:
        return sorted(one.place for one in commit.choose(guesses, 1))

    assert places(Confident(0.9)) == [1, 3] and places(Confident(0.99)) == [1]
    assert places(Confident(0.0)) == [0, 1, 2, 3]
    assert places(Confident(factor=0.0)) == [1]
    assert places(Confident(factor=0.3)) == [1, 3]  # the second needs 1 - 0.3 / 3 = 0.9, the third 1 - 0.3 / 4
    assert places(Confident(factor=2.0)) == [0, 1, 3] and places(Confident(factor=0.25)) == [1]


def test_prophet_fills_with_the_argmax_of_the_step_at_which_it_leaves_off() -> None:
    once = answer(masked_engine(), SHORT[0], Prophet(gaps=(0.0,) * 3, block=4))
    logits = seen_by_all(masked_model(), [*SHORT[0], *[MASK] * NEW])[len(SHORT[0]) :]
    logits[:, MASK] = -torch.inf
    assert once.stats.target_forwards == 1 and once.tokens == tuple(logits.argmax(-1).tolist())
    forwards = [answer(masked_engine(), SHORT[0], Prophet(gaps=(gap,) * 3)).stats.target_forwards
                for gap in (0.0, 1.0, 2.0, 3.0, 6.0, ENDLESS)]
    assert forwards == sorted(forwards) and 1 < forwards[2] < forwards[-1] == NEW


def test_prophet_asks_for_less_in_each_third_and_looks_at_its_region() -> None:
    guesses = [Guess(place, 1, 0.5, 0.0, gap) for place, gap in ((3, 1.0), (5, 3.0))]
    assert [WideGap((3.0, 2.0, 1.0), None).over(guesses, done) for done in (0, 0.3, 0.34, 0.67, 1)] == [
        False, False, True, True, True]
    assert WideGap((3.0, 3.0, 3.0), (4, 2)).over(guesses, 0) and not WideGap((3.0,) * 3, (0, 4)).over(guesses, 0)
    assert WideGap((3.0,) * 3, (0, 2)).over(guesses, 0), "no mask of the region is left"


def test_blocks_end_behind_the_surest_delimiter() -> None:
    guesses = [Guess(place, token, sure, 0, 0) for place, token, sure in
               ((8, 1, 0.9), (9, 5, 0.4), (10, 6, 0.6), (11, 1, 0.9), (12, 5, 0.95))]
    assert Delimited(3, 0.3, (5, 6)).choose(guesses, 16, 8) == 3  # a quarter of 16 from place 8 on
    assert Delimited(2, 0.7, (5, 6)).choose(guesses, 16, 8) == 2
    assert Delimited(3, 0.3, (5,)).choose(guesses, 16, 8) == 2
    assert Delimited(9, 0.99, (5,)).choose(guesses[:2], 16, 2) == 2


@pytest.mark.parametrize("method", MASKED, ids=repr)
def test_each_step_decides_something_and_blocks_fill_the_answer(method: Method) -> None:
    found = answer(masked_engine(), SHORT[2], method, max_new_tokens=13)
    forwards = found.stats.target_forwards // (2 if getattr(method, "guidance", 0) else 1)
    assert len(found.tokens) == 13 and 1 <= forwards <= 13 and MASK not in found.tokens


def test_words_are_streamed_once_none_before_them_is_open_at_the_latest_with_their_block() -> None:
    engine, method, ids = masked_engine(), Diffusion(block=4, steps=6), SHORT[0]
    order, open_, ready = Replay(masked_model(), ids, method).order, set(range(NEW)), list[int]()
    for places in order:
        open_ -= set(places)
        ready.append(min(open_, default=NEW))
    sent = [0] * len(order)
    with engine.stream(ids, method=method, max_new_tokens=NEW) as stream:
        for step in stream:
            sent[stream._seqs[0].ledger.target_forwards - 1] = step.index + 1
    assert [max(sent[: at + 1]) for at in range(len(sent))] == ready and len(set(ready)) > 3
    for fewer in (4, 8):
        with engine.stream(ids, method=method, max_new_tokens=NEW) as part:
            head = [next(part).token for _ in range(fewer)]
        assert tuple(head) == stream.result.tokens[:fewer]


def test_an_end_of_sequence_ends_the_row_once_none_before_it_is_open() -> None:
    method, ids = Diffusion(block=4), SHORT[0]
    whole, order = answer(masked_engine(), ids, method), Replay(masked_model(), ids, method).order
    ended = answer(masked_engine(), ids, method, stop_token_ids=[whole.tokens[5]])
    last = whole.tokens.index(whole.tokens[5])
    assert ended.tokens == whole.tokens[: last + 1] and ended.finish_reason == "stop"
    needed = max(number for number, places in enumerate(order) if min(places) <= last) + 1
    assert ended.stats.target_forwards == needed < len(order)


class Torn(RuntimeError):
    pass


def test_a_forward_that_fails_leaves_the_canvas_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolled back and run again: the same tokens after the same number of steps, whatever KV was kept."""
    for method in (Diffusion(block=4), Diffusion(block=4, reuse="prefix"), Diffusion(block=4, reuse="dual")):
        engine = masked_engine()
        whole = answer(engine, SHORT[0], method)
        seqs = engine.seqs([SHORT[0]], Request.from_options({"method": method, "max_new_tokens": NEW, "seed": 7}))
        batch = begin(seqs[0].recipe.loop, engine.runner, engine.cache_for(seqs, NEW), seqs)
        forward, calls = engine.runner.forward, 0

        def torn(*args: Any, forward: Any = forward, **options: Any) -> Tensor:
            nonlocal calls
            found: Tensor = forward(*args, **options)
            calls += 1
            if calls % 3 == 2:
                raise Torn
            return found

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "forward", torn)
            while batch.seqs:
                try:
                    batch.step(512)
                except Torn:
                    batch.rollback()
        assert tuple(seqs[0].tokens[len(SHORT[0]) :]) == whole.tokens
        assert calls > whole.stats.target_forwards


def test_what_the_work_is() -> None:
    found = answer(masked_engine(), SHORT[1], Diffusion(block=4, steps=6)).stats
    assert (found.target_forwards, found.layers_read, found.ideal_speedup) == (6, 36, pytest.approx(NEW / 6))
    assert found.mean_layers == 6 and found.prompt_tokens == len(SHORT[1])


AR = [Full(), D3(alpha=0.9, core=2), PromptLookup(), make("jacobi"), make("best_of"), make("streaming_llm")]


@pytest.mark.parametrize("method", AR, ids=lambda method: method.name)
def test_a_method_that_writes_from_left_to_right_is_refused_by_name(method: Method) -> None:
    with pytest.raises(Unsupported, match=f"{method.name} with a masked-diffusion model.*method=\"diffusion\""):
        answer(masked_engine(), SHORT[0], method)


def test_layers_are_not_measured_from_left_to_right(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unsupported, match="full with a masked-diffusion model"):
        shoal.quick_card(masked_engine(), keep=False)
    argv = ["calibrate", "--model", str(Path(__file__).parents[3] / "hub" / "shoal-canvas"), "--suite", "parallel"]
    assert main([*argv, "--out", "card.json"]) == 2
    assert "full with a masked-diffusion model" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["diffusion", "fast_dllm", "prophet", "adablock", "diffusion_grammar"])
def test_a_model_that_writes_from_left_to_right_is_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported, match=f"{name} with a model that writes from left to right.*no mask_token_id"):
        answer(engine_for(tiny("llama")), SHORT[0], name)


@pytest.mark.parametrize(("method", "options", "message"), [
    (Diffusion(block=12), {}, "a block of 12 words in an answer of up to 11.*at most 11"),
    (Diffusion(block=2, steps=5), {}, "5 steps for an answer of up to 11 words in 6 blocks.*Use 6 to 11 steps"),
    (Diffusion(steps=12), {}, "12 steps for an answer of up to 11 words in 1 blocks"),
    (Diffusion(), {"repetition_penalty": 1.2}, "penalties with a masked-diffusion model"),
    (Diffusion(), {"logits_processor": [lambda ids, scores: scores]}, "logits processors with a masked"),
])
def test_what_does_not_fit_an_answer_is_refused(method: Method, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        answer(masked_engine(), SHORT[0], method, **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"method": "diffusion", "method_args": {"steps": 0}}, "steps is 0; it must be at least 1"),
    ({"method": "diffusion", "method_args": {"block": 0}}, "block is 0; it must be at least 1"),
    ({"method": "diffusion", "method_args": {"guidance": -1}}, "guidance is -1"),
    ({"method": "diffusion", "method_args": {"guidance": 1, "reuse": "dual"}}, "beside reuse='dual'"),
    ({"method": "diffusion", "method_args": {"remasking": "best"}}, "remasking of diffusion is 'best'"),
    ({"method": "fast_dllm", "method_args": {"threshold": 1.5}}, r"threshold of fast_dllm is 1.5.*\[0, 1\]"),
    ({"method": "fast_dllm", "method_args": {"factor": -1}}, "factor is -1"),
    ({"method": "prophet", "method_args": {"steps": 0}}, "steps is 0"),
    ({"method": "prophet", "method_args": {"region": [-1, 2]}}, "region is"),
    ({"method": "prophet", "method_args": {"gaps": [1, -1, "inf"]}}, "gaps is .*0 or more, infinity for never"),
    ({"method": "adablock", "method_args": {"delimiters": []}}, "delimiters is empty"),
    ({"method": "adablock", "method_args": {"delimiter_threshold": -1}}, "delimiter_threshold is -1"),
])
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(options)


def test_a_constraint_has_no_place() -> None:
    engine = engine_for(masked_model(), chat_tokenizer())
    engine.eos_token_ids = frozenset({1})
    with pytest.raises(Unsupported, match="'constraint' beside a loop of its own, Denoising"):
        answer(engine, SHORT[0], Diffusion(), constraint=Regex("a+"))


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(Unsupported, match="diffusion with sliding windows"):
        answer(engine_for(tiny("hybrid", mask_token_id=MASK)), SHORT[0], Diffusion())


def test_delimiters_are_looked_up_in_the_tokenizer() -> None:
    tokenizer = chat_tokenizer()
    engine = engine_for(masked_model(), tokenizer)
    token = next(token for token in range(VOCAB) if len(tokenizer(tokenizer.decode([token]), add_special_tokens=False)
                                                        ["input_ids"]) == 1)
    text = tokenizer.decode([token])
    options = {"threshold": 0.2, "delimiter_threshold": 0.0}
    by_text, by_id = (answer(engine, SHORT[1], AdaBlock(delimiters=(one,), **options)) for one in (text, token))
    assert by_text.tokens == by_id.tokens
    with pytest.raises(Unsupported, match="the delimiter .* is not one token"):
        answer(engine, SHORT[1], AdaBlock(delimiters=("Hello and then",)))
    with pytest.raises(Unsupported, match="only known with a tokenizer"):
        answer(masked_engine(), SHORT[1], AdaBlock())


def test_in_transformers_generate() -> None:
    ids = torch.tensor([SHORT[0], prompt(len(SHORT[0]), 3, VOCAB - 1)])
    options: dict[str, Any] = {"max_new_tokens": NEW, "custom_generate": Diffusion(block=4), "pad_token_id": 0}
    out = generate(masked_model(), input_ids=ids, **options)
    expected = [answer(masked_engine(), seq, Diffusion(block=4)).tokens for seq in ids.tolist()]
    assert [tuple(seq) for seq in out[:, ids.shape[1] :].tolist()] == expected


def test_a_chat_and_the_server() -> None:
    engine = engine_for(masked_model(), chat_tokenizer())
    chats = [engine.session(method=Diffusion(block=4, reuse="dual"), max_new_tokens=9) for _ in range(2)]
    first = [chat.send("Hello") for chat in chats]
    again = chats[0].send("And then?")
    assert first[0].tokens == first[1].tokens and again.tokens == chats[1].send("And then?").tokens
    body = {"model": MODEL, "prompt": "Some words", "max_tokens": NEW, "temperature": 0, "method": "diffusion"}
    with serving(engine, method="diffusion") as server:
        blocks = {"method_args": {"block": 4}}
        plain = httpx.post(f"{server.url}/v1/completions", json={**body, **blocks}, timeout=60).json()
        refused = httpx.post(f"{server.url}/v1/completions", json={**body, "method": "full"}, timeout=60)
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, **blocks, "stream": True},
                          timeout=60) as parts:
            told = [line for line in parts.iter_lines() if line.startswith("data: {")]
    expected = engine.generate("Some words", method=Diffusion(block=4), max_new_tokens=NEW)
    assert plain["choices"][0]["text"] == expected.text
    assert refused.status_code == 400 and "full with a masked-diffusion model" in refused.json()["error"]["message"]
    assert len(told) >= 3
