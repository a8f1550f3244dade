"""The summary of `lab/benchmarks/serving.py`: aims, gains, and predictions for the same loads."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import scripts

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "shoal bench --serve --shape 1b --context 32"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return imported("serving_gain")


def imported(name: str) -> ModuleType:
    return scripts.script(f"lab/benchmarks/{name}.py")


def result(label: str, median: float, concurrency: int | None = 8, rate: float | None = None, **more: Any) -> Any:
    load = f"{concurrency} at once" if rate is None else f"{rate:g} a second"
    return {"system": "shoal", "label": label, "load": load, "concurrency": concurrency, "rate": rate,
            "tokens_per_second": {"median": median}, "times_the_speed_of": {}, "prompt_tokens": 160, "requests": 4,
            "latency_seconds": {"mean": 100 / median}, **more}


def card(rows: int, layer: float) -> dict[str, Any]:
    return {"quant": None, "layer_seconds": layer, "head_seconds": 0.01, "overhead_seconds": 0.0,
            "kv_seconds_per_position": 0.0, "prefill": [[32, 0.1 * rows], [128, 0.4 * rows]], "rows": rows}


@pytest.fixture
def reports() -> dict[str, Any]:
    times = {"shoal full, waves": {"median": 1.3, "min": 1.2, "max": 1.4}}
    rounds = {"done": 2}
    baselines = {"llama.cpp batches": {"median": 0.9}, "transformers serve": {"median": 4.0}}
    streams = ((1, 10.0), (8, 40.0), (16, 25.0))
    waves = [result("full, waves", 10.0), result("d3:mean=0.6, waves", 13.0, times_the_speed_of=times)]
    mixed = f"{COMMAND} --answers 8,32 --methods full,d3:mean=0.6"
    return {
        "card": {"subject": {"num_hidden_layers": 16}, "cost_cards": [card(1, 0.004), card(8, 0.005)]},
        "streams": {"results": [result("full", speed, clients) for clients, speed in streams]},
        "peers": {"results": [result("full", 10.0, times_the_speed_of=baselines)]},
        "depth": {"command": f"{COMMAND} --new-tokens 64 --concurrency 8 --admission waves", "rounds": rounds,
                  "results": waves},
        "arrivals": {"command": f"{mixed} --rate 2 --requests 6", "rounds": rounds,
                     "results": [result("full, join", 10.0, None, 2.0), result("d3:mean=0.6, join", 12.0, None, 2.0)]},
    }


def test_aims_are_named_whether_reached_or_not(script: ModuleType, reports: dict[str, Any]) -> None:
    found = {aim["what"]: (aim["measured"], aim["reached"]) for aim in script.aims(reports)}
    assert found["tokens/s of 8 streams over one"] == (4.0, True)
    assert found["tokens/s of 16 streams over one"] == (2.5, False)
    assert found["tokens/s over llama.cpp, 8 at once"] == (0.9, False)
    assert found["tokens/s over transformers, 8 at once"] == (4.0, True)
    assert "share of D3's predicted gain, 8 at once, waves" in found


def test_gains_stand_beside_predictions_for_the_same_load(script: ModuleType, reports: dict[str, Any]) -> None:
    depth, arrivals = script.gains(reports)
    assert (depth["policy"], depth["of"], depth["measured"]["median"]) == ("waves", "tokens/s", 1.3)
    # 40 prompt tokens, 64 new ones: 8 x 0.1 x 40/32 for the prompts, 63 steps of the head and 16 layers or 60 % of them
    full = 1.0 + 63 * (0.01 + 16 * 0.005)
    less = 1.0 + 63 * 0.01 + (0.6 * 16 * 64 - 16) * 0.005
    assert depth["in_phase"] == pytest.approx(full / less, rel=0.01)
    assert depth["predicted"]["median"] == pytest.approx(depth["in_phase"], rel=0.05)
    assert (arrivals["policy"], arrivals["of"]) == ("join", "mean latency")
    assert arrivals["measured"]["median"] == pytest.approx(1.2)
    assert 1.0 < arrivals["predicted"]["min"] <= arrivals["predicted"]["max"] < depth["in_phase"]
    del reports["card"]
    assert all("predicted" not in gain for gain in script.gains(reports))


def test_the_summary_and_its_picture_are_written(script: ModuleType, reports: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name, found in reports.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    script.publish(tmp_path, tmp_path, ["lab/benchmarks/serving.py"])
    assert len(json.loads((tmp_path / "gain.json").read_text("utf-8"))["gains"]) == 2
    assert (tmp_path / "serving-gain.png").stat().st_size > 1000


def test_stages_go_in_their_order_and_unknown_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    serving = imported("serving")
    assert serving.chosen("depth,card,gain") == ["card", "depth"]
    assert set(serving.chosen(None)) == set(serving.stages(serving.arguments().parse_args([])))
    with pytest.raises(SystemExit, match="no stage 'dept'"):
        serving.chosen("dept")
