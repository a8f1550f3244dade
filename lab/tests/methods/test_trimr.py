"""TrimR against a slow reader of whole texts, over forwards without a cache; and judges that fail."""

from __future__ import annotations

import copy
import functools
import json
import re
import string
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from chat_tokenizer import chat_tokenizer
from drive import SHORT
from families import tiny
from generate_calls import batch, generate
from searches import Given
from serving import MODEL, serving, tiny_engine
from shoal.decode.branches.verifier import NoVerdict
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.loading.ranks import Ranks
from shoal.engine.request import Request
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.types import ModelInfo
from shoal_lab.components.sentences import last_of
from shoal_lab.loops.thoughts import Question, Repeats, texts
from shoal_lab.loops.trimr import ModelJudge
from shoal_lab.methods.jacobi import Jacobi
from shoal_lab.methods.trimr import Trimming, TrimR
from test_matrix import SAMPLINGS, engine_of
from turns import by_turns

TOKENIZER = chat_tokenizer(string.ascii_lowercase + "ABEHIMNOSTWY" + string.digits + " .,:;!?'\"()+-*/=<>[]\n")
OPEN = [int(token) for token in TOKENIZER("ask<think>", add_special_tokens=False)["input_ids"]]
TAIL = 6
"""Tokens that the model itself writes after a script."""
QUIET: dict[str, Any] = {"share": None, "repeats": None}


@functools.cache
def engine(name: str = "llama") -> Engine:
    packed = "packed" in name
    model = tiny(name.split()[-1], dtype=torch.float32 if packed else torch.float64)
    return engine_for(model, TOKENIZER, backend="packed" if packed else "hf")


