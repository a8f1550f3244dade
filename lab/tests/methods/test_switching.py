"""Two models that write one answer, against a replay in plain Python over forwards without a cache."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends import HF, NATIVE, TORCH, Backend, packed, reference, with_exact_norms
from chat_tokenizer import chat_tokenizer
from drive import SHORT, decode, gap, prompt, stack_of
from families import tiny
from generate_calls import batch, generate
from oracle import prefix_counts, prefix_oracle
from serving import MODEL, serving, tiny_engine
from shoal.cli import main
from shoal.decode import sampling
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.constraints.constraint import Regex
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.types import Result, Sampling
from shoal_lab.components.sentences import Sentences, end_of
from shoal_lab.methods._switching import Switching, turn_of
from shoal_lab.methods.atts import ATTS
from shoal_lab.methods.entropy_adaptive import EntropyAdaptive
from shoal_lab.methods.foreal import FoReaL
from shoal_lab.methods.momentum import Momentum
from shoal_lab.methods.random_switching import RandomSwitching
from turns import by_turns

FULL = DepthPlan.full(6)
SMALL_LAYERS = 4
TOKENIZER = chat_tokenizer()
SETTINGS = [Sampling(), Sampling(temperature=0.8, top_k=12)]
EAD = EntropyAdaptive(tau=1.6, window=2)
CASES: list[Any] = [
    EAD, EntropyAdaptive(tau=1.2, window=5, dwell=3), EntropyAdaptive(tau=1.0, window=1, start="target"),
    FoReaL(lead=3), FoReaL(lead=5, share=0.5), FoReaL(lead=None, share=0.6),
    RandomSwitching(share=0.4), FoReaL(share=0.0),
]


def small_model(family: str = "llama") -> PreTrainedModel:
    """Another model with the same tokens, and fewer layers."""
    return tiny(family, seed=1, layers=SMALL_LAYERS)


def small_stack(backend: Backend, family: str) -> Any:
    if backend is HF:
        return stack_of(_exact_small(family))
    model = tiny(family, seed=1, layers=SMALL_LAYERS, dtype=backend.dtype)
    return packed(model, kernels=backend is NATIVE)


_SMALL: dict[str, PreTrainedModel] = {}


def _exact_small(family: str) -> PreTrainedModel:
    if family not in _SMALL:
        _SMALL[family] = with_exact_norms(small_model(family))
    return _SMALL[family]


def policy_of(method: Any) -> Any:
    """The policy of a method that is not bound to a model."""
    info = replace(engine().info(), draft_engine=None, tokenizer=TOKENIZER)
    return method.recipe(info).loop.policy


def engine(family: str = "llama") -> Engine:
    return engine_for(tiny(family), TOKENIZER)


class Replay:
    """One sequence: every token comes from a forward over the whole text.

    Attributes:
        owners: whether the large model wrote each token.
        fed: number of tokens that each model was fed, small and large.
        logits: logits after each token.
    """

    def __init__(
        self, models: tuple[PreTrainedModel, PreTrainedModel], ids: Sequence[int], method: Any, how: Sampling, seq: int,
        new: int, plans: tuple[DepthPlan, DepthPlan] = (DepthPlan.full(SMALL_LAYERS), FULL),
    ) -> None:
        self.models, self.text, self.prompt, self.how, self.seq = models, list(ids), len(ids), how, seq
        self.plans, self.seen = plans, [0, 0]
        self.fed, self.owners, self.logits = [0, 0], list[bool](), list[Tensor]()
        self.forwards, self.layers = [0, 0], [0, 0]
        {"entropy_adaptive": self._by_entropy, "foreal": self._by_sentence, "random_switching": self._by_chance}[
            method.name](method, new)

    @property
    def tokens(self) -> list[int]:
        return self.text[self.prompt :]

    def ask(self, large: bool) -> Tensor:
        plan = self.plans[large]
        counts = [prefix_counts(drops, self.prompt, len(self.text)) for drops in (plan.attention, plan.mlp)]
        self.fed[large] += len(self.text) - self.seen[large]
        self.layers[large] += sum(plan.depth(max(0, place + 1 - self.prompt))
                                  for place in range(self.seen[large], len(self.text)))
        self.seen[large] = len(self.text)
        self.forwards[large] += 1
        return prefix_oracle(self.models[large], torch.tensor([self.text]), *counts)[-1]

    def say(self, logits: Tensor, large: bool) -> None:
        probs = sampling.probs_of(logits, self.how)
        self.text.append(sampling.draw(probs, sampling.uniform(4, self.seq, len(self.tokens), "sample")))
        self.owners.append(large)
        self.logits.append(logits)

    def _by_entropy(self, method: EntropyAdaptive, new: int) -> None:
        large, written, bits = method.start == "target", 0, list[float]()
        while len(self.tokens) < new:
            logits = self.ask(large)
            probs = [p for p in logits.softmax(-1).tolist() if p > 0]
            bits.append(-sum(p * math.log2(p) for p in probs))
            last = bits[-method.window :]
            unsure = sum(last) / len(last) > method.tau
            if unsure != large and written >= method.dwell:
                large, written = unsure, 0
                logits = self.ask(large)
            self.say(logits, large)
            written += 1

    def _by_chance(self, method: RandomSwitching, new: int) -> None:
        for place in range(new):
            large = sampling.uniform(4, self.seq, place, turn_of(self.text[: self.prompt])) < method.share
            self.say(self.ask(large), large)

    def _by_sentence(self, method: FoReaL, new: int) -> None:
        most = math.inf if method.lead is None else method.lead
        while len(self.tokens) < new:
            led = sampling.uniform(4, self.seq, len(self.tokens), turn_of(self.text[: self.prompt])) < method.share
            sentence = ""
            written = 0
            while len(self.tokens) < new:
                large = led and written < most
                self.say(self.ask(large), large)
                written += 1
                sentence += TOKENIZER.decode(self.text[-1:], skip_special_tokens=True)
                if slow_end(sentence):
                    break


def slow_end(text: str) -> bool:
    """Whether the one sentence of `text` ends with its last character; looks at every character in turn."""
    if not any(letter.isalnum() for letter in text):
        return False
    bare = text.rstrip("\"'”’)]*_")
    if text[-1] in "\n":
        return True
    if bare and bare[-1] in "!?" and any(letter.isalnum() for letter in bare[:-1]):
        return True
    if bare and bare[-1] == ".":
        return not dubious(bare[:-1])
    if text[-1].isspace():
        before = text[:-1].rstrip("\"'”’)]*_")
        return before.endswith(".") and not abbreviated(before[:-1]) and any(c.isalnum() for c in before)
    return False


def abbreviated(before: str) -> bool:
    """Whether a single letter stands there, as in e.g."""
    alone = len(before) == 1 or not (before[-2:-1].isalnum() or before[-2:-1] == "_")
    return before[-1:].isalpha() and alone


def dubious(before: str) -> bool:
    return before[-1:].isdigit() or before[-1:] == "." or abbreviated(before)


@by_turns("backend, method, how", [HF, TORCH, NATIVE], CASES, SETTINGS)
@pytest.mark.quick(5)
def test_who_writes_what_on_every_executor(backend: Backend, method: Any, how: Sampling) -> None:
    """Tokens, writers, work, and the logits of a model that has caught up."""
    family, new = "hybrid" if backend is TORCH else "llama", 30
    loop = Switching(policy_of(method), small_stack(backend, family), DepthPlan.full(SMALL_LAYERS), "small")
    run = decode(None, SHORT, Recipe(FULL, loop=loop), new, runner=backend.runner(family), sampling=how, seed=4)
    models = _exact_small(family), reference(family)
    for number, (seq, ids) in enumerate(zip(run.seqs, SHORT, strict=True)):
        slow = Replay(models, ids, method, how, number, new)
        assert run.tokens[number] == slow.tokens
        assert [not step.from_draft for step in seq.steps] == slow.owners
        assert [step.depth for step in seq.steps] == [(SMALL_LAYERS, 6)[large] for large in slow.owners]
        assert gap(run.logits(number).double(), torch.stack(slow.logits)) <= backend.exact
        ledger = seq.ledger
        assert ledger.second_tokens == slow.owners.count(False)
        assert ledger.switches == sum(a != b for a, b in zip(slow.owners, slow.owners[1:], strict=False))
        assert ledger.second_layer_tokens == SMALL_LAYERS * slow.fed[0]
        assert ledger.prefill_layer_tokens + ledger.decode_layer_tokens == 6 * slow.fed[1]
        assert [ledger.draft_forwards, ledger.target_forwards] == slow.forwards
    owners = [step.from_draft for seq in run.seqs for step in seq.steps]
    assert len(set(owners)) == 2 or method.name == "foreal" and method.share == 0


@pytest.mark.parametrize("method", [EAD, FoReaL(lead=4, share=0.6)], ids=lambda one: one.name)
def test_each_model_has_a_plan_of_its_own(method: Any) -> None:
    large, mine = engine("hybrid"), small_model("hybrid")
    both = replace(method, draft=mine, inner=D3(alpha=0.9, core=2), draft_inner=D3(alpha=0.8, core=1))
    recipe = large.recipe(both, 30)
    assert isinstance(recipe.loop, Switching) and recipe.loop.plan is not None
    found = large.generate(SHORT, method=both, max_new_tokens=30, seed=4)
    for number, (result, ids) in enumerate(zip(found, SHORT, strict=True)):
        slow = Replay((mine, tiny("hybrid")), ids, method, Sampling(), number, 30, (recipe.loop.plan, recipe.plan))
        assert list(result.tokens) == slow.tokens
        plans = (recipe.loop.plan, recipe.plan)
        assert result.depths == tuple(plans[who].depth(step) for step, who in enumerate(slow.owners))
        assert result.stats.extras["second_layer_tokens"] == slow.layers[0]
        assert result.stats.target_forwards == slow.forwards[1]
    assert 0 < sum(result.stats.extras["second_tokens"] for result in found) < 90


@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_the_ends_are_the_two_models(how: dict[str, Any]) -> None:
    large, mine = engine(), engine_for(small_model(), TOKENIZER)
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, **how}
    alone = [[result.tokens for result in one.generate(SHORT, **options)] for one in (mine, large)]
    draft = small_model()
    ends: list[tuple[Method, int]] = [
        (EntropyAdaptive(draft, tau=math.inf), 0), (EntropyAdaptive(draft, tau=math.inf, start="target"), 0),
        (EntropyAdaptive(draft, tau=-1.0), 1), (EntropyAdaptive(draft, tau=-math.inf), 1),
        (FoReaL(draft, share=0.0), 0), (FoReaL(draft, lead=None, share=1.0), 1),
        (RandomSwitching(draft, share=0.0), 0), (RandomSwitching(draft, share=1.0), 1),
        (EntropyAdaptive(draft, tau=99.0), 0), (FoReaL(draft, lead=1000), 1),
    ]
    for method, who in ends:
        found = large.generate(SHORT, method=method, **options)
        assert [result.tokens for result in found] == alone[who], method
        assert all(result.stats.extras["second_tokens"] == (0 if who else 20) for result in found)
        assert all(bool(result.stats.target_forwards) == bool(who) for result in found), "the other one does nothing"
    assert large.recipe(EntropyAdaptive(draft, tau=-1.0), 20).exact_to == "full"
    assert large.recipe(FoReaL(draft, lead=None), 20).exact_to == "full"


@pytest.mark.parametrize("how", [{"seed": 5}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", CASES[:-1], ids=repr)
def test_equal_models_give_plain_decoding_whoever_writes(method: Any, how: dict[str, Any]) -> None:
    one = engine()
    options: dict[str, Any] = {"max_new_tokens": 30, **how}
    found = one.generate(SHORT, method=replace(method, draft=tiny("llama")), **options)
    assert [r.tokens for r in found] == [r.tokens for r in one.generate(SHORT, **options)]
    assert any(r.stats.extras["switches"] for r in found) or method.lead is None


TEXTS = {
    "It works. Then": 10, "It works.": 9, "Is it? No": 7, "Stop!": 5, 'He said "go." And': 14, "(It is.) So": 9,
    "pi is 3.14 or so": None, "pi is 3.": None, "It is 3. Then": 9, "x.append(y)": None, "see e.g. this": None,
    "J. Smith": None, "Hmm...": None, "Hmm... well": 7, "one\ntwo": 4, "...": None, "\n\n": None, "": None,
    "One. Two. Three": 10, "a_b.": 4, "end**.** Go": 9, "v1.2.3": None, "no end": None,
}


@pytest.mark.parametrize("text", TEXTS)
def test_where_a_sentence_ends(text: str) -> None:
    assert end_of(text) == TEXTS[text]


def test_a_token_that_holds_an_end_and_more_begins_the_next_sentence() -> None:
    class Pieces:
        pieces = ("It wor", "ks. Then", " 3", ".", "14", ".", " And", " so.", "\n", "On")

        def decode(self, ids: Sequence[int], **_: Any) -> str:
            return "".join(self.pieces[one] for one in ids)

        def convert_ids_to_tokens(self, token: int) -> str:
            return self.pieces[token]

    sentences = Sentences(Pieces())
    found = [sentences.ends_with(token) for token in range(len(Pieces.pieces))]
    #        It wor works.  3      .      14     .      And   so.   newline  On
    assert found == [False, True, False, False, False, False, True, True, False, False]


def test_without_a_tokenizer_there_is_one_sentence() -> None:
    found = engine_for(tiny("llama")).generate(SHORT[0], method=FoReaL(small_model(), lead=4), max_new_tokens=40)
    assert found.stats.extras["second_tokens"] == 36 and found.stats.extras["switches"] == 1


def submit_all(scheduler: Scheduler, methods: Sequence[Any], **options: Any) -> list[Any]:
    return [scheduler.submit(prompt(3 + 4 * number, number), method=method, max_new_tokens=18, seed=number, **options)
            for number, method in enumerate(methods)]


def test_beside_other_rows_each_gives_what_it_gives_alone() -> None:
    draft, one = small_model(), engine()
    kinds: list[Any] = [replace(EAD, draft=draft), Full(), FoReaL(draft, lead=3), replace(EAD, draft=draft),
                        D3(alpha=0.9, core=2), [FoReaL(draft, lead=3), Momentum()]]
    scheduler = Scheduler(one, prefill_chunk=7, start=False)
    handles = submit_all(scheduler, kinds, temperature=0.9)
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    for number, (method, handle) in enumerate(zip(kinds, handles, strict=True)):
        alone = one.generate(prompt(3 + 4 * number, number), method=method, max_new_tokens=18, seed=number,
                             temperature=0.9)
        assert handle.results[0].tokens == alone.tokens, method


def test_a_row_that_fails_leaves_the_others_as_they_were() -> None:
    draft, one = small_model(), engine()
    calls = 0

    def fails(ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls >= 6:
            raise RuntimeError("this row and no other")
        return scores

    for method in (replace(EAD, draft=draft), FoReaL(draft, lead=3)):
        calls = 0
        scheduler = Scheduler(one, start=False)
        bad = scheduler.submit(prompt(4, 9), method=method, max_new_tokens=18, logits_processor=[fails])
        good = submit_all(scheduler, [method] * 3)
        while scheduler.running or scheduler.waiting:
            scheduler.turn()
        with pytest.raises(RuntimeError, match="this row and no other"):
            list(bad)
        for number, handle in enumerate(good):
            alone = one.generate(prompt(3 + 4 * number, number), method=method, max_new_tokens=18, seed=number)
            assert handle.results[0].tokens == alone.tokens


def test_a_chat_goes_on_from_what_was_kept() -> None:
    one = engine()
    chats = [one.session(method=method, max_new_tokens=12)
             for method in (Full(), EntropyAdaptive(tiny("llama"), tau=1.6, window=2))]
    for message in ("Hello", "And then?", "Well"):
        plain, found = [chat.send(message) for chat in chats]
        assert found.tokens == plain.tokens and found.stats.extras["switches"] > 0


def test_what_has_ended_leaves_both_caches() -> None:
    """Even while only the large model's sequences go on."""
    scheduler = Scheduler(engine(), start=False)
    ends = scheduler.submit(prompt(9, 1), method=EntropyAdaptive(small_model(), tau=50.0), max_new_tokens=3)
    policy = EntropyAdaptive(small_model(), tau=0.0, window=1, dwell=50, start="target")
    scheduler.submit(prompt(4, 2), method=policy, max_new_tokens=20)
    while not ends.done:
        scheduler.turn()
    scheduler.turn()
    assert scheduler.running == 1
    assert [batch._small.seqs for batch in scheduler._batches if hasattr(batch, "_small")] == [0]


