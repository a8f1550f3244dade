"""llama.cpp with drafts on a GGUF file: the text is the model's own, and right guesses save forwards."""

from __future__ import annotations

from typing import Any

import pytest

import bench_file
from shared_models import FIXTURES, REFERENCE
from shoal_lab.bench import workloads
from shoal_lab.bench.baselines.llama_drafts import NAMES, LlamaDrafts
from shoal_lab.bench.drafts import measure
from shoal_lab.bench.drafts.measure import DraftsConfig
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.system import Setting

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install 'shoal-lab[bench]'")
SETTING = Setting("float32", None, "auto", "cpu", 1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bench_file.write(tmp_path_factory.mktemp("file") / "tiny.gguf"))


def test_every_way_to_guess_gives_the_model_s_own_answer(file: str) -> None:
    found: dict[str, Any] = {}
    wish = DraftsConfig([workloads.PROBLEMS], None, items=2, new_tokens=24, shortest=8, baselines=NAMES, assistant=file)
    measure.measure(MeasuredModel(model=file), SETTING, {}, wish, found, lambda: None)
    rows = {row["system"]: row for row in found["results"]}
    assert [rows[name]["equal"] for name in NAMES] == [2, 2, 2], found["texts"]
    assert rows["llama.cpp"]["tokens_per_forward"] == 1
    assert rows["llama.cpp-draft-model"]["tokens_per_forward"] > 3, "it drafts for itself"


def test_what_is_timed_begins_after_the_first_guesses(file: str) -> None:
    made = LlamaDrafts(file, 256, 1, "llama.cpp-draft-model", file).decode([3, 4, 5, 3, 4], 21, frozenset())
    assert len(made.tokens) == 21 and made.timed == 21 - 1 - 5 and made.seconds > 0
    plain = LlamaDrafts(file, 256, 1, "llama.cpp")
    assert plain.decode([3, 4, 5, 3, 4], 21, frozenset()).tokens == made.tokens
    ended = plain.decode([3, 4, 5, 3, 4], 21, frozenset({made.tokens[6]}))
    assert ended.tokens == made.tokens[: made.tokens.index(made.tokens[6]) + 1]


def test_prompts_may_be_longer_than_a_batch(file: str) -> None:
    prompt = [3 + number % 90 for number in range(700)]
    texts = {LlamaDrafts(file, 1024, 1, name).decode(prompt, 8, frozenset()).tokens for name in NAMES[:2]}
    assert len(texts) == 1 and len(*texts) == 8


def test_other_files_are_refused() -> None:
    wish = DraftsConfig([workloads.PROBLEMS], None, baselines=["llama.cpp"])
    with pytest.raises(ValueError, match="GGUF"):
        measure.measure(MeasuredModel(model=str(FIXTURES / REFERENCE)), SETTING, {}, wish, {}, lambda: None)
