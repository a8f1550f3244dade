from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli import main
from shoal.depth.plan import DepthPlan
from shoal.engine.memory import footprint, memory_limit
from shoal.methods.d3 import D3
from shoal.types import ModelInfo
from shoal_lab.calibrate import cost
from shoal_lab.cli import plan as command
from shoal_lab.components.cost import CostCard

DROPS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12)


def planned(capsys, *words: str) -> dict:
    assert main(["plan", "--json", *words]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


@given(DROPS, st.integers(1, 40))
def test_bands_cover_every_step_with_its_own_layers(drops, tokens):
    plan = DepthPlan(*map(tuple, zip(*drops, strict=True)))
    bands = command.bands(plan, tokens)
    assert [step for band in bands for step in range(band.first, band.last + 1)] == list(range(tokens))
    for band in bands:
        for step in (band.first, band.last):
            assert (band.layers, band.depth) == (plan.layers(step), plan.depth(step))


def test_json_is_the_method_s_own_plan(capsys):
    found = planned(capsys, "--layers", "32", "--alpha", "0.98", "--max-new-tokens", "40")
    recipe = D3(alpha=0.98).recipe(ModelInfo(32, 40))
    assert found["counts"] == [recipe.plan.depth(step) for step in range(40)]
    assert found["mean_layers"] == pytest.approx(sum(found["counts"]) / 40)
    assert found["ideal_speedup"] == pytest.approx(32 / found["mean_layers"])
    assert (found["method"], found["exact_to"], found["horizon"]) == ("d3", "plan", 40)


def test_neutral_plan_is_one_full_band(capsys):
    found = planned(capsys, "--layers", "4", "--alpha", "1")
    assert found["bands"] == [{"first": 0, "last": 255, "depth": 4.0, "layers": [0, 1, 2, 3]}]
    assert found["exact_to"] == "full"


def test_text_rows(capsys):
    words = ["--layers", "6", "--method", "early_exit", "--exit-layer", "4", "--max-new-tokens", "10"]
    assert main(["plan", *words]) == 0
    head, first, rest = capsys.readouterr().out.splitlines()
    assert "4.20 of 6 layers on average over 10 tokens" in head
    assert first == "steps   0:    6 layers  \u2588\u2588\u2588\u2588\u2588\u2588"
    assert rest == "steps 1-9:    4 layers  \u2588\u2588\u2588\u2588\u2591\u2591"


def test_lone_sublayers_have_marks_of_their_own():
    plan = DepthPlan((9, 1, 9), (9, 9, 1))
    assert command._row(plan, 1) == "\u2588\u2584\u2580"
    bands = command.report({}, D3(alpha=1.0).recipe(ModelInfo(3)), ModelInfo(3))["bands"]
    assert "attention" not in bands[0]


def test_ascii_where_the_terminal_has_no_blocks(monkeypatch):
    monkeypatch.setattr(sys, "stdout", type("Latin", (), {"encoding": "latin-1"})())
    assert command._row(DepthPlan((9, 1), (9, 9)), 1) == "#m"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "8", "--model", "x"], "exclude each other"),
        (["--layers", "8", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--layers", "8", "--core", "9"], "core"),
        (["--layers", "8", "--method", "shortgpt"], "quick_card"),
    ],
)
def test_refusals(capsys, words, message):
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_memory_of_a_request(capsys, tiny_folder):
    words = ["--model", tiny_folder, "--method", "prompt_lookup", "--prompt-tokens", "50", "--rows", "2",
             "--max-new-tokens", "8"]
    found = planned(capsys, "--memory", "64GiB", *words)
    assert (found["memory"], found["rows"], found["changed"], found["method"]) == (64 << 30, 2, "", "prompt_lookup")
    parts = found["bytes"]
    assert parts.pop("total") == sum(parts.values())
    assert set(parts) == {"process", "weights", "kv", "drafts", "masks", "logits", "work"}
    assert main(["plan", "--memory", "64GiB", *words]) == 0
    assert "2 of 2 prompts at a time: fits into 64GiB" in capsys.readouterr().out


def test_memory_that_does_not_suffice(capsys, tiny_folder, monkeypatch):
    monkeypatch.setattr(footprint, "resident", lambda: 3 << 30)
    monkeypatch.setattr(memory_limit.MemoryLimit, "check_weights", lambda *_: None)  # of the model, which loads
    words = ["plan", "--model", tiny_folder, "--prompt-tokens", "50", "--max-new-tokens", "8", "--method", "full"]
    assert main([*words, "--memory", "2GiB"]) == 2
    said = capsys.readouterr().err
    assert "memory of 2.00 GiB for 1 prompt of up to 50 tokens with max_new_tokens=8" in said
    assert "need is 3.0" in said and "kv " in said and "Use a smaller model" in said
    assert main([*words, "--memory", "lots"]) == 2
    assert "memory is 'lots'; it must be a number and one of B" in capsys.readouterr().err
    assert main([*words, "--allow-lossy", "kv_int8"]) == 2
    assert "give both" in capsys.readouterr().err


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    planned(capsys, "--layers", "16", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "--layers", "16", "--plot", str(tmp_path / "plan.png")]) == 2
    assert "shoal-lab[plot]" in capsys.readouterr().err


def test_the_idealised_runtime_is_the_card_s_sum_and_costs_what_the_user_says(capsys, monkeypatch):
    """F(p) by lines between what was measured, then a step per further token; hours and kilowatt-hours by the price."""
    card = CostCard(0.001, 0.002, 0.003, 0.0, (None,) * 30, ((32, 0.1), (132, 0.6)))
    asked = []
    monkeypatch.setattr(cost, "measure", lambda engine, **how: asked.append(how) or card)
    words = ["--runtime", "--method", "full", "--prompt-tokens", "82", "--max-new-tokens", "11",
             "--price-per-hour", "3.6", "--watts", "72", "--price-per-kwh", "50"]
    found = planned(capsys, *words)
    whole = 0.35 + 10 * (0.002 + 0.003 + 30 * 0.001)
    assert asked == [{"contexts": (32, 82), "seconds": 1.0}]
    assert found["prefill_seconds"] == pytest.approx(0.35)
    assert found["seconds"] == pytest.approx(whole)
    assert found["watt_hours"] == pytest.approx(whole * 72 / 3600)
    assert found["price"] == pytest.approx(whole * 0.001 + whole * 72 / 3600 / 1000 * 50)
    half = planned(capsys, "--runtime", "--method", "early_exit", "--exit-layer", "15", *words[3:])
    assert found["seconds"] - half["seconds"] == pytest.approx(10 * 15 * 0.001)
    for wrong, said in ((["--watts", "-1"], "--watts is -1.0"), (["--method", "kv_int8"], "whose time depends")):
        assert main(["plan", *words, *wrong]) == 2
        assert said in capsys.readouterr().err
