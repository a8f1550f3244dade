"""Perplexity by windows: which tokens are judged, that a reading resumes, and that readers agree."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import bench_file
import perplexity
import readers
import scripts
from shoal.engine.loading.device import default_dtype
from shoal_lab.bench.model import MeasuredModel

ROOT = Path(__file__).resolve().parents[3]
TEXT = "the thing that thought of the other bath, then of the path to the north. " * 20
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[default_dtype(torch.device("cpu"))]
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'shoal-lab[bench]'")
HAS_LLAMA = importlib.util.find_spec("llama_cpp") is not None
needs_llama = pytest.mark.skipif(
    not HAS_LLAMA, reason="llama-cpp-python is not installed: pip install 'shoal-lab[bench]'"
)


class Flat:
    """All tokens equally probable, except for a bonus on the last token."""

    bits_per_weight = 1.0

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus, self.calls = bonus, 0

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        self.calls += 1
        return torch.nn.functional.one_hot(torch.tensor(list(ids)), 8).float() * self.bonus

    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        return [], []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MeasuredModel:
    return MeasuredModel(model=str(bench_file.write(tmp_path_factory.mktemp("file") / "tiny.gguf")))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.script("lab/benchmarks/fidelity.py")


def test_windows_do_not_overlap_and_begin_as_texts_do() -> None:
    assert perplexity.windows(range(10), 100, 4, None) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert perplexity.windows(range(10), 7, 4, 99) == [[99, 0, 1, 2], [99, 3, 4, 5]]
    with pytest.raises(ValueError, match="3 tokens, and a window takes 4"):
        perplexity.windows(range(3), 100, 4, None)
    with pytest.raises(ValueError, match="window is 1"):
        perplexity.windows(range(3), 100, 1, None)


def test_a_loss_is_the_sum_over_all_tokens_but_the_first() -> None:
    ids = [(5 * i * i + i) % 11 for i in range(300)]
    logits = torch.randn(300, 11, generator=torch.Generator().manual_seed(0))
    wanted = -sum(
        float(logits[i, ids[i + 1]]) - math.log(sum(math.exp(float(value)) for value in logits[i])) for i in range(299)
    )
    assert perplexity.loss(logits, ids) == pytest.approx(wanted, rel=1e-5)


def test_a_reading_shows_a_bar_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)  # noqa: B023
        perplexity.read(Flat(), [[1, 2, 3]], tmp_path / f"{terminal}.json", {})
        assert ("windows" in capsys.readouterr().err) == terminal


def test_a_reading_goes_on_where_it_was(tmp_path: Path) -> None:
    pieces, record, about = [[1, 2, 3], [4, 5, 6], [7, 0, 1]], tmp_path / "a.json", {"model": "x"}
    first = Flat()
    assert perplexity.read(first, pieces, record, about, until=0.0)["losses"] == [] and first.calls == 0
    perplexity.read(first, pieces[:1], record, about)
    second = Flat()
    found = perplexity.read(second, pieces, record, about)
    assert (first.calls, second.calls) == (1, 2) and found["judged"] == [2, 2, 2]
    assert found["losses"] == pytest.approx([2 * math.log(8)] * 3)
    assert json.loads(record.read_text("utf-8")) == found
    assert perplexity.resume(record, {"model": "y"})["losses"] == []


def test_perplexities_are_compared_over_what_both_have_read() -> None:
    ours = {"losses": [2.0, 4.0, 9.0], "judged": [2, 2, 2]}
    theirs = {"losses": [1.0, 1.0], "judged": [2, 2]}
    found = perplexity.against(ours, theirs)
    assert (found["windows"], found["tokens"]) == (2, 4)
    assert found["perplexity"] == pytest.approx(math.exp(1.5))
    assert found["reference_perplexity"] == pytest.approx(math.exp(0.5))
    assert found["ratio"] == pytest.approx(math.e)
    spread = 1.96 * math.sqrt(0.5) / math.sqrt(2)  # differences per token are 0.5 and 1.5
    assert found["ratio_high"] == pytest.approx(math.exp(1 + spread))
    assert perplexity.against(ours, {"losses": [], "judged": []}) == {"windows": 0, "tokens": 0}


def test_a_difference_of_logits_is_relative_to_the_largest() -> None:
    reference = torch.tensor([[1.0, -4.0], [0.0, 2.0]])
    found = perplexity.logit_error(torch.tensor([[1.0, -4.0, 7.0], [0.5, 2.0, 7.0]]), reference)
    assert found == {"largest": 0.5, "rms": 0.25, "largest_logit": 4.0, "relative": 0.125}


@needs_llama
def test_readers_of_a_file_agree(model: MeasuredModel) -> None:
    ids = [1, 200, 3, 4, 150, 6, 7, 80, 9]
    opened = [readers.open_reader(name, model, 1) for name in ("reference", "shoal", "llama.cpp", "llama.cpp Q8_0")]
    reference, ours, theirs, eight = (one.logits(ids) for one in opened)
    assert perplexity.logit_error(ours, reference)["relative"] < ROUNDING
    assert perplexity.logit_error(theirs, reference)["relative"] < 0.01
    assert 0.001 < perplexity.logit_error(eight, reference)["relative"] < 0.3
    expected, margins = opened[0].greedy(ids, 6)
    assert expected == opened[1].greedy(ids, 6)[0] and len(margins) == 6 and min(margins) > 0
    assert [one.bits_per_weight for one in opened[:3]] == [32.0] * 3 and 8 < opened[3].bits_per_weight < 9
    with pytest.raises(ValueError, match="shoal int3"):
        readers.open_reader("shoal int3", model, 1)


@pytest.mark.slow
def test_the_script_reads_joins_and_reports(
    script: ModuleType, model: MeasuredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    argv = ["--model", str(model.model), "--text", str(tmp_path / "t.txt"), "--work", str(tmp_path / "work"),
             "--tokens", "400", "--window", "100", "--systems", "shoal,shoal int4", "--json", str(tmp_path / "a.json")]
    for name in ("reference", "shoal", "shoal int4"):
        assert script.main([*argv, "--only", name]) == 0
    assert script.main([*argv, "--join"]) == 0
    found = json.loads((tmp_path / "a.json").read_text("utf-8"))
    rows = {row["system"]: row for row in found["results"]}
    assert rows["shoal"]["ratio"] == pytest.approx(1, abs=ROUNDING) and rows["shoal"]["greedy"]["wrong"] == 0
    assert abs(rows["shoal int4"]["ratio"] - 1) > 1e-3 and 4 < rows["shoal int4"]["bits_per_weight"] < 8
    assert rows["shoal"]["tokens"] == 4 * 99 and found["window"]["stride"] == 100
    assert "$SHOAL_MODELS/tiny.gguf" in found["command"] and str(tmp_path) not in json.dumps(found)
    assert "perplexity" in capsys.readouterr().out


def test_texts_that_part_where_logits_decide_are_wrong(script: ModuleType) -> None:
    reference = [([1, 2, 3], [5.0, 0.1, 5.0])] * 3
    found = script.greedy([([1, 2, 3], []), ([1, 9, 3], []), ([7, 2, 3], [])], reference, tolerance=0.2)
    assert (found["equal"], found["ties"], found["wrong"]) == (1, 1, 1)
    assert found["parted_at"] == [None, 1, 0] and found["margins"] == [None, 0.1, 5.0]
