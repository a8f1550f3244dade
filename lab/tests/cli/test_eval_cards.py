"""An evaluation of depth methods on an unknown model: its layers are measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.engine.cards import card as cards
from shoal.engine.cards import quick as layer_card
from word_problems import write

Effort = layer_card.Effort


@pytest.fixture(autouse=True)
def _small(measures_layers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few short answers instead of a minute of them."""
    monkeypatch.setattr(layer_card, "Effort", lambda seconds=None: Effort(seconds, 40, 12))
    monkeypatch.setattr(layer_card, "asked", lambda engine: [[1, 2, 3], [4, 5, 6, 7]])


@pytest.mark.parametrize("argv", [["--method", "d3"], ["--methods", "full,d3"]])
def test_an_evaluation_knows_the_layers_of_the_methods_it_compares(
    capsys: Any, tiny_folder: str, tmp_path: Path, argv: list[str]
) -> None:
    problems = str(write(tmp_path))
    assert main(["eval", "--model", tiny_folder, "--suite", problems, "--n", "2", *argv, "--max-new-tokens", "12",
                 "--dtype", "float32", "--json"]) == 0
    err = capsys.readouterr().err
    assert "kept for the next time" in err and len(list(cards.cached().glob("*.json"))) == 1
