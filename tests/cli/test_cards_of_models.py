"""Commands with a depth method on a model without a card: its layers are measured once, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli import main
from shoal.engine.cards import card as cards
from shoal.engine.cards import quick as layer_card

TOKENS = ["--max-new-tokens", "12", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def _small(measures_layers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure on a few short answers instead of a minute of them."""
    monkeypatch.setattr(layer_card, "Effort", lambda seconds=None: layer_card_effort(seconds, 40, 12))
    monkeypatch.setattr(layer_card, "asked", lambda engine: [[1, 2, 3], [4, 5, 6, 7]])


layer_card_effort = layer_card.Effort


def done(capsys: Any, *words: str) -> tuple[str, str]:
    assert main([*words]) == 0
    out, err = capsys.readouterr()
    return out, err


def test_the_first_use_of_a_depth_method_measures_and_keeps(capsys: Any, tiny_folder: str) -> None:
    words = ["generate", "--model", tiny_folder, "--method", "d3", "Once", "--temperature", "0", *TOKENS, "--json"]
    out, err = done(capsys, *words)
    assert "a minute at most (--no-card skips that)" in err and "kept for the next time" in err
    assert "\r" not in err and "%" not in err
    (path,) = cards.cached().glob("*.json")
    found = shoal.load(tiny_folder, dtype="float32").card
    assert path.name in found.origin and len(found.layer_scores["leave_one_out"]) == 6
    again, err = done(capsys, *words)
    assert json.loads(again)["depths"] == json.loads(out)["depths"] and err == ""


def test_no_card_keeps_the_order_by_position_and_says_what_it_costs(capsys: Any, tiny_folder: str) -> None:
    words = ["generate", "--model", tiny_folder, "--method", "d3", "--no-card", "Once"]
    out, err = done(capsys, *words, *TOKENS, "--json")
    assert "several times the quality" in err and err.count("\n") == 1
    assert not cards.cached().exists()
    assert json.loads(out)["stats"]["mean_layers"] == pytest.approx(0.85 * 6, abs=0.2)


@pytest.mark.parametrize("words", [["--method", "full"], ["--method", "prompt_lookup"],
                                   ["--method", "d3", "--alpha", "0.99", "--order", "low_first"]])
def test_what_needs_no_card_measures_none(capsys: Any, tiny_folder: str, words: list[str]) -> None:
    _, err = done(capsys, "generate", "--model", tiny_folder, *words, "--quiet", "Once", *TOKENS)
    assert err == "" and not cards.cached().exists()


def test_an_answer_comes_although_nothing_could_be_measured(
    capsys: Any, tiny_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise layer_card.OutOfTime("no time")

    monkeypatch.setattr(layer_card, "measure_card", fails)
    out, err = done(capsys, "generate", "--model", tiny_folder, "--method", "d3", "--quiet", "Once", *TOKENS)
    assert out.strip() and "dropped by position: no time" in err


def test_a_card_of_other_weights_is_said(capsys: Any, tiny_folder: str) -> None:
    engine = shoal.load(tiny_folder, dtype="float32")
    data = layer_card.measure_card(engine, [([1, 2], [3, 4, 5])])
    data["model"] |= {"fingerprints": ["0" * 16], "weights": "Q4_1"}
    cards.keep(data)
    _, err = done(capsys, "generate", "--model", tiny_folder, "--method", "d3", "--quiet", "Once", *TOKENS)
    assert "calibrated on Q4_1" in err
    rows = json.loads(done(capsys, "methods", "--model", tiny_folder, "--json")[0])
    assert rows["card"]["borrowed"] and "calibrated on Q4_1" in rows["card"]["origin"]


def test_the_library_measures_when_asked(tiny_folder: str) -> None:
    engine = shoal.load(tiny_folder, dtype="float32")
    assert engine.card.empty
    card = shoal.quick_card(engine, seconds=30, keep=False)
    assert engine.card is card and not card.empty and not Path(cards.cached()).exists()


def test_env_and_methods_tell_of_cards(capsys: Any, tiny_folder: str) -> None:
    assert json.loads(done(capsys, "env", "--json")[0])["cards_cached"] == 0
    assert "Nothing is known about this model's layers" in done(capsys, "methods", "--model", tiny_folder)[0]
