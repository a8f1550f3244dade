"""Plots from reports and cards are drawn, from little data too."""

from __future__ import annotations

import pytest

from shoal_lab.eval.plots import draw_layers, draw_report

pytest.importorskip("matplotlib")


def row(label, mean, speedup=None, method=None):
    gap = {"mean": -0.1, "low": -0.2, "high": 0.0, "p": 0.1}
    found = {"label": label, "mean_layers": mean, "accuracy": 0.5, "accuracy_interval": [0.4, 0.6],
             "loss_difference": gap, "tokens_per_answer": 12.0,
             "method": method or {"method": "schedule", "method_args": {"order": [2, 1], "steps": [3, 7]}}}
    return found if speedup is None else {**found, "speedup": speedup}


def report():
    backwards = {"method": "reversed_d3", "method_args": {"counts": [6, 3, 4, 6], "order": [1, 2, 3]}}
    rows = [row("full", 6.0), row("d3", 5.0, 1.2), row("constant", 5.0, 1.2), row("reversed d3", 5.0, 1.2, backwards)]
    bins = [{"first": 16 * i, "tokens": tokens, "loss": 1.0, "error": 0.1} for i, tokens in enumerate((900, 20))]
    suite = {"suite": "s.jsonl", "answers": rows, "loss": rows, "by_position": bins, "own_by_position": bins}
    return {"num_layers": 6, "suites": [suite, {"suite": "text", "by_position": []}]}


def test_every_picture_is_drawn(tmp_path):
    drawn = draw_report(report(), tmp_path / "deep" / "pictures")
    names = [path.name for path in drawn]
    kinds = ("accuracy", "schedules", "loss", "positions")
    assert names == [f"s-{kind}.png" for kind in kinds]
    assert all(path.stat().st_size > 4000 for path in drawn)


def test_layer_scores_are_drawn(tmp_path):
    card = {"layer_scores": {"leave_one_out": [0.1, -0.2, 0.3], "influence": [0.3, 0.2, 0.4]}}
    assert draw_layers(card, tmp_path / "layers.png").stat().st_size > 4000
