"""The suite of drafts: replay emits the record whatever is guessed, ratios are paired, bad wishes are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PreTrainedModel

from shared_models import DRAFT, FIXTURES, REFERENCE
from shoal.bench import words, workloads
from shoal.bench.drafts import suite
from shoal.bench.drafts.measure import DraftsConfig, measure
from shoal.bench.drafts.replay import replayed
from shoal.bench.drafts.speakers import HF_OPTIONS, ShoalSpeaker
from shoal.bench.drafts.suite import Decoded, DraftTask
from shoal.bench.subject import MeasuredModel
from shoal.bench.system import Setting
from shoal.engine.load import engine_for
from shoal.methods.d3 import D3
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup

PROMPT = tuple(range(3, 23))
COPY = (*PROMPT[4:16], 90, *PROMPT[:6])


def decode(speaker: Any, task: DraftTask) -> Decoded:
    return suite.together(task, {"one": speaker})["one"]


@pytest.mark.parametrize("answer", [COPY, tuple(range(40, 52)), COPY[:3]])
@pytest.mark.parametrize("method", [Full(), PromptLookup(), PromptLookup(inner=D3(mean=0.85))])
def test_replay_emits_the_record(llama: PreTrainedModel, method: Any, answer: tuple[int, ...]) -> None:
    speaker = ShoalSpeaker(engine_for(llama), method)
    made = decode(speaker, DraftTask(PROMPT, answer, len(answer)))
    assert made.tokens == answer and made.timed == len(answer) - 1


def test_a_text_that_copies_needs_fewer_forwards(llama: PreTrainedModel) -> None:
    made = decode(ShoalSpeaker(engine_for(llama), PromptLookup()), DraftTask(PROMPT, COPY, len(COPY)))
    other = decode(ShoalSpeaker(engine_for(llama), PromptLookup()), DraftTask(PROMPT, tuple(range(40, 59)), 19))
    assert made.per_forward is not None and made.per_forward > 2
    assert other.per_forward == 1.0


def test_methods_that_ask_the_model_are_not_replayed() -> None:
    with pytest.raises(ValueError, match="d3 cannot be replayed.*prompt_lookup"):
        replayed(D3(), (1, 2))


class Fixed:
    """Takes so many seconds per token."""

    def __init__(self, seconds: float, token: int = 1) -> None:
        self.seconds, self.token = seconds, token

    def begin(self, task: DraftTask) -> Fixed:
        self.left, self.task = task.new_tokens - 1, task
        return self

    def step(self) -> bool:
        self.left -= 1
        turns.append(self.seconds)
        return self.left > 0

    def decoded(self) -> Decoded:
        length = self.task.new_tokens
        return Decoded((self.token,) * length, length - 1, self.seconds * (length - 1), 1.5, (0.5, 0.25))


turns: list[float] = []


def test_ratios_are_taken_text_by_text() -> None:
    tasks = {"a": [DraftTask((1,), None, 5), DraftTask((2,), None, 9)], "b": [DraftTask((3,), None, 3)]}
    systems = {"full": Fixed(0.2), "fast": Fixed(0.1), "wrong": Fixed(0.4, token=2)}
    rows = {(row["workload"], row["system"]): row for row in suite.run(tasks, systems, 2)}
    assert len(rows) == 6
    fast, wrong = rows["a", "fast"], rows["b", "wrong"]
    assert fast["times_faster"]["each"] == pytest.approx([2.0] * 4) and fast["tokens_per_second"] == pytest.approx(10)
    assert fast["equal_to_plain"] == 1 and wrong["equal_to_plain"] == 0 and wrong["times_faster"]["median"] == 0.5
    assert fast["acceptance"] == [0.5, 0.25] and fast["runs"] == 4 and wrong["runs"] == 2
    assert "2.00 (2.00-2.00)" in suite.text(list(rows.values()))


def test_systems_take_turns_token_by_token() -> None:
    turns.clear()
    suite.together(DraftTask((1,), None, 4), {"a": Fixed(1.0), "b": Fixed(2.0)})
    assert turns == [1.0, 2.0] * 3


def test_texts_are_read_and_drawn_with_the_seed(tmp_path: Path) -> None:
    (tmp_path / "humaneval").mkdir()
    lines = [{"prompt": f"def f{i}():", "canonical_solution": f" return {i}" * 20} for i in range(9)]
    lines.append({"prompt": "def short():", "canonical_solution": " pass"})
    packed = gzip.compress("\n".join(map(json.dumps, lines)).encode())
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(packed)
    first, again = (workloads.load(tmp_path, ["code"], 4, seed=1) for _ in range(2))
    other = workloads.load(tmp_path, ["code"], 4, seed=2)
    assert first == again != other and len(first["code"]) == 4
    assert all("short" not in text.prompt for text in workloads.load(tmp_path, ["code"], 99)["code"])


def test_missing_texts_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'maths' needs .*test.jsonl.*--data"):
        workloads.load(tmp_path, ["maths"], 1)
    with pytest.raises(ValueError, match="workload"):
        workloads.load(tmp_path, ["poems"], 1)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"items": 0}, "items"),
        ({"rounds": 0}, "rounds"),
        ({"new_tokens": 1}, "new_tokens"),
        ({"peers": ["hg"]}, "hf"),
        ({"data": None}, "--data"),
        ({"peers": ["hf-draft-model"]}, "--assistant"),
        ({"assistant": "shoal-reference-draft"}, "hf-draft-model"),
    ],
)
def test_bad_wishes(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DraftsConfig(**{"workloads": ["maths"], "data": Path(), **wish})


def test_the_tokenizer_of_a_shape_goes_there_and_back() -> None:
    made = words.train(["def add(a, b):\n    return a + b\n", "Tom adds 3 and 4."], size=300)
    text = "def add(a, b):\n    return ä + b"
    ids = made.encode(text).ids
    assert made.decode(ids) == text and max(ids) < 300


def test_every_peer_gives_the_model_s_own_answer() -> None:
    # transformers 5.0's own early exit ends in a TypeError
    peers = [one for one in HF_OPTIONS if one != "hf-early-exit" or not transformers.__version__.startswith("5.0.")]
    draft = str(FIXTURES / DRAFT)
    found = measure(
        MeasuredModel(model=str(FIXTURES / REFERENCE)),
        Setting("float32", None, "auto", "cpu", 1),
        {"draft_model": DraftModel(draft=draft, length=3)},
        DraftsConfig([workloads.PROBLEMS], None, items=1, new_tokens=12, peers=peers, assistant=draft),
    )
    rows = {row["system"]: row for row in found["results"]}
    assert set(rows) == {suite.PLAIN, "draft_model", *peers}
    assert all(row["equal_to_plain"] == 1 for row in rows.values()), rows
    assert rows["draft_model"]["tokens_per_forward"] > 1
