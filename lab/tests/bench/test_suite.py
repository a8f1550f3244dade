"""The suite of drafts: ratios are paired text by text, a wrong text is found, runs resume, bad options are refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shared_models import DRAFT, FIXTURES, REFERENCE
from shoal.engine.loading.load import load
from shoal.methods.aded import ADED
from shoal.methods.d3 import D3
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.snapkv import SnapKV
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.tidal import Tidal
from shoal_lab.bench import workloads
from shoal_lab.bench.drafts import judge, measure, stories, suite, summary
from shoal_lab.bench.drafts.decoders import HF_OPTIONS, ShoalDecoder, ShoalRun
from shoal_lab.bench.drafts.measure import DraftsConfig
from shoal_lab.bench.drafts.suite import Decoded, DraftTask
from shoal_lab.bench.load.folder import train_tokenizer
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.system import Setting
from shoal_lab.eval.scoring import losses

PLAIN_FLOAT = Setting("float32", None, "auto", "cpu", 1)


class Fixed:
    """Takes a fixed time per token."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def begin(self, task: DraftTask) -> Fixed:
        self.left, self.task = task.new_tokens - 1, task
        return self

    def step(self) -> bool:
        self.left -= 1
        turns.append(self.seconds)
        return self.left > 0

    def decoded(self) -> Decoded:
        length = self.task.new_tokens
        return Decoded((1,) * length, length - 1, self.seconds * (length - 1), 1.5, 4, 2)


turns: list[float] = []


def test_systems_take_turns_token_by_token() -> None:
    turns.clear()
    suite.together(DraftTask((1,), 4), {"a": Fixed(1.0), "b": Fixed(2.0)})
    assert turns == [1.0, 2.0] * 3