def test_a_forced_token_is_no_change_of_hands() -> None:
    one = engine()
    one.eos_token_ids = frozenset({2})
    found = one.generate(SHORT[0], method=EntropyAdaptive(small_model(), tau=math.inf), max_new_tokens=30,
                         constraint=Regex("[a-f]{3}, (yes|no) [x-z]{4}"))
    assert (found.stats.extras["switches"], found.stats.target_forwards) == (0, 0)
    assert found.stats.extras["second_tokens"] < 13


def test_a_constraint_binds_both_models() -> None:
    one, wanted, texts = engine(), "[a-f]{3}, (yes|no) [x-z]{4}", set()
    one.eos_token_ids = frozenset({2})
    for tau in (1.6, 99.0, -1.0):
        method = EntropyAdaptive(small_model(), tau=tau, window=1)
        found = one.generate(SHORT[0], method=method, max_new_tokens=30, constraint=Regex(wanted))
        assert re.fullmatch(wanted, found.text) and found.finish_reason == "stop"
        texts.add(found.text)
    assert len(texts) == 3


@pytest.mark.parametrize(("large", "mine"), [(97, 60), (60, 97)])
def test_heads_that_are_padded_to_different_sizes(large: int, mine: int) -> None:
    """A token beyond the small model's vocabulary comes from the large one; the small one's own never occur."""
    runner = stack_of(tiny("llama", vocab_size=large))
    draft = stack_of(tiny("llama", seed=1, layers=4, vocab_size=mine))
    loop = Switching(policy_of(EAD), draft, DepthPlan.full(4), "small")
    prompts = [[5, 17, 41], [8, large - 1, 3]]
    run = decode(None, prompts, Recipe(FULL, loop=loop), 30, runner=runner)
    assert all(0 <= token < large for tokens in run.tokens for token in tokens)
    if large > mine:
        assert run.seqs[1].ledger.second_tokens == 0
        assert run.tokens[1] == decode(None, prompts[1:], FULL, 30, runner=runner).tokens[0]
    readable = [token < mine for token in run.tokens[0]]
    lost = readable.index(False) if False in readable else 30
    assert all(not step.from_draft for step in run.seqs[0].steps[lost + 1 :])
    assert run.seqs[0].ledger.second_tokens > 0