def script(text: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Forces a given thinking text until it is closed."""
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]

    def bind(seen: Tensor, scores: Tensor) -> Tensor:
        place = seen.shape[1] - len(OPEN)
        if place >= len(ids) or seen[0, len(OPEN) :].tolist() != ids[:place]:
            return scores
        bound = torch.full_like(scores, -torch.inf)
        bound[0, ids[place]] = 0.0
        return bound

    return bind


def states(question: Question) -> bool:
    """A judge that looks for `= x`: whether there is one, and whether the last ones are equal."""
    found = [re.findall(r"= (\w)", text) for text in (question.thought, question.former)]
    return bool(found[0]) if question.kind == "answers" else found[0][-1] == found[1][-1]


def by_hand(text: str, method: TrimR, most: int, ids: Sequence[int], tail: int = TAIL) -> tuple[str, int]:
    """The whole answer and the questions asked: everything is read anew after every letter, without a cache."""
    cues = (method.cues or texts()["cues"]).split("|")
    answer, asked = "", 0
    for end in range(1, len(text) + 1):
        answer = text[:end]
        if "</think>" in answer:
            answer = text
            break
        begins = [at for at in range(1, end) for cue in cues
                  if answer[at - 1].isspace() and re.match(re.escape(cue) + r"\W", answer[at:])]
        begins = [at for n, at in enumerate(begins) if not n or at > begins[n - 1]]
        pieces = [answer[a:b].strip() for a, b in zip([0, *begins], begins, strict=False)]
        thoughts = [last_of(piece, method.sentences) for piece in pieces if re.search(r"\w", piece)]
        found = [(one, states(Question("answers", one))) for one in thoughts]
        said = [one for one, yes in found if yes]
        alike = [n > 0 and states(Question("agrees", one, said[n - 1])) for n, one in enumerate(said)]
        asked = len(thoughts) + max(0, len(said) - 1) if method.judge else 0
        run = len(alike) - max((n for n, yes in enumerate(alike) if not yes), default=0)
        looped = method.repeats is not None and any(
            answer[-size * method.repeats :] == answer[-size:] * method.repeats
            for size in range(1, 129) if size * method.repeats >= 16
        ) or method.repeats is not None and any(
            len(answer) >= 16 and len(set(zip(*[iter(answer[-(16 // s * s):])] * s, strict=False))) == 1
            and answer[-16:] == (answer[-s:] * 16)[-16:] for s in range(1, 16) if s * method.repeats < 16
        )
        slow = method.share is not None and end >= method.share * most and len(thoughts) >= method.thoughts
        gentle = method.judge is not None and bool(said) and run >= method.agree
        if looped or slow or gentle:
            if looped or slow:  # before the judge was asked about the thought that has just ended
                asked -= 0 if not method.judge or not begins or not _new(answer, cues) else 1 + (
                    found[-1][1] and len(said) > 1)
            answer += texts()["forceful" if looped or slow else "gentle"] + "</think>\n\n"
            break
    tokens = [*ids, *TOKENIZER(answer, add_special_tokens=False)["input_ids"]]
    for _ in range(tail):
        with torch.no_grad():
            tokens.append(int(tiny("llama")(torch.tensor([tokens])).logits[0, -1].argmax()))
    return TOKENIZER.decode(tokens[len(ids) :], skip_special_tokens=True), asked


def _new(answer: str, cues: Sequence[str]) -> bool:
    """Whether the last letter completes a cue."""
    return any(re.search(rf"\s{re.escape(cue)}\W$", answer) for cue in cues)


SAME = "So x = 4. Wait, x = 4. Wait, and so on. Wait, x = 4. End"
OTHER = "So x = 4. Wait, x = 5. Hmm, x = 4. Wait, x = 5. Wait, no. Wait, done.</think>"
ROUND = "Well. " + "go on and on, " * 7
CASES = [
    (SAME, {}), (SAME, {"agree": 3}), (SAME, {"agree": 4}), (OTHER, {}), (OTHER, {"agree": 3}),
    ("So x = 4. Wait, who knows. Wait, x = 4. Wait, what now? Wait!", {}),
    ("So x = 4. Wait, x = 5. Wait, x = 5. Wait, x = 5. Wait, and", {"agree": 3}),
    ("x = 4.</think> Wait, x = 4. Wait, x = 4. Wait, it is", {}),
    ("A first one. It is = 4. But it is long. Wait, = 4. Wait, = 4. Wait, = 4. Wait, ", {"sentences": 1}),
    (ROUND, {"repeats": 4}), (ROUND, {"repeats": 6}), ("So: " + "z" * 30, {"repeats": 2}), (ROUND, {"repeats": 9}),
    (OTHER, {"share": 0.2, "thoughts": 1}), (OTHER, {"share": 0.2, "thoughts": 0}),
    (OTHER, {"share": 0.3, "thoughts": 5}),
    ("One = 1 Then = 2 Then, = 2 Then ", {"cues": "Then|So that"}),
]


@pytest.mark.parametrize(("text", "options"), CASES)
@pytest.mark.quick(4)
def test_answers_are_those_of_the_reference(text: str, options: dict[str, Any]) -> None:
    method = TrimR(judge=states, **{**QUIET, **options})
    most = len(text) + 150
    expected, asked = by_hand(text, method, most, OPEN)
    found = engine().generate(OPEN, method=method, max_new_tokens=most, logits_processor=[script(text)])
    assert found.text.startswith(expected)
    assert found.stats.extras["judge_calls"] == asked
    closed = "I stop here" in found.text
    assert (found.stats.extras["put_tokens"] > 0) == closed and found.text.count("I stop here") == int(closed)


def test_both_endings_and_none_have_occurred() -> None:
    """Otherwise the cases above would say little."""
    ends = [by_hand(text, TrimR(judge=states, **{**QUIET, **options}), len(text) + 150, OPEN, 0)[0]
            for text, options in CASES]
    kinds = {one: sum(texts()[one] in end for end in ends) for one in ("gentle", "forceful")}
    assert kinds["gentle"] >= 4 and kinds["forceful"] >= 4 and len(ends) - sum(kinds.values()) >= 4


@pytest.mark.parametrize("name", ["llama", "hybrid", "packed llama", "packed hybrid"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_judge_that_says_no_changes_nothing(name: str, sampling: str) -> None:
    options = {"max_new_tokens": len(SAME) + 5, "logits_processor": [script(SAME)], **SAMPLINGS[sampling]}
    plain = engine(name).generate([OPEN, OPEN], **options)
    found = engine(name).generate([OPEN, OPEN], method=TrimR(judge=lambda _: False, **QUIET), **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert [one.stats.extras["judge_calls"] for one in found] == [3, 3]
    assert TrimR(**QUIET).recipe(ModelInfo(6)).exact_to == "full"


@by_turns("name", ["packed llama", "hybrid", "packed hybrid"])
def test_rows_do_not_see_each_other_and_every_executor_agrees_with_its_own_plain_text(name: str) -> None:
    """A sequence that was closed continues as plain decoding does from the same text."""
    both, long = engine(name), {"max_new_tokens": 200}
    methods = [TrimR(judge=states, **QUIET), TrimR(judge=states, repeats=4, share=None)]
    for method in methods:
        prompts = [OPEN, [*OPEN, OPEN[0]], OPEN[:3]]
        several = both.generate(prompts, method=method, logits_processor=[script(SAME)], **long)
        alone = [both.generate(one, method=method, logits_processor=[script(SAME)], **long) for one in prompts]
        assert [one.tokens for one in several] == [one.tokens for one in alone]
        closed = several[0]
        assert "I stop here" in closed.text and closed.stats.extras["put_tokens"]
        end = closed.text.index("</think>\n\n") + len("</think>\n\n")
        rest = both.generate([*OPEN, *closed.tokens[:end]], max_new_tokens=200 - end)
        assert closed.tokens[end:] == rest.tokens


def test_steps_come_at_once_and_are_certain() -> None:
    stream = engine().stream(OPEN, method=TrimR(judge=states, **QUIET), max_new_tokens=150, logprobs=0,
                             logits_processor=[script(SAME)])
    steps = list(stream)
    assert "".join(step.text for step in steps) == stream.result.text
    assert [step.index for step in steps] == list(range(150))
    logs = stream.result.logprobs
    assert logs is not None and len(logs) == 150
    begins, ends = (stream.result.text.index(mark) for mark in ("I have", "</think>"))
    put = [logs[place].logprob for place in range(begins, ends)]
    assert put == [0.0] * len(put)
    again = engine().generate(OPEN, method=TrimR(judge=states, inner=D3(alpha=1.0), **QUIET), max_new_tokens=150,
                              logits_processor=[script(SAME)])
    assert again.tokens == stream.result.tokens


def test_the_answer_may_end_within_what_is_put_in() -> None:
    stops: dict[str, Any] = {"max_new_tokens": 90, "stop": ["same result"]}
    for more, reason in (({"max_new_tokens": 40}, "length"), (stops, "stop")):
        found = engine().generate([OPEN, SHORT[0]], method=TrimR(judge=states, **QUIET),
                                  logits_processor=[script(SAME)], **more)[0]
        assert found.finish_reason == reason and "I have" in found.text and "</think>" not in found.text


@pytest.mark.parametrize("times", [2, 3, 5])
def test_repetition_is_found_when_it_is_there(times: int) -> None:
    draws = torch.Generator().manual_seed(times)
    for size in (1, 2, 3, 5, 7, 16, 40, 128):
        seen, loop = Repeats(times), list(range(size))
        noise = torch.randint(500, 900, (300,), generator=draws).tolist()
        kept = [token for token, _ in groupby(noise)]
        assert not any(map(seen.push, kept))
        turns = [seen.push(token) for token in loop * (times + 20)]
        assert turns.index(True) + 1 == max(size * times, 16)


class Tiny:
    """A judging model, and its answers by transformers."""

    def __init__(self) -> None:
        self.model, self.asked = tiny("qwen3", seed=5), list[bool]()

    def __call__(self, question: Question) -> bool:
        said = texts()[question.kind].replace("{former}", question.former).replace("{thought}", question.thought)
        ids = TOKENIZER.apply_chat_template([{"role": "user", "content": said}], add_generation_prompt=True,
                                        return_dict=False)
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, -1]
        yes, no = ([TOKENIZER(one)["input_ids"][0] for one in letters] for letters in (("y", "Y"), ("n", "N")))
        self.asked.append(bool(logits[yes].logsumexp(0) > logits[no].logsumexp(0)))
        return self.asked[-1]


TRACES = [SAME, OTHER, "Hm. Wait, = 1. Wait, 2! Wait, 3; Wait, 4?? Wait, 5. Wait, the end. Wait, 7. Wait, 8. Wait, 9."]


@pytest.mark.slow
def test_a_model_judges_as_transformers_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its questions are read in pieces, those of several sequences together."""
    known, said = Tiny(), set[bool]()
    for text in TRACES:
        slow = engine().generate(OPEN, method=TrimR(judge=known, agree=4, **QUIET), max_new_tokens=150,
                                 logits_processor=[script(text)])
        home = engine()
        monkeypatch.setattr(type(home.runner), "prefill_chunk", 37, raising=False)
        fast = home.generate([OPEN, OPEN], method=TrimR(judge=known.model, agree=4, **QUIET), max_new_tokens=150,
                             logits_processor=[script(text)])
        monkeypatch.undo()
        assert [one.tokens for one in fast] == [slow.tokens] * 2
        assert [one.stats.extras["judge_calls"] for one in fast] == [slow.stats.extras["judge_calls"]] * 2
        assert fast[0].stats.extras["second_layer_tokens"] == fast[1].stats.extras["second_layer_tokens"] > 0
        said |= set(known.asked)
    assert said == {True, False}


def test_of_a_thought_too_long_the_judge_reads_the_end() -> None:
    home, judge, read = engine(), tiny("qwen3", seed=5), list[str]()
    desk = ModelJudge(engine_for(judge, TOKENIZER), TOKENIZER, 2048)
    seq = home.seqs([OPEN], Request())[0]
    for size in (10, 3000):
        desk.ask(seq, Question("agrees", "w" * size + " = 1.", "v" * size + " = 2."))
        (_, ids), = desk._cached
        read.append(TOKENIZER.decode(ids))
        while not desk.said([seq], 100):
            assert desk._cached
        assert not desk._cached
    assert "wwwwwwwwww = 1." in read[0] and "vvvvvvvvvv = 2." in read[0] and len(read[1]) <= 511 < 3000
    assert "ww = 1." in read[1] and "vv = 2." in read[1]


def test_a_judge_that_cannot_be_asked_fails_the_request() -> None:
    home, tokenizer = engine(), copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{{ raise_exception('only with a system prompt') }}"
    recipe = home.recipe(TrimR(judge=tiny("qwen3", seed=5), agree=4, **QUIET), 60)
    assert isinstance(recipe.loop, Trimming)
    lame = Given(replace(recipe, loop=replace(recipe.loop, judge=engine_for(tiny("qwen3", seed=5), tokenizer))))
    scheduler = Scheduler(home, start=False)
    bad = scheduler.submit(OPEN, method=lame, max_new_tokens=60, logits_processor=[script(SAME)])
    good = scheduler.submit(OPEN, method=lame, max_new_tokens=20)
    for _ in range(200):
        scheduler.turn()
    assert not scheduler.running and len(good.results[0].tokens) == 20
    with pytest.raises(NoVerdict, match="could not be asked: .* refuses these messages: only with a system prompt"):
        list(bad)


def test_the_kv_of_a_judge_counts() -> None:
    home = engine()
    entry = Scheduler(home, start=False).submit(OPEN, method=TrimR(judge=tiny("qwen3", seed=5)), max_new_tokens=9)
    sizes = engine_for(tiny("qwen3", seed=5)).runner.position_bytes
    assert entry.entries[0].need.second == Trimming.second_reads * sum(sizes)


def broken(question: Question) -> bool:
    raise KeyError("no such book")


@pytest.mark.parametrize(
    ("judge", "error", "message"),
    [
        (broken, ValueError, "the judge failed: KeyError: 'no such book'"),
        (lambda _: "yes", ValueError, "the judge said 'yes'; it must say True or False"),
        (lambda _: None, ValueError, "the judge said None"),
        (lambda _: threading.Event().wait(60), TimeoutError, "the judge gave no answer within 0.3 s; use a faster one"),
    ],
)
def test_a_bad_judge_fails_its_own_request_in_time(judge: Any, error: type[Exception], message: str) -> None:
    began, home = time.monotonic(), engine()

    def by_turns(question: Question) -> bool:
        return judge(question) if "= 9" in question.thought else states(question)  # type: ignore[no-any-return]

    options: dict[str, Any] = {"method": TrimR(judge=by_turns, patience=0.3, **QUIET), "max_new_tokens": 150}
    with Scheduler(home) as scheduler:
        bad = scheduler.submit(OPEN, logits_processor=[script("x = 9. Wait, what? Wait")], **options)
        good = scheduler.submit(OPEN, logits_processor=[script(SAME)], **options)
        plain = scheduler.submit(SHORT[1], max_new_tokens=20)
        with pytest.raises(error, match=message):
            list(bad)
        for handle in (good, plain):
            list(handle)
    alone = home.generate(OPEN, logits_processor=[script(SAME)], **options)
    assert good.results[0].tokens == alone.tokens
    assert plain.results[0].tokens == home.generate(SHORT[1], max_new_tokens=20).tokens
    assert time.monotonic() - began < 30


def test_other_rows_go_on_while_a_judge_thinks() -> None:
    """Sequences of its own batch, and of others."""
    home, asked, free = engine(), threading.Event(), threading.Event()

    def slow(question: Question) -> bool:
        asked.set()
        return free.wait(60)

    method = TrimR(judge=slow, **QUIET)
    with Scheduler(home) as scheduler:
        waits = scheduler.submit(OPEN, method=method, max_new_tokens=150, logits_processor=[script(SAME)])
        assert asked.wait(30)
        others = [scheduler.submit(SHORT[1], method=one, max_new_tokens=20) for one in (method, Full())]
        for other in others:
            list(other)
            assert len(other.results[0].tokens) == 20
        assert not waits.done
        free.set()
        list(waits)
    assert "I stop here" in waits.results[0].text


def test_tags() -> None:
    assert Trimming(TrimR(), TOKENIZER).thinking.tags == ("<think>", "</think>")
    assert Trimming(TrimR(opening="[T]"), TOKENIZER).thinking.tags == ("[T]", "[/T]")
    assert Trimming(TrimR(opening=""), TOKENIZER).thinking.tags == ("", "</think>")
    assert Trimming(TrimR(opening="<idea>"), TOKENIZER).thinking.tags == ("<idea>", "</idea>")
    assert Trimming(TrimR(opening="[THINK]"), TOKENIZER).thinking.tags == ("[THINK]", "[/THINK]")
    ids = tuple(TOKENIZER("</mind>", add_special_tokens=False)["input_ids"])
    how = Trimming(TrimR(closing=ids), TOKENIZER).thinking
    assert how.tags == ("<think>", "</mind>")
    assert TOKENIZER.decode(how.ending("gentle")) == texts()["gentle"] + "</mind>\n\n"
    assert Trimming(TrimR(opening="<|begin_of_thought|>"), TOKENIZER).thinking.tags[1] == "<|end_of_thought|>"
    other = chat_tokenizer()
    other.add_tokens(["[THINK]", "[/THINK]"])
    assert Trimming(TrimR(), other).thinking.tags == ("[THINK]", "[/THINK]")


def test_thinking_that_the_answer_begins_itself() -> None:
    """Thinking starts in the answer if no template opens it; without a tag there is no thinking."""
    ids = (OPEN[:3] * len(OPEN))[: len(OPEN)]
    for begin, calls in (("Yes: <think>", 3), ("Yes: <thin>", 0), ("<think></think>", 0)):
        found = engine().generate(ids, method=TrimR(judge=states, **QUIET), max_new_tokens=130,
                                  logits_processor=[script(begin + SAME)])
        assert found.stats.extras["judge_calls"] >= calls and (calls > 0) == (found.stats.extras["judge_calls"] > 0)
        assert ("I stop here" in found.text) == (calls > 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agree": 1}, "agree is 1; it must be at least 2"),
        ({"sentences": 0}, "sentences is 0; it must be at least 1"),
        ({"thoughts": -1}, "thoughts is -1"),
        ({"repeats": 1}, "repeats is 1; it must be at least 2"),
        ({"share": 0.0}, r"share is 0.0; it must be in \(0, 1\]"),
        ({"closing": ""}, "closing is ''; it must be a tag"),
        ({"cues": "a||b"}, r"cues is 'a\|\|b'"),
        ({"patience": 0.0}, "patience is 0.0"),
        ({"judge": 3}, "judge is 3; it must be a model or a callable"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrimR(**options)


def test_what_is_refused() -> None:
    with pytest.raises(Unsupported, match="trimr without a tokenizer"):
        engine_of("llama").generate(SHORT[0], method=TrimR())
    with pytest.raises(Unsupported, match="a judge of one's own as JSON"):
        TrimR(judge=states).to_dict()
    for other in (PromptLookup(), Jacobi()):
        with pytest.raises(ValueError, match="a loop of its own|both fill the part 'loop'"):
            make([TrimR(), other]).recipe(ModelInfo(6))
    with pytest.raises(Unsupported, match="a judge: there is no engine to load it"):
        replace(Trimming(TrimR(judge="m"), TOKENIZER)).batch()(None, None)
    with pytest.raises(Unsupported, match="scores and logits of every token with trimr"):
        generate(tiny("llama"), **batch(), custom_generate=TrimR(opening="", closing=(4,)), output_scores=True,
                 return_dict_in_generate=True)
    assert make(TrimR(judge="m", share=0.25).to_dict()) == TrimR(judge="m", share=0.25)
    with pytest.raises(Unsupported, match="the part 'constraint' beside a loop of its own, Trimming"):
        replace(TrimR().recipe(ModelInfo(6, tokenizer=TOKENIZER)), constraint=lambda: None)  # type: ignore[arg-type]
    for judge, timed in ((states, True), (None, False)):
        assert Trimming(TrimR(judge=judge), TOKENIZER).timed == timed
    assert not Trimming(TrimR(judge="m"), TOKENIZER, engine()).timed
    with pytest.raises(Unsupported, match="waiting for what others say in 2 processes"):
        Ranks(size=2).check(TrimR(judge=states).recipe(ModelInfo(6)))
    both = make([TrimR(), KVInt8()]).recipe(ModelInfo(6, tokenizer=TOKENIZER))
    assert (both.exact_to, both.components) == ("none", ("store", "loop"))
    assert DepthPlan.full(6) == both.plan


def test_in_transformers_generate() -> None:
    method = TrimR(opening="", closing=(4, 9), share=0.5, thoughts=0)
    plain, found = (generate(tiny("llama"), **batch(), custom_generate=one) for one in (Full(), method))
    assert torch.equal(found[:, :14], plain[:, :14]) and found[:, 14:16].tolist() == [[4, 9]] * 3


def test_over_http() -> None:
    home, asked = tiny_engine(), list[Question]()

    def judge(question: Question) -> bool:
        asked.append(question)
        return True

    method = TrimR(judge=judge, share=None, repeats=None, opening="", cues="a|b|c|d|e|f|g|h")
    body = {"model": MODEL, "prompt": "Some words", "max_tokens": 80, "temperature": 0}
    expected = home.generate("Some words", method=method, max_new_tokens=80)
    plain = home.generate("Some words", max_new_tokens=80)
    with serving(home, method=method) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as lines:
            data = [line[6:] for line in lines.iter_lines() if line.startswith("data: {")]
        named = {**body, "method": "trimr", "method_args": {"judge": "some/model"}}
        refused = httpx.post(f"{server.url}/v1/completions", json=named, timeout=60)
        budget = {**body, "method": "trimr", "method_args": {"opening": "", "share": 0.25, "thoughts": 0}}
        capped = httpx.post(f"{server.url}/v1/completions", json=budget, timeout=60).json()
    assert answer["choices"][0]["text"] == expected.text
    assert "".join(json.loads(one)["choices"][0]["text"] for one in data) == expected.text
    assert refused.status_code == 403 and "judge of trimr names a file" in refused.json()["error"]["message"]
    text = capped["choices"][0]["text"]
    assert text.startswith(plain.text[:15]) and texts()["forceful"].strip()[:40] in text