def one(seconds: Sequence[float], difference: dict[str, Any] | None = None, drafted: int = 0) -> dict[str, Any]:
    return {"seconds_per_token": list(seconds), "tokens": 9, "tokens_per_forward": 1.5, "drafted": drafted,
            "accepted": drafted // 2, "ideal_speedup": 1.2, "difference": difference}


def test_ratios_are_taken_text_by_text() -> None:
    wrong = {"tie": True, "nats": 0.5, "agreement": 0.25}
    texts = [
        {"kind": "a", "systems": {"full": one([0.2, 0.3, 0.9]), "fast": one([0.1, 0.9, 0.15], drafted=8)}},
        {"kind": "a", "systems": {"full": one([0.8]), "fast": one([0.1], wrong, drafted=2)}},
        {"kind": "a", "too_short": True},
        {"kind": "b", "systems": {"full": one([]), "fast": one([0.1])}},
    ]
    plain, fast, empty, other = summary.rows(texts, ["a", "b", "c"], ["full", "fast"])
    assert plain["times_faster"]["each"] == [1.0, 1.0] and plain["acceptance"] is None
    assert fast["times_faster"]["each"] == pytest.approx([2.0, 8.0])
    assert fast["times_faster"]["mean"] == pytest.approx(4.0)
    assert (fast["times_faster"]["low"], fast["times_faster"]["high"]) == pytest.approx((2.0, 8.0))
    assert (fast["texts"], fast["equal"], fast["ties"]) == (2, 1, 1)
    assert (fast["acceptance"], fast["nats"], fast["agreement"]) == (0.5, 0.25, 0.625)
    assert empty["times_faster"] is None and other["kind"] == "b"
    assert "4.00 (2.00-8.00)" in summary.text([plain, fast, empty, other])


@pytest.mark.parametrize("method", [Full(), PromptLookup()])
def test_a_prompt_that_was_read_before_gives_the_same_text(method: Any) -> None:
    engine = load(str(FIXTURES / REFERENCE), dtype="float32")
    task, plain = measure._begun(engine, "Tom has 15 cups and buys 4 more. How many cups has he?\n", 24)
    assert task.held is not None
    for asked in (task, replace(task, held=None)):
        made = suite.together(asked, {"one": ShoalDecoder(engine, method)})["one"]
        assert made.tokens == plain and made.seconds > 0
        assert made.timed <= len(plain) - 2 and (made.timed == len(plain) - 2 or made.accepted)


def test_a_run_knows_nothing_of_an_earlier_one() -> None:
    """Methods that learn from answers would have the whole answer in the second round."""
    engine = load(str(FIXTURES / REFERENCE), dtype="float32")
    task, _ = measure._begun(engine, "Tom has 15 cups and buys 4 more. How many cups has he?\n", 40)
    first, second = (suite.together(task, {"one": ShoalDecoder(engine, ADED())})["one"] for _ in range(2))
    assert (first.drafted, first.accepted) == (second.drafted, second.accepted)


def test_how_far_a_text_is_from_the_best_one() -> None:
    engine = load(str(FIXTURES / REFERENCE), dtype="float32")
    task, plain = measure._begun(engine, "Tom has 15 cups.", 12)
    assert judge.difference(engine, task, plain, plain, 0.25) is None
    text = (*plain[:4], 7, *plain[5:9])
    for asked in (task, replace(task, held=None)):
        found = judge.difference(engine, asked, plain, text, 0.25)
        assert found is not None and found.place == 4 and found.agreement == pytest.approx(8 / len(plain))
    # Slow and obvious: token by token, the cost of each against the best one.
    best, way = [], (engine.runner, engine.recipe("full", 12).plan)
    for place in range(len(text)):
        again = engine.generate([*task.prompt, *text[:place]], max_new_tokens=1, logprobs=2)
        assert again.logprobs is not None
        best.append(again.logprobs[0].top[0][1])
        if place == 4:
            (_, first), (_, second) = again.logprobs[0].top
            assert found.margin == pytest.approx(first - second, abs=1e-3)
    ((chosen,),) = losses([task.prompt], [text], [way])
    assert found.nats == pytest.approx(float((torch.tensor(best) + chosen).mean()), abs=1e-3)


def test_texts_are_read_and_drawn_with_the_seed(tmp_path: Path) -> None:
    (tmp_path / "humaneval").mkdir()
    lines = [{"prompt": f"def f{i}(x):", "canonical_solution": f" return {i}"} for i in range(9)]
    packed = gzip.compress("\n".join(map(json.dumps, lines)).encode())
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(packed)
    first, again = (workloads.prompts(tmp_path, "edits", 4, seed=1) for _ in range(2))
    assert first == again != workloads.prompts(tmp_path, "edits", 4, seed=2) and len(first) == 4
    assert all("renamed to f" in text and "_checked" in text for text in first)
    assert len(workloads.prompts(tmp_path, "edits", 99)) == 9


def test_missing_texts_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'mathematics' need .*test.jsonl.*--data"):
        workloads.prompts(tmp_path, "mathematics", 1)
    with pytest.raises(ValueError, match="kind of text"):
        workloads.prompts(tmp_path, "poems", 1)
    with pytest.raises(ValueError, match="kind of text"):
        workloads.prompts(tmp_path, stories.STORIES, 1)  # stories need a tokenizer


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"items": 0}, "items"),
        ({"rounds": 0}, "rounds"),
        ({"minutes": 0}, "minutes"),
        ({"new_tokens": 3}, "new_tokens"),
        ({"baselines": ["hg"]}, "hf"),
        ({"data": None}, "--data"),
        ({"baselines": ["llama.cpp-draft-model"]}, "--assistant"),
        ({"assistant": "shoal-reference-draft"}, "draft model"),
        ({"context": 0}, "context"),
    ],
)
def test_bad_wishes(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DraftsConfig(**{"kinds": ["mathematics"], "data": Path(), **wish})


def test_the_tokenizer_of_a_shape_goes_there_and_back() -> None:
    made = train_tokenizer(["def add(a, b):\n    return a + b\n", "Tom adds 3 and 4."], size=300)
    text = "def add(a, b):\n    return ä + b"
    ids = made.encode(text).ids
    assert made.decode(ids) == text and max(ids) < 300


@dataclass
class Reports:
    """Every version of the report that was kept."""

    found: dict[str, Any]
    times: int = 0

    def keep(self) -> None:
        self.times += 1

    def measure(self, methods: dict[str, Any], **wish: Any) -> dict[str, Any]:
        fixed = {"kinds": [workloads.PROBLEMS], "data": None, "items": 2, "new_tokens": 12, "shortest": 8}
        model = MeasuredModel(model=str(FIXTURES / REFERENCE))
        measure.measure(model, PLAIN_FLOAT, methods, DraftsConfig(**{**fixed, **wish}), self.found, self.keep)
        return self.found


@pytest.mark.slow
def test_every_peer_gives_the_model_s_own_answer() -> None:
    # transformers 5.0's own early exit ends in a TypeError
    baselines = [one for one in HF_OPTIONS if one != "hf-early-exit" or not transformers.__version__.startswith("5.0.")]
    draft = str(FIXTURES / DRAFT)
    found = Reports({}).measure({"draft_model": DraftModel(draft=draft, length=3)}, items=1, baselines=baselines,
                                assistant=draft)
    rows = {row["system"]: row for row in found["results"]}
    assert set(rows) == {suite.PLAIN, "draft_model", *baselines}
    assert all(row["equal"] == 1 and row["times_faster"] for row in rows.values()), rows
    assert rows["draft_model"]["tokens_per_forward"] > 1
    assert found["exact"] == [suite.PLAIN, "draft_model"]
    assert found["lossless"] == {"answers": 1, "equal": 1, "ties": 0, "wrong": 0}


@pytest.mark.slow
def test_a_run_goes_on_where_it_was() -> None:
    run = Reports({})
    first = [dict(text) for text in run.measure({"prompt_lookup": PromptLookup()}, items=1)["texts"]]
    assert [text["new_tokens"] for text in first] == [12] and run.times == 1
    with pytest.raises(ValueError, match="other settings"):
        run.measure({"prompt_lookup": PromptLookup()})
    run.found["asked"]["items"] = 2
    assert run.measure({"prompt_lookup": PromptLookup()})["texts"][:1] == first
    assert run.times == 2 and len({text["prompt"] for text in run.found["texts"]}) == 2
    run.measure({"prompt_lookup": PromptLookup()})
    assert run.times == 2, "nothing is measured twice"


@pytest.mark.slow
def test_short_answers_are_replaced_and_time_ends() -> None:
    # the first problem's answer is the shortest of the three
    found = Reports({}).measure({}, items=1, new_tokens=200, shortest=60)
    assert [len(text.get("systems", {})) for text in found["texts"]][-1] == 1
    with pytest.raises(ValueError, match="no text"):
        Reports({}).measure({}, minutes=1e-9)


@pytest.mark.parametrize(("busy", "kept"), [([0.0, 0.05], [0, 1]), ([0.5, 0.0, 0.9, 0.1], [1, 3]),
                                            ([0.5, 0.4, 0.9, 0.8, 0.7, 0.6], [1, 0])])
def test_rounds_in_which_others_work_are_decoded_again(
    busy: list[float], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(busy)
    monkeypatch.setattr("shoal_lab.bench.idle.others", lambda before, after: next(left))
    assert [number for _, number in measure._quietest(lambda number: number, 2)] == kept
    assert next(left, None) is None
    left = iter([busy + 1 for busy in [0.5, 0.0, 0.1]])
    assert [number for _, number in measure._quietest(lambda number: number, 2, spare=1)] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("token", [0, None])
def test_a_text_that_differs_is_seen(token: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    true = ShoalRun.decoded

    def wrong(run: ShoalRun) -> Decoded:
        made = true(run)
        changed = made.drafted and token == 0
        return replace(made, tokens=(*made.tokens[:3], 0, *made.tokens[4:])) if changed else made

    monkeypatch.setattr(ShoalRun, "decoded", wrong)
    found = Reports({}).measure({"prompt_lookup": PromptLookup(), "d3": D3(mean=0.8)}, new_tokens=24)
    seen = [text["systems"]["prompt_lookup"]["difference"] for text in found["texts"]]
    count = sum(one is not None for one in seen)
    assert all(one is None or (one["place"] == 3 and one["nats"] > 0) for one in seen)
    assert (count > 0) == (token == 0) and found["lossless"]["wrong"] == count
    assert found["exact"] == ["full", "prompt_lookup"]


def test_random_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="random weights"):
        measure.measure(MeasuredModel(shape="tiny"), PLAIN_FLOAT, {}, DraftsConfig([workloads.PROBLEMS], None), {}, id)




class Letters:
    """A tokenizer with a token for each character."""

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def told_stories(folder: Path) -> Path:
    """A data folder with three stories, each with its own letters."""
    (folder / "squality" / "v1-3" / "txt").mkdir(parents=True)
    rows = [{"metadata": {"passage_id": letter}, "document": letter * 40,
             "questions": [{"question_text": f"Who is {letter}?", "responses": [{"response_text": letter}]}]}
            for letter in "abc"]
    (folder / "squality" / "v1-3" / "txt" / "dev.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize("context", [15, 40, 100])
def test_stories_are_as_long_as_is_wanted_and_begin_with_the_one_that_is_asked_about(
    context: int, tmp_path: Path
) -> None:
    found = list(stories.prompts(told_stories(tmp_path), Letters(), context, 9, seed=1))
    assert len(found) == 3, "each story is asked about once"
    for prompt in found:
        text, _, asked = prompt.rpartition("\n\n")
        assert len(text) == context and asked.startswith(f"Who is {text[0]}? ")
        assert text[:40] == text[0] * min(40, context)
        assert len(set(text) - {"\n"}) == -(-context // 42)
    assert found == list(stories.prompts(tmp_path, Letters(), context, 3, seed=1))


def test_stories_are_measured_at_the_length_that_was_asked_for(tmp_path: Path) -> None:
    wish = {"kinds": [stories.STORIES], "data": told_stories(tmp_path), "shortest": 1, "context": 30}
    found = Reports({}).measure({"prompt_lookup": PromptLookup()}, **wish)
    assert found["asked"]["context"] == 30 and {text["kind"] for text in found["texts"]} == {"stories"}
    assert found["lossless"] == {"answers": 2, "equal": 2, "ties": 0, "wrong": 0}


@pytest.mark.parametrize("method", [SnapKV(budget=9, window=8, pool=1), StreamingLLM(window=6, sinks=1, every=2),
                                    KVInt8(), Tidal(k=8)])
def test_methods_that_hear_a_prompt_s_end_hear_it_behind_a_copied_beginning_too(method: Any) -> None:
    engine = load(str(FIXTURES / REFERENCE), dtype="float32")
    task, _ = measure._begun(engine, next(iter(workloads.prompts(None, workloads.PROBLEMS, 1))), 16)
    assert task.held is not None and len(task.prompt) > 20
    run = ShoalDecoder(engine, method).begin(task)
    while run.step():
        pass
    assert run.decoded().tokens == engine.generate(list(task.prompt), method=method, max_new_tokens=16).tokens
