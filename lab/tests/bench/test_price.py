"""The price of a token is seconds times money, and the page shows the command's output."""

from __future__ import annotations

from typing import Any

import pytest

from documents import ROOT
from price import Demand, lines, main

CARD = {"quant": "int8", "layer_seconds": 0.01, "head_seconds": 0.02, "overhead_seconds": 0.005,
        "kv_seconds_per_position": 1e-5, "prefill": [[10, 0.5], [20, 1.0]], "rows": 4}
REPORT: dict[str, Any] = {"subject": {"num_hidden_layers": 8}, "cost_cards": [CARD]}


def test_the_price_is_worked_out_by_hand() -> None:
    (line,) = lines(REPORT, Demand(prompt=20, answer=5, per_hour=3.6), [1.0])
    steps = [0.025 + 8 * 0.01 + 8 * (20 + step) * 1e-5 for step in (1, 2, 3, 4)]
    seconds = 1.0 + sum(steps)
    assert line.tokens_per_second == pytest.approx(4 * 5 / seconds)
    assert line.price == pytest.approx(1e6 * seconds / 20 * 0.001)
    assert (line.quant, line.rows, line.mean, line.layers) == ("int8", 4, 8, 8)


def test_less_depth_costs_less_and_the_prompt_stays() -> None:
    full, less = lines(REPORT, Demand(20, 100, 1.0), [1.0, 0.75])
    assert less.mean == pytest.approx(6, abs=0.2)
    assert 0.75 < less.price / full.price < 0.9


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    report, *rest = argv = ["lab/reports/results/1b-batch.json", "--per-hour", "0.10"]
    main([str(ROOT / report), *rest])
    page = (ROOT / "lab" / "reports" / "scaling.md").read_text("utf-8")
    assert " ".join(["python lab/benchmarks/price.py", *argv]) in page
    assert capsys.readouterr().out.strip() in page