def refused(method: Any, message: str, ask: Callable[[Engine], Engine] = lambda one: one, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        ask(engine()).generate(SHORT[0], method=method, **options)


def test_what_is_refused() -> None:
    refused(EntropyAdaptive(), "entropy_adaptive has no draft model; give draft: a folder, a Hub id, or")
    refused(FoReaL("/no/such/folder"), "/no/such/folder")
    refused(EntropyAdaptive(tiny("llama", vocab_size=50)), "has 50 tokens and the model 97",
            lambda _: engine_for(tiny("llama")))
    short = tiny("llama", seed=1, max_position_embeddings=16)
    refused(FoReaL(short), "a text of up to 25 tokens with .* its context is 16 tokens", max_new_tokens=20)
    refused(EntropyAdaptive(small_model(), draft_inner=PromptLookup()), "draft_inner of entropy_adaptive is .*fills "
            "'proposer'; give one that only chooses layers")
    refused(EntropyAdaptive(small_model(), inner=PromptLookup()), "the part 'proposer' beside a loop of its own")
    refused([EntropyAdaptive(small_model()), PromptLookup()], "entropy_adaptive has a loop of its own.*prompt_lookup")
    refused([FoReaL(small_model()), BestOf(2)], "foreal has a loop of its own.*best_of")


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (lambda: EntropyAdaptive(tau=math.nan), "tau is nan; it must be a number of bits"),
        (lambda: EntropyAdaptive(window=0), "window is 0; it must be at least 1 token"),
        (lambda: EntropyAdaptive(dwell=0), "dwell is 0; it must be at least 1 token"),
        (lambda: EntropyAdaptive(start="both"), "start of entropy_adaptive is 'both'"),
        (lambda: FoReaL(lead=0), "lead is 0; it must be at least 1 token, or None"),
        (lambda: FoReaL(share=1.5), r"share is 1.5; it must be in \[0, 1\]"),
        (lambda: FoReaL(share=math.nan), "share is nan"),
        (lambda: RandomSwitching(share=-0.1), r"share is -0.1; it must be in \[0, 1\]"),
    ],
)
def test_bad_options(make_one: Callable[[], Method], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_one()


def test_it_has_a_form_in_json_with_both_inner_methods() -> None:
    method = EntropyAdaptive("some/folder", tau=math.inf, inner=D3(alpha=0.9), draft_inner=D3(alpha=0.8))
    spec = method.to_dict()
    assert spec["inner"]["method"] == spec["method_args"]["draft_inner"]["method"] == "d3"
    assert make(spec) == method


def test_in_transformers_generate() -> None:
    methods = [EntropyAdaptive(draft, tau=1.6, window=2) for draft in (small_model(), tiny("llama"))]
    found = [generate(tiny("llama"), **batch(), do_sample=False, custom_generate=method) for method in methods]
    plain = generate(tiny("llama"), **batch(), do_sample=False, custom_generate=Full())
    assert torch.equal(found[1], plain) and not torch.equal(found[0], plain)


def test_in_a_stream_it_says_who_wrote() -> None:
    one, method = engine(), replace(EAD, draft=small_model())
    steps = list(one.stream(SHORT[0], method=method, max_new_tokens=30))
    result: Result = one.generate(SHORT[0], method=method, max_new_tokens=30)
    assert [step.token for step in steps] == list(result.tokens)
    assert sum(step.from_draft for step in steps) == result.stats.extras["second_tokens"]


@pytest.mark.parametrize(
    "method", [EAD, FoReaL(lead=3), RandomSwitching(), ATTS(alpha=1.0, draft_tokens=3, target_tokens=2)],
    ids=lambda one: one.name,
)
def test_asked_for_over_http_and_in_a_file_of_prompts(method: Any, tmp_path: Path) -> None:
    """By name, with a stop text and in a stream: the output of `generate`."""
    for name, model in (("small", small_model()), ("large", tiny("llama", layers=4))):
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    one, spec = tiny_engine(), replace(method, draft=str(tmp_path / "small"))
    how: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3}
    whole = one.generate("Some words", method=spec, **how)
    how["stop"] = [whole.text[12:14]]
    cut = one.generate("Some words", method=spec, **how)
    asked = {"prompt": "Some words", **how, **spec.to_dict()}
    body = {"model": MODEL, "max_tokens": 30, **asked}
    with serving(one, methods=(method.name,)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as lines:
            data = [json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: {")]
    assert answer["choices"][0]["text"] == cut.text == whole.text[: whole.text.find(how["stop"][0])]
    assert "".join(item["choices"][0]["text"] for item in data) == cut.text
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(asked) + "\n")
    assert main(["batch", str(source), str(target), "--model", str(tmp_path / "large"), "--dtype", "float64"]) == 0
    (record,) = [json.loads(line) for line in target.read_text().splitlines()]
    assert record["text"] == cut.text and record["second_tokens"] == cut.stats.extras["second_tokens"]


def test_over_http_it_is_the_operators_to_allow() -> None:
    one = tiny_engine()
    body = {"model": MODEL, "prompt": "Some words", "max_tokens": 12, "temperature": 0, "method": "entropy_adaptive",
            "method_args": {"draft": "some/folder", "tau": 2.0}}
    with serving(one) as server:
        refusal = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert refusal.status_code == 403 and "entropy_adaptive" in refusal.json()["error"]["message"]
    with serving(one, methods=("full", "entropy_adaptive")) as server:
        nested = {**body, "method_args": {**body["method_args"], "draft_inner": {"method": "d3"}}}
        refusal = httpx.post(f"{server.url}/v1/completions", json=nested, timeout=60)
        assert refusal.status_code == 403 and "'d3' is not allowed" in refusal.json()["error"]["message"]
