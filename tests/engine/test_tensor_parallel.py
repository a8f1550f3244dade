"""Two processes that share a model say what one says; what cannot be shared is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
import two_processes
from families import tiny
from shoal.engine.loading import ranks
from shoal.errors import Unsupported
from two_processes import CALLS, answers, held, torchrun

FAMILIES = ["llama", "hybrid"]
pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform == "win32",
                                reason="torch is built without gloo here")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("shared")
    for family in FAMILIES:
        tiny(family, layers=4).save_pretrained(home / family)
    return {family: home / family for family in FAMILIES}


@pytest.fixture(scope="module")
def reports(folders: dict[str, Path]) -> list[dict[str, Any]]:
    target = next(iter(folders.values())).parent / "report"
    done = torchrun(two_processes.__file__, target, json.dumps(CALLS), *folders.values())
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(f"{target}.{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_two_processes_say_what_one_says(
    reports: list[dict[str, Any]], folders: dict[str, Path], family: str, dtype: str
) -> None:
    engine = shoal.load(folders[family], dtype=dtype, device="cpu", backend="hf")
    alone = json.loads(json.dumps(answers(engine)))
    for report in reports:
        shared = report[f"{family} {dtype}"]
        assert {name: shared[name] for name in CALLS} == alone
        assert shared["held"] < 0.7 * held(engine.model), "the weights are not shared"


@pytest.mark.slow
def test_processes_agree_on_what_each_would_draw_for_itself(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["drawn"] == reports[1]["drawn"]


@pytest.mark.slow
def test_what_would_part_the_processes_is_refused(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert "measures time" in report["refused"]["controller"]
        assert "join at other ticks" in report["refused"]["scheduler"]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"quant": "int8"}, "quant='int8'"), ({"backend": "packed"}, "'packed'"), ({"model": object()}, "loaded model"),
     ({"model": "model.gguf"}, "GGUF"), ({"backend": "hf"}, "torchrun")],
)
def test_what_cannot_be_shared(folders: dict[str, Path], options: dict[str, Any], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        shoal.load(**{"model": folders["llama"], "tensor_parallel": True, **options})


def test_models_that_cannot_be_cut() -> None:
    two, three = ranks.Ranks(0, 2), ranks.Ranks(0, 3)
    with pytest.raises(Unsupported, match="no plan"):
        ranks.check_model(tiny("gpt2").config, two)
    with pytest.raises(Unsupported, match="4 heads"):
        ranks.check_model(tiny("llama").config, three)
    with pytest.raises(Unsupported, match="2 heads of keys"):
        ranks.check_model(tiny("llama").config, ranks.Ranks(0, 4))
    ranks.check_model(tiny("llama").config, two)
