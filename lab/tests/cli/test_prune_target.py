"""`shoal prune --bytes` and `--speed`: hand-computed sizes and speeds, the least that reaches them, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_models import write_model
from shoal import DropLayers, NarrowMLPs
from shoal.cli import main
from shoal.engine.loading.checkpoint import Checkpoint
from shoal_lab.calibrate import cost
from shoal_lab.cli.prune_target import times_faster
from shoal_lab.components.cost import CostCard
from shoal_lab.prune.write_checkpoint import Outline, folder_bytes

CARD = CostCard(layer_seconds=2.0, head_seconds=3.0, overhead_seconds=1.0, kv_seconds_per_position=0.0,
                windows=(None,) * 6)
ATTENTION, MLP = 2 * 32 * 8 * (4 + 2), 3 * 32
"""Weights of a tiny layer's attention, and of one neuron."""


def pruned(capsys: Any, *argv: Any) -> dict[str, Any]:
    assert main(["prune", *map(str, argv), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Any, *argv: Any) -> str:
    assert main(["prune", *map(str, argv)]) == 2
    return str(capsys.readouterr().err)


def first(*widths: int) -> NarrowMLPs:
    return NarrowMLPs(tuple(tuple(range(width)) for width in widths))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_folders_size_is_what_is_written(
    capsys: Any, tiny_folder: str, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    argv = ["--dtype", "bfloat16"] if dtype else []
    told = pruned(capsys, "ppm", "--model", tiny_folder, "--share", 0.5, "--multiple", 8, "--out", tmp_path / "a",
                  *argv)
    files = Checkpoint(tiny_folder, None, False)
    size = folder_bytes(files.config(), Outline(files.weights()), first(*told["widths"]), dtype)
    assert size == (tmp_path / "a" / "model.safetensors").stat().st_size
    weights = 2 * 256 * 32 + 32 + 6 * (ATTENTION + 32 * MLP + 2 * 32)
    assert 0 < size - weights * (2 if dtype else 4) < 10_000, "the header is all that is beside the weights"


def test_the_least_share_that_fits(capsys: Any, tiny_folder: str, tmp_path: Path) -> None:
    """Of 64 neurons in steps of eight, 48 in each layer are the first that fit."""
    files = Checkpoint(tiny_folder, None, False)
    fits = folder_bytes(files.config(), Outline(files.weights()), first(*[48] * 6))
    for number, (most, width) in enumerate(((fits, 48), (fits - 1, 40), (fits + 1, 48))):
        told = pruned(capsys, "ppm", "--model", tiny_folder, "--bytes", most, "--multiple", 8, "--out",
                      tmp_path / str(number))
        assert told["widths"] == [width] * 6 and told["bytes"] <= most and told["target"] == {"bytes": most}
        assert told["share"] == pytest.approx({48: 0.1876, 40: 0.3126}[width], abs=1e-4)


@pytest.mark.parametrize("argv", [["ppm", "--multiple", 32], ["depth", "--by", "leave_one_out"]],
                         ids=["width", "depth"])
def test_a_file_comes_to_what_was_asked_for(capsys: Any, tmp_path: Path, argv: list[Any]) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes these files")
    write_model("llama", tmp_path / "tiny.gguf", "Q8_0")
    (tmp_path / "shoal.json").write_text(json.dumps({"layer_scores": {"leave_one_out": [1, 2, 3, 4]}}))
    before = (tmp_path / "tiny.gguf").stat().st_size
    most = round(0.8 * before)
    told = pruned(capsys, *argv, "--model", tmp_path / "tiny.gguf", "--bytes", most, "--out", tmp_path / "less.gguf")
    now = (tmp_path / "less.gguf").stat().st_size
    assert now == told["bytes"] <= most
    again = pruned(capsys, *argv, "--model", tmp_path / "tiny.gguf", "--bytes", now, "--out", tmp_path / "same.gguf")
    assert again["bytes"] == now and {**again, "out": 0, "target": 0} == {**told, "out": 0, "target": 0}


@pytest.mark.parametrize(("change", "left"), [
    (DropLayers((1, 4)), 4 * 2.0),
    (first(32, 64, 64, 64, 64, 64), (6 * ATTENTION + MLP * (5 * 64 + 32)) / (6 * ATTENTION + MLP * 6 * 64) * 6 * 2.0),
    (first(*[64] * 6), 12.0),
])
def test_speeds_by_hand(tiny_folder: str, change: Any, left: float) -> None:
    """Layers take 2 seconds each, everything else 4."""
    config = Checkpoint(tiny_folder, None, False).config()
    assert times_faster(CARD, config, change) == pytest.approx((12 + 4) / (left + 4))


def test_layers_that_stay_read_their_own_windows(tiny_folder: str) -> None:
    card = CostCard(0.0, 0.0, 1.0, 1.0, windows=(None, 1, None, 1, 1, 1))
    whole, fewer = 1 + 2 * (128 + 64.5) + 4, 1 + 128 + 64.5 + 3
    config = Checkpoint(tiny_folder, None, False).config()
    assert times_faster(card, config, DropLayers((0, 1))) == pytest.approx(whole / fewer, rel=0.01)


def test_the_least_that_is_fast_enough(
    capsys: Any, tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "measure", lambda engine: CARD)
    told = pruned(capsys, "ppm", "--model", tiny_folder, "--speed", 1.15, "--multiple", 8, "--out", tmp_path / "fast")
    speeds = {width: 16 / (12 * (ATTENTION + MLP * width) / (ATTENTION + MLP * 64) + 4) for width in range(8, 65, 8)}
    width = max(width for width, times in speeds.items() if times >= 1.15)
    assert told["widths"] == [width] * 6 and told["target"]["speed"] == 1.15
    assert told["target"]["predicted"] == pytest.approx(speeds[width], abs=1e-4)
    assert told["target"]["cost"]["layer_seconds"] == 2.0 and "bytes" not in told


@pytest.mark.parametrize(("argv", "why"), [
    (["--bytes", "9TB"], "nothing has to be left out"),
    (["--bytes", "1kB"], "is the best that can be reached this way"),
    (["--speed", 50], "--speed is 50.0, and"),
    (["--bytes", "much"], "it must be a number and one of"),
    (["--speed", 1], "--speed is 1.0; it must be above 1"),
    (["--speed", "nan"], "--speed is nan; it must be above 1"),
    (["--speed", 2, "--share", 0.1], "not allowed with"),
])
@pytest.mark.parametrize("what", ["ppm", "depth"])
def test_what_cannot_be_reached_is_refused(
    capsys: Any, tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, argv: list[Any],
    why: str
) -> None:
    monkeypatch.setattr(cost, "measure", lambda engine: CARD)
    folder = tmp_path / "known"
    folder.mkdir()
    for path in Path(tiny_folder).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "shoal.json").write_text(json.dumps({"layer_scores": {"influence": [1, 2, 3, 4, 5, 6]}}))
    assert why in refused(capsys, what, "--model", folder, "--out", tmp_path / "less", *argv)
    assert [path.name for path in tmp_path.iterdir()] == ["known"]
